// Five steps of each optimizer beside PyTorch's.
#include <gtest/gtest.h>

#include "optim/optimizer.h"
#include "tests/support/python.h"
#include "tests/support/units.h"

namespace tessera {
namespace {

constexpr int kSteps = 5;

TEST(Optimizer, AgreesWithPyTorch) {
  if (const std::string why = test::missing("torch"); !why.empty()) GTEST_SKIP() << why;
  const test::Exchange exchange;
  const FlatUnit unit = test::make_unit("u", {4096}, DType::float32, DType::float32, make_arena());
  std::vector<float> grads;
  for (uint64_t t = 0; t < kSteps; ++t) {
    test::fill_normal(unit, unit.grads, 10 + t, 0.3);
    const std::vector<float> g = unit.grads.to_vector<float>();
    grads.insert(grads.end(), g.begin(), g.end());
  }
  exchange.write("grads.bin", std::span<const float>(grads));
  const auto n = static_cast<size_t>(unit.values.numel());
  for (const char* name : {"sgd", "adam", "adamw"}) {
    test::fill_normal(unit, unit.values, 1, 1.0);
    exchange.write("values.bin", std::span<const float>(unit.values.to_vector<float>()));
    exchange.run(TESSERA_SOURCE_DIR "/tests/compare/optimizer_pytorch.py", fmt::format("{} {}", name, kSteps));
    const std::vector<float> expected = exchange.read<float>("result.bin");
    ASSERT_EQ(expected.size(), n);
    const auto optimizer = make_optimizer(*value_named<OptimizerKind>(kOptimizerNames, name), {unit},
                                          {.beta2 = 0.95, .weight_decay = 0.1});
    for (size_t t = 0; t < kSteps; ++t) {
      std::copy_n(grads.begin() + static_cast<std::ptrdiff_t>(t * n), n, unit.grads.data<float>());
      optimizer->step(0.01 * static_cast<double>(t + 1), 1.0);
    }
    for (size_t i = 0; i < n; ++i)
      ASSERT_NEAR(unit.values.data<float>()[i], expected[i], 1e-6 * (1 + std::abs(expected[i]))) << name << " " << i;
  }
}

}  // namespace
}  // namespace tessera
