// Step-by-step comparison of a run with the oracle.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "optim/optimizer.h"
#include "verify/verify.h"

namespace tessera {

// |a - b| / |b|, 2-norms; 0 for equal tensors and for elements whose gradient is zero (zero_grad_range).
double relative_distance(const Parameter& parameter, const Tensor& a, const Tensor& b);

class Comparison {
 public:
  explicit Comparison(VerifyResult& result) : result_(result) {}

  // Gathered tensors, slot by slot, and the oracle's full units.
  struct Tensors {
    int64_t step = 0;
    TensorDifference::Kind kind{};
    const std::vector<NamedTensor>& found;
    const std::vector<FlatUnit>& units;
    std::vector<Tensor> full;
    std::vector<Tensor> before = {};         // of the preceding step; empty: unknown
    const std::vector<NamedTensor>& owners;  // source rank of each element of `found`
    int rank_of_copy = 0;                    // added to the source rank, for replicas on other ranks
  };

  // Whether later comparisons require bitwise equality or, if the plan splits sums, only agreement within the bound.
  void exactly() { bits_ = true; }
  void within_bound() { bits_ = false; }

  void number(int64_t step, const std::string& what, double found, double expected);
  // Returns whether all tensors are equal, or within the tolerance.
  bool tensors(const Tensors& all, double& worst_distance);

 private:
  struct Pair {
    const Parameter& parameter;
    Tensor expected, before, owners;
  };
  bool one(const Tensors& all, const NamedTensor& found, const Pair& pair, double& worst_distance);
  bool allowed(double distance) const { return !result_.exact && !bits_ && distance <= result_.bound; }
  void note(int64_t step);
  VerifyResult& result_;
  double worst_ = 0;
  bool bits_ = false;
};

// One line per failing value and tensor of the first failing step, then one line per later step.
std::vector<std::string> to_lines(const VerifyResult& result);

}  // namespace tessera
