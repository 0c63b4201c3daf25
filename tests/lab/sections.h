// Test data files: `=== FIELD | FIELD` starts a section, `--- KIND` a text in it; lines before the first section are
// comments. Also a loop over two threads.
#pragma once
#include <algorithm>
#include <atomic>
#include <filesystem>
#include <functional>
#include <future>
#include <iostream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "base/files.h"

namespace tessera::lab {

using Texts = std::vector<std::pair<std::string, std::string>>;

struct Section {
  std::vector<std::string> fields = {};
  Texts texts = {{"", ""}};  // (kind, lines); first: lines before any kind
};

inline std::vector<Section> read_sections(const std::string& file) {
  std::vector<Section> out;
  std::istringstream lines(read_file(std::filesystem::path(TESSERA_SOURCE_DIR) / "tests/lab" / file));
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("=== ")) {
      Section& begun = out.emplace_back();
      for (size_t at = 4, end; at < line.size(); at = end + 3) {
        end = std::min(line.find(" | ", at), line.size());
        begun.fields.push_back(line.substr(at, end - at));
      }
    } else if (line.starts_with("--- ")) {
      out.back().texts.emplace_back(line.substr(4), "");
    } else if (!out.empty()) {
      out.back().texts.back().second += line + "\n";
    }
  }
  return out;
}

// Concatenates say(i) for all i below `count`, computed by two threads.
inline std::string concat_messages(size_t count, const std::function<std::string(size_t)>& say) {
  std::atomic<size_t> next = 0;
  const auto work = [&] {
    std::string said;
    for (size_t mine; (mine = next++) < count;) said += say(mine);
    return said;
  };
  std::future<std::string> other = std::async(std::launch::async, work);
  const std::string here = work();
  return here + other.get();
}

// Pairs of `--- change` and `--- to`.
inline Texts find_changes(const Section& section) {
  Texts out;
  for (const auto& [kind, text] : section.texts) {
    const std::string part = text.substr(0, text.size() - (text.empty() ? 0 : 1));
    if (kind == "change") out.emplace_back(part, "");
    if (kind == "to") out.back().second = part;
  }
  return out;
}

}  // namespace tessera::lab
