// The file with hosts and slots, which is read before each start of a run.
#include <string>
#include <string_view>
#include <vector>

#include "app/train/restarts.h"
#include "tests/fuzz/target.h"

namespace tessera::fuzz {

const Target target("hostfile", [](std::string_view bytes) {
  const std::vector<Host> hosts = parse_hosts(bytes, kWhat);
  std::string written;
  for (const Host& host : hosts) {
    require(!host.name.empty() && host.slots >= 0, "a host has a name and a non-negative number of slots");
    written += host.name + " slots=" + std::to_string(host.slots) + "\n";
  }
  require(count_slots(parse_hosts(written, kWhat)) == count_slots(hosts), "a hostfile round-trips");
});

}  // namespace tessera::fuzz
