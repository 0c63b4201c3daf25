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

Var ulysses_attention(const Var& qkv, int64_t heads, const AttentionOptions& options, Communicator& cp) {
  const int c = cp.size();
  if (c == 1) return packed_attention(qkv, heads, options);
  if (heads <= 0 || heads % c != 0)
    throw Error("[ulysses_attention] " + cp.axis() + " axis: " + std::to_string(c) + " ranks cannot share " +
                std::to_string(heads) + " heads evenly; expected " + nearest_multiples(heads, c));
  if (qkv.value().rank() != 3 || qkv.dim(2) % (3 * heads) != 0)
    throw Error("[ulysses_attention] packed qkv is " + qkv.value().describe() + "; expected (B, T, 3 C) and " +
                std::to_string(heads) + " heads that divide C");
  const int64_t b = qkv.dim(0), t = qkv.dim(1), width = qkv.dim(2), own = heads / c;
  AttentionOptions mine = options;
  if (mine.heads_total == 0) mine.heads_total = heads;
  mine.first_head += cp.rank() * own;
  const Var by_head = reshape(qkv, {b, t, 3, heads, width / (3 * heads)});
  const Var all_tokens = reshape(redistribute(by_head, cp, S(1), S(3)), {b, t * c, width / c});
  return redistribute(packed_attention(all_tokens, own, mine), cp, S(2), S(1));
}

}  // namespace tessera
