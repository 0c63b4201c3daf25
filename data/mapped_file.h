// A file mapped read-only for as long as the object lives; by default nothing. A file system that cannot map has it
// read into memory.
//
// Where the file is cut short meanwhile the system sends SIGBUS to who reads it: a program that would rather say so
// than be killed asks mapped_file_at().
#pragma once
#include <cstddef>
#include <filesystem>
#include <span>
#include <utility>

namespace tessera {

class MappedFile {
 public:
  MappedFile() = default;
  // Throws InputError when it is missing, unreadable or something else than a file.
  explicit MappedFile(const std::filesystem::path& file);
  MappedFile(MappedFile&& other) noexcept { swap(other); }
  MappedFile& operator=(MappedFile&& other) noexcept {
    swap(other);
    return *this;
  }
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  std::span<const std::byte> bytes() const { return {data_, size_}; }

 private:
  void swap(MappedFile& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
  }
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

// The name of the file that is mapped at an address, which a signal handler may ask for; null when there is none.
const char* mapped_file_at(const void* address);

}  // namespace tessera
