// Token files of llm.c that are trained on together, each where it lies: the shards of a large text.
#pragma once
#include <filesystem>
#include <string>
#include <vector>

#include "data/dataset.h"

namespace tessera {

// The regular files that a pattern of the shell (*, ?, [...]) matches, in the order of their names' bytes. None where
// `spec` is no pattern, or itself the name of something. Throws InputError where a pattern matches nothing.
std::vector<std::filesystem::path> matching_files(const std::string& spec);

// Whether it names such files: by a pattern, or as a folder that holds some and no dataset.json.
bool names_shards(const std::string& spec);

// Those to train on, and the one to validate on: the first with "val" in its name, else the first that the pattern
// matches when its last "train" is replaced by "val", else the last of all. Throws InputError: a file of another kind,
// fewer than two.
struct ShardFiles {
  std::vector<std::filesystem::path> train;
  std::filesystem::path val;
  std::vector<std::filesystem::path> unused = {};  // more with "val" in their names
};
ShardFiles find_shards(const std::string& spec);

// Their tokens; the tokenizer must be a folder, since the files do not hold theirs. Throws Error (usage), InputError.
Dataset open_shards(const std::string& spec, const TokenizerChoice& tokenizer);

}  // namespace tessera
