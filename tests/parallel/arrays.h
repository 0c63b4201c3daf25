// Inputs of collectives and their expected results.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include "parallel/comm/algorithms.h"
#include "parallel/comm/launch.h"

namespace tessera::test {

inline std::vector<Algorithm> algorithms(bool with_native) {
  std::vector<Algorithm> out;
  for (size_t i = 0; i < kAlgorithms.size(); ++i)
    if (with_native || kAlgorithms[i].order != AdditionOrder::library) out.push_back(static_cast<Algorithm>(i));
  return out;
}
inline const std::vector<Algorithm> kByMessages = algorithms(false);

// Element i of rank r's input: small integers, whose sums are exact in every order and dtype.
inline double rank_input(int rank, int64_t i) { return static_cast<double>((i * 7 + rank * 3) % 5); }

inline Tensor make_array(int rank, int64_t n, DType dtype, const ArenaPtr& arena) {
  std::vector<double> v(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) v[static_cast<size_t>(i)] = rank_input(rank, i);
  return Tensor::of<double>(v, {n}, arena).to(dtype).to(arena);
}

inline Tensor zeros(int64_t n) { return Tensor::zeros({n}, DType::float32, make_arena()); }

inline std::vector<double> values(const Tensor& t) { return t.on_host().to(DType::float64).to_vector<double>(); }

inline std::vector<double> summed(int ranks, int64_t n) {
  std::vector<double> total(static_cast<size_t>(n));
  for (int r = 0; r < ranks; ++r)
    for (int64_t i = 0; i < n; ++i) total[static_cast<size_t>(i)] += rank_input(r, i);
  return total;
}

// Calls in which one rank requests a different size, dtype, operation, root or reduction.
using OddCall = std::function<void(Communicator&, const Tensor& x, bool odd)>;
inline const std::vector<std::pair<const char*, OddCall>> kOddCalls = {
    {"size", [](auto& c, auto& x, bool odd) { c.all_reduce(x.narrow(0, 0, odd ? 24 : 12)); }},
    {"dtype", [](auto& c, auto& x, bool odd) { c.all_reduce(odd ? x.to(DType::int32) : x); }},
    {"operation", [](auto& c, auto& x, bool odd) { odd ? c.reduce(x, 0) : c.broadcast(x, 0); }},
    {"collective", [](auto& c, auto& x, bool odd) { odd ? c.broadcast(x, 0) : c.all_reduce(x); }},
    {"root", [](auto& c, auto& x, bool odd) { c.broadcast(x, odd ? 1 : 0); }},
    {"reduction", [](auto& c, auto& x, bool odd) { c.all_reduce(x, odd ? Reduction::max : Reduction::sum); }}};

inline std::vector<double> cut(const std::vector<double>& full, int ranks, int rank) {
  const Range p = chunk_range(static_cast<int64_t>(full.size()), ranks, rank);
  return {full.begin() + p.begin, full.begin() + p.end};
}

// Whether uneven chunks, some of them empty, arrive correctly and are counted, in a background call and in the blocking
// call after it.
inline bool exchanges_uneven(Communicator& c, DType dtype, const ArenaPtr& arena) {
  const auto size = [](int from, int to) -> int64_t { return (3 * from + 2 * to) % 5; };
  std::vector<int64_t> sent, received;
  int64_t going = 0, coming = 0, left = 0;
  for (int r = 0; r < c.size(); ++r) {
    sent.push_back(size(c.rank(), r));
    received.push_back(size(r, c.rank()));
    going += sent.back(), coming += received.back();
    left += r == c.rank() ? 0 : sent.back();
  }
  const Tensor in = make_array(c.rank(), going, dtype, arena), out = Tensor::zeros({coming}, dtype, arena),
               again = out.clone();
  const OpCount before = c.counts()[static_cast<size_t>(Op::all_to_all)];
  Work underway = c.start_all_to_all(in, out, sent, received);
  c.all_to_all(in, again, sent, received);
  underway.wait();
  const OpCount after = c.counts()[static_cast<size_t>(Op::all_to_all)];
  bool right = after.calls - before.calls == (c.size() > 1 ? 2 : 0) &&
               after.sent - before.sent == 2 * left * element_size(dtype);
  right = right && values(again) == values(out);
  for (int64_t r = 0, at = 0; r < c.size(); at += received[static_cast<size_t>(r++)]) {
    int64_t full = 0, first = 0;
    for (int to = 0; to < c.size(); ++to) {
      if (to == c.rank()) first = full;
      full += size(static_cast<int>(r), to);
    }
    const int64_t count = received[static_cast<size_t>(r)];
    right = right && values(out.narrow(0, at, count)) ==
                         values(make_array(static_cast<int>(r), full, dtype, arena).narrow(0, first, count));
  }
  return right;
}

}  // namespace tessera::test
