// Memory regions: reserved address space, backed by memory on use.
#pragma once
#include <array>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string_view>
#include <typeindex>
#include <vector>

#include "base/error.h"
#include "tensor/device.h"

namespace tessera {

class Region : NotCopied {
 public:
  virtual ~Region() = default;

  std::byte* base() const { return base_; }
  int64_t capacity() const { return capacity_; }
  Device device() const { return device_; }
  // File through which other processes of this host can map this memory; `number` is unique within this process. A
  // negative descriptor: not shareable.
  struct File {
    int descriptor = -1;
    int64_t number = -1;
  };
  File file() const { return file_; }
  // Makes the first `bytes` usable. Throws OutOfMemory, OutputError (disk full) or std::bad_alloc.
  virtual void commit(int64_t bytes) = 0;

 protected:
  explicit Region(Device device) : device_(device) {}
  std::byte* base_ = nullptr;
  int64_t capacity_ = 0;
  File file_ = {};

 private:
  Device device_;
};

// Reserves `capacity` bytes of address space on huge pages; the first touch allocates memory. If the system refuses,
// reserves at most 64 GiB, made accessible by commit().
std::unique_ptr<Region> host_region(int64_t capacity);
// Reserves address space for twice the machine's memory (halved until the system accepts), which other processes of
// this host can map through file(); on huge pages if /sys/kernel/mm/transparent_hugepage/shmem_enabled permits. The
// destructor frees the memory even if other processes have it mapped. Throws Error if even 1 GiB is refused.
std::unique_ptr<Region> shared_region();
// Backed by an unnamed file in `directory`, for rarely used data. Creation and commit() throw OutputError if the file
// cannot be created or the disk is full.
std::unique_ptr<Region> file_region(const std::filesystem::path& directory);

// A rank's allocator: best fit within one region reserved on huge pages.
//
// Live and peak bytes are counted per block category, so they can be compared with a formula. Every training step
// requests the same blocks in the same order, so no step after the first allocates system memory.
//
// allocate() and release() are thread-safe.

enum class Category : uint8_t { parameters, gradients, optimizer, activations, workspace, communication };
inline constexpr int kCategories = 6;
std::string_view to_string(Category category);

struct Usage {
  int64_t live = 0;  // bytes allocated and not released
  int64_t peak = 0;  // maximum of `live` since the last reset
};

class Arena : NotCopied, public std::enable_shared_from_this<Arena> {
 public:
  explicit Arena(std::unique_ptr<Region> region);
  ~Arena();

  Device device() const { return region_->device(); }
  const Region& region() const { return *region_; }
  // Host arena for transfers; a host arena returns itself.
  std::shared_ptr<Arena> host();

  // Uninitialized block aligned to 64 bytes (256 on a GPU). Throws OutOfMemory beyond the capacity.
  std::byte* allocate(int64_t bytes, Category category);
  void release(std::byte* block, int64_t bytes, Category category);

  Usage usage(Category category) const;
  Usage total() const;
  int64_t footprint() const;  // end of the highest block so far, in bytes from the region's start
  // Equal layouts and equal sequences of requests produce equal addresses.
  struct Layout {
    int64_t footprint = 0;
    std::map<int64_t, int64_t> free;  // offset -> bytes, neighbours merged
    bool operator==(const Layout&) const = default;
  };
  Layout layout() const;
  void reset_peaks();

  // Category of blocks requested without one: activations in the forward pass, workspace in the backward pass.
  Category default_category() const { return default_category_; }
  class Scope : NotCopied {
   public:
    Scope(Arena& arena, Category category) : arena_(arena), before_(arena.default_category_) {
      arena.default_category_ = category;
    }
    ~Scope() { arena_.default_category_ = before_; }

   private:
    Arena& arena_;
    Category before_;
  };

  // While an instance exists, allocate() throws Error instead of growing the region.
  class Fixed : NotCopied {
   public:
    explicit Fixed(Arena& arena) : arena_(arena) { arena_.fix(true); }
    ~Fixed() { arena_.fix(false); }

   private:
    Arena& arena_;
  };
  // While an instance exists, AddressSanitizer permits access to freed blocks, which the kernels of a captured graph
  // reuse (tensor/cuda/gpus.h).
  class AllowReuse : NotCopied {
   public:
    explicit AllowReuse(Arena& arena) : arena_(arena) { arena_.allow_reuse(true); }
    ~AllowReuse() { arena_.allow_reuse(false); }

   private:
    Arena& arena_;
  };

  // Per-rank state, one object per type. Destroyed in reverse order of creation, because an object may use earlier
  // ones.
  template <class T>
  T& local() {
    std::lock_guard lock(mutex_);
    void* found = local(typeid(T));
    if (!found) found = locals_.emplace_back(typeid(T), std::make_shared<T>()).second.get();
    return *static_cast<T*>(found);
  }

 private:
  void* local(std::type_index type) const;
  void count(Category category, int64_t bytes);
  void fix(bool fixed);
  void allow_reuse(bool allowed);

  std::unique_ptr<Region> region_;
  std::shared_ptr<Arena> host_;
  int64_t top_ = 0;
  mutable std::mutex mutex_;
  std::map<int64_t, int64_t> free_;
  std::array<Usage, kCategories> usage_{};
  Usage total_{};
  Category default_category_ = Category::activations;
  bool fixed_ = false;
  int reuse_scopes_ = 0;
  std::vector<std::pair<std::type_index, std::shared_ptr<void>>> locals_;
};

using ArenaPtr = std::shared_ptr<Arena>;
ArenaPtr make_arena();
ArenaPtr make_shared_arena();                                      // see shared_region()
ArenaPtr make_file_arena(const std::filesystem::path& directory);  // see file_region()
// Pinned host memory, which GPU kernels access over the bus. Throws Error in a build without CUDA.
ArenaPtr make_pinned_arena();
// On the host or the calling thread's current GPU (cuda::use_gpu). Throws Error without CUDA or a GPU.
ArenaPtr make_arena(Device device);

// Called immediately and after every allocate() and release() with the live bytes per category; calls are serialized
// and run on the allocating thread. The watcher must not use the arena. An arena has at most one watcher; null removes
// it.
using ArenaWatcher = std::function<void(const std::array<int64_t, kCategories>& live)>;
void watch(Arena& arena, ArenaWatcher watcher);

}  // namespace tessera
