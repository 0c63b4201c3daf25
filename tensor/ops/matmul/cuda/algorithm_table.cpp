// The file of an algorithm table has a title line, then lines "key: choice"; it is locked through a separate file and
// replaced atomically.
#include "tensor/ops/matmul/cuda/algorithm_table.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <memory>
#include <string_view>
#include <system_error>

#include "base/write_file.h"
#include "tensor/ops/matmul/cuda/gemm.h"

namespace tessera::cuda {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kTitle = "Algorithms of matrix products, chosen once and kept: ";

std::string file_name(std::string device) {
  for (char& c : device)
    if ((c < '0' || c > '9') && (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && c != '.') c = '-';
  return device + ".algorithms";
}

// Held while algorithms are timed and the file is read and written.
class FileLock {
 public:
  explicit FileLock(const fs::path& file) {
    fs::create_directories(file.parent_path());
    fs::path name = file;
    name += ".lock";
    descriptor_ = ::open(name.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    int failed = descriptor_ < 0 ? -1 : EINTR;
    while (failed == EINTR) failed = ::flock(descriptor_, LOCK_EX) == 0 ? 0 : errno;
    if (failed == 0) return;
    if (descriptor_ >= 0) ::close(descriptor_);
    throw OutputError("[matmul] cannot lock " + name.string());
  }
  ~FileLock() { ::close(descriptor_); }
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

 private:
  int descriptor_;
};

// Throws before any computation if the file system does not support locks.
void require_locks(const fs::path& directory) {
  std::error_code error;
  fs::create_directories(directory, error);
  const int descriptor = ::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return;  // reported when a table is stored there
  const int cause = ::flock(descriptor, LOCK_SH | LOCK_NB) == 0 ? 0 : errno;
  ::close(descriptor);
  if (is_unknown_operation(cause))
    throw OutputError("[matmul] " + directory.string() + ": cannot lock an algorithm table in this directory: " +
                      std::strerror(cause) + "; set TESSERA_CACHE to a directory on another file system");
}

struct Tables {
  std::mutex mutex;
  std::map<std::string, std::unique_ptr<AlgorithmTable>> of;
  fs::path directory;
};
Tables& tables() {
  static Tables all;
  return all;
}

}  // namespace

void AlgorithmTable::set_directory(const fs::path& directory) {
  std::lock_guard lock(mutex_);
  file_ = directory / file_name(device_);
}

std::string AlgorithmTable::find_or_insert(const std::string& key, const std::string& choice) {
  std::lock_guard lock(mutex_);
  return choices_.emplace(key, choice).first->second;
}

std::string AlgorithmTable::known(const std::string& key) {
  std::lock_guard lock(mutex_);
  const auto found = choices_.find(key);
  return found != choices_.end() ? found->second : "";
}

std::string AlgorithmTable::find_or(const std::string& key, const std::function<std::string()>& choose) {
  std::lock_guard lock(mutex_);
  if (const auto found = choices_.find(key); found != choices_.end()) return found->second;
  if (file_.empty()) return choices_[key] = choose();
  const FileLock held(file_);
  read();
  if (const auto found = choices_.find(key); found != choices_.end()) return found->second;
  choices_[key] = choose();
  write();
  return choices_[key];
}

// Reads choices for keys without a choice in this process.
void AlgorithmTable::read() {
  std::ifstream in(file_);
  if (!in) return;
  std::string line;
  const auto refuse = [&](int64_t number) {
    throw InputError("[matmul] " + file_.string() + " line " + std::to_string(number) + ": '" + line +
                     "'; expected an algorithm table for " + device_ +
                     "; delete the file to time the algorithms again");
  };
  if (!std::getline(in, line) || line != std::string(kTitle) + device_) refuse(1);
  for (int64_t number = 2; std::getline(in, line); ++number) {
    const size_t colon = line.find(": ");
    if (colon == std::string::npos || colon == 0 || colon + 2 == line.size()) refuse(number);
    choices_.emplace(line.substr(0, colon), line.substr(colon + 2));
  }
}

void AlgorithmTable::write() const {
  std::string text = std::string(kTitle) + device_ + '\n';
  for (const auto& [key, choice] : choices_) text.append(key).append(": ").append(choice).append("\n");
  write_file(file_, text);
}

AlgorithmTable& algorithm_table(const std::string& device) {
  Tables& all = tables();
  std::lock_guard lock(all.mutex);
  std::unique_ptr<AlgorithmTable>& table = all.of[device];
  if (!table) {
    table = std::make_unique<AlgorithmTable>(device);
    if (!all.directory.empty()) table->set_directory(all.directory);
  }
  return *table;
}

void cache_algorithms_in(const fs::path& directory) {
  require_locks(directory);
  Tables& all = tables();
  std::lock_guard lock(all.mutex);
  all.directory = directory;
  for (const auto& [device, table] : all.of) table->set_directory(directory);
}

}  // namespace tessera::cuda
