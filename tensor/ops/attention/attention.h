// Causal attention that never holds a T x T matrix.
//
// softmax(q k^T * scale) v by blocks of 64 queries and 64 keys with an online softmax (Milakov and Gimelshein 2018;
// Rabe and Staats 2021; Dao et al. 2022 and 2023, FlashAttention 1 and 2). Forward keeps one number per query and head,
// the log of the softmax's denominator; backward makes each block of probabilities again from it. Tiles are kept
// transposed (keys down, queries across), so that maxima and sums over keys run in vector lanes and need no shuffles.
//
// The T x T matrix may be cut into tiles that are computed apart (on other ranks, at other times). Tiles of the same
// queries are merged by their log-sum-exp, and a tile's part of the gradients is attention_backward() of the tile with
// `out` and `lse` of the merged whole: the row sums of dout * out and the denominators are those of all keys then.
// Results that are to be merged or added are best written in the type of the sums (dtype_of_parts()).
#pragma once
#include "tensor/random.h"
#include "tensor/tensor.h"

namespace tessera {

// Heads of attention that are here, packed as [q | k | v]: H of queries, and K of keys and of values that they share.
struct Heads {
  int64_t query = 1, key = query;
  int64_t packed() const { return query + 2 * key; }
  // The first head of q, k or v (i = 0, 1, 2) among the packed ones, and how many heads it has.
  int64_t begin(int i) const { return i == 0 ? 0 : query + (i - 1) * key; }
  int64_t count(int i) const { return i == 0 ? query : key; }
};

// q, k or v, as (B, T, heads, D), of a packed (B, T, (H + 2 K) D): a view.
Tensor packed_part(const Tensor& packed, const Heads& heads, int i);

struct AttentionOptions {
  double scale = 0;    // 0 means 1 / sqrt(D)
  bool causal = true;  // query i sees keys up to Tk - Tq + i
  // Dropout of probabilities, after the softmax's denominator is taken: element (sequence, head, i, j) has the global
  // index ((first_sequence + b) * heads_total + first_head + h) * tokens_total^2 + i * tokens_total + j in the counter.
  double dropout = 0;
  Philox random{0};
  uint64_t step = 0;
  const uint64_t* step_on_gpu = nullptr;  // as in DropoutTile
  int64_t first_sequence = 0, first_head = 0, heads_total = 0, tokens_total = 0;
  // The places of a tile: the i of its query 0 and the j of its key 0. They count for dropout alone; `causal` goes by
  // Tq and Tk.
  int64_t first_key = 0, first_query = -1;  // -1: first_key + Tk - Tq
  // Document starts, where sequences hold several documents: int32 (B, Tq), where the operands lie, rows running on.
  // Query i of sequence b sees no key before key starts[b][i], counted like first_key in the whole sequence. A query of
  // which no key is in the tile gives zeros and a log-sum-exp of -infinity. Undefined: every key.
  Tensor starts = {};
  bool starts_may_be_ignored = false;  // they only spare work: what is before a start is padding's, which nobody uses
  // A query sees its own key and those before it, `window` in all, by first_query and first_key; 0: all.
  int64_t window = 0;
};

struct AttentionResult {
  Tensor out;  // (B, Tq, H, D), contiguous, dtype of q
  Tensor lse;  // (B, H, Tq), float32, or float64 for float64
};

// q (B, Tq, H, D), k and v (B, Tk, K, D), under the causal mask Tq <= Tk: views of any strides whose last dim runs on
// (slices of a packed qkv, or of a cache). K divides H: query head h sees key-value head h / (H / K) (grouped-query
// attention, Ainslie et al. 2023, arXiv 2305.13245). Sums and probabilities are in float (double for float64). Cost: 4
// B H Tq Tk D FLOPs, blocks that are fully masked left out; workspace 64 x (64 + 4 D) numbers per thread.
AttentionResult attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionOptions& options = {});
// The same, written into `result`: an out whose last dim runs on, of q's dtype or of lse's, and a contiguous lse.
void attention_into(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionOptions& options,
                    const AttentionResult& result);

// `into`, of some keys, and `part`, of others, become the attention to both in `into`: out = sum exp(lse_i - lse) out_i
// with lse = log sum exp(lse_i), computed in lse's dtype and rounded once to into.out's. Each out is of lse's dtype
// or of one whose sums are; rows of into.lse and of both outs run on, and part.lse is contiguous. -infinity says that a
// query has seen no key. Cost: one pass.
void merge_attention(const AttentionResult& into, const AttentionResult& part);

// Gradients, written into views of the shapes of q, k and v (the slices of a packed gradient), each of q's dtype or of
// lse's. Cost: 10 B H Tq Tk D
// FLOPs; workspace of O(T D) per thread. What the heads of a group bring to dk and dv is added in their order. Bits
// depend on neither the threads nor the place in the batch.
void attention_backward(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                        const AttentionResult& forward, const AttentionOptions& options, Tensor& dq, Tensor& dk,
                        Tensor& dv);

// Whether cuDNN's kernels may serve such a call: its arena's KernelChoice allows them, on a GPU, and it is bfloat16,
// with nothing dropped, one document and no window. cuDNN's own checks decide then.
bool asks_cudnn(const Tensor& q, const AttentionOptions& options);
// The dtype of results that are to be merged or added: that of the sums, so that nothing is rounded before; but
// bfloat16 where cuDNN is asked, whose kernels write nothing else.
DType dtype_of_parts(const Tensor& q, const AttentionOptions& options);

// The input of the kernels: operands that fit, and options that leave nothing open (scale, totals and first_query are
// set).
struct AttentionProblem {
  Tensor q, k, v;
  AttentionOptions options;
  int64_t batch = q.dim(0), tq = q.dim(1), tk = k.dim(1), heads = q.dim(2), key_heads = k.dim(2), d = q.dim(3);
  int64_t group() const { return heads / key_heads; }  // query heads that share a key-value head
  int64_t offset() const { return tk - tq; }           // position of query 0
};
struct AttentionGradients {
  Tensor dq, dk, dv;
};

namespace cpu {
void attention(const AttentionProblem& problem, const AttentionResult& result);
void attention_backward(const AttentionProblem& problem, const Tensor& dout, const AttentionResult& forward,
                        const AttentionGradients& gradients);
void merge_attention(const AttentionResult& into, const AttentionResult& part);
}  // namespace cpu

// On a GPU, where the arena's KernelChoice says so, cuDNN's kernels serve what they can (cuda/cudnn_attention.h):
// bfloat16, results too, under the causal mask as many queries as keys, no dropout, one document, no window.
//
// Our own kernels are of two kinds. Those for tensor cores (cuda/tiles.cuh) take bfloat16 with 64 or 128 numbers per
// head whose rows begin at multiples of 16 bytes; plain ones (cuda/plain.cuh) take everything. None adds with atomics:
// the gradient of the queries and those of keys and values are made by two kernels. Bits of a row depend neither on its
// place in the batch nor on what else is there.
namespace cuda {
void attention(const AttentionProblem& problem, const AttentionResult& result);
void attention_backward(const AttentionProblem& problem, const Tensor& dout, const AttentionResult& forward,
                        const AttentionGradients& gradients);
void merge_attention(const AttentionResult& into, const AttentionResult& part);
// "tensor cores" or "plain": which of our kernels take operands like these, for the log of a run and for tests.
const char* attention_kernels(const Tensor& q, const Tensor& k, const Tensor& v);
}  // namespace cuda

}  // namespace tessera
