// Every op of the op table has a microbenchmark, and every microbenchmark runs.
#include <gtest/gtest.h>

#include <set>

#include "bench/op_cases.h"
#include "tests/autograd/op_table.h"

namespace tessera::test {
namespace {

TEST(OpBench, CoversTheOpTable) {
  std::vector<OpRow> table;
  add_elementwise_rows(table);
  add_structured_rows(table);
  add_product_rows(table);
  std::set<std::string> tested, timed;
  for (const OpRow& row : table) tested.insert(row.name);
  for (const bench::OpCase& c : bench::op_cases(bench::kForCpu, make_arena()))
    EXPECT_TRUE(timed.insert(c.name).second) << c.name;
  EXPECT_EQ(tested, timed);
}

TEST(OpBench, EveryCaseRunsBothWays) {
  const ArenaPtr arena = make_arena();
  for (const bench::OpCase& c : bench::op_cases(bench::kForCpu, arena)) {
    std::vector<Var> operands;
    for (const Shape& shape : c.operands) {
      Tensor t = Tensor::empty(shape, DType::bfloat16, arena);
      t.fill(0.5 * (c.low + c.high));
      operands.emplace_back(t, true);
    }
    const Var y = c.op(operands);
    Tensor seed = Tensor::empty(y.shape(), y.dtype(), arena);
    seed.fill(1);
    backward(y, {.seed = seed});
    EXPECT_TRUE(operands[0].grad().defined()) << c.name;
  }
}

}  // namespace
}  // namespace tessera::test
