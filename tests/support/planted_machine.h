// A synthetic machine for tests of predictions.
#pragma once
#include <cstdint>
#include <string>

#include "planner/machine.h"

namespace tessera::test {

// Every kernel call takes 1 ms under any load; every exchange 0.1 ms.
inline planner::Machine synthetic_machine(int64_t cores, const std::string& version = "test") {
  planner::Machine m{.identity = planner::identity_of_this(version), .memory_bytes = 8e9, .copy_bytes_per_s = 1e10};
  m.identity.cores = cores;
  m.product_flops_per_s = {1e11, 2e11};
  for (auto& company : m.costs)
    for (auto& costs : company)
      for (planner::Cost& cost : costs) cost = {1e-3};
  for (auto& links : m.links)
    for (const int64_t ranks : {2, 4}) links[ranks] = {1e-4, 0};
  return m;
}

}  // namespace tessera::test
