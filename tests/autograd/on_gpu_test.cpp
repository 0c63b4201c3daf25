// The op table on a GPU: values and gradients beside the CPU's, and that strides, places and repetition change no bit.
#include <set>

#include "tests/autograd/op_checks.h"
#include "tests/support/gpu.h"

namespace tessera::test {
namespace {

using OpTableGpu = OnGpu;

// Ops made of products, which libraries add up in their own order: tests/tensor has tests of these on a GPU.
const std::set<std::string> kProducts = {"matmul",    "linear",           "gelu_mlp",
                                         "attention", "packed_attention", "grouped_attention"};
// Ops whose formulas, and the orders of whose sums, are the CPU's, gradients included.
const std::set<std::string> kExact = {"neg",     "sqrt", "square", "reciprocal", "relu",    "transpose", "narrow",
                                      "reshape", "sum",  "scale",  "embedding",  "dropout", "rotate"};
// The same, but that the exponentials of float64 are the C library's on the CPU and CUDA's on a GPU.
const std::set<std::string> kExactBut64 = {"exp", "tanh", "sigmoid", "silu", "gelu", "gelu_erf", "bias_gelu", "swiglu"};

bool exact(const Problem& p, DType dtype) {
  if (p.name == "linear_rows") return dtype != DType::bfloat16;  // which tensor cores add in steps of sixteen
  return kExact.contains(p.name) || (dtype != DType::float64 && kExactBut64.contains(p.name));
}

std::vector<OpRow> rows_on_gpu() {
  std::vector<OpRow> rows = op_table();
  std::erase_if(rows, [](const OpRow& row) { return kProducts.contains(row.name); });
  return rows;
}

std::vector<Tensor> moved(const std::vector<Tensor>& tensors, const ArenaPtr& arena) {
  std::vector<Tensor> there;
  for (const Tensor& t : tensors) there.push_back(t.to(arena));
  return there;
}

// The elements of t in order, contiguous, from an address that nothing is aligned to.
Tensor displaced(const Tensor& t) {
  const Tensor room = t.make({t.numel() + 1});
  Tensor view = room.narrow(0, 1, t.numel()).reshape(t.shape());
  view.copy_from(t);
  return view;
}

// Sums in another order, and now and then an element that is rounded the other way.
double bound(DType dtype) {
  switch (dtype) {
    case DType::float64:
      return 1e-14;
    case DType::float32:
      return 2e-6;
    default:
      return 4e-3;
  }
}

TEST_F(OpTableGpu, ValuesAndGradientsAreThoseOfTheCpu) {
  std::set<std::string> seen;
  for_each_problem(rows_on_gpu(), [&](const Problem& p, Random& random) {
    for (const DType dtype : floating(arena)) {
      SCOPED_TRACE(name_of(dtype));
      const std::vector<Tensor> operands = tensors_of(p, draw_values(p, dtype, random), dtype, make_arena());
      const Outcome expected = run(p, operands), found = run(p, moved(operands, arena));
      ASSERT_EQ(found.value.device(), Device::cuda);
      seen.insert(p.name);
      if (exact(p, dtype)) {
        EXPECT_TRUE(same_bits(found, expected));
        continue;
      }
      EXPECT_LT(distance(doubles(found.value), doubles(expected.value)), bound(dtype));
      for (size_t o = 0; o < operands.size(); ++o) {
        ASSERT_EQ(found.grads[o].dtype(), expected.grads[o].dtype());
        // As in op_table_test.cpp: where gradients cancel, rounding is held against terms of order one.
        const auto terms = static_cast<double>(std::max(expected.value.numel(), expected.grads[o].numel()));
        EXPECT_LT(distance(doubles(found.grads[o]), doubles(expected.grads[o]), 0.3 * std::sqrt(terms)),
                  10 * bound(dtype))
            << "operand " << o;
      }
    }
  });
  for (const OpRow& row : op_table())
    EXPECT_NE(seen.contains(row.name), kProducts.contains(row.name)) << row.name << " was left out";
}

// Products among them: a library that chooses by how operands lie is shown them in one way only. Attention has tests of
// its own.
TEST_F(OpTableGpu, StridesAndRepetitionChangeNoBit) {
  std::vector<OpRow> rows = op_table();
  std::erase_if(rows, [](const OpRow& row) { return row.name.ends_with("attention"); });
  for_each_problem(rows, [&](const Problem& p, Random& random) {
    for (const DType dtype : floating(arena)) {
      SCOPED_TRACE(name_of(dtype));
      const Values values = draw_values(p, dtype, random);
      std::vector<Tensor> operands = tensors_of(p, values, dtype, arena), elsewhere;
      for (const Tensor& t : operands) elsewhere.push_back(displaced(t));
      const Outcome expected = run(p, operands);
      const ArenaPtr other = make_arena(Device::cuda);
      const Tensor shift = Tensor::empty({random.between(1, 5000)}, dtype, other);
      EXPECT_TRUE(same_bits(run(p, tensors_of(p, values, dtype, other)), expected)) << "again";
      EXPECT_TRUE(same_bits(run(p, elsewhere), expected)) << "at an odd address";
      for (Tensor& t : operands) t = strided(t);
      EXPECT_TRUE(same_bits(run(p, operands), expected)) << "strided";
    }
  });
}

TEST_F(OpTableGpu, RowsHaveTheSameBitsAlone) {
  int seen = 0;
  for_each_problem(rows_on_gpu(), [&](const Problem& p, Random& random) {
    if (!p.rows_alone) return;
    for (const DType dtype : floating(arena)) {
      const std::vector<Tensor> operands = tensors_of(p, draw_values(p, dtype, random), dtype, arena);
      const SomeRows rows = some_rows(operands, random);
      const Tensor expected = rows.of_value(value_of(p, operands));
      std::vector<Tensor> part = rows.of(operands);
      EXPECT_TRUE(same_bits(value_of(p, part), expected)) << name_of(dtype) << " where they lie";
      for (Tensor& o : part) o = o.clone();
      EXPECT_TRUE(same_bits(value_of(p, part), expected)) << name_of(dtype) << " elsewhere";
      ++seen;
    }
  });
  EXPECT_GT(seen, 20);
}

}  // namespace
}  // namespace tessera::test
