// What the kernels of attention share: the sizes of one call, where its operands lie, its mask and its dropout.
#pragma once
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "tensor/cpu/attention_tiles.h"
#include "tensor/ops/attention.h"

namespace tessera::cpu {

// Sizes of one call, and where (b, h) begins in each operand.
struct AttentionProblem {
  int64_t batch, tq, tk, heads, d;
  AttentionOptions options;
  double scale;
  int64_t offset() const { return tk - tq; }  // position of query 0
};

template <class T>
Rows<T> rows_of(const Tensor& t, int64_t b, int64_t h, int64_t row) {
  using Plain = std::remove_const_t<T>;
  return {t.data<Plain>() + b * t.strides()[0] + row * t.strides()[1] + h * t.strides()[2], t.strides()[1]};
}

// Where a row of one head lies.
struct HeadRow {
  int64_t b, h, row;
};

// Stores rows of a tile in `to`, which is of dtype T or of the tile's own.
template <class T, class A>
void store_head(const Tensor& to, const HeadRow& at, const A* tile, int64_t ld, int64_t rows) {
  if (to.dtype() == kDTypeOf<A>)
    store_rows<A, A>(rows_of<A>(to, at.b, at.h, at.row), tile, ld, rows, to.dim(3));
  else
    store_rows<A, T>(rows_of<T>(to, at.b, at.h, at.row), tile, ld, rows, to.dim(3));
}

inline TileMask mask_at(const AttentionProblem& p, int64_t key0, int64_t query0) {
  return {std::min(kBlock, p.tk - key0), p.options.causal ? query0 + p.offset() - key0 : p.tk};
}
// Keys that the last of `queries` queries from query0 sees.
inline int64_t keys_seen(const AttentionProblem& p, int64_t query0, int64_t queries) {
  return p.options.causal ? std::min(p.tk, query0 + queries + p.offset()) : p.tk;
}

// keep / (1 - p) or 0 for each element of a tile of keys x queries.
template <class A>
void dropout_tile(A* keep, int64_t width, const AttentionProblem& p, int64_t b, int64_t h, int64_t key0,
                  int64_t query0) {
  const AttentionOptions& o = p.options;
  const auto t = static_cast<uint64_t>(o.tokens_total);
  const uint64_t plane = static_cast<uint64_t>((o.first_sequence + b) * o.heads_total + o.first_head + h) * t * t;
  const auto probability = static_cast<float>(o.dropout);
  const A up = static_cast<A>(1 / (1 - o.dropout));
  for (int64_t i = 0; i < width; ++i) {
    const uint64_t row =
        plane + static_cast<uint64_t>(o.first_query + query0 + i) * t + static_cast<uint64_t>(o.first_key + key0);
    Philox::Block words{};
    uint64_t held = ~uint64_t{0};
    for (int64_t j = 0; j < kBlock; ++j) {
      const uint64_t at = row + static_cast<uint64_t>(j);
      if (at >> 2 != held) words = o.random(held = at >> 2, o.step);
      keep[j * width + i] = Philox::to_uniform(words[at & 3]) >= probability ? up : A(0);
    }
  }
}

// Memory of one task, cut from one block.
template <class A>
struct Buffer {
  explicit Buffer(const Tensor& owner, int64_t elements)
      : tensor(owner.make({elements}, kDTypeOf<A>, Category::workspace)), at(tensor.data<A>()) {}
  A* take(int64_t n) {
    A* const p = at;
    at += (n + kLanes<A> - 1) / kLanes<A> * kLanes<A>;
    return p;
  }
  Tensor tensor;
  A* at;
};

inline int64_t lanes_up(int64_t n, int64_t lanes) { return (n + lanes - 1) / lanes * lanes; }

struct AttentionGradients {
  Tensor &dq, &dk, &dv;
};

}  // namespace tessera::cpu
