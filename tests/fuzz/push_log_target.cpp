// Records of applied pushes: accepted ones round-trip, and every server has the same pushes.

#include <string_view>
#include <vector>

#include "parallel/async/push_log.h"
#include "tests/fuzz/target.h"

namespace tessera::fuzz {

const Target target("push_log", [](std::string_view bytes) {
  const PushLog log = parse_push_log(bytes, kWhat);
  require(parse_push_log(to_string(log), kWhat) == log, "a log round-trips");
  require(!log.servers.empty() && log.servers.size() <= static_cast<size_t>(log.workers), "servers are workers");
  for (const std::vector<Push>& order : log.servers)
    for (int w = 0; w < log.workers; ++w)
      require(PushOrder(order, log.workers).clocks(w) == PushOrder(log.servers[0], log.workers).clocks(w),
              "every server has the same pushes");
});

}  // namespace tessera::fuzz
