// Recordings: an accepted one of one or two ranks is compared with itself without an unexpected error.
#include <span>
#include <string_view>
#include <vector>

#include "tests/fuzz/target.h"
#include "verify/audit/compare.h"

namespace tessera::fuzz {

const Target target("recording", [](std::string_view bytes) {
  std::vector<std::span<const std::byte>> files{as_bytes(take(bytes))};
  if (!bytes.empty()) files.push_back(as_bytes(bytes));
  const audit::Recording recording(files, kWhat);
  require(recording.ranks().size() == files.size(), "a file is a rank");
  for (const auto& [key, batches] : recording.tensors())
    for (const auto& [batch, tensor] : batches) {
      require(!tensor.replicas.empty(), "a tensor has a replica");
      std::vector<double> row;
      for (size_t r = 0; r < tensor.replicas.size(); ++r) recording.read(tensor, r, {0, 1}, row);
    }
  const audit::AuditResult result = audit::compare(recording, recording, {});
  for (const audit::TensorResult& t : result.tensors)
    require(!audit::is_compared(t.key.kind) || t.replica != 0 || !(t.distance > 1e-9), "a tensor equals itself");
});

}  // namespace tessera::fuzz
