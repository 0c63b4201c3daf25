// The direct exchange of ranks that see each other's arrays: threads of one process, or processes that have mapped each
// other's memory. Each fetches what is meant for it from where it lies; of an all-reduce it adds its piece of all
// arrays and writes it to all of them. Sums are added in the order of ranks.
#pragma once
#include <vector>

#include "parallel/comm/call.h"

namespace tessera {

class InPlaceExchange {
 public:
  InPlaceExchange(int ranks, int rank);
  // What rank r asks for, with pointers that this rank can follow: to be filled in before run().
  Call& seen(int r) { return seen_[static_cast<size_t>(r)]; }
  // This rank's part of the collective, for any but barrier, send and recv: after everybody has come, and before
  // anybody goes.
  void run(const Call& mine);

 private:
  void all_reduce(const Call& mine);
  void reduce(const Call& mine, Range range);

  int rank_;
  std::vector<Call> seen_;
  std::vector<const std::byte*> in_;
  std::vector<std::byte*> out_;
};

}  // namespace tessera
