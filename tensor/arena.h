// The memory that an arena hands out: one run of addresses, of which only the part that was used is backed by memory.
#pragma once
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <typeindex>

#include "tensor/device.h"
#include "tensor/error.h"

namespace tessera {

class Region : NotCopied {
 public:
  virtual ~Region() = default;

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
// A region like host_region()'s over a file without a name in `directory`, mapped: what is seldom read or written need
// not stay in memory. Throws OutputError here or in commit() when the file cannot be made or the disk has no room.
std::unique_ptr<Region> file_region(const std::filesystem::path& directory);

// The memory of one rank: one reserved region on huge pages, handed out and taken back in order of address.
//
// Every block carries a category, so that the program can say at any time what it holds (parameters, gradients,
// optimizer state, activations, workspace, communication) and what the peak of each was, to the byte, and compare that
// with a formula. A training step asks for the same blocks in the same order each time, so after the first step the
// region no longer grows and no page is new: nothing is taken from the system inside a step.
//
// An arena belongs to one rank. allocate() and release() may be called from any thread.

enum class Category : uint8_t { parameters, gradients, optimizer, activations, workspace, communication };
inline constexpr int kCategories = 6;
std::string_view to_string(Category category);

struct Usage {
  int64_t live = 0;  // bytes asked for and not given back
  int64_t peak = 0;  // the most that was live at one time
};

class Arena : NotCopied, public std::enable_shared_from_this<Arena> {
 public:
  explicit Arena(std::unique_ptr<Region> region);
  ~Arena();

  Device device() const { return region_->device(); }
  const Region& region() const { return *region_; }
  // Host memory for what is read from this arena, or is on its way into it: of an arena on the host, itself.
  std::shared_ptr<Arena> host();

  // A block aligned to 64 bytes (256 on a GPU), its contents undefined. Throws OutOfMemory past the capacity.
  std::byte* allocate(int64_t bytes, Category category);
  void release(std::byte* block, int64_t bytes, Category category);

  Usage usage(Category category) const;
  Usage total() const;
  int64_t footprint() const;  // bytes of the region that were ever handed out, gaps included
  // The free parts of the region. Whoever asks for the same blocks in the same order, beginning with the same layout,
  // gets the same addresses.
  struct Layout {
    int64_t footprint = 0;
    std::map<int64_t, int64_t> free;  // offset -> bytes, neighbours merged
    bool operator==(const Layout&) const = default;
  };
  Layout layout() const;
  void reset_peaks();  // peaks start again from what is live now

  // The category of blocks that are asked for without one: activations in a forward pass, workspace in a backward.
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

  // While one lives, no memory is added to the region: allocate() throws Error instead.
  class Fixed : NotCopied {
   public:
    explicit Fixed(Arena& arena) : arena_(arena) { arena_.fix(true); }
    ~Fixed() { arena_.fix(false); }

   private:
    Arena& arena_;
  };
  // While one or more live, AddressSanitizer lets free memory be used: by work that was queued when it was not free,
  // and that is repeated (tensor/cuda/gpus.h).
  class AllowReuse : NotCopied {
   public:
    explicit AllowReuse(Arena& arena) : arena_(arena) { arena_.lend(true); }
    ~AllowReuse() { arena_.lend(false); }

   private:
    Arena& arena_;
  };

  // State that lives as long as the rank does, one object per type (the cache of compiled matmuls, for one). What was
  // made later goes first: it may use what was there before it.
  template <class T>
  T& local() {
    std::lock_guard lock(mutex_);
    void* found = local(typeid(T));
    if (!found) found = locals_.emplace_back(typeid(T), std::make_shared<T>()).second.get();
    return *static_cast<T*>(found);
  }

 private:
  void* local(std::type_index type) const;  // null: not made yet
  void count(Category category, int64_t bytes);
  void fix(bool fixed);
  void lend(bool lent);

  std::unique_ptr<Region> region_;
  std::shared_ptr<Arena> host_;
  int64_t top_ = 0;
  mutable std::mutex mutex_;
  std::map<int64_t, int64_t> free_;  // offset -> bytes, neighbours merged
  std::array<Usage, kCategories> usage_{};
  Usage total_{};
  Category default_category_ = Category::activations;
  bool fixed_ = false;
  int lent_ = 0;
  std::vector<std::pair<std::type_index, std::shared_ptr<void>>> locals_;
};

using ArenaPtr = std::shared_ptr<Arena>;
ArenaPtr make_arena();         // in the host's memory
ArenaPtr make_shared_arena();  // and in reach of other processes, see shared_region()
ArenaPtr make_file_arena(const std::filesystem::path& directory);  // in a file, see file_region()
// In memory of the host that kernels on GPUs read and write too, over the bus. Throws Error in a build without CUDA.
ArenaPtr make_pinned_arena();
// On `device`: the host, or the GPU that the calling thread has chosen (cuda::use_gpu). Throws Error in a build without
// CUDA and on a machine without a GPU.
ArenaPtr make_arena(Device device);

// Somebody who is told whenever an arena holds more or less.

// Called at once, and behind every allocate() and release() from now on (null: no more), with the live bytes of each
// category: on the thread that changes them, one at a time. It must not use the arena. An arena has one.
using ArenaWatcher = std::function<void(const std::array<int64_t, kCategories>& live)>;
void watch(Arena& arena, ArenaWatcher watcher);

}  // namespace tessera
