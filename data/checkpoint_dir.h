// Checkpoints on disk: folders `step-N` that are whole or absent.
//
//   step-N.tmp-PID/ gets the files; manifest.json (step, what the caller says about the run, size and XXH3-64 of every
//   file) comes last; everything is flushed; one rename makes it step-N; `latest` names it. So a kill, a full disk or a
//   power cut at any moment leaves the earlier checkpoints as they were, and what is left half-written is never loaded.
//   An old checkpoint loses its name before its files, so what is left half-removed is none either.
#pragma once
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

struct CheckpointFile {
  std::string name;
  std::function<void(const std::filesystem::path&)> write;
};

struct Checkpoint {
  std::filesystem::path path;
  int64_t step = 0;
  std::string about;  // JSON object, as it was saved
};

// Saves and returns `directory`/step-N; keeps the newest `keep` checkpoints. A folder of that name is replaced. Throws
// OutputError naming the path and the cause; nothing is left of a failed attempt.
Checkpoint save_checkpoint(const std::filesystem::path& directory, int64_t step, std::span<const CheckpointFile> files,
                           const std::string& about, size_t keep);

// What a manifest says; the names of its files have no directory in them.
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

// Checks the manifest, and the size and checksum of every file. Throws InputError naming the file.
Checkpoint open_checkpoint(const std::filesystem::path& path);

// The newest that opens; `passed_over` gets one line for each newer one that does not, with the reason.
std::optional<Checkpoint> newest_checkpoint(const std::filesystem::path& directory,
                                            std::vector<std::string>& passed_over);

}  // namespace tessera
