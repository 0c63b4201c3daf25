// A hostfile as mpirun reads it: a host on each line, with the number of ranks that it has room for.
//
//   node1 slots=4    # Open MPI
//   node2:4          # MPICH
//   node3            # one
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

struct Host {
  std::string name;
  int64_t slots = 1;
};

// Throws InputError that names `what` and the line.
std::vector<Host> parse_hosts(std::string_view text, const std::string& what);
int64_t slots_of(const std::vector<Host>& hosts);

}  // namespace tessera
