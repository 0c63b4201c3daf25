// Selection of random plans for tests.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <initializer_list>

#include "tensor/random.h"

namespace tessera::test {

// Number of plans: TESSERA_PLANS, or the default.
inline uint64_t plans(uint64_t default_count) {
  const char* const wanted = std::getenv("TESSERA_PLANS");
  return wanted ? std::strtoull(wanted, nullptr, 10) : default_count;
}

// Whether to test item `number` of a long list: all, or with TESSERA_DRAW=n every `every`-th.
inline bool is_selected(uint64_t number, uint64_t every) {
  const char* const sample = std::getenv("TESSERA_DRAW");
  return !sample || (number + std::strtoull(sample, nullptr, 10)) % every == 0;
}

// Selects plans by the number TESSERA_DRAW; without it the selection is fixed.
class Sampler {
 public:
  Sampler(const char* what, uint64_t trial) : random_(Philox::named(seed(), what)), at_(1000 * trial) {}
  int64_t between(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(random_.below(static_cast<uint64_t>(high - low + 1), at_++));
  }
  template <class T>
  T of(std::initializer_list<T> choices) {
    return *(choices.begin() + between(0, static_cast<int64_t>(choices.size()) - 1));
  }

 private:
  static uint64_t seed() {
    const char* const wanted = std::getenv("TESSERA_DRAW");
    return wanted ? std::strtoull(wanted, nullptr, 10) : 11;
  }
  Philox random_;
  uint64_t at_;
};

}  // namespace tessera::test
