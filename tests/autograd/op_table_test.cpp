// Every op of the table: its value against a float64 reference, its gradient against finite differences of that
// reference, other dtypes against float64, and bitwise independence of strides, threads and addresses; the same on a
// GPU; bfloat16 rounding; and a microbenchmark for each.
#include "tests/autograd/op_table.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "bench/op_bench.h"
#include "tests/support/gpu.h"
#include "tests/support/nearest.h"
#include "tests/support/one_thread.h"
#include "tests/support/tensors.h"

namespace tessera::test {

// Random problems, executed and compared.

// All rows of the table.
std::vector<OpRow> op_table() {
  std::vector<OpRow> all;
  add_elementwise_rows(all);
  add_rows(all);
  return all;
}

// Operand values that are exact in `dtype`.
Values random_values(const Problem& p, DType dtype, Random& random) {
  Values values;
  for (const Operand& o : p.operands) {
    const auto random_tensor = [&](size_t) { return random.uniform(o.low, o.high); };
    values.push_back(host_values(made(o.shape, dtype, make_arena(), random_tensor)));
  }
  return values;
}

// The same elements with different strides: with permuted dims, as a view of a larger tensor.
Tensor strided(const Tensor& t) {
  if (t.ndim() < 2) {
    Tensor wide = t.make({t.numel(), 3});
    wide.fill(9);
    Tensor view = wide.narrow(1, 1, 1).reshape(t.shape());
    view.copy_from(t);
    return view;
  }
  Shape padded = t.shape();
  std::swap(padded[0], padded[1]);
  padded[0] += 2;
  Tensor full = t.make(padded);
  full.fill(9);
  Tensor view = full.narrow(0, 1, t.dim(1)).transpose(0, 1);
  view.copy_from(t);
  return view;
}

struct Outcome {
  Tensor value;
  std::vector<Tensor> grads;  // undefined if none arrived
};

double example_weight(size_t i) { return std::cos(static_cast<double>(3 * i + 1)); }

// Value of an op, and gradients of the sum of its elements weighted by `weight(i)`.
Outcome run(const Problem& p, const std::vector<Tensor>& operands, double (*weight)(size_t) = example_weight) {
  std::vector<Var> vars;
  for (const Tensor& t : operands) vars.emplace_back(t, true);
  const Var y = p.op(vars);
  Outcome out{y.value().clone(), {}};
  backward(y, {.seed = made(y.shape(), y.dtype(), y.value().arena(), weight)});
  for (const Var& v : vars) out.grads.push_back(v.grad());
  return out;
}

std::vector<Tensor> make_tensors(const Problem& p, const Values& values, DType dtype, const ArenaPtr& arena) {
  std::vector<Tensor> t;
  for (size_t i = 0; i < values.size(); ++i)
    t.push_back(Tensor::of<double>(values[i], p.operands[i].shape, arena).to(dtype));
  return t;
}

double weighted(const std::vector<double>& y) {
  double sum = 0;
  for (size_t i = 0; i < y.size(); ++i) sum += example_weight(i) * y[i];
  return sum;
}

bool bitwise_equal(const Outcome& a, const Outcome& b) {
  bool same = bitwise_equal(a.value, b.value) && a.grads.size() == b.grads.size();
  for (size_t i = 0; same && i < a.grads.size(); ++i)
    same = a.grads[i].defined() == b.grads[i].defined() &&
           (!a.grads[i].defined() || bitwise_equal(a.grads[i], b.grads[i]));
  return same;
}

// Calls f for fixed random problems of each op.
void for_each_problem(const std::vector<OpRow>& table, const std::function<void(const Problem&, Random&)>& f) {
  constexpr uint64_t kSamples = 16;  // random problems per op
  for (const OpRow& row : table)
    for (uint64_t seed = 0; seed < kSamples; ++seed) {
      Random random(seed);
      Problem p = row.sample(random);
      p.name = row.name;
      std::string what = row.name + " #" + std::to_string(seed);
      for (const Operand& o : p.operands) what += " " + o.shape.str();
      SCOPED_TRACE(what);
      f(p, random);
      if (testing::Test::HasFatalFailure()) return;
    }
}

// Only values, without a graph.
Tensor run_op(const Problem& p, const std::vector<Tensor>& operands) {
  const NoGrad no_grad;
  return p.op(std::vector<Var>(operands.begin(), operands.end())).value();
}

namespace {

TEST(OpTable, ValuesMatchReference) {
  for_each_problem(op_table(), [](const Problem& p, Random& random) {
    for (const auto& [dtype, tolerance] :
         {std::pair(DType::float64, 1e-12), std::pair(DType::float32, 2e-6), std::pair(DType::bfloat16, 1.5e-2)}) {
      const ArenaPtr arena = make_arena();
      const Values values = random_values(p, dtype, random);
      const std::vector<double> expected = p.reference(values);
      const std::vector<double> found = host_values(run_op(p, make_tensors(p, values, dtype, arena)));
      ASSERT_EQ(found.size(), expected.size());
      EXPECT_LT(distance(found, expected, 1e-3), tolerance) << to_string(dtype);
    }
  });
}

TEST(OpTable, GradientsMatchFiniteDifferencesOfReference) {
  for_each_problem(op_table(), [](const Problem& p, Random& random) {
    const ArenaPtr arena = make_arena();
    Values values = random_values(p, DType::float64, random);
    const Outcome outcome = run(p, make_tensors(p, values, DType::float64, arena));
    for (size_t o = 0; o < values.size(); ++o) {
      ASSERT_TRUE(outcome.grads[o].defined()) << "operand " << o;
      const std::vector<double> grad = host_values(outcome.grads[o]);
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

TEST(OpTable, Float32AndBfloat16GradientsMatchFloat64) {
  for_each_problem(op_table(), [](const Problem& p, Random& random) {
    for (const auto& [dtype, tolerance] : {std::pair(DType::float32, 1e-5), std::pair(DType::bfloat16, 4e-2)}) {
      const ArenaPtr arena = make_arena();
      const Values values = random_values(p, dtype, random);
      const Outcome wide = run(p, make_tensors(p, values, DType::float64, arena));
      const Outcome narrow = run(p, make_tensors(p, values, dtype, arena));
      for (size_t o = 0; o < values.size(); ++o) {
        // Where the exact gradient is near zero (attention to one key, cancelling sums), rounding is measured relative
        // to terms of order one.
        const auto terms = static_cast<double>(std::max<int64_t>(wide.value.numel(), wide.grads[o].numel()));
        const double floor = 0.3 * std::sqrt(terms);
        EXPECT_LT(distance(host_values(narrow.grads[o]), host_values(wide.grads[o]), floor), tolerance)
            << to_string(dtype) << " operand " << o;
      }
    }
  });
}

TEST(OpTable, ResultsAreBitwiseIndependentOfStridesAndThreads) {
  const int before = cpu::threads();
  for_each_problem(op_table(), [](const Problem& p, Random& random) {
    for (const DType dtype : {DType::float64, DType::float32, DType::bfloat16}) {
      const ArenaPtr arena = make_arena();
      std::vector<Tensor> operands = make_tensors(p, random_values(p, dtype, random), dtype, arena);
      if (p.library && dtype != DType::float64) continue;  // covered by the next test
      cpu::set_threads(1);
      const Outcome expected = run(p, operands);
      for (const int threads : {2, 3}) {
        cpu::set_threads(threads);
        EXPECT_TRUE(bitwise_equal(run(p, operands), expected)) << threads << " threads, " << to_string(dtype);
      }
      for (Tensor& t : operands) t = strided(t);
      EXPECT_TRUE(bitwise_equal(run(p, operands), expected)) << "strided, " << to_string(dtype);
    }
  });
  cpu::set_threads(before);
}

// oneDNN's results depend on threads and strides, but repeated calls are bitwise identical, at any address.
TEST(OpTable, LibraryMatmulsAreBitwiseReproducible) {
  int seen = 0;
  for_each_problem(op_table(), [&](const Problem& p, Random& random) {
    if (!p.library) return;
    for (const DType dtype : {DType::float32, DType::bfloat16}) {
      const ArenaPtr arena = make_arena(), other = make_arena();
      const Values values = random_values(p, dtype, random);
      const Outcome expected = run(p, make_tensors(p, values, dtype, arena));
      const Tensor shift = Tensor::empty({random.between(1, 5000)}, dtype, other);
      EXPECT_TRUE(bitwise_equal(run(p, make_tensors(p, values, dtype, other)), expected)) << to_string(dtype);
      ++seen;
    }
  });
  EXPECT_GT(seen, 20);
}

// A random range of rows of the operands yields those rows of the result bitwise, also on a GPU.
void expect_rows_independent_of_batch(const std::vector<OpRow>& table, const std::vector<DType>& dtypes,
                                      const ArenaPtr& arena) {
  int rows_seen = 0;
  for_each_problem(table, [&](const Problem& p, Random& random) {
    if (!p.rows_alone) return;
    for (const DType dtype : dtypes) {
      const std::vector<Tensor> operands = make_tensors(p, random_values(p, dtype, random), dtype, arena);
      const int64_t all = operands[0].dim(0), first = random.between(0, all - 1),
                    count = random.between(1, all - first);
      SCOPED_TRACE(testing::Message() << to_string(dtype) << " rows " << first << " + " << count);
      std::vector<Tensor> part = operands;
      for (Tensor& t : part)
        if (t.ndim() > 1 && t.dim(0) == all) t = t.narrow(0, first, count);
      const Tensor expected = run_op(p, operands).narrow(0, first, count);
      if (arena->device() == Device::cuda) {
        EXPECT_TRUE(bitwise_equal(run_op(p, part), expected)) << "different layout";
      }
      for (Tensor& o : part) o = o.clone();
      EXPECT_TRUE(bitwise_equal(run_op(p, part), expected)) << "elsewhere";
      ++rows_seen;
    }
  });
  EXPECT_GT(rows_seen, 20);
}

TEST(OpTable, RowsAreBitwiseIndependentOfBatchSize) {
  expect_rows_independent_of_batch(op_table(), {DType::float32, DType::bfloat16}, make_arena());
}

// The op table on a GPU: values and gradients compared with the CPU's, and bitwise independence of strides, addresses
// and repetition.

using OpTableGpu = OnGpu;

// Ops based on GEMMs, whose libraries sum in different orders; tests/tensor covers them on a GPU.
const std::set<std::string> kProducts = {"matmul",    "linear",           "gelu_mlp",
                                         "attention", "packed_attention", "grouped_attention"};
// Ops with the same formulas and summation orders as on the CPU, including gradients.
const std::set<std::string> kExact = {"neg",     "sqrt", "square", "reciprocal", "relu",    "transpose", "narrow",
                                      "reshape", "sum",  "scale",  "embedding",  "dropout", "rotate"};
// Equal results, except that float64 exponentials come from the C library or from CUDA.
const std::set<std::string> kExactBut64 = {"exp", "tanh", "sigmoid", "silu", "gelu", "gelu_erf", "bias_gelu", "swiglu"};

bool exact(const Problem& p, DType dtype) {
  if (p.name == "grouped_linear") return dtype != DType::bfloat16;  // tensor cores accumulate in steps of sixteen
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

// The elements of t, contiguous, at an unaligned address.
Tensor displaced(const Tensor& t) {
  const Tensor allocation = t.make({t.numel() + 1});
  Tensor view = allocation.narrow(0, 1, t.numel()).reshape(t.shape());
  view.copy_from(t);
  return view;
}

// Relative bound for different summation orders, and for the occasional element that is rounded differently.
double bound(DType dtype) { return dtype == DType::float64 ? 1e-14 : dtype == DType::float32 ? 2e-6 : 4e-3; }

TEST_F(OpTableGpu, ValuesAndGradientsMatchCpu) {
  std::set<std::string> seen;
  for_each_problem(rows_on_gpu(), [&](const Problem& p, Random& random) {
    for (const DType dtype : floating(arena)) {
      SCOPED_TRACE(to_string(dtype));
      const std::vector<Tensor> operands = make_tensors(p, random_values(p, dtype, random), dtype, make_arena());
      const Outcome expected = run(p, operands), found = run(p, moved(operands, arena));
      ASSERT_EQ(found.value.device(), Device::cuda);
      seen.insert(p.name);
      if (exact(p, dtype)) {
        EXPECT_TRUE(bitwise_equal(found, expected));
        continue;
      }
      EXPECT_LT(distance(host_values(found.value), host_values(expected.value), 1e-3), bound(dtype));
      for (size_t o = 0; o < operands.size(); ++o) {
        ASSERT_EQ(found.grads[o].dtype(), expected.grads[o].dtype());
        // As on the CPU: rounding is measured relative to terms of order one where gradients cancel.
        const auto terms = static_cast<double>(std::max(expected.value.numel(), expected.grads[o].numel()));
        EXPECT_LT(distance(host_values(found.grads[o]), host_values(expected.grads[o]), 0.3 * std::sqrt(terms)),
                  10 * bound(dtype))
            << "operand " << o;
      }
    }
  });
  for (const OpRow& row : op_table())
    EXPECT_NE(seen.contains(row.name), kProducts.contains(row.name)) << row.name << " was left out";
}

// Includes GEMMs, because a library that selects algorithms by layout gets a single layout. Attention has separate
// tests.
TEST_F(OpTableGpu, ResultsAreBitwiseIndependentOfStridesAndRepetition) {
  std::vector<OpRow> rows = op_table();
  std::erase_if(rows, [](const OpRow& row) { return row.name.ends_with("attention"); });
  for_each_problem(rows, [&](const Problem& p, Random& random) {
    for (const DType dtype : floating(arena)) {
      SCOPED_TRACE(to_string(dtype));
      const Values values = random_values(p, dtype, random);
      std::vector<Tensor> operands = make_tensors(p, values, dtype, arena), elsewhere;
      for (const Tensor& t : operands) elsewhere.push_back(displaced(t));
      const Outcome expected = run(p, operands);
      const ArenaPtr other = make_arena(Device::cuda);
      const Tensor shift = Tensor::empty({random.between(1, 5000)}, dtype, other);
      EXPECT_TRUE(bitwise_equal(run(p, make_tensors(p, values, dtype, other)), expected)) << "again";
      EXPECT_TRUE(bitwise_equal(run(p, elsewhere), expected)) << "at an odd address";
      for (Tensor& t : operands) t = strided(t);
      EXPECT_TRUE(bitwise_equal(run(p, operands), expected)) << "strided";
    }
  });
}

TEST_F(OpTableGpu, RowsAreBitwiseIndependentOfBatchSize) {
  expect_rows_independent_of_batch(rows_on_gpu(), floating(arena), arena);
}

// Values stored as bfloat16 are rounded to nearest even. Most values and gradients are rounded once, so they equal the
// rounded float32 results. For others the mean error is checked.

// Rows with intermediate rounding, of values or only of gradients; and library GEMMs with different summation orders.
const std::set<std::string> kMore = {"add_norm",  "bias_gelu",        "gelu_mlp",          "linear_cross_entropy",
                                     "attention", "packed_attention", "grouped_attention", "matmul",
                                     "linear",    "mixture"};
const std::set<std::string> kMoreBackwards = {"mul",         "div",           "softmax",
                                              "log_softmax", "cross_entropy", "grouped_linear"};

bool rounded_once(const std::string& row, const std::string& output) {
  return !kMore.contains(row) && (output == "value" || !kMoreBackwards.contains(row));
}

// Values and gradients, with a seed that is exact in bfloat16.
std::map<std::string, Tensor> outputs(const Problem& p, const Values& values, DType dtype, const ArenaPtr& arena) {
  const Outcome y = run(p, moved(make_tensors(p, values, dtype, make_arena()), arena),
                        [](size_t i) { return nearest_bf16(1.5 + example_weight(i)); });
  std::map<std::string, Tensor> out{{"value", y.value}};
  for (size_t i = 0; i < y.grads.size(); ++i)
    if (y.grads[i].defined()) out["gradient " + std::to_string(i)] = y.grads[i];
  return out;
}

// Small elements next to large ones result from cancellation, so their last bits are meaningless.
void add(RoundingError& error, const std::vector<double>& found, const std::vector<double>& exact) {
  double largest = 1e-4;
  for (const double e : exact) largest = std::max(largest, std::abs(e));
  for (size_t i = 0; i < exact.size(); ++i)
    if (std::abs(exact[i]) >= 1e-2 * largest) error.add(found[i], exact[i]);
}

int64_t differing(const std::vector<double>& found, const std::vector<double>& single) {
  int64_t count = 0;
  for (size_t i = 0; i < found.size(); ++i) count += found[i] != nearest_bf16(single[i]) ? 1 : 0;
  return count;
}

// Checks at least the given number of elements of each output, if enough problems provide them.
void expect_rounded(const OpRow& row, const ArenaPtr& there, int64_t elements, uint64_t samples) {
  std::map<std::string, RoundingError> errors;
  const auto enough = [&] {
    return !errors.empty() && std::ranges::all_of(errors, [&](const auto& e) { return e.second.count() >= elements; });
  };
  for (uint64_t seed = 100; seed < 100 + samples && !enough(); ++seed) {
    Random random(seed);
    const Problem p = row.sample(random);
    const Values values = random_values(p, DType::bfloat16, random);
    const auto exact = outputs(p, values, DType::float64, make_arena()),
               single = outputs(p, values, DType::float32, there);
    for (const auto& [output, tensor] : outputs(p, values, DType::bfloat16, there)) {
      if (tensor.dtype() != DType::bfloat16) continue;
      const std::vector<double> found = host_values(tensor);
      add(errors[output], found, host_values(exact.at(output)));
      if (rounded_once(row.name, output)) {
        const int64_t max_differing =
            there->device() == Device::cpu ? 0 : std::ssize(found) / 50 + 1;  // summation order
        EXPECT_LE(differing(found, host_values(single.at(output))), max_differing)
            << row.name << ", " << output << ", seed " << seed;
      }
    }
  }
  for (const auto& [output, error] : errors)
    EXPECT_LE(std::abs(error.mean()), error.chance() + (rounded_once(row.name, output) ? 0.03 : 0.18))
        << row.name << ", " << output << ", of " << error.count();
}

using Rounding = OneThread;

TEST_F(Rounding, EveryOpRoundsToNearestEven) {
  for (const OpRow& row : op_table()) expect_rounded(row, make_arena(), 3000, 300);
}

using RoundingGpu = OnGpu;

TEST_F(RoundingGpu, EveryOpRoundsToNearestEven) {
  for (const OpRow& row : op_table()) expect_rounded(row, arena, 1000, 30);
}

// Every op of the op table has a microbenchmark, every microbenchmark runs, and its operands and counts are correct.

TEST(OpBench, CoversTheOpTable) {
  std::set<std::string> tested, timed;
  for (const OpRow& row : op_table()) tested.insert(row.name);
  for (const bench::OpCase& c : bench::op_cases(bench::kForCpu, make_arena()))
    EXPECT_TRUE(timed.insert(c.name).second) << c.name;
  EXPECT_EQ(tested, timed);
}

// FLOPs for 3,072 rows of 384 channels, 1,536 hidden ones and a vocabulary of 4,096: two per multiplication.
TEST(OpBench, FlopCountsMatchManualCount) {
  constexpr double kProduct = 3'623'878'656, kScores = 301'989'888;  // 2 x 3,072 x 384 x 1,536; 12 x 256^2 x 384
  const std::map<std::string, std::pair<double, double>> expected = {
      {"matmul", {kProduct, 2 * kProduct}},
      {"linear", {kProduct, 2 * kProduct}},
      {"grouped_linear", {kProduct, 2 * kProduct}},
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

TEST(OpBench, EveryCaseRunsForwardAndBackward) {
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

// Small tensors are fully random; larger ones repeat a random prefix.
TEST(OpBench, OperandsAreRandomWithinRange) {
  const bench::OpCase c{.name = "log",
                        .operands = {{3, 1 << 21}, {7, 5}},
                        .op = [](const std::vector<Var>& v) { return binary<Mul>(v[1], v[1]); },
                        .low = 0.5,
                        .high = 2};
  const bench::OpCase other = c;
  bench::Data data(c, DType::float32, make_arena());
  EXPECT_TRUE(data.is_case(c));
  EXPECT_FALSE(data.is_case(other));
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

// Algorithm selection and allocations of first calls are not timed.
TEST(OpBench, WarmsUpEachOpTwice) {
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

TEST(OpBench, CountsOnlyAccessedEmbeddingRows) {
  for (const bench::OpCase& c : bench::op_cases(bench::kForCpu, make_arena())) {
    if (c.name != "embedding") {
      EXPECT_EQ(c.rows_read, 0) << c.name;
      continue;
    }
    const double vocab = 4096, tokens = 12 * 256;  // sampled with replacement
    EXPECT_NEAR(static_cast<double>(c.rows_read), vocab * (1 - std::pow(1 - 1 / vocab, tokens)), 80);
  }
}

}  // namespace
}  // namespace tessera::test
