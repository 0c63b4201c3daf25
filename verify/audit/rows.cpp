// Corresponding rows, by their tokens, and corresponding tensors, by their names.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "verify/audit/pairs.h"

namespace tessera::audit {

namespace {

// Names of tied heads, which some programs store as another parameter.
constexpr std::string_view kHead = "lm_head.weight";

}  // namespace

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

const std::map<Batch, StoredTensor>* Pairing::counterpart(const Key& key) const {
  if (const auto* const same = expected_.find(key.kind, key.name)) return same;
  if (!key.name.starts_with(kHead)) return nullptr;
  for (const char* table : {"model.embed_tokens.weight", "transformer.wte.weight"})
    if (const auto* const tied = expected_.find(key.kind, table)) return tied;
  return nullptr;
}

double Pairing::scale(Kind kind, const Block& block) const {
  const auto found = factors_.find({block.found_batch, block.expected_batch});
  return kind != Kind::output_grad || found == factors_.end() || found->second == 0 ? 1 : found->second;
}

double Pairing::order(const std::string& name) const {
  return std::max(found_.order(name), expected_.find(Kind::output, name) ? expected_.order(name) : -1e18);
}

double Pairing::enclosing_order(std::string name) const {
  while (!name.empty() && !found_.find(Kind::output, name))
    name.resize(name.find('.') == name.npos ? 0 : name.rfind('.'));
  return name.empty() ? -std::numeric_limits<double>::infinity() : order(name);
}

}  // namespace tessera::audit
