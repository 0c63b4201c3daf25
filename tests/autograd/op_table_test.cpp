// Every op of the table: its value against a float64 reference, its gradient against finite differences of that
// reference, the other dtypes against float64, and that strides, threads and places change no bit.

#include "tensor/cpu/vectorize.h"
#include "tests/autograd/op_checks.h"

namespace tessera::test {
namespace {

TEST(OpTable, ValuesAreThoseOfTheReference) {
  for_each_problem(op_table(), [](const Problem& p, Random& random) {
    for (const auto& [dtype, tolerance] :
         {std::pair(DType::float64, 1e-12), std::pair(DType::float32, 2e-6), std::pair(DType::bfloat16, 1.5e-2)}) {
      const ArenaPtr arena = make_arena();
      const Values values = draw_values(p, dtype, random);
      const std::vector<double> expected = p.reference(values);
      const std::vector<double> found = doubles(value_of(p, tensors_of(p, values, dtype, arena)));
      ASSERT_EQ(found.size(), expected.size());
      EXPECT_LT(distance(found, expected), tolerance) << name_of(dtype);
    }
  });
}

TEST(OpTable, GradientsAreTheFiniteDifferencesOfTheReference) {
  for_each_problem(op_table(), [](const Problem& p, Random& random) {
    const ArenaPtr arena = make_arena();
    Values values = draw_values(p, DType::float64, random);
    const Outcome outcome = run(p, tensors_of(p, values, DType::float64, arena));
    for (size_t o = 0; o < values.size(); ++o) {
      ASSERT_TRUE(outcome.grads[o].defined()) << "operand " << o;
      const std::vector<double> grad = doubles(outcome.grads[o]);
      double scale = 1e-3;
      for (const double g : grad) scale = std::max(scale, std::abs(g));
      const size_t stride = std::max<size_t>(1, grad.size() / 24);
      for (size_t i = o % stride; i < grad.size(); i += stride) {
        const double at = values[o][i], h = 1e-5;
        values[o][i] = at + h;
        const double up = weighted(p.reference(values));
        values[o][i] = at - h;
        const double down = weighted(p.reference(values));
        values[o][i] = at;
        EXPECT_NEAR(grad[i], (up - down) / (2 * h), 3e-7 * scale + 1e-8) << "operand " << o << " element " << i;
      }
    }
  });
}

TEST(OpTable, GradientsInOtherDtypesAreNearFloat64) {
  for_each_problem(op_table(), [](const Problem& p, Random& random) {
    for (const auto& [dtype, tolerance] : {std::pair(DType::float32, 1e-5), std::pair(DType::bfloat16, 4e-2)}) {
      const ArenaPtr arena = make_arena();
      const Values values = draw_values(p, dtype, random);
      const Outcome wide = run(p, tensors_of(p, values, DType::float64, arena));
      const Outcome narrow = run(p, tensors_of(p, values, dtype, arena));
      for (size_t o = 0; o < values.size(); ++o) {
        // Rounding is held against terms of order one where the true gradient is near zero (attention to one key, sums
        // that cancel).
        const auto terms = static_cast<double>(std::max<int64_t>(wide.value.numel(), wide.grads[o].numel()));
        const double floor = 0.3 * std::sqrt(terms);
        EXPECT_LT(distance(doubles(narrow.grads[o]), doubles(wide.grads[o]), floor), tolerance)
            << name_of(dtype) << " operand " << o;
      }
    }
  });
}

TEST(OpTable, StridesAndThreadsChangeNoBit) {
  const int before = cpu::threads();
  for_each_problem(op_table(), [](const Problem& p, Random& random) {
    for (const DType dtype : {DType::float64, DType::float32, DType::bfloat16}) {
      const ArenaPtr arena = make_arena();
      std::vector<Tensor> operands = tensors_of(p, draw_values(p, dtype, random), dtype, arena);
      if (p.library && dtype != DType::float64) continue;  // the next test
      cpu::set_threads(1);
      const Outcome expected = run(p, operands);
      for (const int threads : {2, 3}) {
        cpu::set_threads(threads);
        EXPECT_TRUE(same_bits(run(p, operands), expected)) << threads << " threads, " << name_of(dtype);
      }
      for (Tensor& t : operands) t = strided(t);
      EXPECT_TRUE(same_bits(run(p, operands), expected)) << "strided, " << name_of(dtype);
    }
  });
  cpu::set_threads(before);
}

// oneDNN promises no bits over threads and strides, but the same bits for the same call, wherever its memory lies.
TEST(OpTable, TheLibrarysProductsRepeatTheirBits) {
  int seen = 0;
  for_each_problem(op_table(), [&](const Problem& p, Random& random) {
    if (!p.library) return;
    for (const DType dtype : {DType::float32, DType::bfloat16}) {
      const ArenaPtr arena = make_arena(), other = make_arena();
      const Values values = draw_values(p, dtype, random);
      const Outcome expected = run(p, tensors_of(p, values, dtype, arena));
      const Tensor shift = Tensor::empty({random.between(1, 5000)}, dtype, other);
      EXPECT_TRUE(same_bits(run(p, tensors_of(p, values, dtype, other)), expected)) << name_of(dtype);
      ++seen;
    }
  });
  EXPECT_GT(seen, 20);
}

TEST(OpTable, RowsHaveTheSameBitsAlone) {
  int rows_seen = 0;
  for_each_problem(op_table(), [&](const Problem& p, Random& random) {
    if (!p.rows_alone) return;
    for (const DType dtype : {DType::float32, DType::bfloat16}) {
      const ArenaPtr arena = make_arena();
      const std::vector<Tensor> operands = tensors_of(p, draw_values(p, dtype, random), dtype, arena);
      const SomeRows rows = some_rows(operands, random);
      std::vector<Tensor> part = rows.of(operands);
      for (Tensor& o : part) o = o.clone();
      EXPECT_TRUE(same_bits(value_of(p, part), rows.of_value(value_of(p, operands))))
          << name_of(dtype) << " rows " << rows.first << " + " << rows.count;
      ++rows_seen;
    }
  });
  EXPECT_GT(rows_seen, 20);
}

}  // namespace
}  // namespace tessera::test
