// Attention graphs built with cuDNN's frontend headers.
//
// cuDNN describes a tensor as (B, H, T, D) with any strides, so slices of a packed qkv and of its gradient are used in
// place. The log-sum-exp is the natural logarithm, as in Tessera's kernels, so each backward pass works with either
// forward pass.
#include "tensor/ops/attention/cuda/cudnn_attention.h"

#include <cudnn_frontend.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "tensor/cuda/context.h"

namespace tessera::cuda {
namespace {

namespace frontend = cudnn_frontend;
using frontend::graph::Graph;
using frontend::graph::Tensor_attributes;
using Node = std::shared_ptr<Tensor_attributes>;

constexpr int64_t kStatistics = FusedAttention::kOperands;  // id of the log-sum-exp, after the operands

// First non-empty line of cuDNN's message, without trailing underscores.
std::string first_line(const std::string& text) {
  const size_t begin = std::min(text.find_first_not_of(" \n"), text.size());
  const std::string line = text.substr(begin, text.find('\n', begin) - begin);
  return line.substr(0, line.find_last_not_of(" _") + 1);
}

Node bfloat16_node(const FusedAttention& p, FusedAttention::Operand which, Node node) {
  const auto& [batch, token, head] = p.strides[which];
  node->set_uid(which)
      .set_data_type(frontend::DataType_t::BFLOAT16)
      .set_dim({p.batch, p.count_heads(which), p.read_tokens(which), p.d})
      .set_stride({batch, head, token, 1});
  return node;
}
Node statistics_node(const FusedAttention& p, Node node) {
  node->set_uid(kStatistics)
      .set_data_type(frontend::DataType_t::FLOAT)
      .set_dim({p.batch, p.heads, p.queries, 1})
      .set_stride({p.heads * p.queries, p.queries, 1, 1});
  return node;
}

template <class Attributes>
Attributes make_attributes(const FusedAttention& p) {
  Attributes a;
  a.set_name("attention").set_attn_scale(p.scale).set_causal_mask(p.causal);
  return a;
}

// `capability`: compute capability of the target GPU; 0: the calling thread's GPU.
std::shared_ptr<Graph> make_graph(const FusedAttention& p, int capability = 0) {
  auto graph = std::make_shared<Graph>();
  if (capability > 0) graph->set_sm_version(capability);  // nodes copy it, so set it first
  graph->set_io_data_type(frontend::DataType_t::BFLOAT16)
      .set_intermediate_data_type(frontend::DataType_t::FLOAT)
      .set_compute_data_type(frontend::DataType_t::FLOAT);
  const auto input = [&](FusedAttention::Operand which) {
    return graph->tensor(*bfloat16_node(p, which, std::make_shared<Tensor_attributes>()));
  };
  const Node q = input(FusedAttention::q), k = input(FusedAttention::k), v = input(FusedAttention::v);
  if (!p.backward) {
    auto [out, statistics] =
        graph->sdpa(q, k, v, make_attributes<frontend::graph::SDPA_attributes>(p).set_generate_stats(true));
    bfloat16_node(p, FusedAttention::out, out)->set_output(true);
    statistics_node(p, statistics)->set_output(true);
    return graph;
  }
  const Node out = input(FusedAttention::out), dout = input(FusedAttention::dout);
  const Node statistics = graph->tensor(*statistics_node(p, std::make_shared<Tensor_attributes>()));
  auto [dq, dk, dv] = graph->sdpa_backward(
      q, k, v, out, dout, statistics,
      make_attributes<frontend::graph::SDPA_backward_attributes>(p).set_deterministic_algorithm(p.deterministic));
  bfloat16_node(p, FusedAttention::dq, dq)->set_output(true);
  bfloat16_node(p, FusedAttention::dk, dk)->set_output(true);
  bfloat16_node(p, FusedAttention::dv, dv)->set_output(true);
  return graph;
}

std::string refusal_in(frontend::error_t answer) {  // its member functions are not const
  if (!answer.is_bad()) return "";
  const std::string line = first_line(answer.get_message());
  return line.empty() ? "no reason reported" : line;
}

// Runs cuDNN's support checks: returns the reason for a refusal, or "". Without a handle, for the GPU set in the graph.
std::string refusal(Graph& graph, cudnnHandle_t library) {
  std::string why = cudnn_too_old(cudnnGetVersion());
  if (why.empty()) why = refusal_in(graph.validate());
  if (why.empty()) why = refusal_in(library ? graph.build_operation_graph(library) : graph.build_operation_graph());
  if (why.empty()) why = refusal_in(graph.create_execution_plans({frontend::HeurMode_t::A}));
  if (why.empty()) why = refusal_in(graph.check_support());
  return why;
}

std::string refusal_or_build(Graph& graph, cudnnHandle_t library) {
  std::string why = refusal(graph, library);
  if (!why.empty()) return why;
  why = refusal_in(graph.build_plans());
  return why.empty() ? "" : "the execution plan cannot be built: " + why;
}

void expect(cudnnStatus_t status, const char* what) {
  if (status != CUDNN_STATUS_SUCCESS)
    throw Error(fmt::format("[attention] cuDNN: {}: {}", what, cudnnGetErrorString(status)), Status::communication);
}
void expect(frontend::error_t e, const char* what) {
  if (e.is_bad()) throw Error(fmt::format("[attention] cuDNN: {}: {}", what, refusal_in(e)), Status::communication);
}

using Library = Handle<cudnnHandle_t, cudnnDestroy>;

struct Plan {
  std::shared_ptr<Graph> graph;
  int64_t workspace = 0;
};

using Pointers = std::unordered_map<int64_t, void*>;

class Cudnn {
 public:
  bool run(Arena& arena, const FusedAttention& p, Pointers& pointers, bool well) {
    auto found = plans_.find(p);
    if (found == plans_.end()) found = plans_.emplace(p, cudnn_plan(arena, p)).first;
    const Plan& plan = found->second;
    if (!plan.graph) return false;
    if (!well) return refuse(arena, p, "rows are not aligned to 16 bytes");  // regardless of cuDNN's checks
    // Freed as soon as the kernels are queued: the block's next user is queued after them.
    Tensor workspace;
    if (plan.workspace > 0)
      workspace =
          Tensor::empty({(plan.workspace + 3) / 4}, DType::float32, arena.shared_from_this(), Category::workspace);
    expect(plan.graph->execute(library(arena), pointers, plan.workspace > 0 ? workspace.address() : nullptr), "run");
    arena.local<Context>().queued(p.backward ? "attention_backward" : "attention", cudaSuccess);
    return true;
  }

 private:
  cudnnHandle_t library(Arena& arena) {
    if (!library_.get()) {
      expect(cudnnCreate(library_.receive()), "start");
      expect(cudnnSetStream(library_.get(), arena.local<Context>().stream()), "stream");
    }
    return library_.get();
  }

  // Logs that Tessera's kernels are used instead, or throws if that is not allowed.
  static bool refuse(Arena& arena, const FusedAttention& p, const std::string& why) {
    const std::string message =
        fmt::format("cuDNN {} does not support {} of (B, T, H, D) = ({}, {}, {}, {}){}{}: {}", cudnn_version(),
                    p.backward ? "the backward pass" : "attention", p.batch, p.queries, p.heads, p.d,
                    p.keys == p.queries ? "" : fmt::format(", {} keys", p.keys),
                    p.key_heads == p.heads ? "" : fmt::format(" and {} key-value heads", p.key_heads), why);
    if (arena.local<KernelChoice>().attention == AttentionKernels::cudnn)
      throw Error(fmt::format("[attention] {}; fallback to Tessera's kernels is disabled", message));
    arena.local<KernelLog>().refuse(message);
    return false;
  }

  Plan cudnn_plan(Arena& arena, const FusedAttention& p) {
    Plan plan{.graph = make_graph(p)};
    if (const std::string why = refusal_or_build(*plan.graph, library(arena)); !why.empty()) {
      cudaGetLastError();  // clears the error, so that the next kernel does not report it
      refuse(arena, p, why);
      return {};
    }
    expect(plan.graph->get_workspace_size(plan.workspace), "workspace");
    return plan;
  }

  Library library_;
  std::map<FusedAttention, Plan> plans_;
};

// Dims of size 1 get a canonical stride, so that they neither distinguish graphs nor fail checks.
FusedAttention::Strides matrix_strides(const Tensor& t) {
  FusedAttention::Strides strides{};
  for (int i = 0; i < 3; ++i) strides[static_cast<size_t>(i)] = t.dim(i) == 1 ? t.numel() : t.strides()[i];
  return strides;
}

std::pair<FusedAttention, Pointers> make_call(const std::vector<const Tensor*>& operands, const Tensor& lse,
                                              const AttentionProblem& of) {
  FusedAttention p{.batch = of.batch,
                   .queries = of.tq,
                   .keys = of.tk,
                   .heads = of.heads,
                   .key_heads = of.key_heads,
                   .d = of.d,
                   .scale = static_cast<float>(of.options.scale),
                   .causal = of.options.causal,
                   .backward = operands.size() > FusedAttention::kForward};
  Pointers pointers{{kStatistics, lse.address()}};
  for (size_t i = 0; i < operands.size(); ++i) {
    p.strides[i] = matrix_strides(*operands[i]);
    pointers[static_cast<int64_t>(i)] = operands[i]->address();
  }
  return {p, std::move(pointers)};
}

bool run(const std::vector<const Tensor*>& operands, const Tensor& lse, const AttentionProblem& of) {
  Arena& arena = *lse.arena();
  auto [problem, pointers] = make_call(operands, lse, of);
  problem.deterministic = problem.backward && arena.local<KernelChoice>().deterministic;
  const bool well = std::all_of(operands.begin(), operands.end(), [](const Tensor* t) { return rows_are_aligned(*t); });
  return arena.local<Cudnn>().run(arena, problem, pointers, well);
}

}  // namespace

bool cudnn_attention(const AttentionProblem& p, const AttentionResult& result) {
  return run({&p.q, &p.k, &p.v, &result.out}, result.lse, p);
}

bool cudnn_attention_backward(const AttentionProblem& p, const Tensor& dout, const AttentionResult& forward,
                              const AttentionGradients& gradients) {
  return run({&p.q, &p.k, &p.v, &forward.out, &dout, &gradients.dq, &gradients.dk, &gradients.dv}, forward.lse, p);
}

namespace {
std::string version_text(size_t v) { return fmt::format("{}.{}.{}", v / 10000, v / 100 % 100, v % 100); }
}  // namespace

std::string cudnn_version() { return version_text(cudnnGetVersion()); }

std::string cudnn_too_old(size_t version) {
  constexpr size_t kOldest = 91501;
  if (version >= kOldest) return "";
  return fmt::format("{} is older than {}: it reads out of bounds if the number of tokens is not a multiple of 128",
                     version_text(version), version_text(kOldest));
}

std::string cudnn_refuses(const FusedAttention& problem) {
  Library library;
  if (const cudnnStatus_t status = cudnnCreate(library.receive()); status != CUDNN_STATUS_SUCCESS)
    return cudnnGetErrorString(status);
  return refusal_or_build(*make_graph(problem), library.get());
}

std::string cudnn_refuses(const FusedAttention& problem, int capability, std::string_view gpu) {
  auto device = std::make_shared<frontend::DeviceProperties>();
  if (auto e = device->deserialize({gpu.begin(), gpu.end()}); e.is_bad()) return first_line(e.get_message());
  const std::shared_ptr<Graph> graph = make_graph(problem, capability);
  graph->set_device_properties(device);
  return refusal(*graph, nullptr);
}

}  // namespace tessera::cuda
