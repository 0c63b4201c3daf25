// Index ranges of slices.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "verify/audit/recording.h"

namespace tessera::audit {

inline int64_t count_indices(const std::vector<Range>& ranges) {
  int64_t n = 0;
  for (const Range& r : ranges) n += r.size();
  return n;
}

inline std::vector<Range> dim_ranges(const Slice& slice, const std::vector<int64_t>& shape, size_t dim) {
  return slice.index.empty() ? std::vector<Range>{{0, shape[dim]}} : slice.index[dim];
}

inline bool overlap(const Slice& a, const Slice& b, const std::vector<int64_t>& shape) {
  for (size_t d = 0; d < shape.size(); ++d) {
    bool common = false;
    for (const Range& x : dim_ranges(a, shape, d))
      for (const Range& y : dim_ranges(b, shape, d)) common = common || (x.begin < y.end && y.begin < x.end);
    if (!common) return false;
  }
  return true;
}

// Position of an index among the indices of a slice; -1 if it has none.
inline int64_t local_index(const std::vector<Range>& ranges, int64_t i) {
  int64_t before = 0;
  for (const Range& r : ranges) {
    if (i >= r.begin && i < r.end) return before + i - r.begin;
    before += r.size();
  }
  return -1;
}

}  // namespace tessera::audit
