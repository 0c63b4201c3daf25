// Attention by cuDNN: which problems it serves, and running them. Only in a build where kWithCudnn is true.
//
// A problem is a graph of operations that cuDNN's frontend lowers to one fused kernel (backward: a few). Graphs are
// built once for each problem and kept with the arena; cuDNN's own checks decide which problems it serves.
#pragma once
#include <compare>

#include "tensor/kernels.h"
#include "tensor/ops/attention/attention.h"

namespace tessera::cuda {

// Whether every row of (B, T, H, D) begins where 16 bytes may be read at once.
inline bool starts_well(const Tensor& t) {
  const int64_t size = element_size(t.dtype());
  bool all = reinterpret_cast<uintptr_t>(t.address()) % 16 == 0;
  for (int d = 0; d < 3; ++d) all = all && (t.dim(d) == 1 || t.strides()[d] * size % 16 == 0);
  return all;
}

// All that a graph is built from: bfloat16 (B, T, H, D), keys and values with key_heads that divide H, under the causal
// mask as many queries as keys, no dropout.
struct FusedAttention {
  enum Operand : uint8_t { q, k, v, out, dout, dq, dk, dv };
  static constexpr int kForward = 4, kOperands = 8;  // the forward pass has the first four
  using Strides = std::array<int64_t, 3>;  // strides of batch, token and head, in elements; the last dim runs on
  int64_t batch = 0, queries = 0, keys = queries, heads = 0, key_heads = heads, d = 0;
  std::array<Strides, kOperands> strides{};
  float scale = 0;
  bool causal = true, backward = false, deterministic = false;

  auto operator<=>(const FusedAttention&) const = default;
  static bool of_keys(Operand which) { return which == k || which == v || which == dk || which == dv; }
  int64_t count_heads(Operand which) const { return of_keys(which) ? key_heads : heads; }
  int64_t read_tokens(Operand which) const { return of_keys(which) ? keys : queries; }
};

// That of a packed qkv (B, T, (H + 2 K) D) and of its packed gradient, causal, as a GPT asks for it.
inline FusedAttention packed_problem(int64_t batch, int64_t tokens, const Heads& heads, int64_t d, bool backward) {
  const int64_t c = heads.query * d, all = heads.packed() * d;
  const FusedAttention::Strides packed{tokens * all, all, d}, plain{tokens * c, c, d}, none{};
  FusedAttention p{
      .batch = batch, .queries = tokens, .heads = heads.query, .key_heads = heads.key, .d = d, .backward = backward};
  p.strides = {packed, packed, packed, plain, none, none, none, none};
  if (backward) p.strides = {packed, packed, packed, plain, plain, packed, packed, packed};
  p.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(d)));
  return p;
}

// The problem of a tile of a ring (parallel/ring_attention.cpp): the last `queries` of the tokens of a packed qkv, and
// the first `keys` of as many tokens of (B, T, 2 K, D), keys and values beside each other; results lie by themselves.
struct TileOfRing {
  int64_t batch, tokens, queries, keys;
  bool causal;
};
inline FusedAttention tile_problem(const TileOfRing& tile, const Heads& heads, int64_t d, bool backward) {
  FusedAttention p = packed_problem(tile.batch, tile.tokens, heads, d, backward);
  const int64_t c = heads.query * d, kv = 2 * heads.key * d;
  p.queries = tile.queries, p.keys = tile.keys, p.causal = tile.causal;
  using Of = FusedAttention;
  p.strides[Of::k] = p.strides[Of::v] = {tile.tokens * kv, kv, d};
  if (!backward) p.strides[Of::out] = {tile.queries * c, c, d};
  if (backward) {
    p.strides[Of::dq] = {tile.queries * c, c, d};
    p.strides[Of::dk] = p.strides[Of::dv] = {tile.keys * kv, kv, d};
  }
  return p;
}

// Whether cuDNN did it. Where it refuses the problem, or rows do not begin at multiples of 16 bytes, nothing was queued
// and the arena's KernelLog says why; under AttentionKernels::cudnn that is an Error.
bool cudnn_attention(const AttentionProblem& problem, const AttentionResult& result);
bool cudnn_attention_backward(const AttentionProblem& problem, const Tensor& dout, const AttentionResult& forward,
                              const AttentionGradients& gradients);

std::string cudnn_version();  // "9.19.0", of the library that is loaded
// Why a library of such a version (91501 is 9.15.1) is not asked at all; empty: it is. Before 9.15.1 kernels read
// memory that is not theirs where 128 does not divide the tokens.
std::string cudnn_too_old(size_t version);
// Why cuDNN refuses the problem on the calling thread's GPU, or cannot compile it there; empty where it serves it.
std::string cudnn_refuses(const FusedAttention& problem);
// The answer of cuDNN's checks for a GPU that need not be there: compute capability `capability` (90 for 9.0),
// described by `gpu` in cuDNN's JSON (CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION).
std::string cudnn_refuses(const FusedAttention& problem, int capability, std::string_view gpu);

}  // namespace tessera::cuda
