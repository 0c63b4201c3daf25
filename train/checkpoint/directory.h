// Checkpoints on disk: atomic directories `step-N`.
//
//   Files are written to step-N.tmp-.../, manifest.json (step, the caller's description of the run, size and XXH3-64 of
//   every file) last. After a flush, one rename creates step-N, and `latest` names it. A kill, a full disk or a power
//   failure at any moment leaves earlier checkpoints intact. Deletion renames a checkpoint first. Incomplete
//   directories are never loaded.
//
//   A new step-N replaces an old one atomically. NFS, Lustre and FUSE cannot exchange two names: there the old one
//   becomes step-N.replaced, which counts as step N if there is no step-N.
#pragma once
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/write_file.h"

namespace tessera {

struct Checkpoint {
  std::filesystem::path path;
  int64_t step = 0;
  std::string about;  // JSON object, as saved
};

// A checkpoint being written to path(). All members throw OutputError with the path and the cause.
class NewCheckpoint {
 public:
  NewCheckpoint(std::filesystem::path directory, int64_t step);
  const std::filesystem::path& path() const { return name_.path(); }
  int64_t step() const { return step_; }
  // Publishes the files in path() as directory/step-N, replacing an existing one; retains the newest `keep` checkpoints
  // and the best one.
  Checkpoint finish(const std::string& about, size_t keep);

 private:
  std::filesystem::path directory_;
  TemporaryName name_;  // deleted unless finish() succeeds
  int64_t step_;
};

// The checkpoint with the lowest validation loss, stored in the file `best`: "step-N 1.87".
struct BestCheckpoint {
  int64_t step = 0;
  double val_loss = 0;
};
std::optional<BestCheckpoint> best_checkpoint(const std::filesystem::path& directory);
void write_best(const std::filesystem::path& directory, const BestCheckpoint& best);

// File names have no directory.
struct ListedFile {
  std::string name;
  uint64_t bytes = 0;
  std::string xxh3;  // XXH3-64, lower-case hexadecimal
};
struct Manifest {
  int64_t step = 0;
  std::string about;
  std::vector<ListedFile> files;
};
// `what` names the manifest in errors. Throws InputError.
Manifest parse_manifest(std::string_view json, const std::string& what);

// Checks the manifest, and size and checksum of every file. Rank files ("model.rank-2-of-4.safetensors") may be
// missing, because another host has them. Throws InputError with the file.
Checkpoint open_checkpoint(const std::filesystem::path& path);

// The newest checkpoint that opens and passes `check` (which throws otherwise); `passed_over` receives one line with
// the reason for each newer one.
std::optional<Checkpoint> newest_checkpoint(
    const std::filesystem::path& directory, std::vector<std::string>& passed_over,
    const std::function<void(const Checkpoint&)>& check = [](const Checkpoint&) {});

}  // namespace tessera
