// What a microbenchmark computes with: made once for each case, since Google Benchmark calls a row again for every
// guess of its number of iterations.
#pragma once
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
  // New variables of the same tensors: gradients do not outlive a row.
  std::vector<Var> operands(bool requires_grad) const;
  // A gradient of the result, made when it is first asked for.
  Tensor seed();

 private:
  Tensor drawn(const Shape& shape) const;

  const OpCase& case_;
  Tensor block_;  // random elements of the case's range, of which every tensor is made
  std::vector<Tensor> operands_;
  std::optional<Tensor> seed_;
};

}  // namespace tessera::bench
