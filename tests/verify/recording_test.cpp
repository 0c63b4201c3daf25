// Files of recordings: errors name the file, the tensor and the rank; memory does not grow with the tensors.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/files.h"
#include "data/safetensors.h"
#include "tests/support/errors.h"
#include "tests/support/python.h"
#include "verify/audit/compare.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using audit::Recording;
using test::Exchange;
using Json = nlohmann::json;

struct Values {
  DType dtype{};
  std::vector<int64_t> shape;
  std::vector<float> floats = {};
  std::vector<int32_t> integers = {};
};

// The file of one rank, before it is written.
struct Rank {
  std::map<std::string, std::string> metadata{{"tessera_recording", "1"}, {"step", "1"}};
  Json info{{"framework", "torch"}, {"axes", Json::object()}}, entries = Json::object();
  std::map<std::string, Values> tensors;

  Rank(int rank, int ranks) {
    metadata["rank"] = std::to_string(rank), metadata["ranks"] = std::to_string(ranks);
    info["axes"]["dp"] = {rank, ranks};
    tensors["ids"] = {DType::int32, {1, 3}, {}, {rank, 2, 3}};
    tensors["targets"] = {DType::int32, {1, 3}, {}, {2, 3, -1}};
    tensors["x"] = {DType::float32, {1, 3, 2}, {1, 2, 3, 4, 5, 6}};
    tensors["w"] = {DType::float32, {2, 2}, {1, 2, 3, 4}};
    entries["ids"] = {{"name", "input_ids"}, {"kind", "input_ids"}, {"microbatch", 0}};
    entries["targets"] = {{"name", "targets"}, {"kind", "targets"}, {"microbatch", 0}};
    entries["x"] = {{"name", "layers.0"}, {"kind", "output"}, {"microbatch", 0}};
    entries["w"] = {{"name", "layers.0.weight"}, {"kind", "parameter"}};
  }
  void write(const fs::path& file) {
    std::vector<TensorBytes> bytes;
    for (const auto& [name, t] : tensors)
      bytes.push_back(
          {name, t.dtype, t.shape,
           t.dtype == DType::int32 ? std::as_bytes(std::span(t.integers)) : std::as_bytes(std::span(t.floats))});
    metadata["info"] = info.dump(), metadata["tensors"] = entries.dump();
    write_safetensors(file, bytes, metadata);
  }
};
using Change = std::function<void(Rank& rank)>;

class RecordingFiles : public testing::Test {
 protected:
  // A recording of two ranks whose second one is changed.
  fs::path recording(const std::string& name, const Change& change = {}) const {
    const fs::path to = directory_.path(name);
    fs::create_directories(to);
    for (int rank = 0; rank < 2; ++rank) {
      Rank r(rank, 2);
      if (rank == 1 && change) change(r);
      r.write(to / fmt::format("rank_{:04}.safetensors", rank));
    }
    return to;
  }
  Exchange directory_;
};

TEST_F(RecordingFiles, ErrorsNameFileTensorAndField) {
  const Recording right(recording("right"));
  EXPECT_EQ(right.rows().size(), 2u);
  const auto entry = [](const char* key, const Json& fields) {
    return Change([key, fields](Rank& r) { r.entries[key].update(fields); });
  };
  const auto info = [](const Json& fields) { return Change([fields](Rank& r) { r.info.update(fields); }); };
  const auto text = [](const char* key, const char* value) {
    return Change([key, value](Rank& r) { r.metadata[key] = value; });
  };
  const auto tensor = [](const char* key, const Values& values) {
    return Change([key, values](Rank& r) { r.tensors[key] = values; });
  };
  const std::string x = "rank_0001.safetensors: tensor 'x': ", w = "rank_0001.safetensors: tensor 'w': ";
  const std::string about = "rank_0001.safetensors: info: ";
  const int64_t big = int64_t{1} << 40;
  const std::vector<std::pair<Change, std::string>> cases{
      {text("rank", "0"), "rank_0001.safetensors: expected rank 1, got rank 0"},
      {text("ranks", "3"), "expected 3 files, one per rank, got 2"},
      {text("rank", "one"), "rank_0001.safetensors: rank: expected a decimal number, got \"one\""},
      {text("step", "2"), "rank_0001.safetensors: expected step 1 as on rank 0, got 2"},
      {text("tessera_recording", "9"), "expected version 1 of recordings, got \"9\""},
      {info({{"framework", "jax"}}), about + "framework: expected \"torch\" as on rank 0, got \"jax\""},
      {info({{"axes", {{"dp", {0, 2}}}}}), about + "axes: expected other coordinates than rank 0"},
      {info({{"axes", {{"tp", {1, 2}}}}}), about + "axes: expected the axes and sizes of rank 0"},
      {info({{"axes", {{"dp", {1, big}}}}}), about + "axes: expected {\"dp\": [coordinate, size]} of at most 2 ranks"},
      {info({{"axes", {{"dp", 3}}}}), about + "axes: expected {\"dp\": [coordinate, size]}"},
      {info({{"microbatches", "all"}}), about + "microbatches: expected a number from 0, got \"all\""},
      {info({{"losses", {3}}}), about + "losses: expected objects, got 3"},
      {info({{"losses", {{{"tokens", "all"}}}}}), about + "losses: tokens: expected a number, got \"all\""},
      {info({{"losses", {{{"scale", 0}}}}}), about + "losses: scale: expected a positive number, got 0"},
      {info({{"optimizer", 3}}), about + "optimizer: expected an object, got 3"},
      {info({{"optimizer", {{"groups", {{{"betas", "x"}}}}}}}), about + "optimizer: betas: expected two numbers"},
      {info({{"clip", {{"norm", "x"}}}}), about + "clip: norm: expected a number, got \"x\""},
      {entry("x", {{"kind", "weights"}}), x + "kind: expected one of input_ids, targets"},
      {entry("x", {{"name", 3}}), x + "name: expected text, got 3"},
      {entry("x", {{"microbatch", -1}}), x + "microbatch: expected a number from 0, got -1"},
      {entry("w", {{"partial", {"tp"}}}), w + "partial: expected axes of the rank, got 'tp'"},
      {entry("w", {{"shape", {2, -2}}}), w + "shape: expected sizes, got [2,-2]"},
      {entry("w", {{"shape", {big, big}}}), w + "shape: expected at most 2^53 elements"},
      {entry("w", {{"shape", {2, 4}}, {"index", {{{0, 2}}, {{1, 2}, {1, 2}}}}}),
       w + "index: expected ranges without common elements, got [[1,2],[1,2]] in dim 1"},
      {entry("w", {{"shape", {2, 2}}, {"index", {{{0, 2}}, {{1, 3}}}}}), w + "index: expected ranges [start, stop]"},
      {entry("w", {{"shape", {2, 4}}, {"index", {{{0, 2}}, {{1, 2}}}}}), w + "index: expected 2 elements of (2, 4)"},
      {entry("w", {{"shape", {2, 4}}}), w + "index: expected 8 elements of (2, 4), got (2, 2)"},
      {entry("w", {{"name", "v.weight"}, {"shape", {2, big}}, {"index", {{{0, 2}}, {{5, 7}}}}}),
       w + "shape: expected at most 65568 elements for 4 recorded ones, got (2, 1099511627776)"},
      {tensor("w", {DType::float32, {2, 3}, {1, 2, 3, 4, 5, 6}}),
       w + "shape: expected (2, 2) as on rank 0, got (2, 3)"},
      {tensor("ids", {DType::float32, {1, 3}, {1, 2, 3}}), "tensor 'ids': expected input_ids as integers of shape"},
      {tensor("targets", {DType::int32, {3, 1}, {}, {1, 2, 3}}),
       "tensor 'targets': shape: expected (1, 3) as of input_ids, got (3, 1)"},
      {[](Rank& r) {
         r.entries["y"] = {{"kind", "grad"}};
       },
       "rank_0001.safetensors: there is no tensor 'y'"},
      {[](Rank& r) { r.entries["x"] = 3; }, x + "expected an object in `tensors`, got 3"},
  };
  for (size_t i = 0; i < cases.size(); ++i)
    expect_error(Status::input, {cases[i].second},
                 [&] { Recording(recording(fmt::format("case{}", i), cases[i].first)); });
}

TEST_F(RecordingFiles, TornAndMixedFilesAreNamed) {
  const fs::path all = recording("torn"), second = all / "rank_0001.safetensors";
  const std::string bytes = read_file(second);
  const auto refused = [&](const std::string& content, const std::string& part) {
    std::ofstream(second, std::ios::binary) << content;
    expect_error(Status::input, {"rank_0001.safetensors", part}, [&] { Recording{all}; });
  };
  refused(bytes.substr(0, bytes.size() - 4), "expected two ascending integers");
  refused(bytes.substr(0, 100), "not safetensors: header of");
  refused("", "not safetensors, but an empty file");
  refused(std::string(8, '\x7f') + bytes.substr(8), "not safetensors: header of 9187201950435737471 bytes");
  refused(read_file(all / "rank_0000.safetensors"), "expected rank 1, got rank 0");
  fs::remove(second);
  expect_error(Status::input, {"rank_0000.safetensors: expected 2 files, one per rank, got 1"},
               [&] { Recording{all}; });
  fs::remove(all / "rank_0000.safetensors");
  expect_error(Status::input, {"expected rank_0000.safetensors and those of the other ranks, got none"},
               [&] { Recording{all}; });
}

TEST_F(RecordingFiles, ValuesThatAreNotFiniteAreLocated) {
  const Recording right(recording("right"));
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()})
    for (const size_t at : {0, 3}) {
      const Recording wrong(recording("wrong", [&](Rank& r) { r.tensors["x"].floats[at] = bad; }));
      expect_error(Status::input,
                   {"rank_0001.safetensors: tensor 'x': expected finite values, got",
                    fmt::format("at row {}, column {}", at / 2, at % 2)},
                   [&] { audit::compare(wrong, right, {}); });
    }
}

// Slices of two ranks with gaps, in the order of their ranges.
TEST_F(RecordingFiles, ReadsSlicesInTheirPlaces) {
  const Recording r(recording("slices", [](Rank& rank) {
    rank.tensors["v"] = {DType::float32, {2, 2}, {1, 2, 3, 4}};
    rank.entries["v"] = {{"name", "v.weight"}, {"kind", "parameter"}, {"shape", {3, 4}}};
    rank.entries["v"]["index"] = {{{2, 3}, {0, 1}}, {{3, 4}, {1, 2}}};
  }));
  const audit::StoredTensor& v = r.find(audit::Kind::parameter, "v.weight")->begin()->second;
  std::vector<double> found;
  r.read(v, 0, {0, 3}, found);
  ASSERT_EQ(found.size(), 12u);
  const std::map<size_t, double> expected{{11, 1}, {9, 2}, {3, 3}, {1, 4}};
  for (size_t i = 0; i < found.size(); ++i)
    EXPECT_TRUE(expected.contains(i) ? found[i] == expected.at(i) : std::isnan(found[i])) << i << ": " << found[i];
  EXPECT_EQ(r.owner(v, 0, 2, 3), 1);
  EXPECT_EQ(r.owner(v, 0, 1, 1), -1);
  EXPECT_EQ(r.findings().size(), 1u);
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)

// The peak resident memory of the process since the last call, in bytes.
int64_t peak() {
  std::ifstream status("/proc/self/status");
  int64_t kilobytes = 0;
  for (std::string line; std::getline(status, line);)
    if (line.starts_with("VmHWM:")) kilobytes = std::stoll(line.substr(6));
  std::ofstream("/proc/self/clear_refs") << "5";
  return kilobytes * 1024;
}

TEST_F(RecordingFiles, ComparisonUsesLessMemoryThanTwiceTheLargestTensor) {
  constexpr int64_t kTokens = 64, kVocabulary = 1 << 17, kLogits = kTokens * kVocabulary * 4;  // 32 MiB
  const auto write = [&](const fs::path& to, int ranks) {
    fs::create_directories(to);
    for (int rank = 0; rank < ranks; ++rank) {
      std::vector<TensorBytes> tensors{{"input_ids", DType::int32, {1, kTokens}, {}}};
      Json entries = Json::object();
      for (const char* kind : {"output", "output_grad"}) {
        tensors.push_back({kind, DType::float32, {1, kTokens, kVocabulary}, {}});
        entries[kind] = {{"name", "lm_head"}, {"kind", kind}, {"microbatch", 0}};
      }
      const Json info = {{"axes", {{"tp", {rank, ranks}}}}};
      const SafetensorsLayout layout = safetensors_layout(tensors, {{"tessera_recording", "1"},
                                                                    {"rank", std::to_string(rank)},
                                                                    {"ranks", std::to_string(ranks)},
                                                                    {"info", info.dump()},
                                                                    {"tensors", entries.dump()}});
      const fs::path file = to / fmt::format("rank_{:04}.safetensors", rank);
      std::ofstream(file, std::ios::binary) << layout.header;
      fs::resize_file(file, static_cast<uintmax_t>(layout.size));  // zeros that occupy no space
    }
    return to;
  };
  const fs::path found = write(directory_.path("found"), 2), expected = write(directory_.path("expected"), 1);
  peak();
  const int64_t before = peak();
  const audit::AuditResult result = audit::compare(Recording(found), Recording(expected), {});
  EXPECT_LT(peak() - before, 2 * kLogits) << "the files have 6 such tensors";
  ASSERT_EQ(result.tensors.size(), 2u);
  for (const audit::TensorResult& t : result.tensors) EXPECT_EQ(t.elements, kTokens * kVocabulary);
}

#endif

}  // namespace
}  // namespace tessera
