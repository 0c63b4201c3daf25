// Ring attention: the walk around the ring, forward and backward.
#include <array>
#include <string>
#include <vector>

#include "autograd/ops.h"
#include "parallel/context_parallel.h"

namespace tessera {
namespace {

constexpr int kKeysAndValues = 0, kTheirGradients = 1;  // tags

// One call on one rank: sizes, and who is where.
struct Ring {
  Communicator& cp;
  Balance balance;
  AttentionOptions options;
  DType dtype, wide;  // of the operands and of sums
  Heads heads;
  int64_t b, tokens, d;  // tokens: of this rank

  int ranks() const { return cp.size(); }
  int next() const { return (cp.rank() + 1) % ranks(); }
  int previous() const { return (cp.rank() + ranks() - 1) % ranks(); }
  // Whose keys are here after so many hops.
  int holder(int hop) const { return (cp.rank() + ranks() - hop) % ranks(); }
  std::vector<ChunkPair> pairs(int hop) const {
    return chunk_pairs(ranks(), cp.rank(), holder(hop), balance, options.causal);
  }

  int chunks() const { return balance == Balance::zigzag ? 2 : 1; }
  int64_t chunk_tokens() const { return tokens / chunks(); }
  // Which of its rank's chunks it is: the second half of the sequence lies on every rank behind the first.
  int place(int chunk) const { return chunk / ranks(); }
  Tensor chunk_of(const Tensor& x, int chunk) const {
    return x.narrow(1, place(chunk) * chunk_tokens(), chunk_tokens());
  }

  Shape by_head() const { return {b, tokens, heads.query, d}; }
  Shape tile_shape(int i) const { return {b, chunk_tokens(), heads.count(i), d}; }  // of q, k or v
  Tensor part(const Tensor& packed, int i) const { return packed_part(packed, heads, i); }
  Tensor travelling(const Tensor& like, DType type) const {
    return like.make({2, b, tokens, heads.key, d}, type, Category::communication);
  }
  Tensor keys_and_values(const Tensor& packed) const {
    Tensor kv = travelling(packed, dtype);
    for (int i = 0; i < 2; ++i) kv.select(0, i).copy_from(part(packed, 1 + i));
    return kv;
  }

  AttentionOptions tile(const ChunkPair& pair) const {
    AttentionOptions o = options;
    o.causal = options.causal && pair.query == pair.key;
    o.first_query = pair.query * chunk_tokens();
    o.first_key = pair.key * chunk_tokens();
    if (o.tokens_total == 0) o.tokens_total = tokens * ranks();
    if (o.starts.defined()) o.starts = chunk_of(o.starts, pair.query);
    return o;
  }
};

Ring ring_of(const Tensor& qkv, const Heads& heads, const AttentionOptions& options, Communicator& cp,
             Balance balance) {
  const std::string where = "[ring_attention] " + cp.axis() + " axis: ";
  const Tensor q = packed_part(qkv, heads, 0);
  if (balance == Balance::zigzag && qkv.dim(1) % 2 != 0)
    throw Error(where + "a rank has " + std::to_string(qkv.dim(1)) + " tokens; zig-zag takes an even number");
  if (options.first_key != 0 || options.first_query >= 0)
    throw Error(where + "first_key and first_query are given; they follow from the ranks");
  return {cp, balance, options, qkv.dtype(), wide_of(qkv.dtype()), heads, q.dim(0), q.dim(1), q.dim(3)};
}

struct RingAttended {
  Tensor out;               // (B, T / c, H, D)
  std::vector<Tensor> lse;  // of each chunk, (B, H, tokens of a chunk)

  Attended chunk(const Ring& ring, int chunk) const {
    return {ring.chunk_of(out, chunk), lse[static_cast<size_t>(ring.place(chunk))]};
  }
};

RingAttended forward(const Ring& ring, const Tensor& packed) {
  const Tensor q = ring.part(packed, 0), kv = ring.keys_and_values(packed);
  RingAttended sum{packed.make(ring.by_head(), ring.wide), {}};
  for (int i = 0; i < ring.chunks(); ++i)
    sum.lse.push_back(packed.make({ring.b, ring.heads.query, ring.chunk_tokens()}, ring.wide));
  const Attended part{packed.make(ring.tile_shape(0), ring.wide, Category::workspace),
                      packed.make(sum.lse[0].shape(), ring.wide, Category::workspace)};
  std::vector<bool> begun(sum.lse.size());
  for (int hop = 0; hop < ring.ranks(); ++hop) {
    const bool last = hop + 1 == ring.ranks();
    if (!last) ring.cp.send(kv, ring.next(), kKeysAndValues);
    for (const ChunkPair& pair : ring.pairs(hop)) {
      const auto at = static_cast<size_t>(ring.place(pair.query));
      const Attended into = sum.chunk(ring, pair.query);
      attention_into(ring.chunk_of(q, pair.query), ring.chunk_of(kv.select(0, 0), pair.key),
                     ring.chunk_of(kv.select(0, 1), pair.key), ring.tile(pair), begun[at] ? part : into);
      if (begun[at]) merge_attended(into, part);
      begun[at] = true;
    }
    if (!last) ring.cp.recv(kv, ring.previous(), kKeysAndValues);
  }
  sum.out = sum.out.to(ring.dtype);
  return sum;
}

// dq, dk and dv of what is computed on one rank, and room for one tile's.
class Backward {
 public:
  Backward(const Ring& ring, const Tensor& packed, const RingAttended& result, const Tensor& dout)
      : ring_(ring), q_(ring.part(packed, 0)), result_(result), dout_(dout) {
    for (size_t i = 0; i < 3; ++i)
      tile_[i] = packed.make(ring.tile_shape(static_cast<int>(i)), ring.wide, Category::workspace);
  }

  // Adds what the keys that are here after `hop` bring to dq, and what this rank's queries bring to their dk and dv.
  void add(int hop, const Tensor& kv, const std::array<Tensor, 3>& sums) {
    for (const ChunkPair& pair : ring_.pairs(hop)) {
      attention_backward(ring_.chunk_of(dout_, pair.query), ring_.chunk_of(q_, pair.query),
                         ring_.chunk_of(kv.select(0, 0), pair.key), ring_.chunk_of(kv.select(0, 1), pair.key),
                         result_.chunk(ring_, pair.query), ring_.tile(pair), tile_[0], tile_[1], tile_[2]);
      for (size_t i = 0; i < 3; ++i) {
        Tensor chunk = ring_.chunk_of(sums[i], i == 0 ? pair.query : pair.key);
        add_(chunk, tile_[i]);
      }
    }
  }

 private:
  const Ring& ring_;
  const Tensor q_;
  const RingAttended& result_;
  const Tensor& dout_;
  std::array<Tensor, 3> tile_;
};

// The gradients of a block start at the rank after its home and come home at last: c - 1 hops, one behind the block's.
Tensor backward(const Ring& ring, const Tensor& packed, const RingAttended& result, const Tensor& dout) {
  const Tensor kv = ring.keys_and_values(packed);
  Tensor gradient = packed.make(packed.shape(), ring.wide);
  gradient.fill(0);
  const std::array<Tensor, 3> home{ring.part(gradient, 0), ring.part(gradient, 1), ring.part(gradient, 2)};
  Tensor dkv = ring.travelling(packed, ring.wide);
  const Tensor arriving = ring.travelling(packed, ring.wide);
  Backward local(ring, packed, result, dout);
  for (int hop = 0; hop < ring.ranks(); ++hop) {
    const bool last = hop + 1 == ring.ranks();
    if (!last) ring.cp.send(kv, ring.next(), kKeysAndValues);
    if (hop == 0) {
      local.add(hop, kv, home);
    } else {
      dkv.fill(0);
      local.add(hop, kv, {home[0], dkv.select(0, 0), dkv.select(0, 1)});
      if (hop > 1) {
        ring.cp.recv(arriving, ring.previous(), kTheirGradients);
        add_(dkv, arriving);
      }
      ring.cp.send(dkv, ring.next(), kTheirGradients);
    }
    if (!last) ring.cp.recv(kv, ring.previous(), kKeysAndValues);
  }
  ring.cp.recv(arriving, ring.previous(), kTheirGradients);
  for (int i = 0; i < 2; ++i) {
    Tensor own = home[static_cast<size_t>(i) + 1];
    add_(own, arriving.select(0, i));
  }
  return gradient.to(ring.dtype);
}

}  // namespace

Var ring_attention(const Var& qkv, const Heads& heads, const AttentionOptions& options, Communicator& cp,
                   Balance balance) {
  if (cp.size() == 1) return packed_attention(qkv, heads, options);
  const Ring ring = ring_of(qkv.value(), heads, options, cp, balance);
  const RingAttended result = forward(ring, qkv.value());
  return record_one("ring_attention", result.out.reshape({ring.b, ring.tokens, heads.query * ring.d}), {qkv},
                    [ring, result, packed = qkv.saved()](Grads& g) {
                      g.give(0, backward(ring, packed.get(), result, g.output().contiguous().reshape(ring.by_head())));
                    });
}

}  // namespace tessera
