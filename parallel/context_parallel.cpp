// Who has which tokens, and Ulysses, which is two changes of placement.
#include "parallel/context_parallel.h"

#include <numeric>
#include <string>

#include "autograd/ops.h"
#include "parallel/placement.h"

namespace tessera {
namespace {

// The largest multiple of `unit` up to n and the smallest from n, as "4 or 8"; zero does not count.
std::string nearest_multiples(int64_t n, int64_t unit) {
  const int64_t below = n / unit * unit;
  return (below > 0 ? std::to_string(below) + " or " : "") + std::to_string(below + unit);
}

// Copies heads between a packed qkv (B, T, (H + 2 K) D) and what each of c ranks shall have of it, (B, T, c, its part).
void copy_heads(const Tensor& packed, const Tensor& ranks, const Heads& heads, bool out) {
  const int64_t c = ranks.dim(2);
  const Heads own{heads.query / c, heads.key / c};
  for (int64_t r = 0; r < c; ++r)
    for (int i = 0; i < 3; ++i) {
      Tensor whole = packed_part(packed, heads, i).narrow(2, r * own.count(i), own.count(i)),
             part = packed_part(ranks.select(2, r), own, i);
      if (out)
        part.copy_from(whole);
      else
        whole.copy_from(part);
    }
}

Var by_rank(const Var& qkv, const Heads& heads, int64_t c) {
  const Shape packed = qkv.shape(), by_rank{packed[0], packed[1], c, packed[2] / c};
  const Tensor ranks = qkv.value().make(by_rank);
  copy_heads(qkv.value(), ranks, heads, true);
  return record_one("heads_by_rank", ranks, {qkv.edge()}, [=](Grads& g) {
    const Tensor given = g.output().contiguous(), dqkv = given.make(packed);
    copy_heads(dqkv, given, heads, false);
    g.give(0, dqkv);
  });
}

}  // namespace

std::vector<int> context_chunks(int ranks, int rank, Balance balance) {
  if (rank < 0 || rank >= ranks)
    throw Error("[context_parallel] there is no rank " + std::to_string(rank) + " among " + std::to_string(ranks));
  if (balance == Balance::contiguous) return {rank};
  return {rank, 2 * ranks - 1 - rank};
}

std::vector<int64_t> context_positions(int64_t tokens, int ranks, int rank, Balance balance) {
  const Balance cut = ranks == 1 ? Balance::contiguous : balance;
  const std::vector<int> chunks = context_chunks(ranks, rank, cut);
  const int64_t count = ranks * std::ssize(chunks);
  if (tokens <= 0 || tokens % count != 0)
    throw Error("[context_parallel] " + std::to_string(tokens) + " tokens do not make " + std::to_string(count) +
                " equal chunks for " + std::to_string(ranks) + " ranks; expected " + nearest_multiples(tokens, count));
  std::vector<int64_t> positions(static_cast<size_t>(tokens / ranks));
  const int64_t size = tokens / count;
  auto at = positions.begin();
  for (const int chunk : chunks) {
    std::iota(at, at + size, chunk * size);
    at += size;
  }
  return positions;
}

std::vector<ChunkPair> chunk_pairs(int ranks, int rank, int holder, Balance balance, bool causal) {
  std::vector<ChunkPair> pairs;
  for (const int query : context_chunks(ranks, rank, balance))
    for (const int key : context_chunks(ranks, holder, balance))
      if (!causal || key <= query) pairs.push_back({query, key});
  return pairs;
}

Var ulysses_attention(const Var& qkv, const Heads& heads, const AttentionOptions& options, Communicator& cp) {
  const int c = cp.size();
  if (c == 1) return packed_attention(qkv, heads, options);
  for (const int64_t count : {heads.query, heads.key})
    if (count <= 0 || count % c != 0)
      throw Error("[ulysses_attention] " + cp.axis() + " axis: " + std::to_string(c) + " ranks cannot share " +
                  std::to_string(count) + " heads evenly; expected " + nearest_multiples(count, c));
  const int64_t b = qkv.dim(0), t = qkv.dim(1), width = qkv.dim(2);
  const Heads own{heads.query / c, heads.key / c};
  AttentionOptions mine = options;
  if (mine.heads_total == 0) mine.heads_total = heads.query;
  mine.first_head += cp.rank() * own.query;
  const Var all_tokens = redistribute(by_rank(qkv, heads, c), cp, S(1), S(2));  // (B, T, c: 1, width / c)
  return redistribute(packed_attention(reshape(all_tokens, {b, t * c, width / c}), own, mine), cp, S(2), S(1));
}

}  // namespace tessera
