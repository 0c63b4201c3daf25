// Context parallelism: every sequence is sharded over its tokens, and only attention communicates across shards. Ring
// attention passes keys and values from rank to rank while queries stay local (Liu, Zaharia and Abbeel 2023, arXiv
// 2310.01889); in Ulysses each rank computes attention over all tokens for some heads (Jacobs et al. 2023, arXiv
// 2309.14509).
//
//   ring of c = 4 ranks            zig-zag: 2c chunks           Ulysses: (tokens x heads)
//
//   rank 0 --k, v--> rank 1        chunk   0 1 2 3 4 5 6 7      before      in attention
//     ^                |           rank 0  #             #      0 0 0 0     0 1 2 3
//    k, v            k, v          rank 1    #         #        1 1 1 1     0 1 2 3
//     |                v           rank 2      #     #          2 2 2 2     0 1 2 3
//   rank 3 <--k, v-- rank 2        rank 3        # #            3 3 3 3     0 1 2 3
//
// Under the causal mask chunk g attends to g + 1 chunks, so with contiguous shards later ranks have more work. Pairing
// chunk i with chunk 2c - 1 - i balances the ranks (Brandon et al. 2023, "Striped attention", describe the imbalance).
//
// placements   activations S(tokens), parameters I with gradients P over this axis; in Ulysses q, k, v and the result
//              change S(tokens) -> S(heads) -> S(tokens)
// memory/rank  ring: q, k, v and `out` for T / c tokens, their log-sum-exp, and k and v in transit; no tensor of
//              all T tokens. Ulysses: q, k, v and `out` for T tokens and H / c heads: the same number of elements
// volume/rank  e bytes per element, a per accumulator (4, or 8 in float64), N = B T H D and M = B T K D elements:
//              ring     forward  c - 1 messages of k and v: 2 (c - 1) / c e M bytes
//                       backward the same, plus c - 1 messages of dk and dv: 2 (c - 1) / c a M bytes
//              Ulysses  forward  2 all-to-alls, packed q, k, v before and the result after: 2 (c - 1) / c^2 e (N + M)
//                       bytes
//                       backward the same
//
// Both sample the dropout masks of the one-rank run and differ from it only in rounding.
#pragma once
#include <cstdint>
#include <vector>

#include "autograd/var.h"
#include "parallel/comm/communicator.h"
#include "tensor/ops/attention/attention.h"

namespace tessera {

enum class ContextMode : uint8_t { ring, ulysses };

enum class SequencePartition : uint8_t {
  zigzag,     // rank i has chunks i and 2c - 1 - i of 2c
  contiguous  // rank i has chunk i of c
};

constexpr SequencePartition sequence_partition(ContextMode mode) {
  return mode == ContextMode::ring ? SequencePartition::zigzag : SequencePartition::contiguous;
}

// Chunk indices in the sequence, in a rank's local order.
std::vector<int> context_chunks(int ranks, int rank, SequencePartition balance);

// In local order. Throws Error (usage) with the nearest valid numbers of tokens if chunks would be unequal.
std::vector<int64_t> context_positions(int64_t tokens, int ranks, int rank, SequencePartition balance);

// A chunk of queries and a chunk of keys, by their index in the sequence.
struct ChunkPair {
  int query = 0, key = 0;
  bool operator==(const ChunkPair&) const = default;
};
// The unmasked pairs of `rank`'s queries and `holder`'s keys. The pairs of a hop form one rectangle: the causal block
// for the rank's own keys, all queries with the first chunk of an earlier holder, the later queries with both chunks of
// a later holder. Dropout, documents and windows depend on positions, so with them each pair is computed separately.
std::vector<ChunkPair> chunk_pairs(int ranks, int rank, int holder, SequencePartition balance, bool causal);

// qkv (B, T / c, (H + 2 K) D), packed as [q | k | v], with tokens in the order of context_positions() -> (B, T / c, H
// D). Collective over the axis, forward and backward; `cp` must outlive the graph. Each block of keys and values is
// forwarded before it is used, so communication overlaps with computation. The result accumulates by hops (own keys,
// then the keys of rank - 1, rank - 2, ...), dk and dv by ranks (next rank first, own last), in the accumulation dtype
// and rounded once, except that cuDNN's kernels round each partial result (partial_dtype()). options.starts refer to
// this rank's queries.
Var ring_attention(const Var& qkv, const Heads& heads, const AttentionOptions& options, Communicator& cp,
                   SequencePartition balance = SequencePartition::zigzag);

// Ulysses: contiguous tokens; c must divide H and K. options.starts refer to all tokens.
Var ulysses_attention(const Var& qkv, const Heads& heads, const AttentionOptions& options, Communicator& cp);

}  // namespace tessera
