// Checks of a communicator's operations, for any kind of rank, with host or GPU arrays.
#pragma once
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "tensor/random.h"
#include "tests/parallel/arrays.h"

namespace tessera::test {

inline std::atomic<int> failures{0};

inline void expect(bool good, const std::string& what) {
  if (good) return;
  ++failures;
  std::fprintf(stderr, "expectation failed: %s\n", what.c_str());
}

inline std::string named(const Communicator& c, int64_t n, DType dtype, const char* op) {
  return std::string(op) + " by " + std::string(to_string(c.algorithm())) + " of " + std::to_string(n) + " " +
         std::string(to_string(dtype)) + " on rank " + std::to_string(c.rank()) + " of " + std::to_string(c.size());
}

inline void check_sums(Communicator& c, int64_t n, DType dtype, const ArenaPtr& arena) {
  const int ranks = c.size(), me = c.rank();
  const std::vector<double> total = summed(ranks, n);
  const Tensor mine = make_array(me, n, dtype, arena);
  Tensor x = mine.clone();
  c.all_reduce(x);
  expect(values(x) == total, named(c, n, dtype, "all_reduce"));
  x = mine.clone();
  c.start_all_reduce(x).wait();
  expect(values(x) == total, named(c, n, dtype, "all_reduce in the background"));
  const Range own = chunk_range(n, ranks, me);
  Tensor part = Tensor::empty({own.size()}, dtype, arena);
  c.reduce_scatter(mine, part);
  expect(values(part) == cut(total, ranks, me), named(c, n, dtype, "reduce_scatter"));
  expect(values(mine) == values(make_array(me, n, dtype, arena)), named(c, n, dtype, "reduce_scatter's input"));
  Tensor full = Tensor::zeros({n}, dtype, arena);
  c.all_gather(part, full);
  expect(values(full) == total, named(c, n, dtype, "all_gather"));
  x = mine.clone();
  const Tensor inside = x.narrow(0, own.begin, own.size());
  c.reduce_scatter(x, inside);
  expect(values(inside) == cut(total, ranks, me), named(c, n, dtype, "reduce_scatter in place"));
  c.all_gather(inside, x);
  expect(values(x) == total, named(c, n, dtype, "all_gather in place"));
}

inline void check_roots(Communicator& c, int64_t n, DType dtype, const ArenaPtr& arena) {
  const int ranks = c.size(), me = c.rank();
  const std::vector<double> total = summed(ranks, n);
  const Tensor mine = make_array(me, n, dtype, arena);
  const Range own = chunk_range(n, ranks, me);
  const Tensor part = mine.narrow(0, own.begin, own.size()).clone();
  for (int root = 0; root < ranks; ++root) {
    Tensor x = mine.clone();
    c.broadcast(x, root);
    expect(values(x) == values(make_array(root, n, dtype, arena)), named(c, n, dtype, "broadcast"));
    x = mine.clone();
    c.reduce(x, root);
    expect(values(x) == (me == root ? total : values(mine)), named(c, n, dtype, "reduce"));
    const Tensor full = me == root ? Tensor::zeros({n}, dtype, arena) : Tensor::meta({n}, dtype);
    c.gather(part, full, root);
    for (int r = 0; me == root && r < ranks; ++r) {
      const Range theirs = chunk_range(n, ranks, r);
      const Tensor from = make_array(r, n, dtype, arena).narrow(0, theirs.begin, theirs.size());
      expect(values(full.narrow(0, theirs.begin, theirs.size())) == values(from), named(c, n, dtype, "gather"));
    }
    const Tensor got = Tensor::zeros({own.size()}, dtype, arena);
    c.scatter(full, got, root);
    expect(values(got) == values(part), named(c, n, dtype, "gather and scatter"));
  }
  const int64_t each = n / ranks + 1;
  const Tensor in = make_array(me, ranks * each, dtype, arena), out = Tensor::zeros({ranks * each}, dtype, arena);
  c.all_to_all(in, out);
  for (int r = 0; r < ranks; ++r)
    expect(values(out.narrow(0, each * r, each)) ==
               values(make_array(r, ranks * each, dtype, arena).narrow(0, each * me, each)),
           named(c, n, dtype, "all_to_all"));
  expect(exchanges_uneven(c, dtype, arena), named(c, n, dtype, "uneven all_to_all"));
}

inline void check_operations(Communicator& c, const std::vector<int64_t>& sizes, const std::vector<DType>& dtypes,
                             const std::vector<ArenaPtr>& arenas) {
  for (const int64_t n : sizes)
    for (const DType dtype : dtypes)
      for (const ArenaPtr& arena : arenas) {
        check_sums(c, n, dtype, arena);
        check_roots(c, n, dtype, arena);
      }
}

// Messages with two tags, of `size` elements and more, received in a different order than sent.
inline void check_messages(Communicator& c, int from, int to, int64_t size) {
  const ArenaPtr arena = make_arena();
  const auto message = [&](int i) { return make_array(i, size + i, DType::float32, arena); };
  for (int i = 0; c.rank() == from && i < 10; ++i) c.send(message(i), to, i % 2);
  if (c.rank() != to) return;
  for (const int i : {1, 0, 3, 5, 2, 7, 4, 6, 8, 9}) {
    const Tensor x = Tensor::zeros({size + i}, DType::float32, arena);
    c.recv(x, from, i % 2);
    expect(values(x) == values(message(i)), "message " + std::to_string(i));
  }
}

// A rank's input of a sum that depends on its order.
inline Tensor for_order(int rank, int ranks, int64_t size, DType dtype) {
  std::vector<float> v;
  for (int64_t i = 0; i < size; ++i)
    v.push_back(static_cast<float>(Philox::named(7, "order").normal(static_cast<uint64_t>(i * ranks + rank))));
  return Tensor::of<float>(v, {size}, make_arena()).to(dtype);
}

// The same sum by thread ranks, whose order other tests check.
inline std::vector<double> sum_of_threads(int ranks, Algorithm algorithm, int64_t size, DType dtype) {
  std::vector<double> out;
  launch({.ranks = ranks, .timeout_s = 20, .algorithm = algorithm}, [&](Communicator& world) {
    const Tensor x = for_order(world.rank(), ranks, size, dtype);
    world.all_reduce(x);
    if (world.rank() == 0) out = values(x);
  });
  return out;
}

}  // namespace tessera::test
