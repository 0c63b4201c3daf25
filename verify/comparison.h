// Step by step: what a run computed against what the oracle computed.
#pragma once
#include <string>
#include <vector>

#include "optim/optimizer.h"
#include "verify/verify.h"

namespace tessera {

// |a - b| / |b|, 2-norms; 0 for equal tensors. Where the parameter's gradient vanishes they are not compared.
double relative_distance(const Parameter& parameter, const Tensor& a, const Tensor& b);

class Comparison {
 public:
  explicit Comparison(VerifyResult& result) : result_(result) {}

  // Gathered tensors, slot by slot, against whole units of the oracle.
  struct Tensors {
    int64_t step = 0;
    TensorDifference::Kind kind{};
    const std::vector<NamedTensor>& found;
    const std::vector<FlatUnit>& units;
    std::vector<Tensor> whole;
    std::vector<Tensor> before = {};         // as `whole`, of the step before; empty: not known
    const std::vector<NamedTensor>& owners;  // the rank of each element of `found`
    int rank_of_copy = 0;                    // what is added to that rank: other ranks' copies
  };

  // What follows must have the same bits whatever the plan; or, again, be within the bound of a plan that splits sums.
  void exactly() { bits_ = true; }
  void within_bound() { bits_ = false; }

  // The loss, or the norm of the gradients.
  void number(int64_t step, const std::string& what, double found, double expected);
  // `worst_distance` becomes the largest distance that was seen. True where all are equal, or within the bound.
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

// One line for each number and tensor that is wrong in the first step in which any is, one for each step after it.
std::vector<std::string> lines_of(const VerifyResult& result);

}  // namespace tessera
