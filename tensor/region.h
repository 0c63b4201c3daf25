// What an arena hands out: one run of addresses, of which only the part that was used is backed by memory.
#pragma once
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>

#include "tensor/device.h"

namespace tessera {

class Region {
 public:
  virtual ~Region() = default;
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  std::byte* base() const { return base_; }
  int64_t capacity() const { return capacity_; }
  Device device() const { return device_; }
  // The file that other processes of this host can map to see the same memory, and what no other region of this process
  // was ever called; negative: they cannot.
  struct File {
    int descriptor = -1;
    int64_t number = -1;
  };
  File file() const { return file_; }
  // Makes the first `bytes` usable; called before more than ever before is handed out. Throws when there is no room:
  // std::bad_alloc where the system has none.
  virtual void commit(int64_t bytes) = 0;

 protected:
  explicit Region(Device device) : device_(device) {}
  std::byte* base_ = nullptr;
  int64_t capacity_ = 0;
  File file_ = {};

 private:
  Device device_;
};

// Address space of `capacity` bytes on huge pages; memory comes with the first touch. Where the system refuses so much,
// 64 GiB at most, of which commit() takes what is used.
std::unique_ptr<Region> host_region(int64_t capacity);
// Twice the machine's memory in addresses, halved while the system refuses, which other processes of this host can map
// (file()); on huge pages where these are for shared memory (/sys/kernel/mm/transparent_hugepage/shmem_enabled). It
// gives its memory back when it goes, whoever has it mapped. Throws Error when even 1 GiB is refused.
std::unique_ptr<Region> shared_region();
// The same as host_region() over a file without a name in `directory`, mapped: what is seldom read or written need not
// stay in memory. Throws OutputError here or in commit() when the file cannot be made or the disk has no room.
std::unique_ptr<Region> file_region(const std::filesystem::path& directory);

}  // namespace tessera
