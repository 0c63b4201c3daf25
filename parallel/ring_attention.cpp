// Ring attention: forward and backward hops.
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "autograd/ops.h"
#include "parallel/context_parallel.h"

namespace tessera {
namespace {

constexpr int kKeysAndValues = 0, kTheirGradients = 1;  // tags

// One attention call on some of this rank's queries and the holder's keys.
struct Tile {
  Range queries, keys;
  AttentionOptions options;
  // Whether this tile is the first written to these queries' result, and to these keys' gradient.
  bool first_of_queries, first_of_keys;
};

struct Ring {
  Communicator& cp;
  SequencePartition balance;
  AttentionOptions options;
  DType dtype, tile_dtype, wide;  // dtypes of operands, of one tile's results, and of accumulators
  Heads heads;
  int64_t b, tokens, d;  // tokens per rank

  int ranks() const { return cp.size(); }
  int next() const { return (cp.rank() + 1) % ranks(); }
  int previous() const { return (cp.rank() + ranks() - 1) % ranks(); }
  // The rank whose keys this rank has after `hop` hops.
  int holder(int hop) const { return (cp.rank() + ranks() - hop) % ranks(); }
  // With two ranks, adding two bfloat16 results rounds once, so no wider accumulator is needed.
  DType sum() const { return ranks() == 2 ? tile_dtype : wide; }

  int64_t chunk_tokens() const { return balance == SequencePartition::zigzag ? tokens / 2 : tokens; }
  // On every rank, chunks of the sequence's second half follow those of its first half.
  Range place(int chunk) const {
    const int64_t begin = chunk / ranks() * chunk_tokens();
    return {begin, begin + chunk_tokens()};
  }

  Shape by_head() const { return {b, tokens, heads.query, d}; }
  Tensor make_block(const Tensor& like, DType type) const {
    return like.make({b, tokens, 2 * heads.key, d}, type, Category::communication);
  }
  Tensor q_slice(const Tensor& packed) const { return packed_slice(packed, heads, 0); }
  Tensor kv_slice(const Tensor& packed) const {
    return packed.narrow(2, heads.query * d, 2 * heads.key * d).reshape({b, tokens, 2 * heads.key, d});
  }
  Tensor keys_and_values(const Tensor& packed) const {
    Tensor kv = make_block(packed, dtype);
    kv.copy_from(kv_slice(packed));
    return kv;
  }
  Tensor keys(const Tensor& kv) const { return kv.narrow(2, 0, heads.key); }
  Tensor values(const Tensor& kv) const { return kv.narrow(2, heads.key, heads.key); }

  // The unmasked tiles of a hop: one, unless elements depend on positions in the full sequence, which are not
  // contiguous across several chunks.
  std::vector<Tile> tiles(int hop) const;
};

Tensor token_slice(const Tensor& x, const Range& tokens) { return x.narrow(1, tokens.begin, tokens.size()); }

std::vector<Tile> Ring::tiles(int hop) const {
  const std::vector<ChunkPair> pairs = chunk_pairs(ranks(), cp.rank(), holder(hop), balance, options.causal);
  std::vector<Tile> all;
  if (options.dropout == 0 && !options.starts.defined() && options.window == 0) {
    if (pairs.empty()) return {};
    AttentionOptions o = options;
    o.causal = options.causal && hop == 0;
    all.push_back({{place(pairs.front().query).begin, place(pairs.back().query).end},
                   {place(pairs.front().key).begin, place(pairs.back().key).end},
                   o,
                   hop == 0,
                   true});
    return all;
  }
  std::vector<int> begun;  // keys that earlier tiles use
  for (const ChunkPair& pair : pairs) {
    AttentionOptions o = options;
    o.causal = options.causal && pair.query == pair.key;
    o.first_query = pair.query * chunk_tokens();
    o.first_key = pair.key * chunk_tokens();
    if (o.tokens_total == 0) o.tokens_total = tokens * ranks();
    if (o.starts.defined()) o.starts = token_slice(o.starts, place(pair.query));
    const bool first_of_keys = std::find(begun.begin(), begun.end(), pair.key) == begun.end();
    all.push_back({place(pair.query), place(pair.key), o, hop == 0 && place(pair.key).begin == 0, first_of_keys});
    begun.push_back(pair.key);
  }
  return all;
}

Ring make_ring(const Tensor& qkv, const Heads& heads, const AttentionOptions& options, Communicator& cp,
               SequencePartition balance) {
  const std::string where = "[ring_attention] " + cp.axis() + " axis: ";
  const Tensor q = packed_slice(qkv, heads, 0);
  if (balance == SequencePartition::zigzag && qkv.dim(1) % 2 != 0)
    throw Error(where + "a rank has " + std::to_string(qkv.dim(1)) + " tokens; zig-zag requires an even number");
  if (options.first_key != 0 || options.first_query >= 0)
    throw Error(where + "first_key and first_query must not be set; they are derived from the ranks");
  AttentionOptions o = options;
  if (o.starts_may_be_ignored) o.starts = {};  // otherwise a hop would require several tiles
  return {cp,    balance,  o,        qkv.dtype(), partial_dtype(q, o), accum_dtype(qkv.dtype()),
          heads, q.dim(0), q.dim(1), q.dim(3)};
}

struct RingAttended {
  AttentionResult all;  // (B, T / c, H, D) and (B, H, T / c)

  AttentionResult of(const Range& queries) const {
    return {token_slice(all.out, queries), all.lse.narrow(2, queries.begin, queries.size())};
  }
  // Memory for a tile's result: `out` and `lse` each in their final place if that is free and needs no conversion.
  AttentionResult destination(const Ring& ring, const Tile& tile) const {
    AttentionResult to = of(tile.queries);
    if (!tile.first_of_queries || to.out.dtype() != ring.tile_dtype)
      to.out = to.out.make(to.out.shape(), ring.tile_dtype, Category::workspace);
    if (!tile.first_of_queries || !to.lse.is_contiguous())
      to.lse = to.lse.make(to.lse.shape(), ring.wide, Category::workspace);
    return to;
  }
  void begin(const Tile& tile, const AttentionResult& destination) const {
    AttentionResult place = of(tile.queries);
    if (place.out.address() != destination.out.address()) place.out.copy_from(destination.out);
    if (place.lse.address() != destination.lse.address()) place.lse.copy_from(destination.lse);
  }
};

AttentionResult forward(const Ring& ring, const Tensor& packed) {
  const Tensor q = ring.q_slice(packed), kv = ring.keys_and_values(packed);
  const RingAttended sum{
      {packed.make(ring.by_head(), ring.sum()), packed.make({ring.b, ring.heads.query, ring.tokens}, ring.wide)}};
  for (int hop = 0; hop < ring.ranks(); ++hop) {
    const bool last = hop + 1 == ring.ranks();
    if (!last) ring.cp.send(kv, ring.next(), kKeysAndValues);
    for (const Tile& tile : ring.tiles(hop)) {
      const AttentionResult destination = sum.destination(ring, tile);
      attention_into(token_slice(q, tile.queries), token_slice(ring.keys(kv), tile.keys),
                     token_slice(ring.values(kv), tile.keys), tile.options, destination);
      if (tile.first_of_queries)
        sum.begin(tile, destination);
      else
        merge_attention(sum.of(tile.queries), destination);
    }
    if (!last) ring.cp.recv(kv, ring.previous(), kKeysAndValues);
  }
  return {sum.all.out.to(ring.dtype), sum.all.lse};
}

// The target of a tile's gradient: its final place if that is free, otherwise a temporary that is then added.
class Gradient {
 public:
  Gradient(const Tensor& place, DType tile_dtype, bool first)
      : place_(place), first_(first), tile_(place), separate_(!first || place.dtype() != tile_dtype) {
    if (separate_) tile_ = place.make(place.shape(), tile_dtype, Category::workspace);
  }
  const Tensor& tile() const { return tile_; }
  void take() {
    if (!separate_) return;
    if (first_)
      place_.copy_from(tile_);
    else
      add_(place_, tile_);
  }

 private:
  Tensor place_;
  bool first_;
  Tensor tile_;
  bool separate_;
};

class Backward {
 public:
  Backward(const Ring& ring, const Tensor& packed, const AttentionResult& result, const Tensor& dout)
      : ring_(ring), q_(ring.q_slice(packed)), result_{result}, dout_(dout) {}

  // Adds the contribution of the keys present after `hop` to dq, and writes this rank's contribution to their dk and
  // dv. Returns the number of leading key tokens that are unmasked; gradients of later tokens are not written.
  int64_t add(int hop, const Tensor& kv, const Tensor& dq, const Tensor& dkv) {
    int64_t unmasked = 0;
    for (const Tile& tile : ring_.tiles(hop)) {
      Gradient queries(token_slice(dq, tile.queries), ring_.tile_dtype, tile.first_of_queries),
          keys(token_slice(dkv, tile.keys), ring_.tile_dtype, tile.first_of_keys);
      Tensor dq_tile = queries.tile(), dk = ring_.keys(keys.tile()), dv = ring_.values(keys.tile());
      const AttentionResult merged = result_.of(tile.queries);
      attention_backward(token_slice(dout_, tile.queries), token_slice(q_, tile.queries),
                         token_slice(ring_.keys(kv), tile.keys), token_slice(ring_.values(kv), tile.keys),
                         {merged.out, merged.lse.contiguous()}, tile.options, dq_tile, dk, dv);
      queries.take();
      keys.take();
      unmasked = std::max(unmasked, tile.keys.end);
    }
    return unmasked;
  }

 private:
  const Ring& ring_;
  const Tensor q_;
  const RingAttended result_;
  const Tensor& dout_;
};

// Gradients of a block start one rank after its owner and end at the owner: c - 1 hops, one hop behind the block.
Tensor backward(const Ring& ring, const Tensor& packed, const AttentionResult& result, const Tensor& dout) {
  const Tensor kv = ring.keys_and_values(packed);
  const Tensor gradient = packed.make(packed.shape(), ring.sum());
  const Tensor dq = ring.q_slice(gradient);
  Tensor home = ring.kv_slice(gradient);
  const Tensor dkv = ring.make_block(packed, ring.wide), arriving = ring.make_block(packed, ring.wide);
  Backward local(ring, packed, result, dout);
  for (int hop = 0; hop < ring.ranks(); ++hop) {
    const bool last = hop + 1 == ring.ranks();
    if (!last) ring.cp.send(kv, ring.next(), kKeysAndValues);
    if (hop == 0) {
      local.add(hop, kv, dq, home);
    } else {
      const int64_t unmasked = local.add(hop, kv, dq, dkv);
      Tensor brought = token_slice(dkv, {0, unmasked}), rest = token_slice(dkv, {unmasked, ring.tokens});
      if (hop > 1) {
        ring.cp.recv(arriving, ring.previous(), kTheirGradients);
        if (unmasked > 0) add_(brought, token_slice(arriving, {0, unmasked}));
        rest.copy_from(token_slice(arriving, {unmasked, ring.tokens}));
      } else {
        rest.fill(0);
      }
      ring.cp.send(dkv, ring.next(), kTheirGradients);
    }
    if (!last) ring.cp.recv(kv, ring.previous(), kKeysAndValues);
  }
  ring.cp.recv(arriving, ring.previous(), kTheirGradients);
  add_(home, arriving);
  return gradient.to(ring.dtype);
}

}  // namespace

Var ring_attention(const Var& qkv, const Heads& heads, const AttentionOptions& options, Communicator& cp,
                   SequencePartition balance) {
  if (cp.size() == 1) return packed_attention(qkv, heads, options);
  const Ring ring = make_ring(qkv.value(), heads, options, cp, balance);
  const AttentionResult result = forward(ring, qkv.value());
  return record_one("ring_attention", result.out.reshape({ring.b, ring.tokens, heads.query * ring.d}), {qkv},
                    [ring, result, packed = qkv.saved()](Grads& g) {
                      g.set(0, backward(ring, packed.get(), result, g.output().contiguous().reshape(ring.by_head())));
                    });
}

}  // namespace tessera
