// Token positions, and Ulysses attention.
#include "parallel/context_parallel.h"

#include <array>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "autograd/ops.h"

namespace tessera {
namespace {

// "4 or 8": the nearest positive multiples.
std::string nearest_multiples(int64_t n, int64_t unit) {
  const int64_t below = n / unit * unit;
  return (below > 0 ? std::to_string(below) + " or " : "") + std::to_string(below + unit);
}

// Exchanged arrays have the layout (c, T / c, B, ...): each rank's tokens are one chunk, and all tokens are (T, B,
// ...), which attention reads and writes in place.
struct Ulysses {
  Communicator& cp;
  AttentionOptions options;
  Heads heads, own;
  int64_t b, t, d;  // t: this rank's tokens outside of attention

  Tensor make_buffer(const Tensor& like, int64_t count, Category category) const {
    return like.make({cp.size(), t, b, count * d}, like.dtype(), category);
  }
  Tensor exchange(const Tensor& sent, Category category) const {
    const Tensor got = make_buffer(sent, sent.dim(3) / d, category);
    cp.all_to_all(sent, got);
    return got;
  }
  // A view (B, T, heads, D).
  Tensor by_head(const Tensor& exchanged) const {
    return exchanged.reshape({cp.size() * t, b, exchanged.dim(3) / d, d}).transpose(0, 1);
  }
  Tensor view(const Tensor& exchanged, int i) const { return by_head(exchanged).narrow(2, own.begin(i), own.count(i)); }

  // Copies heads between (B, T / c, heads of all ranks x D) and the exchanged array: n groups of `count` heads from
  // head `begin` on, each sharded over the ranks.
  void copy(Tensor full, Tensor ranks, int64_t begin, int64_t count, int64_t n, bool out) const {
    const int64_t c = cp.size();
    full = full.narrow(2, begin * d, n * count * d).reshape({b, t, n, c, count / c * d});
    full = full.transpose(0, 3).transpose(2, 3);  // (c, T / c, B, n, a rank's shard)
    ranks = ranks.narrow(3, begin / c * d, n * count / c * d).reshape({c, t, b, n, count / c * d});
    if (out)
      ranks.copy_from(full);
    else
      full.copy_from(ranks);
  }
  void copy_packed(const Tensor& packed, const Tensor& ranks, bool out) const {
    if (heads.query == heads.key) return copy(packed, ranks, 0, heads.query, 3, out);
    copy(packed, ranks, 0, heads.query, 1, out);
    copy(packed, ranks, heads.query, heads.key, 2, out);
  }
};

Var ulysses(const Ulysses& u, const Var& qkv) {
  const Tensor& packed = qkv.value();
  const Category saved = packed.arena()->default_category(), moved = Category::communication;
  const auto all_tokens = [&] {
    const Tensor sent = u.make_buffer(packed, u.own.packed(), moved);
    u.copy_packed(packed, sent, true);
    return u.exchange(sent, saved);
  };
  const Tensor mine = all_tokens(), out = u.make_buffer(packed, u.own.query, saved);
  const AttentionResult result{u.by_head(out),
                               packed.make({u.b, u.own.query, u.t * u.cp.size()}, accum_dtype(packed.dtype()))};
  attention_into(u.view(mine, 0), u.view(mine, 1), u.view(mine, 2), u.options, result);
  const Tensor y = packed.make({u.b, u.t, u.heads.query * u.d});
  u.copy(y, u.exchange(out, moved), 0, u.heads.query, 1, false);
  return record_one("ulysses_attention", y, {qkv.edge()}, [=, shape = packed.shape()](Grads& g) {
    const auto all_gradients = [&](const Tensor& dy) {
      const Tensor sent = u.make_buffer(dy, u.own.query, moved);
      u.copy(dy, sent, 0, u.heads.query, 1, true);
      return u.exchange(sent, moved);
    };
    const Tensor dout = all_gradients(g.output().contiguous()), gradient = u.make_buffer(mine, u.own.packed(), moved);
    Tensor dq = u.view(gradient, 0), dk = u.view(gradient, 1), dv = u.view(gradient, 2);
    attention_backward(u.by_head(dout), u.view(mine, 0), u.view(mine, 1), u.view(mine, 2), result, u.options, dq, dk,
                       dv);
    const Tensor dqkv = mine.make(shape);
    u.copy_packed(dqkv, u.exchange(gradient, moved), false);
    g.set(0, dqkv);
  });
}

}  // namespace

std::vector<int> context_chunks(int ranks, int rank, SequencePartition balance) {
  if (rank < 0 || rank >= ranks)
    throw Error("[context_parallel] rank out of range: " + std::to_string(rank) + " of " + std::to_string(ranks));
  if (balance == SequencePartition::contiguous) return {rank};
  return {rank, 2 * ranks - 1 - rank};
}

std::vector<int64_t> context_positions(int64_t tokens, int ranks, int rank, SequencePartition balance) {
  const SequencePartition partition = ranks == 1 ? SequencePartition::contiguous : balance;
  const std::vector<int> chunks = context_chunks(ranks, rank, partition);
  const int64_t count = ranks * std::ssize(chunks);
  if (tokens <= 0 || tokens % count != 0)
    throw Error("[context_parallel] " + std::to_string(tokens) + " tokens are not divisible into " +
                std::to_string(count) + " equal chunks for " + std::to_string(ranks) +
                " ranks; nearest valid value: " + nearest_multiples(tokens, count));
  std::vector<int64_t> positions(static_cast<size_t>(tokens / ranks));
  const int64_t size = tokens / count;
  auto at = positions.begin();
  for (const int chunk : chunks) {
    std::iota(at, at + size, chunk * size);
    at += size;
  }
  return positions;
}

std::vector<ChunkPair> chunk_pairs(int ranks, int rank, int holder, SequencePartition balance, bool causal) {
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
      throw Error("[ulysses_attention] " + cp.axis() + " axis: " + std::to_string(c) + " ranks do not divide " +
                  std::to_string(count) + " heads; nearest valid value: " + nearest_multiples(count, c));
  const Tensor q = packed_slice(qkv.value(), heads, 0);
  const Heads own{heads.query / c, heads.key / c};
  AttentionOptions mine = options;
  if (mine.heads_total == 0) mine.heads_total = heads.query;
  mine.first_head += cp.rank() * own.query;
  return ulysses({cp, mine, heads, own, q.dim(0), q.dim(1), q.dim(3)}, qkv);
}

}  // namespace tessera
