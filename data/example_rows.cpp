// Laying out examples in rows.
#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>

#include "data/examples.h"
#include "tensor/error.h"

namespace tessera {
namespace {

// For each row the examples in it. An example of n tokens takes n - 1 places: its last token is a target alone.
std::vector<std::vector<int64_t>> packed_rows(const std::vector<EncodedExample>& examples, int64_t context) {
  std::vector<int64_t> order(examples.size());
  std::iota(order.begin(), order.end(), 0);
  const auto places = [&](int64_t e) { return std::ssize(examples[static_cast<size_t>(e)].tokens) - 1; };
  std::ranges::stable_sort(order, [&](int64_t a, int64_t b) { return places(a) > places(b); });
  std::vector<std::vector<int64_t>> rows;
  std::map<int64_t, std::vector<size_t>> by_room;  // rows that are not full
  for (const int64_t e : order) {
    const auto fits = by_room.lower_bound(places(e));
    size_t row = rows.size();
    int64_t room = context;
    if (fits == by_room.end()) {
      rows.emplace_back();
    } else {
      room = fits->first;
      row = fits->second.back();
      fits->second.pop_back();
      if (fits->second.empty()) by_room.erase(fits);
    }
    rows[row].push_back(e);
    if (room > places(e)) by_room[room - places(e)].push_back(row);
  }
  return rows;
}

}  // namespace

int64_t targets_of(const EncodedExample& example) {
  return example.trained.empty() ? 0 : std::count(example.trained.begin() + 1, example.trained.end(), true);
}

ExampleRows::ExampleRows(const std::vector<EncodedExample>& examples, int64_t context, bool packed)
    : context_(context), packed_(packed) {
  if (examples.empty()) throw Error("[examples] expected at least one");
  for (const EncodedExample& e : examples) {
    if (std::ssize(e.tokens) > context + 1 || e.tokens.size() != e.trained.size() || tessera::targets_of(e) == 0)
      throw Error(fmt::format("[examples] example {} has {} tokens, {} of them targets; expected at most {}, and one",
                              begins_.size(), e.tokens.size(), tessera::targets_of(e), context + 1));
    tokens_.insert(tokens_.end(), e.tokens.begin(), e.tokens.end());
    trained_.insert(trained_.end(), e.trained.begin(), e.trained.end());
    begins_.push_back(std::ssize(tokens_));
  }
  std::vector<std::vector<int64_t>> rows;
  if (packed)
    rows = packed_rows(examples, context);
  else
    for (int64_t e = 0; e < std::ssize(examples); ++e) rows.push_back({e});
  for (const std::vector<int64_t>& row : rows) {
    int64_t sum = 0;
    for (const int64_t e : row) sum += tessera::targets_of(examples[static_cast<size_t>(e)]);
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

void ExampleRows::load(int64_t first, int64_t count, int32_t* inputs, int32_t* targets) const {
  if (first < 0 || count < 0 || first > this->count() - count)
    throw Error(fmt::format("rows {} to {} are not among the {} of the examples", first, first + count, this->count()));
  for (int64_t r = 0; r < count; ++r) {
    int32_t *const in = inputs + r * context_, *const out = targets + r * context_;
    const int64_t filled = walk(first + r, [&](size_t e, int64_t at) {
      for (int64_t t = begins_[e]; t + 1 < begins_[e + 1]; ++t, ++at) {
        in[at] = tokens_[static_cast<size_t>(t)];
        out[at] = trained_[static_cast<size_t>(t) + 1] != 0 ? tokens_[static_cast<size_t>(t) + 1] : kIgnored;
      }
    });
    std::fill(in + filled, in + context_, 0);
    std::fill(out + filled, out + context_, kIgnored);
  }
}

void ExampleRows::starts(int64_t first, int64_t count, int32_t* out) const {
  for (int64_t r = 0; r < count; ++r) {
    int32_t* const row = out + r * context_;
    const int64_t filled = walk(first + r, [&](size_t e, int64_t at) {
      std::fill(row + at, row + at + (begins_[e + 1] - begins_[e] - 1), static_cast<int32_t>(at));
    });
    std::fill(row + filled, row + context_, static_cast<int32_t>(filled));
  }
}

std::vector<int32_t> ExampleRows::prompt() const {
  std::vector<int32_t> out{tokens_.front()};
  for (size_t t = 1; t < tokens_.size() && trained_[t] == 0; ++t) out.push_back(tokens_[t]);
  return out;
}

std::vector<int32_t> ExampleRows::target_tokens() const {
  std::vector<int32_t> out;
  for (size_t e = 0; e + 1 < begins_.size(); ++e)
    for (auto t = static_cast<size_t>(begins_[e]) + 1; t < static_cast<size_t>(begins_[e + 1]); ++t)
      if (trained_[t] != 0) out.push_back(tokens_[t]);
  return out;
}

uint64_t ExampleRows::checksum() const {
  const std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> state(XXH3_createState(), XXH3_freeState);
  XXH3_64bits_reset(state.get());
  const auto add = [&](const auto& values) {
    XXH3_64bits_update(state.get(), values.data(), values.size() * sizeof(values[0]));
  };
  add(tokens_), add(trained_), add(begins_), add(members_), add(row_ends_);
  return XXH3_64bits_digest(state.get());
}

}  // namespace tessera
