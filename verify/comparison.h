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

  // What follows must have the same bits whatever the plan; or, again, be within the bound of a plan that splits sums.
  void exactly() { bits_ = true; }
  void within_bound() { bits_ = false; }

  // The loss, or the norm of the gradients.
  void number(int64_t step, const std::string& what, double found, double expected);
  // Gathered tensors, slot by slot, against whole units of the oracle; `what` they are. `worst_distance` becomes the
  // largest distance that was seen.
  void tensors(int64_t step, const char* what, const std::vector<NamedTensor>& found,
               const std::vector<FlatUnit>& units, const std::vector<Tensor>& whole, double& worst_distance);

 private:
  struct About {
    int64_t step;
    const char* what;
    const Parameter& parameter;
  };
  void one(const About& about, const NamedTensor& found, const Tensor& expected, double& worst_distance);
  void differs(double distance, const std::string& line);
  VerifyResult& result_;
  double worst_ = 0;
  bool reported_ = false, bits_ = false;
};

}  // namespace tessera
