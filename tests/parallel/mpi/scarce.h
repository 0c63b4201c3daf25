// The tests say here what the system refuses to give.
#pragma once
#include <atomic>

namespace tessera::test {

struct Scarce {
  std::atomic<bool> memory{false}, threads{false};  // memory to share, threads to begin
};
extern Scarce scarce;

}  // namespace tessera::test
