// Helpers for rows of the op table: draw problems, run them forwards and backwards, compare what came out.
#pragma once

#include "tests/autograd/op_table.h"
#include "tests/support/tensors.h"

namespace tessera::test {

// The whole table.
std::vector<OpRow> op_table();
// f for random problems of each op, the same ones every time.
void for_each_problem(const std::vector<OpRow>& table, const std::function<void(const Problem&, Random&)>& f);

// Numbers for the operands, which `dtype` holds exactly.
Values draw_values(const Problem& p, DType dtype, Random& random);
std::vector<Tensor> tensors_of(const Problem& p, const Values& values, DType dtype, const ArenaPtr& arena);
// The same elements behind other strides: dims in another order, and inside a larger tensor.
Tensor strided(const Tensor& t);

struct Outcome {
  Tensor value;
  std::vector<Tensor> grads;  // undefined where none came
};
// Value and gradients of sum(weights * op(operands)), with the weights of weighted().
Outcome run(const Problem& p, const std::vector<Tensor>& operands);
double weighted(const std::vector<double>& y);
Tensor value_of(const Problem& p, const std::vector<Tensor>& operands);  // alone, without a graph

// |a - b| / max(|b|, floor), 2-norms.
double distance(const std::vector<double>& a, const std::vector<double>& b, double floor = 1e-3);
std::vector<double> doubles(const Tensor& t);
bool same_bits(const Outcome& a, const Outcome& b);

// Some rows, from a random one on, of the operands that have as many rows as the first; and of a value.
struct SomeRows {
  int64_t first = 0, count = 0, all = 0;
  std::vector<Tensor> of(std::vector<Tensor> operands) const;
  Tensor of_value(const Tensor& value) const { return value.narrow(0, first, count); }
};
SomeRows some_rows(const std::vector<Tensor>& operands, Random& random);

}  // namespace tessera::test
