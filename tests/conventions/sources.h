// Reads the project's files for the convention tests.
#pragma once

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <regex>
#include <set>
#include <string>
#include <vector>

namespace tessera::conventions {

// A file of the repository: its path from the root, and its text.
struct Source {
  std::string path, text;

  // "tensor" of tensor/cpu/loops.h; empty for a file at the root.
  std::string directory() const { return path.find('/') == std::string::npos ? "" : path.substr(0, path.find('/')); }
  bool ends_with(const std::string& tail) const { return path.ends_with(tail); }
  bool is_header() const { return ends_with(".h"); }
  bool is_cuda() const { return ends_with(".cu") || ends_with(".cuh"); }
  bool is_code() const { return is_header() || is_cuda() || ends_with(".cpp"); }
};

// One #include: the name, and whether it is in quotes (ours) or in angle brackets.
struct Include {
  std::string name;
  bool quoted;
};

inline std::string read_text(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Every file with one of these suffixes (none: every file), sorted by path; build directories, runs and hidden
// directories are skipped.
inline std::vector<Source> all_sources(const std::filesystem::path& root = TESSERA_SOURCE_DIR,
                                       const std::set<std::string>& kinds = {".cpp", ".h", ".cu", ".cuh", ".cmake",
                                                                             ".sh", ".txt", ".py"}) {
  std::vector<Source> found;
  for (auto it = std::filesystem::recursive_directory_iterator(root);
       it != std::filesystem::recursive_directory_iterator(); ++it) {
    const std::string name = it->path().filename().string();
    const bool top = it.depth() == 0;
    if (it->is_directory()) {
      if (name.starts_with(".") || (top && (name.starts_with("build") || name == "runs")))
        it.disable_recursion_pending();
    } else if (kinds.empty() || kinds.contains(it->path().extension().string())) {
      found.push_back({std::filesystem::relative(it->path(), root).generic_string(), read_text(it->path())});
    }
  }
  std::ranges::sort(found, {}, &Source::path);
  return found;
}

// All places in a text that match a pattern.
inline std::vector<std::smatch> matches(const std::string& text, const std::regex& pattern) {
  return {std::sregex_iterator(text.begin(), text.end(), pattern), {}};
}
// The first group of a pattern at each place that matches it.
inline std::vector<std::string> first_groups(const std::string& text, const std::regex& pattern) {
  return {std::sregex_token_iterator(text.begin(), text.end(), pattern, 1), {}};
}

inline std::vector<Include> read_includes(const Source& source) {
  static const std::regex line(R"re(^[ \t]*#[ \t]*include[ \t]*(["<])([^">]+)[">])re", std::regex::multiline);
  std::vector<Include> found;
  for (const std::smatch& at : matches(source.text, line)) found.push_back({at[2], at[1] == "\""});
  return found;
}

// The complaints about all files that are code, one line each, for a failing test to print.
inline std::string complaints(const std::function<std::string(const Source&)>& rule) {
  std::string all;
  for (const Source& source : all_sources())
    if (const std::string complaint = rule(source); !complaint.empty()) all += source.path + ": " + complaint + "\n";
  return all;
}

}  // namespace tessera::conventions
