// metrics.jsonl, whose first records a resumed run retains.
#include <string>
#include <string_view>

#include "tests/fuzz/target.h"
#include "train/run/metrics.h"

namespace tessera::fuzz {

const Target target("metrics", [](std::string_view bytes) {
  const std::string retained = records_until(bytes, 100, kWhat).records;
  require(retained.size() <= bytes.size() && (retained.empty() || retained.back() == '\n'),
          "complete lines are retained");
  require(records_until(retained, 100, kWhat).records == retained, "truncation is idempotent");
});

}  // namespace tessera::fuzz
