// Low-rank adaptation (Hu et al. 2021, "LoRA", arXiv 2106.09685, section 4.1): the product of two small trainable
// matrices is added to a frozen weight W (out, in).
//
//   y = x W^T + scale * dropout(x) A^T B^T      A (rank, in), random;  B (out, rank), initially zero
//
// An adapter may cover a range of W's rows, such as q or v of a fused [q | k | v]. Cost: rank / out + rank / in of W's
// FLOPs.
#pragma once
#include <cstdint>
#include <functional>

#include "nn/layers.h"

namespace tessera {

struct LoraOptions {
  int64_t rank = 8;
  double scale = 1;
  double dropout = 0;       // of the adapter's input
  bool starts_idle = true;  // B is initially zero
};

class Lora : public Module {
 public:
  Lora(int64_t in, int64_t first, int64_t out, const LoraOptions& options);

  // y (..., first + out or more) plus the adapter's output for x (B, T, in); may overwrite y.
  Var add_to(Var y, const Var& x);

  int64_t first() const { return first_; }
  // For tensor parallelism: the first local column of y that the adapter covers; `between` redistributes the activation
  // between A and B.
  void place(int64_t first_here, std::function<Var(Var)> between);

  Linear &a, &b;  // "lora_A" and "lora_B"
  Dropout& drop;

 private:
  int64_t first_, first_here_;
  double scale_;
  std::function<Var(Var)> between_;
};

}  // namespace tessera
