// Every op of the table: its value against a float64 reference, its gradient against finite differences of that
// reference, the other dtypes against float64, and that strides, threads and places change no bit.
#include "tests/autograd/op_table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "tensor/cpu/vectorize.h"
#include "tensor/ops/reduce.h"

namespace tessera::test {
namespace {

constexpr int kDraws = 16;  // random problems per op

std::vector<OpRow> table() {
  std::vector<OpRow> all;
  add_elementwise_rows(all);
  add_structured_rows(all);
  add_product_rows(all);
  return all;
}

Values draw_values(const Problem& p, DType dtype, Random& random) {
  Values values;
  for (const Operand& o : p.operands) {
    std::vector<double> v(static_cast<size_t>(o.shape.numel()));
    for (double& x : v) {
      x = random.uniform(o.low, o.high);
      if (dtype == DType::float32) x = static_cast<double>(static_cast<float>(x));
      if (dtype == DType::bfloat16) x = static_cast<double>(static_cast<float>(bfloat16(static_cast<float>(x))));
    }
    values.push_back(std::move(v));
  }
  return values;
}

Tensor tensor_of(const std::vector<double>& v, const Shape& shape, DType dtype, const ArenaPtr& arena) {
  return Tensor::of<double>(v, shape, arena).to(dtype);
}

// The same elements behind other strides: dims in another order, and inside a larger tensor.
Tensor strided(const Tensor& t) {
  if (t.rank() < 2) {
    Tensor wide = t.make({t.numel(), 3});
    wide.fill(9);
    Tensor view = wide.narrow(1, 1, 1).reshape(t.shape());
    view.copy_from(t);
    return view;
  }
  Shape padded = t.shape();
  std::swap(padded[0], padded[1]);
  padded[0] += 2;
  Tensor whole = t.make(padded);
  whole.fill(9);
  Tensor view = whole.narrow(0, 1, t.dim(1)).transpose(0, 1);
  view.copy_from(t);
  return view;
}

struct Outcome {
  Tensor value;
  std::vector<Tensor> grads;  // undefined where none came
};

// Value and gradients of sum(weights * op(operands)).
Outcome run(const Problem& p, const std::vector<Tensor>& operands) {
  std::vector<Var> vars;
  for (const Tensor& t : operands) vars.emplace_back(t, true);
  const Var y = p.op(vars);
  Outcome out{y.value().clone(), {}};
  Tensor seed = Tensor::empty(y.shape(), y.dtype(), y.value().arena());
  const Tensor weights = Tensor::empty(y.shape(), DType::float64, y.value().arena());
  for (int64_t i = 0; i < weights.numel(); ++i) weights.data<double>()[i] = std::cos(static_cast<double>(3 * i + 1));
  seed.copy_from(weights);
  backward(y, {.seed = seed});
  for (const Var& v : vars) out.grads.push_back(v.grad());
  return out;
}

std::vector<Tensor> tensors_of(const Problem& p, const Values& values, DType dtype, const ArenaPtr& arena) {
  std::vector<Tensor> t;
  for (size_t i = 0; i < values.size(); ++i) t.push_back(tensor_of(values[i], p.operands[i].shape, dtype, arena));
  return t;
}

double weighted(const std::vector<double>& y) {
  double sum = 0;
  for (size_t i = 0; i < y.size(); ++i) sum += std::cos(static_cast<double>(3 * i + 1)) * y[i];
  return sum;
}

// |a - b| / max(|b|, floor), 2-norms.
double distance(const std::vector<double>& a, const std::vector<double>& b, double floor = 1e-3) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    difference += (a[i] - b[i]) * (a[i] - b[i]);
    norm += b[i] * b[i];
  }
  return std::sqrt(difference) / std::max(std::sqrt(norm), floor);
}

std::vector<double> doubles(const Tensor& t) { return t.to(DType::float64).to_vector<double>(); }

bool same_bits(const Tensor& a, const Tensor& b) {
  if (a.defined() != b.defined()) return false;
  if (!a.defined()) return true;
  const Tensor x = a.contiguous(), y = b.contiguous();
  return x.shape() == y.shape() && std::memcmp(x.raw(), y.raw(), static_cast<size_t>(x.nbytes())) == 0;
}

bool same_bits(const Outcome& a, const Outcome& b) {
  bool same = same_bits(a.value, b.value) && a.grads.size() == b.grads.size();
  for (size_t i = 0; same && i < a.grads.size(); ++i) same = same_bits(a.grads[i], b.grads[i]);
  return same;
}

template <class F>
void for_each_problem(const F& f) {
  for (const OpRow& row : table())
    for (uint64_t seed = 0; seed < kDraws; ++seed) {
      Random random(seed);
      const Problem p = row.draw(random);
      std::string what = row.name + " #" + std::to_string(seed);
      for (const Operand& o : p.operands) what += " " + o.shape.str();
      SCOPED_TRACE(what);
      f(p, random);
      if (testing::Test::HasFatalFailure()) return;
    }
}

TEST(OpTable, ValuesAreThoseOfTheReference) {
  for_each_problem([](const Problem& p, Random& random) {
    for (const auto& [dtype, tolerance] :
         {std::pair(DType::float64, 1e-12), std::pair(DType::float32, 2e-6), std::pair(DType::bfloat16, 1.5e-2)}) {
      const ArenaPtr arena = make_arena();
      const Values values = draw_values(p, dtype, random);
      const std::vector<double> expected = p.reference(values);
      const NoGrad no_grad;
      std::vector<Var> vars;
      for (const Tensor& t : tensors_of(p, values, dtype, arena)) vars.emplace_back(t);
      const std::vector<double> found = doubles(p.op(vars).value());
      ASSERT_EQ(found.size(), expected.size());
      EXPECT_LT(distance(found, expected), tolerance) << name_of(dtype);
    }
  });
}

TEST(OpTable, GradientsAreTheFiniteDifferencesOfTheReference) {
  for_each_problem([](const Problem& p, Random& random) {
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
  for_each_problem([](const Problem& p, Random& random) {
    for (const auto& [dtype, tolerance] : {std::pair(DType::float32, 1e-5), std::pair(DType::bfloat16, 4e-2)}) {
      const ArenaPtr arena = make_arena();
      const Values values = draw_values(p, dtype, random);
      const Outcome wide = run(p, tensors_of(p, values, DType::float64, arena));
      const Outcome narrow = run(p, tensors_of(p, values, dtype, arena));
      for (size_t o = 0; o < values.size(); ++o) {
        // Where the true gradient is near zero (attention to one key, sums that cancel), rounding is held against terms
        // of order one.
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
  for_each_problem([](const Problem& p, Random& random) {
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
  for_each_problem([&](const Problem& p, Random& random) {
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
  for_each_problem([&](const Problem& p, Random& random) {
    if (!p.rows_alone) return;
    for (const DType dtype : {DType::float32, DType::bfloat16}) {
      const ArenaPtr arena = make_arena();
      const std::vector<Tensor> operands = tensors_of(p, draw_values(p, dtype, random), dtype, arena);
      const NoGrad no_grad;
      const auto value = [&](const std::vector<Tensor>& inputs) {
        std::vector<Var> vars;
        for (const Tensor& t : inputs) vars.emplace_back(t);
        return p.op(vars).value();
      };
      const Tensor whole = value(operands);
      const int64_t rows = operands[0].dim(0), at = random.between(0, rows - 1), length = random.between(1, rows - at);
      std::vector<Tensor> part = operands;
      for (Tensor& t : part)
        if (t.rank() > 1 && t.dim(0) == rows) t = t.narrow(0, at, length).clone();
      EXPECT_TRUE(same_bits(value(part), whole.narrow(0, at, length)))
          << name_of(dtype) << " rows " << at << " + " << length;
      ++rows_seen;
    }
  });
  EXPECT_GT(rows_seen, 20);
}

}  // namespace
}  // namespace tessera::test
