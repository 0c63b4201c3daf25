// The group `collective/`: every collective by every algorithm that has a way of its own for it.
//
//   collective/all_reduce/direct/threads/2/1048576        name, algorithm, backend, ranks, bytes; bf16: `/bf16` behind
//
// Sizes and bandwidths are those of nccl-tests (its doc/PERFORMANCE.md): S is the whole array, algbw = S / time, and
// busbw is that times a factor by which it can be compared with the rate of a link, whatever the ranks.
#pragma once
#include <string>
#include <vector>

#include "bench/calibrate.h"
#include "bench/ranks.h"

namespace tessera::bench {

// The samples that the rows of one collective, algorithm, backend, number of ranks and dtype have found.
struct Family {
  std::string name;       // "collective/all_reduce/direct/threads/2"
  double bus_factor = 1;  // busbw / algbw
  std::vector<Sample> samples = {};
};
using Families = std::vector<Family>;

// The rows note their times in `families`, which must outlive them.
std::vector<RankRow> collective_rows(const Place& place, Families& families);

}  // namespace tessera::bench
