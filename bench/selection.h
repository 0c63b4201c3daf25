// Which rows run: the names that `--benchmark_filter` means. Google Benchmark reads it so too, but compares it with
// names that have words of its own at their end.
#pragma once
#include <regex>
#include <string>
#include <vector>

namespace tessera::bench {

class Selection {
 public:
  // A POSIX extended expression, which may be found anywhere in a name; behind a minus, all names that it is not found
  // in. Empty or "all": every name. Throws Error (usage) for what is no expression.
  explicit Selection(const std::string& filter);
  bool has(const std::string& name) const { return std::regex_search(name, expression_) != inverted_; }

 private:
  bool inverted_;
  std::regex expression_;
};

// Takes the flag `--benchmark_list_tests` out of the words: whether names are only to be listed. Throws Error (usage)
// for a value that is neither true nor false.
bool take_listing(std::vector<std::string>& words);

}  // namespace tessera::bench
