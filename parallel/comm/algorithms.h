// Collective algorithms over messages. Each has a file that says its order of summation and what it sends.
//
//   direct   every rank sends piece r to rank r, which adds in rank order; then every rank sends its sum to all
//   ring     n - 1 steps around a ring, each adding one rank to a piece; n - 1 more to hand the sums on
//   tree     pairs, pairs of pairs, ...: log2(n) steps, whole arrays
//   root     everything to rank 0, which adds in rank order and sends the sum back
//   native   the library's own (MPI, NCCL)
#pragma once
#include <array>
#include <string_view>

#include "parallel/comm/transport.h"

namespace tessera {

enum class Algorithm : uint8_t { direct, ring, tree, root, native };
inline constexpr std::array<std::string_view, 5> kAlgorithmNames = {"direct", "ring", "tree", "root", "native"};
constexpr std::string_view name_of(Algorithm algorithm) { return kAlgorithmNames.at(static_cast<size_t>(algorithm)); }

// Whether a collective is the library's own with this algorithm. Uneven pieces are where nothing else can reach them.
// Throws Error where it has to be, and is asked to add in another order.
bool goes_native(const Transport& t, Algorithm algorithm, const Call& call);
// Runs one collective with the algorithm; operations that an algorithm has no way of its own for go the direct way.
// Returns the bytes that this rank sent.
int64_t run_collective(Transport& t, Algorithm algorithm, const Call& call);

int64_t direct_by_messages(Transport& t, const Call& call);
// The bytes that a rank sends in the direct exchange: 2 (n - 1) arrays by all ranks of an all-reduce together.
// Collectives of a library, which does not tell what it sends, are counted so too.
int64_t sent_directly(const Call& call, int ranks, int rank);
int64_t ring(Transport& t, const Call& call);  // all_reduce, reduce_scatter, all_gather
int64_t tree(Transport& t, const Call& call);  // all_reduce, reduce, broadcast
int64_t root(Transport& t, const Call& call);  // all_reduce, reduce_scatter, all_gather: through rank 0

}  // namespace tessera
