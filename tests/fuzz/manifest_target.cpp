// A checkpoint's manifest, and the comparison of --resume with its description of the run.
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string_view>

#include "base/json.h"
#include "tests/fuzz/target.h"
#include "train/run/run_directory.h"

namespace tessera::fuzz {

const Target target("manifest", [](std::string_view bytes) {
  const Manifest manifest = parse_manifest(bytes, kWhat);
  require(manifest.step >= 0, "a step is not negative");
  for (const ListedFile& file : manifest.files) {
    const std::filesystem::path name(file.name);
    require(name.is_relative() && name.filename() == name && name != ".." && name != ".",
            "a listed file is in the manifest's directory");
    require(std::string_view(name.c_str()) == file.name, "a name contains no NUL");
  }
  const size_t found = differences(manifest.about, R"({"layers": 4, "dtype": "fp32"})", kWhat).size();
  require(found <= 2 + parse_json(manifest.about, kWhat)["run"].size(), "at most one difference per key");
});

}  // namespace tessera::fuzz
