// All schedules, for parameterized tests.
#pragma once
#include <fmt/format.h>

#include <string>
#include <vector>

#include "parallel/pipeline/schedules.h"

namespace tessera::test {

// All generators for p ranks and m micro-batches; interleaved with each number of chunks if p divides m.
inline std::vector<Schedule> all_schedules(int ranks, int microbatches, int max_chunks = 4) {
  std::vector<Schedule> out;
  for (const std::string& name : schedule_names()) {
    if (name != "interleaved") out.push_back(make_schedule(name, ranks, microbatches));
    for (int chunks = 1; name == "interleaved" && chunks <= max_chunks && microbatches % ranks == 0; ++chunks)
      out.push_back(make_schedule(name, ranks, microbatches, chunks));
  }
  return out;
}

inline std::string described(const Schedule& s) {
  return fmt::format("{}, {} ranks, {} micro-batches, {} chunks", s.name, s.ranks, s.microbatches, s.chunks());
}

}  // namespace tessera::test
