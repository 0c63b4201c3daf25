// What a microbenchmark computes with: made once for each case, since Google Benchmark calls a row again for every
// guess of its number of iterations.
#pragma once
#include <array>
#include <optional>
#include <vector>

#include "bench/op_cases.h"

namespace tessera::bench {

class Data {
 public:
  // `c` outlives it.
  Data(const OpCase& c, DType dtype, const ArenaPtr& arena);

  // Of this very case, so of its dtype and its arena's sizes.
  bool is_of(const OpCase& c) const { return &c == &case_; }
  // New variables of the same tensors: gradients do not outlive a row. Before they are given for the first time, the op
  // has run twice with such, with its gradients where they are asked for: first calls choose among algorithms by the
  // clock, and take memory.
  std::vector<Var> operands(bool requires_grad);
  // A gradient of the result, made when it is first asked for; and how the result's backward pass begins.
  Tensor seed();
  BackwardOptions seeded(const Var& y);

 private:
  Tensor drawn(const Shape& shape) const;
  std::vector<Var> variables(bool requires_grad) const;

  const OpCase& case_;
  Tensor block_;  // random elements of the case's range, of which every tensor is made
  std::vector<Tensor> operands_;
  std::optional<Tensor> seed_;
  std::array<bool, 2> warm_ = {};  // without gradients, with them
};

}  // namespace tessera::bench
