// Which algorithm of a library makes which product: chosen once, by timing, and then the same for good.
//
// Two algorithms add in different orders, so their results differ in the last bits. A plan and the run that it is
// compared with must use one choice for each product: this table is shared by all ranks that are threads of a process,
// and by all processes through a file, of which the first word on a product stands.
#pragma once
#include <filesystem>
#include <functional>
#include <map>
#include <mutex>
#include <string>

namespace tessera::cuda {

class AlgorithmTable {
 public:
  // `device` names the GPU and the library's version; it is the name of the file, and told in its first line.
  explicit AlgorithmTable(std::string device) : device_(std::move(device)) {}

  // The choice that is known for `key`, or else the result of choose(), kept from then on. Only one caller chooses at a
  // time, in all processes that share a file: choose() may time, and must wait for nobody. Keys and choices are of one
  // line, a key without a colon. Throws InputError when the file is not a table, OutputError when it cannot be written.
  std::string find_or(const std::string& key, const std::function<std::string()>& choose);
  // The choice that this process knows for `key` by now; empty: none.
  std::string known(const std::string& key);
  // The same as find_or() without timing or files: for this process, keeps `choice` unless there is one.
  std::string find_or_keep(const std::string& key, const std::string& choice);

  // Uses the file of this device in `directory` from now on; it is read when the next unknown product is met.
  void keep_in(const std::filesystem::path& directory);

 private:
  void read();
  void write() const;

  std::mutex mutex_;
  std::string device_;
  std::filesystem::path file_;  // empty: none
  std::map<std::string, std::string> choices_;
};

// The table of this process for a device: ranks that are threads must share it.
AlgorithmTable& algorithm_table(const std::string& device);

}  // namespace tessera::cuda
