// Causal attention without a T x T matrix in memory.
//
// softmax(q k^T * scale) v in blocks of 64 queries and 64 keys with an online softmax (Milakov and Gimelshein 2018;
// Rabe and Staats 2021; Dao et al. 2022 and 2023, FlashAttention 1 and 2). Forward saves the log-sum-exp of the scores
// per query and head, from which backward recomputes the probabilities. Tiles are stored transposed (keys x queries),
// so that maxima and sums over keys run in vector lanes without shuffles.
//
// Tiles of the T x T matrix may be computed separately, also on other ranks. Tiles of the same queries are merged by
// their log-sum-exp. A tile's contribution to the gradients is attention_backward() of the tile with the merged `out`
// and `lse`, because then the row sums of dout * out and the denominators cover all keys. Results to be merged or
// accumulated should have the accumulation dtype (partial_dtype()) to avoid intermediate rounding.
#pragma once
#include <cstdint>

#include "tensor/random.h"
#include "tensor/tensor.h"

namespace tessera {

// Local heads, packed as [q | k | v]: H query heads that share K key and K value heads.
struct Heads {
  int64_t query = 1, key = query;
  int64_t packed() const { return query + 2 * key; }
  int64_t begin(int i) const { return i == 0 ? 0 : query + (i - 1) * key; }
  int64_t count(int i) const { return i == 0 ? query : key; }
};

// View of q, k or v, (B, T, heads, D), in a packed tensor (B, T, (H + 2 K) D).
Tensor packed_slice(const Tensor& packed, const Heads& heads, int i);

struct AttentionOptions {
  double scale = 0;    // 0: 1 / sqrt(D)
  bool causal = true;  // query i attends to keys up to Tk - Tq + i
  // Dropout of probabilities, applied after the softmax denominator is computed: element (sequence, head, i, j) has the
  // global RNG index ((first_sequence + b) * heads_total + first_head + h) * tokens_total^2 + i * tokens_total + j.
  double dropout = 0;
  Philox random{0};
  uint64_t step = 0;
  const uint64_t* step_on_gpu = nullptr;  // as in DropoutTile
  int64_t first_sequence = 0, first_head = 0, heads_total = 0, tokens_total = 0;
  // Global positions of the tile's first query and key, for dropout, `starts` and `window`; `causal` uses Tq and Tk.
  int64_t first_key = 0, first_query = -1;  // -1: first_key + Tk - Tq
  // Document starts: int32 (B, Tq) on the operands' device, with contiguous rows. Query i of sequence b attends to no
  // key before starts[b][i], a position in the full sequence like first_key. A query without keys in the tile returns
  // zeros and a log-sum-exp of -infinity.
  Tensor starts = {};
  bool starts_may_be_ignored = false;  // `starts` excludes keys only for padding, whose outputs are unused
  // Sliding window: a query attends to `window` keys, ending with its own. 0: no window.
  int64_t window = 0;
};

struct AttentionResult {
  Tensor out;  // (B, Tq, H, D), contiguous, q's dtype
  Tensor lse;  // (B, H, Tq), float32, or float64 for float64
};

// q (B, Tq, H, D), k and v (B, Tk, K, D); the causal mask requires Tq <= Tk. Views of any strides with a contiguous
// last dim (slices of a packed qkv or of a KV cache). K divides H: query head h uses key-value head h / (H / K)
// (grouped-query attention, Ainslie et al. 2023, arXiv 2305.13245). Accumulates in float (double for float64). Cost: 4
// B H Tq Tk D FLOPs, excluding fully masked blocks; workspace of 64 x (64 + 4 D) elements per thread.
AttentionResult attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionOptions& options = {});
// `out` needs a contiguous last dim and q's or lse's dtype; `lse` must be contiguous.
void attention_into(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionOptions& options,
                    const AttentionResult& result);

// Merges attention of the same queries to two disjoint sets of keys: out = sum exp(lse_i - lse) out_i with lse = log
// sum exp(lse_i), computed in lse's dtype and rounded once to into.out's. Outputs have lse's dtype or one that
// accumulates in it; rows of into.lse and of both outputs, and all of tile.lse, are contiguous.
void merge_attention(const AttentionResult& into, const AttentionResult& tile);

// Writes gradients into views of the shapes of q, k and v, each with q's or lse's dtype. Cost: 10 B H Tq Tk D FLOPs;
// workspace of O(T D) per thread. A group's query heads contribute to dk and dv in head order; results are independent
// of the number of threads and the position in the batch.
void attention_backward(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                        const AttentionResult& forward, const AttentionOptions& options, Tensor& dq, Tensor& dk,
                        Tensor& dv);

// Whether cuDNN may run such a call, subject to its own support checks: bfloat16 on a GPU, permitted by KernelChoice,
// without dropout, window or document starts (unless they may be ignored).
bool asks_cudnn(const Tensor& q, const AttentionOptions& options);
// Accumulation dtype for results to be merged; bfloat16 for cuDNN, its only output dtype.
DType partial_dtype(const Tensor& q, const AttentionOptions& options);

struct AttentionProblem {
  Tensor q, k, v;
  AttentionOptions options;
  int64_t batch = q.dim(0), tq = q.dim(1), tk = k.dim(1), heads = q.dim(2), key_heads = k.dim(2), d = q.dim(3);
  int64_t group() const { return heads / key_heads; }
  int64_t offset() const { return tk - tq; }
};
struct AttentionGradients {
  Tensor dq, dk, dv;
};

// Operands of the kernels of both devices.
//
// First visible key of each query, relative to the problem's key 0: the later of the starts of its document and its
// window.
struct QueryStarts {
  static constexpr int kNone = -(1 << 30);
  const int32_t* first = nullptr;  // null: no documents
  int64_t row = 0;                 // stride between sequences
  int offset = 0, queries = 0;
  int begin = kNone;  // first key of query 0's window
  struct Bounds {
    int min_start = 0, max_start = 0;
  };

  constexpr bool any() const { return first || begin != kNone; }
  constexpr int of(int64_t b, int query) const {
    if (query >= queries || !any()) return 0;
    const int document = first ? first[b * row + query] - offset : kNone,
              window = begin == kNone ? kNone : begin + query;
    return document > window ? document : window;
  }
};
QueryStarts query_starts(const AttentionProblem& p);

// Dropout by global position; survivors are multiplied by `up`.
struct AttentionDropout {
  Philox random{0};
  uint64_t step = 0;
  const uint64_t* step_on_gpu = nullptr;  // replaces `step` unless null
  uint64_t tokens = 0, first_plane = 0, heads_total = 0, first_query = 0, first_key = 0;
  float probability = 0;
  double up = 1;
  bool any = false;

  // RNG index of a query and key 0.
  constexpr uint64_t index(int64_t b, int64_t h, int64_t query) const {
    const uint64_t plane = first_plane + static_cast<uint64_t>(b) * heads_total + static_cast<uint64_t>(h);
    return (plane * tokens + first_query + static_cast<uint64_t>(query)) * tokens + first_key;
  }
};
AttentionDropout attention_dropout(const AttentionOptions& o);

namespace cpu {
void attention(const AttentionProblem& problem, const AttentionResult& result);
void attention_backward(const AttentionProblem& problem, const Tensor& dout, const AttentionResult& forward,
                        const AttentionGradients& gradients);
void merge_attention(const AttentionResult& into, const AttentionResult& tile);
}  // namespace cpu

// cuDNN runs the problems it supports (cuda/cudnn_attention.h) if the arena's KernelChoice allows it. Tessera has
// tensor-core kernels (cuda/tiles.cuh) for bfloat16 with head dims 64 and 128 and rows aligned to 16 bytes, and plain
// kernels (cuda/plain.cu) for everything else. Neither uses atomics.
namespace cuda {
void attention(const AttentionProblem& problem, const AttentionResult& result);
void attention_backward(const AttentionProblem& problem, const Tensor& dout, const AttentionResult& forward,
                        const AttentionGradients& gradients);
void merge_attention(const AttentionResult& into, const AttentionResult& tile);
// "tensor cores" or "plain", for logs and tests.
const char* attention_kernels(const Tensor& q, const Tensor& k, const Tensor& v);
}  // namespace cuda

}  // namespace tessera
