// Rows of tokenized examples: packing, targets, checksums.
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <numeric>
#include <span>
#include <vector>

#include "base/error.h"
#include "base/files.h"
#include "data/examples.h"

namespace tessera {

// An example of n tokens occupies n - 1 positions, because its last token is only a target.
static std::vector<std::vector<int64_t>> packed_rows(const std::vector<EncodedExample>& examples, int64_t context) {
  std::vector<int64_t> order(examples.size());
  std::iota(order.begin(), order.end(), 0);
  const auto places = [&](int64_t e) { return std::ssize(examples[static_cast<size_t>(e)].tokens) - 1; };
  std::ranges::stable_sort(order, [&](int64_t a, int64_t b) { return places(a) > places(b); });
  std::vector<std::vector<int64_t>> rows;
  std::map<int64_t, std::vector<size_t>> by_free_space;
  for (const int64_t e : order) {
    const auto fits = by_free_space.lower_bound(places(e));
    size_t row = rows.size();
    int64_t free_space = context;
    if (fits == by_free_space.end()) {
      rows.emplace_back();
    } else {
      free_space = fits->first;
      row = fits->second.back();
      fits->second.pop_back();
      if (fits->second.empty()) by_free_space.erase(fits);
    }
    rows[row].push_back(e);
    if (free_space > places(e)) by_free_space[free_space - places(e)].push_back(row);
  }
  return rows;
}

int64_t count_targets(const EncodedExample& example) {
  return example.trained.empty() ? 0 : std::count(example.trained.begin() + 1, example.trained.end(), true);
}

ExampleRows::ExampleRows(const std::vector<EncodedExample>& examples, int64_t context, bool packed)
    : context_(context), packed_(packed) {
  if (examples.empty()) throw Error("[examples] expected at least one example");
  for (const EncodedExample& e : examples) {
    if (std::ssize(e.tokens) > context + 1 || e.tokens.size() != e.trained.size() || tessera::count_targets(e) == 0)
      throw Error(fmt::format("[examples] example {} has {} tokens, {} of them targets; expected at most {}, and one",
                              begins_.size(), e.tokens.size(), tessera::count_targets(e), context + 1));
    tokens_.insert(tokens_.end(), e.tokens.begin(), e.tokens.end());
    trained_.insert(trained_.end(), e.trained.begin(), e.trained.end());
    begins_.push_back(std::ssize(tokens_));
    bytes_ += e.bytes;
  }
  std::vector<std::vector<int64_t>> rows;
  if (packed)
    rows = packed_rows(examples, context);
  else
    for (int64_t e = 0; e < std::ssize(examples); ++e) rows.push_back({e});
  for (const std::vector<int64_t>& row : rows) {
    int64_t sum = 0;
    for (const int64_t e : row) sum += tessera::count_targets(examples[static_cast<size_t>(e)]);
    members_.insert(members_.end(), row.begin(), row.end());
    row_ends_.push_back(std::ssize(members_));
    row_targets_.push_back(sum);
    targets_ += sum;
  }
}

template <class F>
int64_t ExampleRows::walk(int64_t row, const F& f) const {
  int64_t at = 0;
  for (int64_t m = row > 0 ? row_ends_[static_cast<size_t>(row) - 1] : 0; m < row_ends_[static_cast<size_t>(row)];
       ++m) {
    const auto e = static_cast<size_t>(members_[static_cast<size_t>(m)]);
    f(e, at);
    at += begins_[e + 1] - begins_[e] - 1;
  }
  return at;
}

int64_t ExampleRows::length(int64_t row) const {
  return walk(row, [](size_t, int64_t) {});
}

void ExampleRows::load_row(int64_t row, int32_t* inputs, int32_t* targets) const {
  const int64_t filled = walk(row, [&](size_t e, int64_t at) {
    for (int64_t t = begins_[e]; t + 1 < begins_[e + 1]; ++t, ++at) {
      inputs[at] = tokens_[static_cast<size_t>(t)];
      targets[at] = trained_[static_cast<size_t>(t) + 1] != 0 ? tokens_[static_cast<size_t>(t) + 1] : kIgnored;
    }
  });
  std::fill(inputs + filled, inputs + context_, 0);
  std::fill(targets + filled, targets + context_, kIgnored);
}

void ExampleRows::row_starts(int64_t row, int32_t* out) const {
  const int64_t filled = walk(row, [&](size_t e, int64_t at) {
    std::fill(out + at, out + at + (begins_[e + 1] - begins_[e] - 1), static_cast<int32_t>(at));
  });
  std::fill(out + filled, out + context_, static_cast<int32_t>(filled));
}

std::vector<int32_t> ExampleRows::prompt() const {
  std::vector<int32_t> out{tokens_.front()};
  for (size_t t = 1; t < tokens_.size() && trained_[t] == 0; ++t) out.push_back(tokens_[t]);
  return out;
}

uint64_t ExampleRows::checksum() const {
  return tessera::checksum_of_chunks([&](const ChunkFunction& add) {
    const auto all = [&](const auto& values) { add(std::as_bytes(std::span(values))); };
    all(tokens_), all(trained_), all(begins_), all(members_), all(row_ends_);
  });
}

}  // namespace tessera
