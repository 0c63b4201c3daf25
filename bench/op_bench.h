// Microbenchmarks of ops.
#pragma once
#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "bench/run.h"

namespace tessera::bench {

using Vars = std::vector<Var>;

// Sizes are those of a small GPT's training step.

struct OpCase {
  using Op = std::function<Var(const Vars&)>;
  std::string name;  // row of the op table
  std::vector<Shape> operands;
  Op op;
  double forward_flops = 0, backward_flops = 0;  // of matmuls; 0: memory-bound op
  double low = -1, high = 1;                     // of operand elements
  int64_t rows_read = 0;                         // rows of the first operand read in forward; 0: all
};

struct Sizes {
  int64_t batch, tokens, channels, heads, vocab;
};
inline constexpr Sizes kForCpu{12, 256, 384, 6, 4096}, kForGpu{32, 1024, 768, 12, 50304};

std::vector<OpCase> op_cases(const Sizes& sizes, const ArenaPtr& arena);

// Values in [low, high), seeded by `name`; token ids below `vocab`.
Tensor random_values(int64_t count, std::string_view name, DType dtype, const ArenaPtr& arena, double low = -0.5,
                     double high = 0.5);
Tensor random_ids(int64_t count, int64_t vocab, const ArenaPtr& arena);
Tensor repeated(const Tensor& block, const Shape& shape);

// Operands are created once, because Google Benchmark calls a row for each estimate of its iteration count.

class Data {
 public:
  Data(const OpCase& c, DType dtype, const ArenaPtr& arena);

  bool is_case(const OpCase& c) const { return &c == &case_; }
  // New variables that wrap the same tensors, so gradients do not outlive a row. The first call runs the op twice
  // (with backward if requires_grad), because first calls time algorithms and allocate memory.
  Vars operands(bool requires_grad);
  // A lazily created gradient of the result, and options of a backward pass from it.
  Tensor seed();
  BackwardOptions seeded(const Var& y);

 private:
  Vars variables(bool requires_grad) const;

  const OpCase& case_;
  Tensor block_;  // repeated in all tensors
  std::vector<Tensor> operands_;
  std::optional<Tensor> seed_;
  std::array<bool, 2> warm_ = {};  // [requires_grad]
};

// Measured roofs of the roofline model (Williams et al. 2009).

struct Ceilings {
  double bytes_per_s;  // copy bandwidth of all threads, bytes read plus written
  double flops;        // matmul 1024^3, on a GPU 8192^3
};

double copy_bandwidth(int64_t bytes, double seconds);  // bytes read plus written
double matmul_throughput(int64_t n, double seconds);

struct Throughput {
  double bytes_per_s, flops, fraction;  // roofline time / measured time
};
Throughput compute_throughput(double bytes, double flops, double seconds, const Ceilings& ceilings);

// The best FLOP/s of several n x n x n matmuls.
double measure_matmuls(int64_t n, int rounds, DType dtype, const ArenaPtr& arena);
// The best of several rounds; the copy reads `bytes` and writes `bytes`.
Ceilings measure_ceilings(DType dtype, int64_t bytes, const ArenaPtr& arena);

// Group `op/`: every op of the op table, forward and backward, as in op/matmul/forward/fp32. Rows report the minimum
// bytes moved (operands and results once), matmul FLOPs, and `fraction`, the roofline time over the measured time.

struct OpRows {
  std::vector<Row> rows;
  // (name, text), such as "ceiling_fp32", for each dtype in `wanted`; measured on first use.
  std::function<std::vector<std::pair<std::string, std::string>>(const std::vector<Row>& wanted)> ceilings;
};

OpRows op_rows(Device device);

}  // namespace tessera::bench
