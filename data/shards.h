// Shards of a large text: llm.c token files, read in place.
#pragma once
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "data/dataset.h"

namespace tessera {

// The files that match a shell pattern (*, ?, [...]), sorted bytewise; none if `spec` is not a pattern or is an
// existing name. Throws InputError, prefixed with `prefix`, if nothing matches.
std::vector<std::filesystem::path> matching_files(const std::string& spec, std::string_view prefix = "");

// Whether `spec` is a pattern, or a directory with llm.c token files and without dataset.json.
bool names_shards(const std::string& spec);

// The validation file is the first with "val" in its name, otherwise the first match of the pattern with its last
// "train" replaced by "val", otherwise the last file. Throws InputError for other formats and for fewer than two files.
struct ShardFiles {
  std::vector<std::filesystem::path> train;
  std::filesystem::path val;
  std::vector<std::filesystem::path> unused = {};  // further files with "val" in their names
};
ShardFiles find_shards(const std::string& spec);

// The tokenizer must be a directory. Throws Error (usage), InputError.
Dataset open_shards(const std::string& spec, const TokenizerChoice& tokenizer);

}  // namespace tessera
