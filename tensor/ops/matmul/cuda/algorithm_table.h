// Choice of a GEMM algorithm per problem: timed once, then fixed.
//
// Two algorithms add in different orders, so their results differ in the last bits. A plan and its reference run must
// use the same algorithm for each problem: this table is shared by all ranks that are threads of a process, and by all
// processes through a file, in which the first entry for a problem is final.
#pragma once
#include <filesystem>
#include <functional>
#include <map>
#include <mutex>
#include <string>

namespace tessera::cuda {

class AlgorithmTable {
 public:
  // `device` identifies the GPU and the library version; it is the file name and the file's first line.
  explicit AlgorithmTable(std::string device) : device_(std::move(device)) {}

  // The choice for `key`; if there is none, calls choose() and stores its result. choose() runs under a lock shared by
  // all processes that use the file: it may time algorithms but must not wait for other callers. Keys and choices are
  // single-line, keys without a colon. Throws InputError if the file is not a table, OutputError if it cannot be
  // written.
  std::string find_or(const std::string& key, const std::function<std::string()>& choose);
  // The choice for `key` that this process currently knows; empty if none.
  std::string known(const std::string& key);
  // As find_or() without timing or files: stores `choice` for this process unless there is one.
  std::string find_or_insert(const std::string& key, const std::string& choice);

  // Uses this device's file in `directory` from now on; the file is read at the next unknown key.
  void set_directory(const std::filesystem::path& directory);

 private:
  void read();
  void write() const;

  std::mutex mutex_;
  std::string device_;
  std::filesystem::path file_;  // empty: none
  std::map<std::string, std::string> choices_;
};

// The process-wide table of a device, shared by ranks that are threads.
AlgorithmTable& algorithm_table(const std::string& device);

}  // namespace tessera::cuda
