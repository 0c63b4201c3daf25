// Places of wrong elements: two recordings of one tensor are written, whose values differ in known ranges.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "data/safetensors.h"
#include "tests/support/python.h"
#include "verify/audit/compare.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using audit::AuditResult;
using audit::Kind;
using Json = nlohmann::json;
using Ranges = std::vector<Range>;

// A tensor of all ranks, sharded over tp along a dim.
struct Full {
  Kind kind{};
  std::string name;
  std::vector<int64_t> shape;
  int64_t dim = 0;
};

struct Place {
  Full tensor;
  std::vector<Ranges> wrong;  // by dim; empty: all indices
  int64_t tp = 1;
  std::string extents;
  std::vector<int> ranks = {0};
};

bool inside(const Ranges& ranges, int64_t i) {
  return ranges.empty() || std::ranges::any_of(ranges, [&](const Range& r) { return i >= r.begin && i < r.end; });
}

// The rank's slice; elements in all of the `wrong` ranges are 1 larger.
std::vector<double> slice_values(const Full& t, const Range& rows, const std::vector<Ranges>* wrong) {
  std::vector<double> out;
  int64_t count = 1;
  for (const int64_t n : t.shape) count *= n;
  for (int64_t flat = 0; flat < count; ++flat) {
    std::vector<int64_t> at(t.shape.size());
    int64_t rest = flat;
    for (size_t d = t.shape.size(); d-- > 0; rest /= t.shape[d]) at[d] = rest % t.shape[d];
    if (at[static_cast<size_t>(t.dim)] < rows.begin || at[static_cast<size_t>(t.dim)] >= rows.end) continue;
    bool is_wrong = wrong;
    for (size_t d = 0; wrong && d < at.size(); ++d) is_wrong = is_wrong && inside((*wrong)[d], at[d]);
    out.push_back(1 + std::sin(static_cast<double>(flat)) / 2 + (is_wrong ? 1 : 0));
  }
  return out;
}

constexpr int64_t kMicrobatches = 2, kWrongMicrobatch = 1;

// A step with the place's tensor, an output that identifies the rows, and the output gradient of the last module.
void write(const fs::path& to, const Place& place, bool found) {
  fs::create_directories(to);
  std::vector<int64_t> rows = place.tensor.shape;
  rows.resize(3, 4);
  for (int64_t rank = 0; rank < place.tp; ++rank) {
    std::vector<std::vector<double>> values;
    std::vector<TensorBytes> bytes;
    Json entries = Json::object();
    const auto add = [&](const Full& t, int64_t microbatch, bool is_wrong) {
      const auto size = t.shape[static_cast<size_t>(t.dim)];
      const Range shard = chunk_range(size, static_cast<int>(place.tp), static_cast<int>(rank));
      values.push_back(slice_values(t, shard, is_wrong ? &place.wrong : nullptr));
      std::vector<int64_t> shape = t.shape;
      shape[static_cast<size_t>(t.dim)] = shard.size();
      Json index = Json::array();
      for (size_t d = 0; d < shape.size(); ++d)
        index.push_back({{static_cast<int64_t>(d) == t.dim ? shard.begin : 0,
                          static_cast<int64_t>(d) == t.dim ? shard.end : t.shape[d]}});
      const std::string key = std::to_string(bytes.size());
      bytes.push_back({key, DType::float64, shape, {}});
      entries[key] = {{"name", t.name},
                      {"kind", to_string(t.kind)},
                      {"microbatch", microbatch},
                      {"shape", t.shape},
                      {"index", index}};
    };
    const bool batched = place.tensor.kind == Kind::output || place.tensor.kind == Kind::output_grad;
    for (int64_t m = 0; m < (batched ? kMicrobatches : 1); ++m) {
      add({Kind::output, "model.layers.9", rows, 1}, m, false);
      add({Kind::output_grad, "lm_head", rows, 1}, m, false);
      add(place.tensor, m, found && (!batched || m == kWrongMicrobatch));
    }
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i].bytes = std::as_bytes(std::span<const double>(values[i]));
    const Json info{{"axes", {{"tp", {rank, place.tp}}}}, {"microbatches", kMicrobatches}, {"heads", {4, 2}}};
    write_safetensors(to / fmt::format("rank_{:04}.safetensors", rank), bytes,
                      {{"tessera_recording", "1"},
                       {"rank", std::to_string(rank)},
                       {"ranks", std::to_string(place.tp)},
                       {"step", "1"},
                       {"info", info.dump()},
                       {"tensors", entries.dump()}});
  }
}

std::string to_text(const std::vector<audit::Extent>& extents) {
  std::string out;
  for (const audit::Extent& e : extents) {
    out += (out.empty() ? "" : ", ") + e.dim;
    for (const Range& r : e.ranges) out += fmt::format(" [{}, {})", r.begin, r.end);
  }
  return out;
}

TEST(Locate, NamesRanksTokensHeadsAndVocabulary) {
  const std::string block = "model.layers.3.", attention = block + "self_attn.";
  const std::vector<Place> places{
      {{Kind::grad, attention + "q_proj.weight", {32, 12}},
       {{{0, 8}, {24, 32}}, {}},
       1,
       "heads [0, 1) [3, 4), columns [0, 12)"},
      {{Kind::grad, attention + "q_proj.weight", {32, 12}},
       {{{25, 26}}, {{3, 4}}},
       4,
       "heads [3, 4), columns [3, 4)",
       {3}},
      {{Kind::grad, attention + "k_proj.weight", {16, 12}},
       {{{8, 16}}, {}},
       2,
       "key-value heads [1, 2), columns [0, 12)",
       {1}},
      {{Kind::parameter, attention + "v_proj.bias", {16}}, {{{2, 5}}}, 1, "key-value heads [0, 1)"},
      {{Kind::grad, attention + "o_proj.weight", {12, 32}, 1},
       {{{4, 6}}, {{8, 24}}},
       4,
       "rows [4, 6), heads [1, 3)",
       {1, 2}},
      {{Kind::grad, "transformer.h.2.attn.c_attn.weight", {12, 64}},
       {{}, {{40, 48}}},
       1,
       "rows [0, 12), key heads [1, 2)"},
      {{Kind::grad, "transformer.h.2.attn.c_attn.weight", {12, 64}},
       {{}, {{0, 9}, {63, 64}}},
       1,
       "rows [0, 12), heads [0, 2), value heads [1, 2)"},
      {{Kind::grad, block + "mlp.up_proj.weight", {32, 12}}, {{{1, 3}}, {{5, 7}}}, 1, "rows [1, 3), columns [5, 7)"},
      {{Kind::grad, "lm_head.weight", {40, 12}},
       {{{5, 9}, {30, 40}}, {}},
       4,
       "vocabulary [5, 9) [30, 40), columns [0, 12)",
       {0, 3}},
      {{Kind::parameter, "model.embed_tokens.weight", {40, 12}},
       {{{39, 40}}, {{0, 2}}},
       1,
       "vocabulary [39, 40), columns [0, 2)"},
      {{Kind::output, attention + "k_proj", {2, 8, 16}, 1},
       {{{1, 2}}, {{0, 2}, {6, 8}}, {{0, 8}}},
       4,
       "sequences [1, 2), tokens [0, 2) [6, 8), key-value heads [0, 1)",
       {0, 3}},
      {{Kind::output_grad, attention + "q_proj", {2, 8, 32}, 1},
       {{}, {{4, 5}}, {{16, 32}}},
       2,
       "sequences [0, 2), tokens [4, 5), heads [2, 4)",
       {1}},
      {{Kind::output, "lm_head", {2, 8, 40}, 2},
       {{}, {}, {{38, 40}}},
       2,
       "sequences [0, 2), tokens [0, 8), vocabulary [38, 40)",
       {1}},
      {{Kind::output, block + "self_attn", {2, 8, 32}, 1},
       {{}, {{3, 8}}, {}},
       2,
       "sequences [0, 2), tokens [3, 8), channels [0, 32)",
       {0, 1}},
  };
  const test::Exchange directory;
  for (size_t i = 0; i < places.size(); ++i) {
    const Place& p = places[i];
    const fs::path found = directory.path(fmt::format("found{}", i)),
                   expected = directory.path(fmt::format("right{}", i));
    write(found, p, true);
    write(expected, p, false);
    const AuditResult r = audit::compare(audit::Recording(found), audit::Recording(expected), {});
    ASSERT_TRUE(r.first) << p.tensor.name;
    EXPECT_EQ(r.first->tensor.key.name, p.tensor.name);
    EXPECT_EQ(to_text(r.first->extents), p.extents) << p.tensor.name;
    EXPECT_EQ(r.first->ranks, p.ranks) << p.tensor.name;
    EXPECT_EQ(r.first->rank, p.ranks[0]) << p.tensor.name;
    const bool batched = p.tensor.shape.size() == 3;
    EXPECT_EQ(r.first->microbatches, batched ? std::vector{kWrongMicrobatch} : std::vector<int64_t>()) << p.tensor.name;
    EXPECT_EQ(r.first->layer, audit::layer_index(p.tensor.name));
  }
}

}  // namespace
}  // namespace tessera
