// Collective algorithms built on messages.
//
//   direct   every rank sends chunk r to rank r, which adds in rank order; then every rank sends its sum to all
//   ring     n - 1 steps around a ring, each adding one rank to a chunk; n - 1 more to distribute the sums
//   tree     pairs, pairs of pairs, ...: log2(n) steps with full arrays
//   root     everything to rank 0, which adds in rank order and sends the sum back
//   native   the library's own (MPI, NCCL)
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/error.h"
#include "parallel/comm/transport.h"

namespace tessera {

enum class Algorithm : uint8_t { direct, ring, tree, root, native };

int64_t ring(Transport& t, const Call& call);
int64_t tree(Transport& t, const Call& call);
int64_t root(Transport& t, const Call& call);

// In rank order, around the ring starting after the chunk's owner, in pairs, or in the library's order.
// verify/reference.cpp implements the same orders independently.
enum class AdditionOrder : uint8_t { ranks, around, pairs, library };

// A new algorithm needs a function, an Algorithm, and its row; `ops` are the operations that it supports, and all
// others use direct. Options, messages, tests and benchmarks follow from the row.
struct AlgorithmRow {
  std::string_view name;
  AdditionOrder order;
  int64_t (*run)(Transport& t, const Call& call) = nullptr;
  std::array<Op, 3> ops = {};
  constexpr bool has(Op op) const { return run && std::find(ops.begin(), ops.end(), op) != ops.end(); }
  constexpr bool lacks(Op op) const { return run && !has(op); }
  // Whether the order is the same for all elements, wherever they are in the array.
  constexpr bool adds_uniformly() const { return order != AdditionOrder::around && order != AdditionOrder::library; }
};
inline constexpr auto kAlgorithms = std::to_array<AlgorithmRow>({
    {"direct", AdditionOrder::ranks},
    {"ring", AdditionOrder::around, ring, {Op::all_reduce, Op::reduce_scatter, Op::all_gather}},
    {"tree", AdditionOrder::pairs, tree, {Op::all_reduce, Op::reduce, Op::broadcast}},
    {"root", AdditionOrder::ranks, root, {Op::all_reduce, Op::reduce_scatter, Op::all_gather}},
    {"native", AdditionOrder::library},
});
constexpr const AlgorithmRow& find_row(Algorithm algorithm) { return kAlgorithms.at(static_cast<size_t>(algorithm)); }
constexpr std::string_view to_string(Algorithm algorithm) { return find_row(algorithm).name; }
inline constexpr auto kAlgorithmNames = row_names(kAlgorithms);

// "direct, ring, tree or root": the algorithms with a documented summation order; `uniform`: only those whose order is
// the same for all elements.
std::string expected_algorithms(bool uniform = false);

// Whether the library runs the collective. Uneven chunks use the library only if messages cannot reach the arrays.
// Throws Error if the library is required but a different summation order is requested.
bool uses_native(const Transport& t, Algorithm algorithm, const Call& call);
// Runs one collective, with direct if the algorithm does not support it. Returns the bytes that this rank sent.
int64_t run_collective(Transport& t, Algorithm algorithm, const Call& call);

int64_t direct_by_messages(Transport& t, const Call& call);
int64_t exchange(Transport& t, const Call& call);  // inside another collective
// Bytes that a rank sends in the direct exchange: for an all-reduce, 2 (n - 1) arrays over all ranks. Library
// collectives, whose traffic is unknown, are counted the same.
int64_t sent_directly(const Call& call, int ranks, int rank);

// Ranges of an all_to_all's chunks: to rank r in `in`, from rank r in `out`.
Range send_range(const Call& call, int ranks, int r);
Range recv_range(const Call& call, int ranks, int r);

// Skips empty chunks. Returns the bytes that this rank sent.
int64_t send_chunks(Transport& t, const Call& call);
// Copies this rank's own chunk and receives the others. Throws CommError if a message's size differs from the chunk's.
void receive_chunks(Transport& t, const Call& call);
int64_t exchange_uneven(Transport& t, const Call& call);

}  // namespace tessera
