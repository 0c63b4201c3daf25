// Parts of parameters: where their elements lie in the whole.

#include <gtest/gtest.h>

#include "nn/layers.h"

namespace tessera {
namespace {

// Every element of the part, one after another, against an index written out with loops.
TEST(Parameter, RunsAreTheElementsOfThePart) {
  const Philox random = Philox::named(3, "cuts");
  uint64_t at = 0;
  const auto draw = [&](int64_t least, int64_t most) {
    return least + static_cast<int64_t>(random.below(static_cast<uint64_t>(most - least + 1), at++));
  };
  for (int trial = 0; trial < 200; ++trial) {
    const Shape whole{draw(1, 4), draw(1, 7), draw(1, 3)};
    const auto dim = static_cast<int>(draw(0, 2));
    Parameter parameter{.name = "p", .whole = whole};
    parameter.shard.dim = dim;
    std::vector<ShardSpec::Run>& runs = parameter.shard.runs;
    for (int64_t from = 0; from < whole[dim];) {
      const int64_t begin = from + draw(0, 1), size = draw(1, 2);
      if (begin + size > whole[dim]) break;
      runs.push_back({begin, size});
      from = begin + size;
    }
    if (runs.empty()) runs.push_back({0, 1});
    const Shape here = parameter.local();
    std::vector<int64_t> indices;  // along the dim
    for (const ShardSpec::Run& run : runs)
      for (int64_t i = 0; i < run.size; ++i) indices.push_back(run.begin + i);
    std::vector<int64_t> expected;
    for (int64_t a = 0; a < here[0]; ++a)
      for (int64_t b = 0; b < here[1]; ++b)
        for (int64_t c = 0; c < here[2]; ++c) {
          int64_t i[3] = {a, b, c};
          i[dim] = indices[static_cast<size_t>(i[dim])];
          expected.push_back((i[0] * whole[1] + i[1]) * whole[2] + i[2]);
        }
    const int64_t begin = draw(0, here.numel() - 1), end = draw(begin, here.numel());
    std::vector<int64_t> found;
    int64_t next = begin;
    for_each_run(parameter, begin, end, [&](int64_t from, int64_t to, int64_t count) {
      EXPECT_EQ(from, next);
      next += count;
      for (int64_t i = 0; i < count; ++i) found.push_back(to + i);
    });
    EXPECT_EQ(found, std::vector<int64_t>(expected.begin() + begin, expected.begin() + end)) << trial;
  }
}

TEST(Parameter, APartStartsWithTheValuesOfTheWhole) {
  Linear whole(5, 6, {}), part(5, 6, {});
  part.shard(part.weight, {.runs = {{1, 2}, {4, 1}}});
  EXPECT_THROW(part.shard(part.weight, {.runs = {{0, 1}}}), Error);
  EXPECT_THROW(part.shard(*part.bias, {.runs = {{5, 2}}}), Error);
  whole.materialize(9, make_arena(), DType::float32, DType::float32);
  part.materialize(9, make_arena(), DType::float32, DType::float32);
  const std::vector<float> all = whole.weight.value().to_vector<float>(), some = part.weight.value().to_vector<float>();
  ASSERT_EQ(some.size(), 15u);
  const int64_t rows[] = {1, 2, 4};
  for (size_t r = 0; r < 3; ++r)
    for (size_t c = 0; c < 5; ++c) EXPECT_EQ(some[r * 5 + c], all[static_cast<size_t>(rows[r]) * 5 + c]);
}

TEST(Module, UnitsOfAnotherRankAreNotHere) {
  Mlp mlp(8, 32, {});
  mlp.up.make_unit();
  mlp.down.make_unit();
  EXPECT_EQ(mlp.parameters().size(), 4u);
  mlp.up.set_here(false);
  ASSERT_EQ(mlp.layout().size(), 1u);
  EXPECT_EQ(mlp.layout()[0].name, "down");
  EXPECT_EQ(mlp.parameters().size(), 2u);
}

}  // namespace
}  // namespace tessera
