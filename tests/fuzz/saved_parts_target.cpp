// The description of the elements in a checkpoint shard: an accepted one round-trips.
#include <string>
#include <string_view>
#include <vector>

#include "tests/fuzz/target.h"
#include "train/checkpoint/full_state.h"

namespace tessera::fuzz {

const Target target("saved_parts", [](std::string_view bytes) {
  const std::vector<SavedSlice> parts = parse_parts(bytes, kWhat);
  const std::string said = describe_parts(parts);
  require(describe_parts(parse_parts(said, kWhat)) == said, "a description round-trips");
  for (const SavedSlice& p : parts)
    for (const ShardSpec::Run& run : p.shard.runs)
      require(run.begin >= 0 && run.size > 0 && run.begin + run.size <= p.full_shape[p.shard.dim],
              "a run is in its dim");
});

}  // namespace tessera::fuzz
