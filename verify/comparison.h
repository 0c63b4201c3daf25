// Numbers of a run against those of the oracle, step by step, and how far apart they may be.
#pragma once

#include "optim/optimizer.h"
#include "verify/verify.h"

namespace tessera {

// |a - b| / |b|, 2-norms; 0 for equal tensors. Where the parameter's gradient zero_grad_range they are not compared.
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
    int rank_of_copy = 0;                    // added to that rank: other ranks' copies
  };

  // Comparisons that follow ask for the same bits whatever the plan; or, again, for the bound of a plan that splits
  // sums.
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
std::vector<std::string> to_lines(const VerifyResult& result);

// How far a plan that splits sums may be from one rank.
//
// float64: 1e-12, relative, 2-norms, tensor by tensor. fp32 and bf16: k 1.03^L eps with L layers. k is calibrated in
// the same run, from the gradients of two serial runs that differ in nothing but the order of their sums (all
// sequences of a rank at once, and one after another): four times what the worst tensor shows in any step, at least 64
// and at most 256, so that no calibration can excuse a defect. At least 64, since those two differ in sums over
// sequences alone (a batch of one has but one order), and a plan in sums over tokens and channels too: with AVX-512,
// whose products have other orders than AVX2's, a ring of two ranks with 4 channels came to 49. In fp32 also at least
// twice what the first of the two is from its gradients in float64: a gradient that is small beside what it is summed
// from, as that of the norm of keys, is that far off in any order, and so is the plan's.
struct Tolerance {
  double bound = 0;
  std::string text;  // how it came to be, for people
};

// `orders` and `error`: what two orders of sums, and float64, differ by from a serial run; float64 asks for neither.
Tolerance compute_tolerance(DType dtype, int64_t layers, double orders, double error);
// The tolerance of loss, norm and gradients of a step.
Tolerance compute_tolerance(const Job& job, const Sequences& sequences, const Working& working = VerifyHooks().working);

// All steps of a rank of the plan, beside the oracle, which rank 0 has; then what was counted.
void run_beside_oracle(const Job& job, Communicator& world, const Sequences& sequences, const VerifyHooks& hooks,
                       VerifyResult& result);

}  // namespace tessera
