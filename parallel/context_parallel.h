// Context parallelism: every sequence is cut along its tokens, and attention, the one place where tokens meet, brings
// them together. Ring attention lets keys and values travel and keeps queries at home (Liu, Zaharia and Abbeel 2023,
// arXiv 2310.01889); Ulysses lets every rank see all tokens of some heads (Jacobs et al. 2023, arXiv 2309.14509).
//
//   ring of c = 4 ranks            zig-zag: 2c chunks           Ulysses: (tokens x heads)
//
//   rank 0 --k, v--> rank 1        chunk   0 1 2 3 4 5 6 7      before      while attending
//     ^                |           rank 0  #             #      0 0 0 0     0 1 2 3
//    k, v            k, v          rank 1    #         #        1 1 1 1     0 1 2 3
//     |                v           rank 2      #     #          2 2 2 2     0 1 2 3
//   rank 3 <--k, v-- rank 2        rank 3        # #            3 3 3 3     0 1 2 3
//
// Under the causal mask chunk g sees g + 1 chunks, so a rank that holds one run of tokens has more to do the later they
// are; with a chunk from the front and its mirror image from the back all ranks have the same (Brandon et al. 2023,
// "Striped attention", name the problem).
//
// placements   activations S(tokens) everywhere, parameters I with gradients P over this axis; in Ulysses q, k, v and
//              the result change S(tokens) -> S(heads) -> S(tokens)
// memory/rank  ring: q, k, v and out of T / c tokens, their log-sum-exp, and the travelling blocks; nothing of T
//              tokens. Ulysses: q, k, v and out of T tokens and H / c heads: as many elements
// volume/rank  e bytes per element, a of the sums (4, or 8 in float64), N = B T H D of queries, M = B T K D of keys:
//              ring     forward  c - 1 messages of k and v: 2 (c - 1) / c e M bytes
//                       backward the same, and c - 1 messages of dk and dv: 2 (c - 1) / c a M bytes
//              Ulysses  forward  2 all-to-alls, packed q, k, v there and the result back: 2 (c - 1) / c^2 e (N + M)
//                       bytes
//                       backward the same
//
// Both draw the dropout of one rank that has the whole sequence, and differ from it by the rounding of sums.
#pragma once

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

// The chunks that a rank has, in its order, by their number in the sequence.
std::vector<int> context_chunks(int ranks, int rank, SequencePartition balance);

// The positions in the sequence of the tokens that a rank has, in its order. Throws Error (usage) that names the
// nearest numbers of tokens that can be cut; one rank takes any.
std::vector<int64_t> context_positions(int64_t tokens, int ranks, int rank, SequencePartition balance);

// A tile of the attention matrix: a chunk of queries against a chunk of keys, by their numbers in the sequence.
struct ChunkPair {
  int query = 0, key = 0;
  bool operator==(const ChunkPair&) const = default;
};
// The pairs of `rank`'s queries and `holder`'s keys in which a query sees a key: all of them, or under the causal mask
// those with key <= query. Those of a hop are computed at once, as one rectangle: of the rank's own keys the whole
// under the mask, of an earlier holder's all queries with its first chunk, of a later one's the late queries with both.
// Only dropout, documents and windows, which count positions, take the pairs one after another.
std::vector<ChunkPair> chunk_pairs(int ranks, int rank, int holder, SequencePartition balance, bool causal);

// qkv (B, T / c, (H + 2 K) D), packed as [q | k | v], of this rank's tokens in the order of context_positions() -> (B,
// T / c, H D). Every rank of the axis calls it, forward and backward; `cp` must outlive the graph. A block of keys and
// values is sent on before it is computed with, so that it travels meanwhile. Sums of the result go by hops (own keys
// first, then those of rank - 1, rank - 2, ...), of dk and dv by ranks (the next one's, ..., the previous one's, then
// its own), both in the type of the sums, rounded once; but cuDNN's kernels round each part before (dtype_of_parts()).
// options.starts are of this rank's queries. On an axis of size 1 it is packed_attention().
Var ring_attention(const Var& qkv, const Heads& heads, const AttentionOptions& options, Communicator& cp,
                   SequencePartition balance = SequencePartition::zigzag);

// The same of contiguous tokens, by heads: c must divide H and K. options.starts are of all tokens.
Var ulysses_attention(const Var& qkv, const Heads& heads, const AttentionOptions& options, Communicator& cp);

}  // namespace tessera
