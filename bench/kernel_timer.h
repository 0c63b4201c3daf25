// How long a kernel takes for calls of one size, and what it finds in the caches: see bench/calibrate.h.
#pragma once
#include <array>
#include <functional>
#include <vector>

#include "autograd/var.h"
#include "bench/calibrate.h"
#include "parallel/comm/communicator.h"

namespace tessera::bench {

// One op, of some sizes: inputs first, then parameters.
struct KernelCase {
  planner::Kernel forward, backward;
  planner::Sizes sizes, backward_sizes;
  std::vector<Shape> inputs = {}, parameters = {};
  std::function<Var(std::vector<Var>& in, const std::vector<Var>& weights)> op;
  bool of_inputs = true, of_parameters = true;  // gradients that are made
  // Makes the root of the backward pass of the result, in time that does not count.
  std::function<Var(std::vector<Var>& in, Var result)> root = {};
};

class KernelTimer {
 public:
  KernelTimer(DType dtype, const Calibration& how, Communicator& world) : dtype_(dtype), how_(how), world_(world) {}

  // Both passes of the op. Every rank calls it.
  void time(const KernelCase& c);
  // Work that says itself how long it took.
  void time(planner::Kernel kernel, const planner::Sizes& sizes, const std::function<double()>& once) {
    note(kernel, sizes, repeat(once));
  }
  planner::Machine::Costs costs() const;

  // Seconds of this thread, or on the wall where it has others to help it.
  static double now();
  const ArenaPtr& arena() const { return arena_; }
  DType dtype() const { return dtype_; }
  int64_t bytes() const { return how_.bytes; }

 private:
  Tensor drawn(const Shape& shape, DType dtype) const;
  double repeat(const std::function<double()>& once) const;
  void note(planner::Kernel kernel, const planner::Sizes& sizes, double seconds);

  DType dtype_;
  Calibration how_;
  Communicator& world_;
  ArenaPtr arena_ = make_arena();
  std::array<std::vector<planner::Timed>, planner::kKernels> timed_;
};

}  // namespace tessera::bench
