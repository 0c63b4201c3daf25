// Include rules: which layer may include which, where headers of CUDA, MPI, NCCL and third parties may appear, and that
// the figure in docs/design.md shows the actual layers. Each rule is a function of one file, so a synthetic violation
// proves that it can fail.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <regex>
#include <set>
#include <string>
#include <vector>

#include "tests/conventions/sources.h"

namespace tessera::conventions {
namespace {

using Graph = std::map<std::string, std::set<std::string>>;

// The layers that each layer may include in addition to itself. Directories not listed here (app, bench, tests,
// examples) may include all.
const Graph kAllowed{
    {"base", {}},
    {"tensor", {"base"}},
    {"autograd", {"base", "tensor"}},
    {"nn", {"base", "tensor", "autograd"}},
    {"optim", {"base", "tensor", "autograd", "nn"}},
    {"models", {"base", "tensor", "autograd", "nn"}},
    {"parallel", {"base", "tensor", "autograd", "nn", "optim"}},
    {"data", {"base", "tensor"}},
    {"train", {"base", "tensor", "autograd", "nn", "optim", "models", "parallel", "data"}},
    {"hub", {"base", "tensor", "autograd", "nn", "optim", "models", "parallel", "data", "train"}},
    {"planner", {"base", "tensor", "autograd", "nn", "optim", "models", "parallel", "data", "train"}},
    {"verify", {"base", "tensor", "autograd", "nn", "optim", "models", "parallel", "data", "train"}},
    {"lab", {"base", "tensor", "autograd", "nn", "optim", "models", "parallel", "data", "train", "planner", "verify"}},
};

std::string broken_layering(const Source& source) {
  if (!source.is_code()) return "";
  const auto allowed = kAllowed.find(source.directory());
  for (const Include& include : read_includes(source)) {
    if (!include.quoted) continue;
    const size_t slash = include.name.find('/');
    if (slash == std::string::npos) return "\"" + include.name + "\" is not a path from the repository's root";
    const std::string layer = include.name.substr(0, slash);
    // These files of models/ connect models with the strategies and so may include parallel/.
    static const std::regex joining("models/(layout|stages|decoder_layout|language_model)\\.(h|cpp)");
    const bool joins = std::regex_match(source.path, joining);
    if (joins && layer == "parallel") continue;
    if (allowed != kAllowed.end() && layer != source.directory() && !allowed->second.contains(layer))
      return source.directory() + "/ may not include \"" + include.name + "\"";
  }
  return "";
}

std::string misplaced_backend(const Source& source) {
  if (!source.is_code()) return "";
  static const std::regex cuda("^(cuda|cublas|cudnn|curand|cub/|cute/|cutlass|thrust/|nvtx|mma\\.h).*"),
      nccl("^nccl.*"), mpi("^mpi\\.h$"), x86("^(cpuid|x86gprintrin|[a-z]+mmintrin|immintrin)\\.h$");
  const auto in = [&](const char* part) { return source.path.find(part) != std::string::npos; };
  for (const Include& include : read_includes(source)) {
    if (std::regex_match(include.name, cuda) && !source.is_cuda() && !in("/cuda/") && !in("/nccl"))
      return "<" + include.name + "> belongs in .cu files and cuda/ directories";
    if (std::regex_match(include.name, nccl) && !in("/nccl")) return "<" + include.name + "> belongs in nccl* files";
    if (std::regex_match(include.name, mpi) && !in("/mpi")) return "<" + include.name + "> belongs in mpi* files";
    if (std::regex_match(include.name, x86) && !in("/x86/"))
      return "<" + include.name + "> belongs in x86/ directories";
  }
  return "";
}

// Inside tensor/ includes point downward too: from ops/ to cpu/ and cuda/, which operations share, and from these to
// the tensor. Headers of the tensor and of operations do not mention kernels. CPU code uses no type of cuda::, and
// includes no header of a cuda/ directory except in the storage, which allocates and copies GPU memory.
std::string upward_in_tensor(const Source& source) {
  static const std::set<std::string> below{"tensor", "autograd", "nn"},
      storage{"tensor/arena.cpp", "tensor/tensor.cpp"};
  static const std::regex type(R"(\bcuda::[A-Z])");
  if (!source.is_code() || !below.contains(source.directory())) return "";
  const auto in = [](const std::string& path, const char* part) { return path.find(part) != std::string::npos; };
  const bool gpu = source.is_cuda() || in(source.path, "/cuda/");
  const bool shared = source.path.starts_with("tensor/cpu/") || source.path.starts_with("tensor/cuda/");
  const bool contract = source.is_header() && !gpu && !in(source.path, "/cpu/");
  for (const Include& include : read_includes(source)) {
    if (!include.quoted) continue;
    const bool refused = (!gpu && !storage.contains(source.path) && in(include.name, "/cuda/")) ||
                         (shared && in(include.name, "/ops/")) || (contract && in(include.name, "/cpu/"));
    if (refused) return "may not include \"" + include.name + "\"";
  }
  return !gpu && std::regex_search(source.text, type) ? "uses a type of cuda::" : "";
}

// A header of the C++ library has no dot and no slash; the list has headers of the compiler and the system.
bool is_standard(const std::string& name) {
  static const std::set<std::string> system{"immintrin.h", "omp.h",  "unistd.h", "fcntl.h",
                                            "spawn.h",     "poll.h", "sched.h",  "linux/futex.h"};
  return name.find_first_of("./") == std::string::npos || system.contains(name) || name.starts_with("sys/");
}

std::string third_party_in_tensor_header(const Source& source) {
  if (source.directory() != "tensor" || !source.is_header() || source.path.find("/cuda/") != std::string::npos)
    return "";
  for (const Include& include : read_includes(source))
    if (!include.quoted && !is_standard(include.name)) return "a header of tensor/ includes <" + include.name + ">";
  return "";
}

// The first header in angle brackets that matches `refused`, in a file or in its transitive includes.
std::string reached(const Source& source, const std::regex& refused, std::set<std::string>&& seen = {}) {
  for (const Include& include : read_includes(source)) {
    if (!include.quoted && std::regex_search(include.name, refused))
      return source.path + " includes <" + include.name + ">";
    if (!include.quoted || !seen.insert(include.name).second) continue;
    const Source next{include.name, read_text(std::filesystem::path(TESSERA_SOURCE_DIR) / include.name)};
    if (std::string found = reached(next, refused, std::move(seen)); !found.empty()) return found;
  }
  return "";
}

// nvcc cannot compile fmt or spdlog in C++20: no .cu file may reach one of them.
std::string third_party_in_cuda(const Source& source) {
  if (!source.is_cuda() || source.directory() == "tests" || source.directory() == "bench") return "";
  static const std::regex refused("^(fmt|spdlog|CLI|nlohmann|oneapi|gtest)/|^dnnl");
  return reached(source, refused);
}

// tessera.h is the header of user programs: it includes only the C++ library, so no other dependency is needed.
std::string third_party_for_users(const Source& source) {
  if (source.path != "tessera.h") return "";
  static const std::regex refused("[./]");
  return reached(source, refused);
}

// Everything that can be reached from each node.
Graph closure(Graph graph) {
  for (bool grew = true; grew;) {
    grew = false;
    for (auto& [from, reached] : graph)
      for (const std::string& via : std::set<std::string>(reached))
        if (const auto next = graph.find(via); next != graph.end())
          for (const std::string& to : next->second) grew |= reached.insert(to).second;
  }
  return graph;
}

// The actual layers: directories with code, without tests and examples, which may include everything.
Graph layer_graph(const std::vector<Source>& sources) {
  static const std::set<std::string> outside{"tests", "examples", ""};
  Graph graph;
  for (const Source& source : sources) {
    if (!source.is_code() || outside.contains(source.directory())) continue;
    std::set<std::string>& to = graph[source.directory()];
    for (const Include& include : read_includes(source))
      if (const std::string layer = include.name.substr(0, include.name.find('/'));
          include.quoted && layer != source.directory())
        to.insert(layer);
  }
  return closure(graph);
}

// The arrows `a --> b` of the first Mermaid figure of a page.
Graph parse_figure(const std::string& page) {
  const size_t begin = page.find("```mermaid"), end = page.find("```", begin + 3);
  if (begin == std::string::npos || end == std::string::npos) return {};
  const std::string picture = page.substr(begin, end - begin);
  static const std::regex arrow(R"(([a-z]+)\s*-->\s*([a-z]+))");
  Graph graph;
  for (const std::smatch& at : matches(picture, arrow)) {
    graph[at[1]].insert(at[2]);
    graph[at[2]];
  }
  return closure(graph);
}

std::string print(const Graph& graph) {
  std::string text;
  for (const auto& [from, reached] : graph) {
    text += from + " includes:";
    for (const std::string& to : reached) text += " " + to;
    text += "\n";
  }
  return text;
}

TEST(Includes, PointToLowerLayers) { EXPECT_EQ(complaints(broken_layering), ""); }
TEST(Includes, PointToLowerLayersInsideTensor) { EXPECT_EQ(complaints(upward_in_tensor), ""); }
TEST(Includes, BackendHeadersAppearOnlyInBackendFiles) { EXPECT_EQ(complaints(misplaced_backend), ""); }
TEST(Includes, TensorHeadersIncludeNoThirdPartyHeaders) { EXPECT_EQ(complaints(third_party_in_tensor_header), ""); }
TEST(Includes, CudaFilesIncludeNoThirdPartyHeaders) { EXPECT_EQ(complaints(third_party_in_cuda), ""); }
TEST(Includes, PublicHeadersIncludeNoThirdPartyHeaders) { EXPECT_EQ(complaints(third_party_for_users), ""); }

TEST(Includes, MatchFigureInDesignDocument) {
  EXPECT_EQ(print(parse_figure(read_text(std::filesystem::path(TESSERA_SOURCE_DIR) / "docs/design.md"))),
            print(layer_graph(all_sources())));
}

TEST(Includes, ChecksDetectViolations) {
  EXPECT_NE(broken_layering({"tensor/a.h", "#include \"autograd/var.h\"\n"}), "");
  EXPECT_NE(broken_layering({"data/a.cpp", "// x\n  #  include \"nn/module.h\"\n"}), "");
  EXPECT_NE(broken_layering({"optim/a.cpp", "#include \"models/decoder.h\"\n"}), "");
  EXPECT_NE(broken_layering({"app/a.cpp", "#include \"neighbour.h\"\n"}), "");
  EXPECT_NE(broken_layering({"parallel/a.cpp", "#include \"models/decoder.h\"\n"}), "");
  EXPECT_NE(broken_layering({"train/a.cpp", "#include \"verify/verify.h\"\n"}), "");
  EXPECT_NE(broken_layering({"verify/a.cpp", "#include \"app/options.h\"\n"}), "");
  EXPECT_EQ(broken_layering({"nn/a.h", "#include \"tensor/tensor.h\"\n#include <vector>\n"}), "");
  EXPECT_NE(misplaced_backend({"tensor/a.cpp", "#include <cuda_runtime.h>\n"}), "");
  EXPECT_NE(misplaced_backend({"parallel/comm/thread.cpp", "#include <mpi.h>\n"}), "");
  EXPECT_EQ(misplaced_backend({"tensor/ops/a.cu", "#include <cuda_runtime.h>\n"}), "");
  EXPECT_NE(misplaced_backend({"tensor/cpu/a.h", "#include <immintrin.h>\n"}), "");
  EXPECT_EQ(misplaced_backend({"tensor/cpu/x86/a.h", "#include <immintrin.h>\n"}), "");
  EXPECT_NE(upward_in_tensor({"tensor/ops/a/cpu/a.cpp", "#include \"tensor/ops/a/cuda/a.h\"\n"}), "");
  EXPECT_NE(upward_in_tensor({"tensor/ops/a.cpp", "void f(const cuda::Operands& o);\n"}), "");
  EXPECT_NE(upward_in_tensor({"tensor/ops/a/a.h", "#include \"tensor/ops/a/cpu/a.h\"\n"}), "");
  EXPECT_NE(upward_in_tensor({"tensor/cuda/a.cuh", "#include \"tensor/ops/a.h\"\n"}), "");
  EXPECT_EQ(upward_in_tensor({"tensor/ops/a/a.cpp", "#include \"tensor/ops/a/cpu/a.h\"\ncuda::a();\n"}), "");
  EXPECT_EQ(upward_in_tensor({"tensor/ops/a.cu", "#include \"tensor/cuda/loops.cuh\"\n#include \"tensor/ops/a.h\"\n"}),
            "");
  EXPECT_NE(third_party_in_tensor_header({"tensor/a.h", "#include <fmt/format.h>\n"}), "");
  EXPECT_EQ(third_party_in_tensor_header({"tensor/a.h", "#include <immintrin.h>\n#include <span>\n"}), "");
  EXPECT_NE(third_party_in_cuda({"tensor/a.cu", "#include <fmt/format.h>\n"}), "");
  EXPECT_NE(third_party_for_users({"tessera.h", "#include \"base/json.h\"\n"}), "");
  EXPECT_NE(third_party_in_cuda({"tensor/a.cu", "#include \"tensor/ops/matmul/cpu/dnnl.cpp\"\n#include <dnnl.hpp>\n"}),
            "");
}

TEST(Includes, FigureIsComparedByReachability) {
  const std::string page = "x\n```mermaid\ngraph TD\n  c --> b\n  b --> a\n```\n";
  const Source b{"b/b.h", "#include \"a/a.h\"\n"}, c{"c/c.h", "#include \"b/b.h\"\n"}, a{"a/a.h", ""};
  EXPECT_EQ(print(parse_figure(page)), print(layer_graph({a, b, c})));
  const Source upward{"a/up.h", "#include \"c/c.h\"\n"};
  EXPECT_NE(print(parse_figure(page)), print(layer_graph({a, b, c, upward})));
  EXPECT_NE(print(parse_figure(page)), print(layer_graph({a, b, {"c/c.h", "#include \"a/a.h\"\n"}})));
}

}  // namespace
}  // namespace tessera::conventions
