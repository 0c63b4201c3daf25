// Low-rank adaptation (Hu et al. 2021, "LoRA", arXiv 2106.09685, section 4.1): beside a frozen weight W (out, in) two
// small matrices are trained, and their product is added to it.
//
//   y = x W^T + scale * dropout(x) A^T B^T      A (rank, in), drawn;  B (out, rank), zeros at first
//
// An adapter may be for some rows of W only: for q and v in a fused [q | k | v]. It costs rank / out + rank / in of the
// FLOPs of W.
#pragma once

#include "nn/layers.h"

namespace tessera {

struct LoraOptions {
  int64_t rank = 8;
  double scale = 1;
  double dropout = 0;       // dropout of the adapter's own input
  bool starts_idle = true;  // B is zeros
};

class Lora : public Module {
 public:
  // An adapter of the rows [first, first + out) of a weight with `in` columns.
  Lora(int64_t in, int64_t first, int64_t out, const LoraOptions& options);

  // y (..., more than first + out) with the adapter's part of x (B, T, in) added; may write over y.
  Var add_to(Var y, const Var& x);

  int64_t first() const { return first_; }
  // Where ranks share the layer: the columns of y that are the adapter's begin here, and what lies between A and B
  // passes `between` on its way.
  void place(int64_t first_here, std::function<Var(Var)> between);

  Linear &a, &b;  // "lora_A" and "lora_B"
  Dropout& drop;

 private:
  int64_t first_, first_here_;
  double scale_;
  std::function<Var(Var)> between_;
};

}  // namespace tessera
