// AddressSanitizer annotations of an arena's blocks, which it would otherwise treat as one.
#include <gtest/gtest.h>

#include "tensor/arena.h"

extern "C" [[gnu::weak]] void __asan_init();

namespace tessera {
namespace {

class SanitizerDeathTest : public testing::Test {
 protected:
  void SetUp() override {
    if (&__asan_init == nullptr) GTEST_SKIP() << "a build without AddressSanitizer";
  }
  ArenaPtr arena = make_arena();
  std::byte* block = arena->allocate(100, Category::workspace);
};

TEST_F(SanitizerDeathTest, DetectsUseOfReleasedBlock) {
  arena->release(block, 100, Category::workspace);
  EXPECT_DEATH(*block = std::byte{1}, "use-after-poison");
}

TEST_F(SanitizerDeathTest, DetectsAccessOutsideBlock) {
  std::byte* const next = arena->allocate(100, Category::workspace);
  EXPECT_DEATH(block[100] = std::byte{1}, "use-after-poison");
  EXPECT_DEATH(next[-1] = std::byte{1}, "use-after-poison");
  arena->release(next, 100, Category::workspace);
  arena->release(block, 100, Category::workspace);
}

}  // namespace
}  // namespace tessera
