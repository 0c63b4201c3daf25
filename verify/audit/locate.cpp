// Positions of wrong elements: ranks, micro-batches, tokens, heads, vocabulary.
#include "verify/audit/locate.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/json.h"

namespace tessera::audit {

namespace {

constexpr double kExplained = 0.2;  // residual of a difference that is a multiple of another tensor
constexpr double kElsewhere = 0.5;  // distance of the first rows of different slices

using Sample = std::pair<Batch, int64_t>;  // micro-batch and sequence in it
using Hits = std::vector<bool>;            // by index of a dim: whether an element is wrong

std::vector<Range> hit_ranges(const Hits& hits) {
  std::vector<Range> out;
  for (int64_t i = 0; i < std::ssize(hits); ++i) {
    if (!hits[static_cast<size_t>(i)]) continue;
    if (out.empty() || out.back().end != i) out.push_back({i, i});
    out.back().end = i + 1;
  }
  return out;
}

bool any_hit(const Hits& hits, const std::vector<Range>& ranges) {
  const auto at = [&](int64_t i) { return hits.begin() + std::min<int64_t>(i, std::ssize(hits)); };
  return std::ranges::any_of(ranges,
                             [&](const Range& r) { return std::find(at(r.begin), at(r.end), true) != at(r.end); });
}

// Units of a dim that have a meaning: `count` units of `size` indices, from an index on.
struct Units {
  const char* name;
  int64_t count = 0, begin = 0, size = 1;
};

struct Heads {
  int64_t query = 0, key = 0;  // 0: unknown
};

Heads read_heads(const Pairing& pair) {
  for (const Recording* const r : {&pair.found_, &pair.expected_}) {
    const nlohmann::json& heads = r->info("heads");
    if (!heads.is_array() || heads.size() != 2) continue;
    return {natural(heads[0]).value_or(0), natural(heads[1]).value_or(0)};
  }
  return {};
}

enum class Projection : uint8_t { none, query, key, fused, output, vocabulary };

Projection projection(const std::string& name) {
  constexpr auto kModules = std::to_array<std::pair<std::string_view, Projection>>({
      {"q_proj", Projection::query},
      {"q_b_proj", Projection::query},
      {"core_attention", Projection::query},
      {"k_proj", Projection::key},
      {"v_proj", Projection::key},
      {"qkv_proj", Projection::fused},
      {"qkv", Projection::fused},
      {"c_attn", Projection::fused},
      {"o_proj", Projection::output},
      {"out_proj", Projection::output},
      {"attn.c_proj", Projection::output},
      {"lm_head", Projection::vocabulary},
      {"embed_tokens", Projection::vocabulary},
      {"wte", Projection::vocabulary},
  });
  std::string_view module = name;
  for (const std::string_view suffix : {".weight", ".bias"})
    if (module.ends_with(suffix)) module.remove_suffix(suffix.size());
  for (const auto& [end, projection] : kModules)
    if (module == end || (module.ends_with(end) && module[module.size() - end.size() - 1] == '.')) return projection;
  return Projection::none;
}

// The units of dim `d` of a tensor; activations have dims (sequences, tokens, channels).
std::vector<Units> dim_units(const Key& key, const std::vector<int64_t>& shape, size_t d, Heads heads) {
  const bool batched = is_batched(key.kind), is_matrix = !batched && shape.size() == 2;
  const bool transposed = key.name.starts_with("transformer.h.");  // weights of GPT-2
  const size_t output = batched ? 2 : is_matrix && transposed ? 1 : 0;
  const Projection what = projection(key.name);
  std::vector<Units> parts;
  if (is_matrix && d != output && what == Projection::output) parts = {{"heads", heads.query}};
  if (d == output && what == Projection::query) parts = {{"heads", heads.query}};
  if (d == output && what == Projection::key) parts = {{"key-value heads", heads.key}};
  if (d == output && what == Projection::fused)
    parts = {{"heads", heads.query}, {"key heads", heads.key}, {"value heads", heads.key}};
  if (d == output && what == Projection::vocabulary && (!batched || key.name == "lm_head"))
    parts = {{"vocabulary", shape[d]}};
  int64_t all = 0, begin = 0;
  for (const Units& part : parts) all += part.count;
  if (all == 0 || shape[d] % all != 0) {
    const std::array<const char*, 3> activation{"sequences", "tokens", "channels"}, parameter{"rows", "columns", ""};
    return {{shape.size() == 1 ? "elements" : (batched ? activation : parameter).at(d), shape[d]}};
  }
  for (Units& part : parts) {  // heads have the same size
    part.begin = begin, part.size = shape[d] / all;
    begin += part.count * part.size;
  }
  return parts;
}

std::vector<Extent> make_extents(const Key& key, const std::vector<Hits>& hits, Heads heads) {
  std::vector<int64_t> shape;
  for (const Hits& dim : hits) shape.push_back(std::ssize(dim));
  std::vector<Extent> out;
  for (size_t d = 0; d < hits.size(); ++d)
    for (const Units& units : dim_units(key, shape, d, heads)) {
      Hits wrong;
      for (int64_t i = 0; i < units.count; ++i) {
        const int64_t begin = units.begin + i * units.size;
        wrong.push_back(any_hit(hits[d], {{begin, begin + units.size}}));
      }
      if (std::vector<Range> ranges = hit_ranges(wrong); !ranges.empty())
        out.push_back({units.name, std::move(ranges)});
    }
  return out;
}

// The gradient's parameter, which a reused buffer adds to it, or the direction of the last update, which a stale
// parameter lacks.
class Explanation {
 public:
  Explanation(const Pairing& pair, const Key& key) : recording_(pair.found_) {
    const auto tensor = [&](Kind kind, const std::string& name) -> const StoredTensor* {
      const auto* const all = recording_.find(kind, name);
      const StoredTensor& wrong = recording_.tensors().at(key).begin()->second;
      return all && all->begin()->second.shape == wrong.shape ? &all->begin()->second : nullptr;
    };
    if (key.kind == Kind::grad) value_ = tensor(Kind::parameter, key.name);
    if (key.kind != Kind::parameter) return;
    value_ = tensor(Kind::state, key.name + ".exp_avg"), square_ = tensor(Kind::state, key.name + ".exp_avg_sq");
    if (!value_) value_ = tensor(Kind::state, key.name + ".momentum_buffer");
  }
  // The multiple of the explanation that `differences` are; nothing is added without one.
  void add(Range rows, const std::vector<double>& differences) {
    if (!value_) return;
    recording_.read(*value_, 0, rows, values_);
    if (square_) recording_.read(*square_, 0, rows, squares_);
    for (size_t i = 0; i < std::min(differences.size(), values_.size()); ++i) {
      const double root = square_ ? std::sqrt(squares_[i]) + 1e-12 : 1;
      sums_.add(differences[i], values_[i] / root, 1);
    }
  }
  double factor() const { return sums_.ee > 0 && sums_.ff > 0 && sums_.residual() < kExplained ? sums_.factor() : 0; }

 private:
  const Recording& recording_;
  const StoredTensor *value_ = nullptr, *square_ = nullptr;
  std::vector<double> values_, squares_;
  Sums sums_;
};

// Whether a rank's slice of a parameter has the values of another slice of the expected tensor.
bool is_elsewhere(const Pairing& c, const TensorResult& t) {
  const StoredTensor& a = c.found_.tensors().at(t.key).begin()->second;
  const StoredTensor& e = c.counterpart(t.key)->begin()->second;
  if (a.shape != e.shape) return false;
  std::vector<double> here, there;
  for (const Slice& slice : a.replicas[std::min(t.replica, a.replicas.size() - 1)])
    for (const auto& replica : a.replicas)
      for (const Slice& other : replica) {
        if (other.bytes->shape != slice.bytes->shape || slice.index.empty() || other.index.empty()) continue;
        if (&other == &slice) continue;
        // The slice's values in the place of the other one.
        const StoredTensor moved{a.shape, {{{slice.rank, slice.bytes, other.index, {}}}}};
        Sums right;
        for_each_rows(a.rows(), a.width(), [&](Range rows) {
          if (right.distance() > kElsewhere) return;
          c.found_.read(moved, 0, rows, here);
          c.expected_.read(e, 0, rows, there);
          right.add(compare_rows(here, there, a.width(), e.width(), 1));
        });
        if (right.n > 0 && right.distance() <= t.tolerance) return true;
      }
  return false;
}

// Sets whether every wrong sequence is right up to a separator, the same token in each, or sequences are wrong from
// different tokens on: masks of context ranks are equal in all sequences.
void find_documents(const Recording& found, const std::map<Sample, Range>& tokens, RecordedStep& step) {
  std::set<int64_t> separators, firsts;
  for (const auto& [sample, wrong] : tokens) firsts.insert(wrong.begin);
  step.document = firsts.size() > 1 && *firsts.begin() > 0;
  for (const TokenRow& row : found.rows()) {
    const auto wrong = tokens.find({row.batch, row.row});
    if (wrong == tokens.end()) continue;
    const int64_t at = wrong->second.begin;
    if (at == 0 || at >= std::ssize(row.ids)) return;
    const auto token = row.ids[static_cast<size_t>(at - 1)];
    if (std::count(row.ids.begin(), row.ids.begin() + at - 1, token) > 0) return;  // an earlier document
    separators.insert(token);
  }
  if (separators.size() != 1) return;
  step.document = true;
  step.tokens_from = *separators.begin();
}

// Ranks whose slices have wrong indices in every dim.
std::vector<int> wrong_ranks(const std::vector<Slice>& slices, const std::vector<Hits>& hits) {
  std::vector<int> out;
  for (const Slice& slice : slices) {
    bool wrong = true;
    for (size_t d = 0; d < slice.index.size() && slice.index.size() == hits.size(); ++d)
      wrong = wrong && any_hit(hits[d], slice.index[d]);
    if (wrong) out.push_back(slice.rank);
  }
  return out;
}

}  // namespace

Divergence locate(const Pairing& pair, const TensorResult& t, RecordedTensor& seen, RecordedStep& step) {
  Divergence out{.tensor = t, .layer = layer_index(t.key.name)};
  if (!pair.found_.tensors().contains(t.key)) return out;
  const auto& tensors = pair.found_.tensors().at(t.key);
  const StoredTensor& any = tensors.begin()->second;
  const auto replica = [&](const StoredTensor& a) { return std::min(t.replica, a.replicas.size() - 1); };
  out.rank = std::max(0, pair.found_.owner(any, replica(any), 0, 0));
  if (!is_compared(t.key.kind)) return out;
  const bool batched = is_batched(t.key.kind);
  std::vector<Hits> hits(batched ? 3 : any.shape.size() > 1 ? 2 : 1);
  const auto hit = [&](size_t d, int64_t i) {
    if (i >= std::ssize(hits[d])) hits[d].resize(static_cast<size_t>(i) + 1);
    hits[d][static_cast<size_t>(i)] = true;
  };
  std::set<Sample> samples;
  std::set<int64_t> data, wrong_data, microbatches;
  std::map<Sample, Range> tokens;                                                         // bounds of the wrong ones
  std::vector<double> here, there, differences, shift(static_cast<size_t>(any.width()));  // shift: sums by column
  double squares = 0, rows = 0;
  Explanation explanation(pair, t.key);
  const double least = 4 * std::max(t.tolerance, 1e-7) * t.size;
  for_each_block(
      pair.match(), tensors, *pair.counterpart(t.key), batched,
      [&](const Block& b, const StoredTensor& a, const StoredTensor& e) {
        pair.found_.read(a, replica(a), b.rows, here);
        pair.expected_.read(e, 0, b.other, there);
        const double scale = pair.scale(t.key.kind, b);
        samples.insert({b.found_batch, b.sample}), data.insert(b.found_batch.first);
        rows += static_cast<double>(b.rows.size());
        differences.assign(here.size(), std::numeric_limits<double>::quiet_NaN());
        Hits rows_hit(static_cast<size_t>(b.rows.size()));
        for_each_element(here, there, a.width(), e.width(), [&](double x, double y, int64_t r, int64_t column) {
          const double difference = x - scale * y;
          if (std::isnan(difference)) return;
          differences[static_cast<size_t>(r * a.width() + column)] = difference;
          if (column < std::ssize(shift)) shift[static_cast<size_t>(column)] += difference;
          squares += difference * difference;
          if (!(std::abs(difference) > least)) return;
          if (out.wrong++ == 0) {
            out.rank = pair.found_.owner(a, replica(a), b.rows.begin + r, column);
            out.microbatch = batched ? b.found_batch.second : -1;
          }
          hit(hits.size() - 1, column);
          rows_hit[static_cast<size_t>(r)] = true;
        });
        for (const Range& range : hit_ranges(rows_hit)) {
          const int64_t first = batched ? b.first_token : b.rows.begin;
          for (int64_t r = range.begin; r < range.end && hits.size() > 1; ++r) hit(hits.size() - 2, first + r);
          if (!batched) continue;
          const Range wrong{first + range.begin, first + range.end};
          Range& bounds = tokens.try_emplace({b.found_batch, b.sample}, wrong).first->second;
          bounds = {std::min(bounds.begin, wrong.begin), std::max(bounds.end, wrong.end)};
          hit(0, b.sample), wrong_data.insert(b.found_batch.first), microbatches.insert(b.found_batch.second);
        }
        explanation.add(b.rows, differences);
      });
  hits.back().resize(static_cast<size_t>(any.width()));
  if (!batched && hits.size() == 2) hits[0].resize(static_cast<size_t>(any.rows()));
  out.extents = make_extents(t.key, hits, read_heads(pair));
  if (out.wrong > 0)
    for (const Hits& dim : hits) {
      const std::vector<Range> ranges = hit_ranges(dim);
      out.index.push_back({ranges.front().begin, ranges.back().end});
    }
  for (const int64_t m : microbatches) out.microbatches.push_back(m);
  std::set<int> ranks;
  for (const auto& [batch, a] : tensors)
    if (out.wrong > 0 && (!batched || wrong_data.contains(batch.first)))
      for (const int rank : wrong_ranks(a.replicas[replica(a)], hits)) ranks.insert(rank);
  out.ranks.assign(ranks.begin(), ranks.end());
  if (batched && out.wrong > 0) seen.first_token = out.index[1].begin, seen.end_token = out.index[1].end;
  double same = 0;
  for (const double sum : shift) same += sum * sum / std::max(1.0, rows);
  seen.same_shift = t.key.kind == Kind::output && rows > 1 && same > 0.98 * squares;
  if (t.key.kind == Kind::grad) seen.of_parameter = explanation.factor();
  if (t.key.kind == Kind::parameter) seen.of_update = explanation.factor();
  seen.some_samples = batched && tokens.size() < samples.size();
  seen.some_data_ranks = batched && wrong_data.size() < data.size();
  seen.elsewhere = t.key.kind == Kind::parameter && is_elsewhere(pair, t);
  if (t.key.kind == Kind::output && !pair.found_.rows().empty()) find_documents(pair.found_, tokens, step);
  return out;
}

}  // namespace tessera::audit
