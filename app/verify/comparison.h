// Step by step: what a run computed against what the oracle computed.
#pragma once
#include <string>
#include <vector>

#include "app/verify/verify.h"
#include "optim/optimizer.h"

namespace tessera {

class Comparison {
 public:
  explicit Comparison(VerifyResult& result) : result_(result) {}

  void loss(int64_t step, double found, double expected);
  // Gathered tensors, slot by slot, against whole units of the oracle; `what` they are. `worst_distance` becomes the
  // largest |a - b| / |b| (2-norms) that was seen.
  void tensors(int64_t step, const char* what, const std::vector<NamedTensor>& found,
               const std::vector<FlatUnit>& units, const std::vector<Tensor>& whole, double& worst_distance);

 private:
  void one(int64_t step, const char* what, const NamedTensor& found, const Tensor& expected, double& worst_distance);
  void differs(const std::string& line);
  VerifyResult& result_;
  double worst_ = 0;
};

}  // namespace tessera
