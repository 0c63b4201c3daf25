// Choice of a GEMM algorithm per problem: timed once, then fixed.
//
// Because algorithms add in different orders, results differ in the last bits, and a plan and its reference run must
// use the same algorithms. The table is therefore shared by all ranks of a process, and by all processes through a
// file, in which the first entry for a problem is final.
#pragma once
#include <algorithm>
#include <filesystem>
#include <functional>
#include <map>
#include <mutex>
#include <string>

namespace tessera::cuda {

class AlgorithmTable {
 public:
  // `device` identifies GPU and library version; it is the file's name and first line.
  explicit AlgorithmTable(std::string device) : device_(std::move(device)) {}

  // The choice for `key`. Calls choose() if there is none, under a lock shared by all processes that use the file:
  // choose() may time algorithms but must not wait for other callers. Keys and choices are single-line, keys without a
  // colon. Throws InputError if the file is not a table, OutputError if it cannot be written.
  std::string find_or(const std::string& key, const std::function<std::string()>& choose);
  // Empty if there is no choice.
  std::string known(const std::string& key);
  // Inserts `choice` unless one exists, bypassing the file.
  std::string find_or_insert(const std::string& key, const std::string& choice);

  // Uses this device's file in `directory`, read at the next unknown key.
  void set_directory(const std::filesystem::path& directory);

 private:
  void read();
  void write() const;

  std::mutex mutex_;
  std::string device_;
  std::filesystem::path file_;
  std::map<std::string, std::string> choices_;
};

AlgorithmTable& algorithm_table(const std::string& device);

}  // namespace tessera::cuda
