// Every op of the op table has a microbenchmark, every microbenchmark runs, and what they compute with.
#include "bench/op_bench.h"

#include <set>

#include "tests/autograd/op_checks.h"

namespace tessera::test {
namespace {

TEST(OpBench, CoversTheOpTable) {
  std::set<std::string> tested, timed;
  for (const OpRow& row : op_table()) tested.insert(row.name);
  for (const bench::OpCase& c : bench::op_cases(bench::kForCpu, make_arena()))
    EXPECT_TRUE(timed.insert(c.name).second) << c.name;
  EXPECT_EQ(tested, timed);
}

// Operations on 3,072 rows of 384 channels, 1,536 hidden ones and a vocabulary of 4,096: two for each multiplication.
TEST(OpBench, CountsTheArithmeticOfProducts) {
  constexpr double kProduct = 3'623'878'656, kScores = 301'989'888;  // 2 3,072 384 1,536; 12 256^2 384
  const std::map<std::string, std::pair<double, double>> expected = {
      {"matmul", {kProduct, 2 * kProduct}},
      {"linear", {kProduct, 2 * kProduct}},
      {"linear_rows", {kProduct, 2 * kProduct}},
      {"gelu_mlp", {2 * kProduct, 4 * kProduct}},
      {"linear_cross_entropy", {28'991'029'248, 0}},
      {"attention", {2 * kScores, 5 * kScores}},
      {"packed_attention", {2 * kScores, 5 * kScores}},
      {"grouped_attention", {2 * kScores, 5 * kScores}},
  };
  for (const bench::OpCase& c : bench::op_cases(bench::kForCpu, make_arena())) {
    const auto found = expected.find(c.name);
    EXPECT_EQ(c.forward_flops, found == expected.end() ? 0 : found->second.first) << c.name;
    EXPECT_EQ(c.backward_flops, found == expected.end() ? 0 : found->second.second) << c.name;
  }
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

// Small tensors are drawn whole; of larger ones a beginning is, and repeats.
TEST(OpBench, OperandsAreMadeOnceInTheirRange) {
  const bench::OpCase c{.name = "log",
                        .operands = {{3, 1 << 21}, {7, 5}},
                        .op = [](const std::vector<Var>& v) { return binary<Mul>(v[1], v[1]); },
                        .low = 0.5,
                        .high = 2};
  const bench::OpCase other = c;
  bench::Data data(c, DType::float32, make_arena());
  EXPECT_TRUE(data.is_of(c));
  EXPECT_FALSE(data.is_of(other));
  const std::vector<Var> first = data.operands(true), again = data.operands(false);
  ASSERT_EQ(first.size(), 2U);
  EXPECT_TRUE(first[0].requires_grad() && !again[0].requires_grad());
  for (size_t i = 0; i < first.size(); ++i) {
    EXPECT_EQ(first[i].shape(), c.operands[i]);
    EXPECT_EQ(first[i].value().raw(), again[i].value().raw());
    const std::vector<float> values = first[i].value().to_vector<float>();
    const auto [low, high] = std::minmax_element(values.begin(), values.end());
    EXPECT_TRUE(*low >= 0.5F && *low < 0.7F && *high <= 2 && *high > 1.8F) << *low << " to " << *high;
  }
  const float* const large = first[0].value().data<float>();
  EXPECT_EQ(large[(1 << 22) + 5], large[5]);
  EXPECT_NE(large[1 << 21], large[0]);
  EXPECT_EQ(data.seed().shape(), c.operands[1]);
  EXPECT_EQ(data.seed().raw(), data.seed().raw());
}

// The choices and memory of first calls are not timed.
TEST(OpBench, AnOpHasRunTwiceBeforeItIsTimed) {
  int calls = 0;
  const bench::OpCase c{.name = "mul", .operands = {{7, 5}}, .op = [&calls](const std::vector<Var>& v) {
                          ++calls;
                          return binary<Mul>(v[0], v[0]);
                        }};
  bench::Data data(c, DType::float32, make_arena());
  const std::vector<Var> forward = data.operands(false);
  EXPECT_EQ(calls, 2);
  data.operands(false);
  EXPECT_EQ(calls, 2);
  const std::vector<Var> trained = data.operands(true);
  EXPECT_EQ(calls, 2 + 2 + 1);  // one for the shape of the result's gradient
  EXPECT_FALSE(trained[0].grad().defined());
}

TEST(OpBench, AnEmbeddingReadsTheRowsOfItsTokens) {
  for (const bench::OpCase& c : bench::op_cases(bench::kForCpu, make_arena())) {
    if (c.name != "embedding") {
      EXPECT_EQ(c.rows_read, 0) << c.name;
      continue;
    }
    const double vocab = 4096, tokens = 12 * 256;  // drawn with replacement
    EXPECT_NEAR(static_cast<double>(c.rows_read), vocab * (1 - std::pow(1 - 1 / vocab, tokens)), 80);
  }
}

}  // namespace
}  // namespace tessera::test
