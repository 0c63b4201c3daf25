// Bitwise comparison of the shards of each parameter.
#include "verify/audit/shards.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "verify/audit/recording.h"

namespace tessera::audit {

namespace {

// Zeros, ones and other constants are identical by intention.
bool is_constant(const TensorBytes& t) {
  int64_t elements = 1;
  for (const int64_t n : t.shape) elements *= n;
  if (elements < 2) return true;
  const size_t size = t.bytes.size() / static_cast<size_t>(elements);
  return std::ranges::equal(t.bytes.first(t.bytes.size() - size), t.bytes.subspan(size));
}

}  // namespace

std::string identical_shards(const Recording& recording) {
  int64_t sharded = 0;
  std::vector<std::string> names;
  std::set<std::string> axes;
  for (const auto& [key, batches] : recording.tensors()) {
    if (key.kind != Kind::parameter) continue;
    const std::vector<Slice>& slices = batches.begin()->second.replicas.front();
    if (slices.size() < 2 || !slices[0].partial.empty() || is_constant(*slices[0].bytes)) continue;
    ++sharded;
    const bool identical = std::ranges::all_of(slices, [&](const Slice& s) {
      return s.bytes->shape == slices[0].bytes->shape && std::ranges::equal(s.bytes->bytes, slices[0].bytes->bytes);
    });
    if (!identical) continue;
    names.push_back(key.name);
    const auto at = [&](const Slice& s) { return recording.ranks()[static_cast<size_t>(s.rank)].axes; };
    for (const auto& [axis, coordinate] : at(slices[0]))
      if (const auto other = at(slices[1]); other.contains(axis) && other.at(axis) != coordinate) axes.insert(axis);
  }
  if (names.empty()) return "";
  return fmt::format(
      "{} of {} sharded parameters have bitwise identical shards on the ranks of {}, such as {}: the ranks "
      "initialize different shards with the same random numbers",
      names.size(), sharded, axes.empty() ? "the mesh" : *axes.begin(), names.front());
}

}  // namespace tessera::audit
