// One problem for each op of the op table, of the size that it has in a small GPT's training step, with the arithmetic
// that it needs.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "autograd/ops.h"

namespace tessera::bench {

struct OpCase {
  std::string name;  // name of the op table's row
  std::vector<Shape> operands;
  std::function<Var(const std::vector<Var>&)> op;
  double forward_flops = 0, backward_flops = 0;  // FLOPs of the products inside; 0: the op is bound by memory
  double low = -1, high = 1;                     // bounds of the operands' elements
  int64_t rows_read = 0;                         // rows of the first operand that forward reads; 0: all of them
};

struct Sizes {
  int64_t batch, tokens, channels, heads, vocab;
};
inline constexpr Sizes kForCpu{12, 256, 384, 6, 4096}, kForGpu{32, 1024, 768, 12, 50304};

std::vector<OpCase> op_cases(const Sizes& sizes, const ArenaPtr& arena);

}  // namespace tessera::bench
