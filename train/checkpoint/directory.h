// Checkpoints on disk: folders `step-N` that are whole or absent.
//
//   step-N.tmp-.../ gets the files; manifest.json (step, what the caller says about the run, size and XXH3-64 of every
//   file) comes last; everything is flushed; one rename makes it step-N; `latest` names it. So a kill, a full disk or a
//   power cut at any moment leaves the earlier checkpoints as they were, and what is left half-written is never loaded.
//   An old checkpoint loses its name before its files, so what is left half-removed is none either.
//
//   A new step-N takes the place of an old one in one step. NFS, Lustre and FUSE cannot exchange two names: there the
//   old one is called step-N.replaced meanwhile, which counts as step N for as long as there is no step-N.
#pragma once
#include <functional>

#include "tensor/write_file.h"

namespace tessera {

struct Checkpoint {
  std::filesystem::path path;
  int64_t step = 0;
  std::string about;  // JSON object, as it was saved
};

// A checkpoint that is being written: files go into path(). Everything throws OutputError naming the path and the
// cause.
class NewCheckpoint {
 public:
  NewCheckpoint(std::filesystem::path directory, int64_t step);
  const std::filesystem::path& path() const { return name_.path(); }
  int64_t step() const { return step_; }
  // Makes it directory/step-N, with all files that are in path() now; a folder of that name is replaced. The newest
  // `keep` checkpoints stay, and the best.
  Checkpoint finish(const std::string& about, size_t keep);

 private:
  std::filesystem::path directory_;
  TemporaryName name_;  // which removes what did not become a checkpoint
  int64_t step_;
};

// The checkpoint with the lowest validation loss is named in a file beside it, `best`: "step-N 1.87".
struct BestCheckpoint {
  int64_t step = 0;
  double val_loss = 0;
};
std::optional<BestCheckpoint> best_checkpoint(const std::filesystem::path& directory);
void write_best(const std::filesystem::path& directory, const BestCheckpoint& best);

// Entries of a manifest; the names of its files have no directory in them.
struct ListedFile {
  std::string name;
  uint64_t bytes = 0;
  std::string xxh3;  // XXH3-64 in lower-case hexadecimal
};
struct Manifest {
  int64_t step = 0;
  std::string about;
  std::vector<ListedFile> files;
};
// `what` names the manifest in messages. Throws InputError.
Manifest parse_manifest(std::string_view json, const std::string& what);

// Checks the manifest, and the size and checksum of every file. Parts of ranks ("model.rank-2-of-4.safetensors") may be
// missing: another host has them. Throws InputError naming the file.
Checkpoint open_checkpoint(const std::filesystem::path& path);

// The newest that opens and that `check` does not throw for; `passed_over` gets one line for each newer one, with the
// reason.
std::optional<Checkpoint> newest_checkpoint(
    const std::filesystem::path& directory, std::vector<std::string>& passed_over,
    const std::function<void(const Checkpoint&)>& check = [](const Checkpoint&) {});

}  // namespace tessera
