// The microbenchmarks of ops: their problems, the data that they compute with, what the machine can do, and their rows.
#pragma once

#include "bench/run.h"

namespace tessera::bench {

using Vars = std::vector<Var>;

// One problem for each op of the op table, of the size that it has in a small GPT's training step, with the arithmetic
// that it needs.

struct OpCase {
  using Op = std::function<Var(const Vars&)>;
  std::string name;  // name of the op table's row
  std::vector<Shape> operands;
  Op op;
  double forward_flops = 0, backward_flops = 0;  // FLOPs of the products inside; 0: the op is bound by memory
  double low = -1, high = 1;                     // bounds of the operands' elements
  int64_t rows_read = 0;                         // rows of the first operand that forward reads; 0: all of them
};

struct Sizes {
  int64_t batch, tokens, channels, heads, vocab;
};
inline constexpr Sizes kForCpu{12, 256, 384, 6, 4096}, kForGpu{32, 1024, 768, 12, 50304};

std::vector<OpCase> op_cases(const Sizes& sizes, const ArenaPtr& arena);

// Numbers that a name draws, from `low` on and below `high`; and token ids below `vocab`.
Tensor random_numbers(int64_t count, std::string_view name, DType dtype, const ArenaPtr& arena, double low = -0.5,
                      double high = 0.5);
Tensor random_ids(int64_t count, int64_t vocab, const ArenaPtr& arena);
// A tensor of so many elements, which are those of `block` again and again.
Tensor repeated(const Tensor& block, const Shape& shape);

// The data that a microbenchmark computes with: made once for each case, since Google Benchmark calls a row again for
// every guess of its number of iterations.

class Data {
 public:
  // `c` outlives it.
  Data(const OpCase& c, DType dtype, const ArenaPtr& arena);

  // True of this very case, and so of its dtype and its arena's sizes.
  bool is_case(const OpCase& c) const { return &c == &case_; }
  // New variables of the same tensors: gradients do not outlive a row. Before they are given for the first time, the op
  // has run twice with such, with its gradients where they are asked for: first calls choose among algorithms by the
  // clock, and take memory.
  Vars operands(bool requires_grad);
  // A gradient of the result, made when it is first asked for; and how the result's backward pass begins.
  Tensor seed();
  BackwardOptions seeded(const Var& y);

 private:
  Vars variables(bool requires_grad) const;

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
Rates compute_rates(double bytes, double flops, double seconds, const Ceilings& ceilings);

// The best rate of so many products of n x n matrices.
double measure_products(int64_t n, int rounds, DType dtype, const ArenaPtr& arena);
// The best of several rounds; the copy is of `bytes` to and from.
Ceilings measure_ceilings(DType dtype, int64_t bytes, const ArenaPtr& arena);

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
