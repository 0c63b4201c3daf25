// The regions that arenas lie in where the system refuses a terabyte of addresses.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cstdlib>
#include <cstring>

#include "tensor/arena.h"

namespace tessera {
namespace {

// In a process of its own: regions lie apart, take what is used of them, and give their places back.
[[noreturn]] void use_regions_under_a_limit() {
  const rlimit limit{int64_t{2} << 30, int64_t{2} << 30};
  const int64_t tera = int64_t{1} << 40, part = int64_t{3} << 20;
  if (setrlimit(RLIMIT_AS, &limit) != 0) std::_Exit(1);
  auto first = host_region(tera);
  const auto second = host_region(tera);
  if (first->capacity() != int64_t{64} << 30 || second->base() - first->base() != first->capacity()) std::_Exit(2);
  for (Region* region : {first.get(), second.get()}) {
    region->commit(part);
    region->commit(2 * part);
    std::memset(region->base(), 7, static_cast<size_t>(2 * part));
  }
  const std::byte* const place = first->base();
  first.reset();
  if (host_region(tera)->base() != place) std::_Exit(3);
  if (second->base()[2 * part - 1] != std::byte{7}) std::_Exit(4);
  std::_Exit(0);
}

TEST(Region, UnderALimitOnAddressesEachTakesWhatItUses) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer wants more addresses";
#endif
  EXPECT_EXIT(use_regions_under_a_limit(), testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace tessera
