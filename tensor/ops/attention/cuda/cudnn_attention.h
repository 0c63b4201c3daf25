// Attention with cuDNN, if kWithCudnn: the frontend compiles a graph of operations to one fused kernel (backward: a
// few). Graphs are cached with the arena; cuDNN's own checks decide which problems are supported.
#pragma once
#include <array>
#include <cmath>
#include <compare>
#include <cstdint>
#include <string>
#include <string_view>

#include "tensor/kernels.h"
#include "tensor/ops/attention/attention.h"

namespace tessera::cuda {

inline bool rows_are_aligned(const Tensor& t) {
  const int64_t size = element_size(t.dtype());
  bool all = reinterpret_cast<uintptr_t>(t.address()) % 16 == 0;
  for (int d = 0; d < 3; ++d) all = all && (t.dim(d) == 1 || t.strides()[d] * size % 16 == 0);
  return all;
}

// Cache key of a graph: attention on bfloat16 (B, T, H, D) without dropout; key_heads divide H; the causal mask
// requires equal numbers of queries and keys.
struct FusedAttention {
  enum Operand : uint8_t { q, k, v, out, dout, dq, dk, dv };
  static constexpr int kForward = 4, kOperands = 8;
  using Strides = std::array<int64_t, 3>;  // of batch, token and head, in elements; the last dim is contiguous
  int64_t batch = 0, queries = 0, keys = queries, heads = 0, key_heads = heads, d = 0;
  std::array<Strides, kOperands> strides{};
  float scale = 0;
  bool causal = true, backward = false, deterministic = false;

  auto operator<=>(const FusedAttention&) const = default;
  static bool of_keys(Operand which) { return which == k || which == v || which == dk || which == dv; }
  int64_t count_heads(Operand which) const { return of_keys(which) ? key_heads : heads; }
  int64_t read_tokens(Operand which) const { return of_keys(which) ? keys : queries; }
};

// A GPT's packed qkv (B, T, (H + 2 K) D) and its gradient.
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

// A tile of ring attention (parallel/ring_attention.cpp): q is the last `queries` tokens of a packed qkv, k and v are
// the first `keys` tokens of (B, T, 2 K, D), and results are separate tensors.
struct RingTile {
  int64_t batch, tokens, queries, keys;
  bool causal;
};
inline FusedAttention tile_problem(const RingTile& tile, const Heads& heads, int64_t d, bool backward) {
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

// Returns false, with nothing queued and the reason in KernelLog, if the problem is unsupported or rows are not aligned
// to 16 bytes; with AttentionKernels::cudnn throws Error.
bool cudnn_attention(const AttentionProblem& problem, const AttentionResult& result);
bool cudnn_attention_backward(const AttentionProblem& problem, const Tensor& dout, const AttentionResult& forward,
                              const AttentionGradients& gradients);

std::string cudnn_version();  // loaded version: "9.19.0"
// Why this version (91501 is 9.15.1) is not used; empty if it is used. Before 9.15.1, kernels read out of bounds unless
// the number of tokens is a multiple of 128.
std::string cudnn_too_old(size_t version);
// Why cuDNN cannot run the problem on the thread's GPU; empty if it can.
std::string cudnn_refuses(const FusedAttention& problem);
// For a GPU that need not be present: compute capability (90 for 9.0) and description in cuDNN's JSON
// (CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION).
std::string cudnn_refuses(const FusedAttention& problem, int capability, std::string_view gpu);

}  // namespace tessera::cuda
