// Sums of bfloat16 over ranks are rounded to nearest even: once by direct and root, once for each value sent by ring
// and tree.

#include "tensor/random.h"
#include "tests/parallel/arrays.h"
#include "tests/support/gpu.h"
#include "tests/support/nearest.h"

namespace tessera {
namespace {

using test::nearest_bf16;
using test::RoundingError;

// Positive, so that errors of all roundings on the way go one way or none.
std::vector<double> numbers(int rank, int64_t count) {
  const Philox random = Philox::named(static_cast<uint64_t>(rank), "rounding of sums");
  std::vector<double> out;
  for (int64_t i = 0; i < count; ++i)
    out.push_back(nearest_bf16(0.5 + static_cast<double>(random.uniform(static_cast<uint64_t>(i)))));
  return out;
}

void expect_rounded(Communicator& world, int64_t count, const ArenaPtr& arena, bool once) {
  const auto mine = [&] {
    return Tensor::of<double>(numbers(world.rank(), count), {count}, make_arena()).to(DType::bfloat16).to(arena);
  };
  std::vector<double> total(static_cast<size_t>(count));
  for (int r = 0; r < world.size(); ++r) {
    const std::vector<double> theirs = numbers(r, count);
    for (size_t i = 0; i < total.size(); ++i) total[i] += theirs[i];  // exact: few numbers of 8 bits
  }
  const auto expect = [&](const char* what, const Tensor& found, int64_t first) {
    const std::vector<double> values = found.to(DType::float64).to_vector<double>();
    RoundingError error;
    for (size_t i = 0; i < values.size(); ++i) {
      const double exact = total[static_cast<size_t>(first) + i];
      error.add(values[i], exact);
      if (once) {
        ASSERT_EQ(values[i], nearest_bf16(exact)) << what << " " << i;
      }
    }
    EXPECT_LE(std::abs(error.mean()), 0.02 + error.chance()) << what << " of " << error.count();
  };
  const Tensor all = mine();
  world.all_reduce(all);
  expect("all_reduce", all, 0);
  const Range own = piece(count, world.size(), world.rank());
  const Tensor part = Tensor::empty({own.size()}, DType::bfloat16, arena);
  world.reduce_scatter(mine(), part);
  expect("reduce_scatter", part, own.begin);
  const Tensor at_root = mine();
  world.reduce(at_root, 0);
  if (world.rank() == 0) expect("reduce", at_root, 0);
}

void expect_rounded_by(Algorithm algorithm, int ranks, Device device) {
  SCOPED_TRACE(std::string(name_of(algorithm)) + ", " + std::to_string(ranks) + " ranks");
  launch({.ranks = ranks, .threads_per_rank = 1, .timeout_s = 30, .algorithm = algorithm}, [&](Communicator& world) {
    const ArenaPtr arena = device == Device::cpu ? world.make_arena() : make_arena(device);
    const bool once = algorithm == Algorithm::direct || algorithm == Algorithm::root || ranks == 2;
    for (const int64_t count : {int64_t{777}, int64_t{20000}}) expect_rounded(world, count, arena, once);
  });
}

TEST(Rounding, OfSumsOverRanksIsToNearestEven) {
  for (const Algorithm algorithm : test::kByMessages)
    for (const int ranks : {2, 3, 4}) expect_rounded_by(algorithm, ranks, Device::cpu);
}

using RoundingGpu = test::OnGpu;

TEST_F(RoundingGpu, OfSumsOverRanksIsToNearestEven) {
  for (const Algorithm algorithm : test::kByMessages) expect_rounded_by(algorithm, 3, Device::cuda);
}

}  // namespace
}  // namespace tessera
