// Collective algorithms over messages. Each has a file that says its order of summation and what it sends.
//
//   direct   every rank sends piece r to rank r, which adds in rank order; then every rank sends its sum to all
//   ring     n - 1 steps around a ring, each adding one rank to a piece; n - 1 more to hand the sums on
//   tree     pairs, pairs of pairs, ...: log2(n) steps, whole arrays
//   root     everything to rank 0, which adds in rank order and sends the sum back
//   native   the library's own (MPI, NCCL)
#pragma once

#include "parallel/comm/transport.h"

namespace tessera {

enum class Algorithm : uint8_t { direct, ring, tree, root, native };

int64_t ring(Transport& t, const Call& call);
int64_t tree(Transport& t, const Call& call);
int64_t root(Transport& t, const Call& call);  // through rank 0

// The order in which the values of one element are added: of ranks, around from the rank after that which owns its
// piece, in pairs, or the library's. verify/reference.cpp adds so too.
enum class AdditionOrder : uint8_t { ranks, around, pairs, library };

// An algorithm's row of the table: its order, its function, and for which operations that is. All others go the direct
// way.
struct AlgorithmRow {
  std::string_view name;
  AdditionOrder order;
  int64_t (*run)(Transport& t, const Call& call) = nullptr;
  std::array<Op, 3> ops = {};
  constexpr bool has(Op op) const { return run && std::find(ops.begin(), ops.end(), op) != ops.end(); }
  constexpr bool lacks(Op op) const { return run && !has(op); }
};
inline constexpr std::array<AlgorithmRow, 5> kAlgorithms = {{
    {"direct", AdditionOrder::ranks},
    {"ring", AdditionOrder::around, ring, {Op::all_reduce, Op::reduce_scatter, Op::all_gather}},
    {"tree", AdditionOrder::pairs, tree, {Op::all_reduce, Op::reduce, Op::broadcast}},
    {"root", AdditionOrder::ranks, root, {Op::all_reduce, Op::reduce_scatter, Op::all_gather}},
    {"native", AdditionOrder::library},
}};
constexpr const AlgorithmRow& find_row(Algorithm algorithm) { return kAlgorithms.at(static_cast<size_t>(algorithm)); }
constexpr std::string_view to_string(Algorithm algorithm) { return find_row(algorithm).name; }
inline constexpr auto kAlgorithmNames = [] {
  std::array<std::string_view, kAlgorithms.size()> names;
  for (size_t i = 0; i < names.size(); ++i) names[i] = kAlgorithms[i].name;
  return names;
}();

// Whether a collective is the library's own with this algorithm. Uneven pieces are where nothing else can reach them.
// Throws Error where it has to be, and is asked to add in another order.
bool goes_native(const Transport& t, Algorithm algorithm, const Call& call);
// Runs one collective with the algorithm; operations that an algorithm has no way of its own for go the direct way.
// Returns the bytes that this rank sent.
int64_t run_collective(Transport& t, Algorithm algorithm, const Call& call);

int64_t direct_by_messages(Transport& t, const Call& call);
int64_t exchange(Transport& t, const Call& call);  // the same, as a part of another collective
// The bytes that a rank sends in the direct exchange: 2 (n - 1) arrays by all ranks of an all-reduce together.
// Collectives of a library, which does not tell what it sends, are counted so too.
int64_t sent_directly(const Call& call, int ranks, int rank);

// The all-to-all of pieces whose sizes differ: where they lie, and how they go as messages (parallel/comm/tree.cpp).

// Ranges of the pieces in an all_to_all among so many ranks, whether its pieces are even or not: where in `in` the
// piece for rank r lies, and where in `out` that from rank r.
Range piece_for(const Call& call, int ranks, int r);
Range piece_from(const Call& call, int ranks, int r);

// Each rank sends its pieces to the others, the next rank's first; empty ones are not sent. Returns the bytes that left
// this rank.
int64_t send_pieces(Transport& t, const Call& call);
// Then it copies its own and takes what comes. Throws CommError where a message is not as long as its piece.
void receive_pieces(Transport& t, const Call& call);
int64_t exchange_uneven(Transport& t, const Call& call);

}  // namespace tessera
