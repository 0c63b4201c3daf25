// Rows of JSON files, and the files of a data set of examples.
#pragma once
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

// Calls f with each row of a file, possibly compressed, and its line number from 1 (inside one object: its row number).
// A truncated row ends with its line. Throws InputError for unreadable files, rows above 64 MiB, and objects with
// several lists of rows.
using LineFunction = std::function<void(std::string_view line, int64_t number)>;
void for_each_line(const std::filesystem::path& file, const LineFunction& f);
void for_each_line(std::string_view bytes, const std::string& what, const LineFunction& f);

// Whether the first bytes are an object or a list of objects; in .json files also a list of strings. A file without
// rows counts if it is named .jsonl or .ndjson (.gz, .zst).
bool holds_examples(const std::filesystem::path& file);

// Returns a note if a file to be read as text is CSV, TSV or YAML by its name. Throws InputError if its columns are
// keys of examples.
std::string check_table(const std::filesystem::path& file);

// The example files that `data` names: a file; several files or patterns separated by commas; or a directory without
// dataset.json, whose files count as validation data by the name rules of the `datasets` library ("test" only if no
// other file does). Empty if `data` names no examples. Throws InputError for a pattern without matches, a file of
// another format among several, and a directory of Parquet or Arrow.
struct ExampleFiles {
  std::vector<std::filesystem::path> train = {}, val = {}, unused = {};
};
ExampleFiles example_files(const std::string& spec);
bool names_examples(const std::string& spec);

}  // namespace tessera
