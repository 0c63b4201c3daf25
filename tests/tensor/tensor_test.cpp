// Views, copies and the arena.

#include <gtest/gtest.h>

#include "tensor/ops/elementwise.h"
#include "tensor/ops/reduce.h"

namespace tessera {
namespace {

Tensor iota(const Shape& shape, const ArenaPtr& arena) {
  Tensor t = Tensor::empty(shape, DType::float32, arena);
  for (int64_t i = 0; i < t.numel(); ++i) t.data<float>()[i] = static_cast<float>(i);
  return t;
}

TEST(Tensor, ViewsShareStorage) {
  const ArenaPtr arena = make_arena();
  const Tensor t = iota({2, 3, 4}, arena);
  const Tensor v = t.transpose(0, 2).narrow(0, 1, 2);  // (2, 3, 2)
  EXPECT_EQ(v.shape(), (Shape{2, 3, 2}));
  EXPECT_EQ(v.to_vector<float>(), (std::vector<float>{1, 13, 5, 17, 9, 21, 2, 14, 6, 18, 10, 22}));
  EXPECT_EQ(v.storage(), t.storage());
  EXPECT_EQ(t.select(1, 2).to_vector<float>(), (std::vector<float>{8, 9, 10, 11, 20, 21, 22, 23}));
  EXPECT_EQ(t.narrow(2, 0, 4).reshape({6, -1}).shape(), (Shape{6, 4}));
  EXPECT_EQ(t.reshape({2, 12}).narrow(1, 0, 8).reshape({2, 4, 2}).to_vector<float>(),
            (std::vector<float>{0, 1, 2, 3, 4, 5, 6, 7, 12, 13, 14, 15, 16, 17, 18, 19}));
  EXPECT_THROW(t.transpose(0, 2).reshape({24}), Error);
  EXPECT_THROW(t.reshape({5, 5}), Error);
  EXPECT_THROW(t.narrow(0, 1, 2), Error);
}

TEST(Tensor, ExpandRepeats) {
  const ArenaPtr arena = make_arena();
  const Tensor t = iota({3, 1}, arena).expand({2, 3, 2});
  EXPECT_EQ(t.to_vector<float>(), (std::vector<float>{0, 0, 1, 1, 2, 2, 0, 0, 1, 1, 2, 2}));
  EXPECT_THROW(iota({3}, arena).expand({2}), Error);
}

TEST(Tensor, BroadcastAddAndItsBackward) {
  const ArenaPtr arena = make_arena();
  const Tensor a = iota({2, 3}, arena), b = iota({2, 1}, arena);
  EXPECT_EQ(binary<Add>(a, b).to_vector<float>(), (std::vector<float>{0, 1, 2, 4, 5, 6}));
  EXPECT_EQ(sum_to(a, {2, 1}).to_vector<float>(), (std::vector<float>{3, 12}));
  EXPECT_EQ(sum_to(a, {3}).to_vector<float>(), (std::vector<float>{3, 5, 7}));
  EXPECT_EQ(sum(a).item<float>(), 15);
  EXPECT_EQ(unary<Gelu>(a).numel(), 6);
}

TEST(Arena, CountsByCategoryAndReusesMemory) {
  const ArenaPtr arena = make_arena();
  {
    const Tensor p = Tensor::empty({10}, DType::float32, arena, Category::parameters);
    EXPECT_EQ(arena->usage(Category::parameters).live, 40);
    for (int i = 0; i < 100; ++i) (void)Tensor::empty({1000}, DType::float64, arena);
    EXPECT_EQ(arena->usage(Category::activations).live, 0);
    EXPECT_EQ(arena->usage(Category::activations).peak, 8000);
    EXPECT_EQ(arena->total().peak, 8040);
  }
  EXPECT_LE(arena->footprint(), 8256);  // under AddressSanitizer two gaps lie between
  EXPECT_EQ(arena->total().live, 0);
}

TEST(Arena, MayLieInAFile) {
  const ArenaPtr arena = make_file_arena(std::filesystem::temp_directory_path());
  Tensor t = Tensor::empty({3'000'000}, DType::float32, arena, Category::optimizer);
  t.fill(2.5);
  EXPECT_EQ(t.data<float>()[2'999'999], 2.5F);
  EXPECT_EQ(arena->usage(Category::optimizer).live, 12'000'000);
  EXPECT_THROW(make_file_arena("/no/such/directory"), OutputError);
}

TEST(Arena, PastItsCapacityThrowsAndStaysWhole) {
  Arena arena(host_region(int64_t{1} << 30));
  std::byte* const a = arena.allocate(1000, Category::workspace);
  arena.release(a, 1000, Category::workspace);
  EXPECT_THROW(arena.allocate(int64_t{1} << 31, Category::workspace), OutOfMemory);
  EXPECT_THROW(arena.allocate(INT64_MAX - 1000, Category::workspace), OutOfMemory);
  EXPECT_EQ(arena.total().live, 0);
  EXPECT_EQ(arena.allocate(1000, Category::workspace), a);
  arena.release(a, 1000, Category::workspace);
}

std::vector<char> ended;  // names that the destructors of the test below add: they cannot capture a variable
template <char kName>
struct Ends {
  ~Ends() { ended.push_back(kName); }
};

TEST(Arena, WhatItKeepsGoesInTheReverseOrder) {
  {
    const ArenaPtr arena = make_arena();
    arena->local<Ends<'b'>>();
    arena->local<Ends<'c'>>();
    arena->local<Ends<'a'>>();
    EXPECT_EQ(&arena->local<Ends<'c'>>(), &arena->local<Ends<'c'>>());
  }
  EXPECT_EQ(ended, (std::vector<char>{'a', 'c', 'b'}));
}

TEST(Tensor, MetaHasNoMemory) {
  const Tensor t = Tensor::meta({1000000, 1000000}, DType::float32);
  EXPECT_EQ(t.numel(), 1000000000000);
  EXPECT_THROW(t.data<float>(), Error);
}

}  // namespace
}  // namespace tessera
