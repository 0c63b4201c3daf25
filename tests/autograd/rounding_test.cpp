// Values that an op stores as bfloat16 are rounded to nearest even. Most values and gradients are rounded once: they
// are exactly those of float32, rounded. For the others the mean error says so.
#include <set>

#include "tests/autograd/op_checks.h"
#include "tests/support/gpu.h"
#include "tests/support/nearest.h"
#include "tests/support/one_thread.h"

namespace tessera::test {
namespace {

// Rows that round on the way, all of them or their gradients alone; and products of libraries, which may sum
// otherwise.
const std::set<std::string> kMore = {"add_norm",  "bias_gelu",        "gelu_mlp",          "linear_cross_entropy",
                                     "attention", "packed_attention", "grouped_attention", "matmul",
                                     "linear",    "mixture"};
const std::set<std::string> kMoreBackwards = {"mul", "div", "softmax", "log_softmax", "cross_entropy", "linear_rows"};

bool rounded_once(const std::string& row, const std::string& output) {
  return !kMore.contains(row) && (output == "value" || !kMoreBackwards.contains(row));
}

// Values and gradients, by a seed that bfloat16 holds exactly.
std::map<std::string, Tensor> outputs(const Problem& p, const Values& values, DType dtype, const ArenaPtr& arena) {
  std::vector<Var> vars;
  for (const Tensor& t : tensors_of(p, values, dtype, make_arena())) vars.emplace_back(t.to(arena), true);
  const Var y = p.op(vars);
  std::map<std::string, Tensor> out{{"value", y.value().clone()}};
  std::vector<double> seed(static_cast<size_t>(y.value().numel()));
  for (size_t i = 0; i < seed.size(); ++i) seed[i] = nearest_bf16(1.5 + std::cos(static_cast<double>(3 * i + 1)));
  backward(y, {.seed = Tensor::of<double>(seed, y.shape(), make_arena()).to(y.dtype()).to(arena)});
  for (size_t i = 0; i < vars.size(); ++i)
    if (vars[i].grad().defined()) out["gradient " + std::to_string(i)] = vars[i].grad();
  return out;
}

// Elements that are small beside the others are what cancelled, and their last place says nothing.
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

// Checks so many elements of each output at least, as far as so many draws have them.
void expect_rounded(const OpRow& row, const ArenaPtr& there, int64_t elements, uint64_t draws) {
  std::map<std::string, RoundingError> errors;
  const auto enough = [&] {
    return !errors.empty() && std::ranges::all_of(errors, [&](const auto& e) { return e.second.count() >= elements; });
  };
  for (uint64_t seed = 100; seed < 100 + draws && !enough(); ++seed) {
    Random random(seed);
    const Problem p = row.draw(random);
    const Values values = draw_values(p, DType::bfloat16, random);
    const auto exact = outputs(p, values, DType::float64, make_arena()),
               single = outputs(p, values, DType::float32, there);
    for (const auto& [output, tensor] : outputs(p, values, DType::bfloat16, there)) {
      if (tensor.dtype() != DType::bfloat16) continue;
      const std::vector<double> found = doubles(tensor);
      add(errors[output], found, doubles(exact.at(output)));
      if (rounded_once(row.name, output)) {
        const int64_t most = there->device() == Device::cpu ? 0 : std::ssize(found) / 50 + 1;  // sums in other orders
        EXPECT_LE(differing(found, doubles(single.at(output))), most)
            << row.name << ", " << output << ", seed " << seed;
      }
    }
  }
  for (const auto& [output, error] : errors)
    EXPECT_LE(std::abs(error.mean()), error.chance() + (rounded_once(row.name, output) ? 0.03 : 0.18))
        << row.name << ", " << output << ", of " << error.count();
}

using Rounding = OneThread;

TEST_F(Rounding, OfEveryOpIsToNearestEven) {
  for (const OpRow& row : op_table()) expect_rounded(row, make_arena(), 3000, 300);
}

using RoundingGpu = OnGpu;

TEST_F(RoundingGpu, OfEveryOpIsToNearestEven) {
  for (const OpRow& row : op_table()) expect_rounded(row, arena, 1000, 30);
}

}  // namespace
}  // namespace tessera::test
