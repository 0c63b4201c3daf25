// A parameter of which only a part is here: some indices of one dim, as tensor parallelism cuts it.
//
//   whole (6, C)     runs {0, 1} {2, 1} {4, 1} of dim 0: rows 0, 2 and 4, the first half of each of q, k and v
//   here  (3, C)
#pragma once
#include <cstdint>
#include <vector>

#include "tensor/shape.h"

namespace tessera {

struct Cut {
  struct Run {
    int64_t begin = 0, size = 0;
  };
  Shape whole = {};  // of the parameter; meaningless when there are no runs
  int dim = 0;
  std::vector<Run> runs = {};  // empty: the parameter is here as a whole

  bool is_whole() const { return runs.empty(); }
  // The shape of what is here.
  Shape local() const;
};

// Calls f(here, whole, count) for the longest runs of elements that are consecutive in both: `here` and `whole` are
// flat indices. [begin, end) are elements of what is here; `shape` is its shape.
template <class F>
void for_each_run(const Cut& cut, const Shape& shape, int64_t begin, int64_t end, const F& f) {
  if (cut.is_whole()) {
    if (begin < end) f(begin, begin, end - begin);
    return;
  }
  int64_t inner = 1, outer = 1;
  for (int d = 0; d < shape.rank(); ++d) (d < cut.dim ? outer : inner) *= d == cut.dim ? 1 : shape[d];
  const int64_t row = cut.whole[cut.dim] * inner;
  int64_t here = 0;
  for (int64_t o = 0; o < outer; ++o)
    for (const Cut::Run& run : cut.runs) {
      const int64_t size = run.size * inner, from = begin > here ? begin : here,
                    to = end < here + size ? end : here + size;
      if (from < to) f(from, o * row + run.begin * inner + from - here, to - from);
      here += size;
    }
}

}  // namespace tessera
