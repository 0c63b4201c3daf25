// Matching of rows by their tokens.
#include <algorithm>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "verify/audit/pairs.h"

namespace tessera::audit {

RowMatch::RowMatch(const Recording& found, const Recording& expected) {
  using Content = std::pair<std::vector<int64_t>, std::vector<int64_t>>;
  const auto count = [](const Recording& r) {
    std::map<Batch, int64_t> out;
    for (const TokenRow& row : r.rows()) ++out[row.batch];
    return out;
  };
  samples_ = count(found);
  if (!found.rows().empty() && !expected.rows().empty()) {
    const std::map<Batch, int64_t> there = count(expected);
    const auto content = [](const TokenRow& row) {
      return Content{{row.ids.begin(), row.ids.begin() + row.used},
                     {row.targets.begin(), row.targets.begin() + row.used}};
    };
    std::map<Content, std::vector<const TokenRow*>> unused;
    std::map<Content, const TokenRow*> any;
    for (const TokenRow& row : expected.rows()) {
      unused[content(row)].push_back(&row);
      any[content(row)] = &row;
    }
    const auto place = [&](const TokenRow& row, const TokenRow& other) {
      places_[{row.batch, row.row}] = {other.batch, other.row, there.at(other.batch), std::min(row.used, other.used)};
    };
    std::vector<const TokenRow*> left;
    for (const TokenRow& row : found.rows()) {
      const auto same = unused.find(content(row));
      if (same == unused.end()) {
        left.push_back(&row);
        continue;
      }
      const bool fresh = !same->second.empty();
      place(row, fresh ? *same->second.front() : *any.at(same->first));
      if (fresh) same->second.erase(same->second.begin());
      (fresh ? matched : repeated) += 1;
    }
    for (const TokenRow* row : left) {  // with the same tokens, but other targets
      const auto same = std::ranges::find_if(unused, [&](const auto& rest) {
        const int64_t common = rest.second.empty() ? 0 : std::min(row->used, rest.second.front()->used);
        return common > 1 && std::equal(row->ids.begin(), row->ids.begin() + common, rest.second.front()->ids.begin());
      });
      foreign += same == unused.end() ? 1 : 0;
      if (same == unused.end()) continue;
      place(*row, *same->second.front());
      same->second.erase(same->second.begin());
      ++matched, ++other_targets;
    }
    dropped = std::ssize(expected.rows()) - matched;
    return;
  }
  for (const auto& [key, batches] : found.tensors()) {
    const auto* const others = key.kind == Kind::output ? expected.find(key.kind, key.name) : nullptr;
    if (!others) continue;
    std::vector<Place> all;
    for (const auto& [batch, t] : *others)
      for (int64_t row = 0; !t.shape.empty() && row < t.shape[0]; ++row) all.push_back({batch, row, t.shape[0], 0});
    size_t at = 0;
    for (const auto& [batch, t] : batches)
      for (int64_t row = 0; !t.shape.empty() && row < t.shape[0]; ++row, ++at) {
        samples_[batch] = t.shape[0];
        if (at < all.size()) places_[{batch, row}] = all[at];
      }
    matched = std::ssize(places_);
    return;
  }
}

const RowMatch::Place* RowMatch::find(Batch batch, int64_t row) const {
  const auto found = places_.find({batch, row});
  return found == places_.end() ? nullptr : &found->second;
}

int64_t RowMatch::samples(Batch batch) const {
  const auto found = samples_.find(batch);
  return found == samples_.end() ? 0 : found->second;
}

}  // namespace tessera::audit
