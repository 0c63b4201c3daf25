// The data that a microbenchmark computes with: made once for each case, since Google Benchmark calls a row again for
// every guess of its number of iterations.
#pragma once
#include <array>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "autograd/var.h"
#include "bench/calibrate.h"
#include "bench/op_cases.h"
#include "bench/run.h"
#include "parallel/comm/communicator.h"
#include "tensor/device.h"
#include "tensor/tensor.h"

namespace tessera::bench {

class Data {
 public:
  // `c` outlives it.
  Data(const OpCase& c, DType dtype, const ArenaPtr& arena);

  // True of this very case, and so of its dtype and its arena's sizes.
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

// The most that this machine can do, measured: the two roofs of the roofline (Williams et al. 2009).

struct Ceilings {
  double bytes_per_s;  // rate of a copy, read and written bytes together, by all threads
  double flops;        // rate of a product of 1024^3, on a GPU of 8192^3, by the library
};

double copy_rate(int64_t bytes, double seconds);  // bytes/s of a copy of so many: they are read and written
double product_rate(int64_t n, double seconds);   // FLOP/s of a product of n x n matrices

// The rates of so much work, done in so many seconds, as a benchmark gives them.
struct Rates {
  double bytes_per_s, flops, share;  // share: of the time that the slower of the two takes at the ceilings
};
Rates rates_of(double bytes, double flops, double seconds, const Ceilings& ceilings);

// The best of several rounds; the copy is of `bytes` to and from.
Ceilings measure_ceilings(DType dtype, int64_t bytes, const ArenaPtr& arena);

// How long a kernel takes for calls of one size, and what it finds in the caches: see bench/calibrate.h.

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

// The group `op/`: every op of the op table, forward and backward.
//
//   op/matmul/forward/fp32
//
// Each row gives the bytes that the op must move at least (operands and results, once), the arithmetic of its products,
// and `share`: of the time that the slower of the two would take at the machine's measured ceilings.

struct OpRows {
  std::vector<Row> rows;
  // Measures the ceilings, unless they were: "ceiling_fp32" and what it is, for each dtype that `wanted` has rows of.
  std::function<std::vector<std::pair<std::string, std::string>>(const std::vector<Row>& wanted)> ceilings;
};

OpRows op_rows(Device device);

}  // namespace tessera::bench
