// dataset.json, the description next to a dataset's token files.
#include <string>
#include <string_view>

#include "data/dataset.h"
#include "tests/fuzz/target.h"

namespace tessera::fuzz {

const Target target("dataset", [](std::string_view bytes) {
  const DatasetDescription d = parse_description(bytes, kWhat);
  require(d.train_tokens >= 0 && d.val_tokens >= 0, "counts are not negative");
  require(!d.train_files.empty(), "there is a training file");
  for (const std::string& name : d.train_files)
    require(name.ends_with(".tok") && name.find('/') == std::string::npos, "a file is in the same directory");
  require(d.train_bytes >= 1 && d.val_bytes >= 1, "no split is empty");
});

}  // namespace tessera::fuzz
