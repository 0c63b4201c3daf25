// metrics.jsonl, whose first records a resumed run retains.
#include <string>
#include <string_view>

#include "tests/fuzz/target.h"
#include "train/run/metrics.h"

namespace tessera::fuzz {

const Target target("metrics", [](std::string_view bytes) {
  const std::string kept = records_until(bytes, 100, kWhat).records;
  require(kept.size() <= bytes.size() && (kept.empty() || kept.back() == '\n'), "complete lines are retained");
  require(records_until(kept, 100, kWhat).records == kept, "truncation is idempotent");
});

}  // namespace tessera::fuzz
