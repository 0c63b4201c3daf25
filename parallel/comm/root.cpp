// Collectives through a root, as in DataParallel and a parameter server: simple, but the root's link is the bottleneck.
//
//   1 \            / 1
//   2 -> 0 (sum) -> 2        gather, then broadcast
//   3 /            \ 3
//
// Summation order: rank order, in float32, rounded once; bitwise identical to the direct exchange. The root receives
// and sends n - 1 arrays; every other rank sends and receives one.
#include <cstdint>

#include "parallel/comm/algorithms.h"
#include "parallel/comm/memory.h"

namespace tessera {

int64_t root(Transport& t, const Call& call) {
  int64_t sent = 0;
  const auto step = [&](Op op, const std::byte* in, std::byte* out) {
    Call inner = call;
    inner.op = op;
    inner.root = 0;
    inner.in = in;
    inner.out = out;
    sent += exchange(t, inner);
  };
  if (call.op == Op::all_reduce) {
    step(Op::reduce, call.in, call.out);
  } else if (call.op == Op::reduce_scatter) {
    Scratch total(call, t.rank() == 0 ? call.bytes() : 0);
    step(Op::reduce, call.in, total.data());
    step(Op::scatter, total.data(), call.out);
  } else {
    step(Op::gather, call.in, call.out);
  }
  if (call.op != Op::reduce_scatter) step(Op::broadcast, call.out, call.out);
  return sent;
}

}  // namespace tessera
