// Dispatch of collective algorithms, and the direct exchange over messages.
#include "parallel/comm/algorithms.h"

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "parallel/comm/memory.h"

namespace tessera {
namespace {

constexpr int kTag = -1;

struct Exchange {
  Transport& t;
  const Call& call;
  int n = t.size(), rank = t.rank();
  int64_t element = element_size(call.dtype);
  int64_t sent = 0;
  Memory memory{call};

  Range range(int r) const { return chunk_range(call.count, n, r); }
  int64_t bytes(int r) const { return range(r).size() * element; }
  void send(int to, const std::byte* data, int64_t size) {
    memory.send(t, to, kTag, data, size);
    sent += size;
  }
  void recv(int from, std::byte* data, int64_t size) const { memory.recv(t, from, kTag, data, size); }

  void send_chunks(const std::byte* full) {
    for (int r = 0; r < n; ++r)
      if (r != rank) send(r, full + range(r).begin * element, bytes(r));
  }
  // out = the sum, in rank order, of the `size` bytes that each rank sent; this rank's input is at `own`.
  void sum_received(const std::byte* own, std::byte* out, int64_t size) const {
    std::vector<Scratch> theirs;
    std::vector<const std::byte*> in(static_cast<size_t>(n), own);
    for (int r = 0; r < n; ++r) {
      if (r == rank) continue;
      theirs.emplace_back(call, size);
      in[static_cast<size_t>(r)] = theirs.back().data();
      recv(r, theirs.back().data(), size);
    }
    memory.reduce_ranks(in, std::span(&out, 1), {0, size / element});
  }
  void gather_chunks(const std::byte* own, std::byte* full) {
    for (int r = 0; r < n; ++r)
      if (r != rank) send(r, own, bytes(rank));
    memory.copy(full + range(rank).begin * element, own, bytes(rank));
    for (int r = 0; r < n; ++r)
      if (r != rank) recv(r, full + range(r).begin * element, bytes(r));
  }

  void run();
};

void Exchange::run() {
  const int64_t begin = range(rank).begin * element, all = call.bytes();
  switch (call.op) {
    case Op::all_reduce:
      send_chunks(call.in);
      sum_received(call.in + begin, call.out + begin, bytes(rank));
      return gather_chunks(call.out + begin, call.out);
    case Op::reduce_scatter:
      send_chunks(call.in);
      return sum_received(call.in + begin, call.out, bytes(rank));
    case Op::all_gather:
      return gather_chunks(call.in, call.out);
    case Op::broadcast:
      if (rank != call.root) return recv(call.root, call.out, all);
      for (int r = 0; r < n; ++r)
        if (r != rank) send(r, call.in, all);
      return;
    case Op::reduce:
      return rank == call.root ? sum_received(call.in, call.out, all) : send(call.root, call.in, all);
    case Op::gather:
      if (rank != call.root) return send(call.root, call.in, bytes(rank));
      memory.copy(call.out + begin, call.in, bytes(rank));
      for (int r = 0; r < n; ++r)
        if (r != rank) recv(r, call.out + range(r).begin * element, bytes(r));
      return;
    case Op::scatter:
      if (rank != call.root) return recv(call.root, call.out, bytes(rank));
      memory.copy(call.out, call.in + begin, bytes(rank));
      return send_chunks(call.in);
    case Op::all_to_all:
      sent = exchange_uneven(t, call);
      return;
    default: {  // barrier: a message between every pair of ranks
      std::byte token{};
      for (int r = 0; r < n; ++r)
        if (r != rank) t.send(r, kTag, &token, 1);
      for (int r = 0; r < n; ++r)
        if (r != rank) recv(r, &token, 1);
    }
  }
}

int64_t over_messages(int64_t (*algorithm)(Transport&, const Call&), Transport& t, const Call& call) {
  return named_in_errors([&] { return describe(call) + ": "; }, [&] { return algorithm(t, call); });
}

}  // namespace

int64_t exchange(Transport& t, const Call& call) {
  Exchange messages{t, call};
  messages.run();
  return messages.sent;
}

int64_t direct_by_messages(Transport& t, const Call& call) { return over_messages(exchange, t, call); }

int64_t sent_directly(const Call& call, int ranks, int rank) {
  const int64_t own = chunk_range(call.count, ranks, rank).size() * element_size(call.dtype), all = call.bytes();
  const int64_t others = ranks - 1;
  switch (call.op) {
    case Op::all_reduce:
      return all - own + others * own;
    case Op::reduce_scatter:
      return all - own;
    case Op::all_to_all:
      return all - send_range(call, ranks, rank).size() * element_size(call.dtype);
    case Op::all_gather:
      return others * own;
    case Op::broadcast:
      return rank == call.root ? others * all : 0;
    case Op::reduce:
      return rank == call.root ? 0 : all;
    case Op::gather:
      return rank == call.root ? 0 : own;
    case Op::scatter:
      return rank == call.root ? all - own : 0;
    default:
      return 0;
  }
}

std::string expected_algorithms(bool uniform) {
  std::vector<std::string_view> names;
  for (const AlgorithmRow& row : kAlgorithms)
    if (uniform ? row.adds_uniformly() : row.order != AdditionOrder::library) names.push_back(row.name);
  return alternatives(names);
}

bool uses_native(const Transport& t, Algorithm algorithm, const Call& call) {
  if (algorithm == Algorithm::native && call.op != Op::barrier && !call.splits) return true;
  if (!t.only_native(call)) return false;
  const bool adds = call.op == Op::all_reduce || call.op == Op::reduce_scatter || call.op == Op::reduce;
  if (!adds) return true;
  throw Error("[comm] " + std::string(t.kind()) + " reduce GPU arrays in the library's order: " + describe(call) +
              " by " + std::string(to_string(algorithm)) + "; expected native");
}

int64_t run_collective(Transport& t, Algorithm algorithm, const Call& call) {
  if (uses_native(t, algorithm, call)) return t.native(call);
  if (call.splits) return over_messages(exchange_uneven, t, call);
  if (find_row(algorithm).has(call.op)) return over_messages(find_row(algorithm).run, t, call);
  return t.direct(call);
}

}  // namespace tessera
