// Attention to some keys and attention to others, made one.
#include "tensor/cuda/attention_merge.h"

#include <algorithm>

#include "tensor/cpu/attention_problem.h"
#include "tensor/cuda/attention.h"
#include "tensor/ops/attention.h"

namespace tessera {
namespace {

template <class A>
void merge_rows(const Attended& into, const Attended& part) {
  const int64_t heads = into.out.dim(2), tokens = into.out.dim(1), d = into.out.dim(3);
  cpu::split(into.out.dim(0) * heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; ++at) {
      const cpu::Rows<A> to = cpu::rows_of<A>(into.out, at / heads, at % heads, 0);
      const cpu::Rows<const A> from = cpu::rows_of<const A>(part.out, at / heads, at % heads, 0);
      A *const lse = into.lse.data<A>() + at * tokens, *const other = part.lse.data<A>() + at * tokens;
      for (int64_t i = 0; i < tokens; ++i) {
        const A top = std::max(lse[i], other[i]);
        const A both = top + math::log(math::exp(lse[i] - top) + math::exp(other[i] - top));
        const A mine = math::exp(lse[i] - both), theirs = math::exp(other[i] - both);
        cpu::vectorized([=, y = to.data + i * to.stride, x = from.data + i * from.stride] {
          for (int64_t c = 0; c < d; ++c) y[c] = math::fma(x[c], theirs, y[c] * mine);
        });
        lse[i] = both;
      }
    }
  });
}

}  // namespace

void merge_attended(const Attended& into, const Attended& part) {
  if (!(into.out.shape() == part.out.shape()) || !(into.lse.shape() == part.lse.shape()) ||
      into.out.dtype() != part.out.dtype() || into.out.dtype() != into.lse.dtype() ||
      into.lse.dtype() != part.lse.dtype())
    throw Error("[merge_attended] into is " + into.out.describe() + " with lse " + into.lse.describe() + ", part " +
                part.out.describe() + " with lse " + part.lse.describe() + "; expected the same of one dtype");
  const auto on_cpu = [&] {
    with_floating(into.lse.dtype(), "merge_attended", [&](auto t) { merge_rows<Accumulate<decltype(t)>>(into, part); });
  };
  on_device(into.out.device(), on_cpu, [&] { cuda::merge_attended(into, part); });
}

}  // namespace tessera
