// Best fit over a sorted free list; a neighbour that is free too is merged at once, so a step's pattern repeats itself.
#include "tensor/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <string>
#include <utility>
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

namespace tessera {
namespace {
constexpr int64_t kAlignment = 64;
constexpr int64_t kLeastReserved = int64_t{1} << 30;
constexpr int64_t kFileCapacity = int64_t{1} << 38, kFileGrowth = int64_t{1} << 22;

// Under AddressSanitizer what is not handed out may not be touched, and a gap lies behind every block.
#ifdef __SANITIZE_ADDRESS__
constexpr int64_t kGap = 64;
void forbid(const std::byte* p, int64_t bytes) { __asan_poison_memory_region(p, static_cast<size_t>(bytes)); }
void permit(const std::byte* p, int64_t bytes) { __asan_unpoison_memory_region(p, static_cast<size_t>(bytes)); }
#else
constexpr int64_t kGap = 0;
void forbid(const std::byte*, int64_t) {}
void permit(const std::byte*, int64_t) {}
#endif

// ThreadSanitizer knows 1.5 TB of addresses, and the arenas of many ranks reserve more.
#ifdef __SANITIZE_THREAD__
constexpr int64_t kMostReserved = int64_t{4} << 30;
#else
constexpr int64_t kMostReserved = std::numeric_limits<int64_t>::max();
#endif

int64_t rounded(int64_t bytes) {
  return std::max<int64_t>(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment) + kGap;
}
}  // namespace

std::string_view name_of(Category category) {
  constexpr std::array<std::string_view, kCategories> names = {"parameters",  "gradients", "optimizer",
                                                               "activations", "workspace", "communication"};
  return names[static_cast<size_t>(category)];
}

Arena::Arena(int64_t capacity) : capacity_(std::min(capacity, kMostReserved)) {
  const auto reserve = [this] {
    return mmap(nullptr, static_cast<size_t>(capacity_), PROT_READ | PROT_WRITE,
                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  };
  void* p = reserve();
  // A limit on address space (ulimit -v, strict overcommit, a sanitizer's shadow) may leave room for less.
  while (p == MAP_FAILED && capacity_ > kLeastReserved) {
    capacity_ /= 2;
    p = reserve();
  }
  if (p == MAP_FAILED)
    throw Error("[arena] cannot reserve " + std::to_string(capacity_) +
                " bytes of address space: " + std::strerror(errno));
  madvise(p, static_cast<size_t>(capacity_), MADV_HUGEPAGE);  // a hint: without huge pages all is slower, nothing else
  base_ = static_cast<std::byte*>(p);
}

Arena::Arena(const std::filesystem::path& directory) : capacity_(kFileCapacity) {
  const auto refuse = [&](const char* what) {
    const std::string cause = std::strerror(errno);
    if (file_ >= 0) close(file_);
    throw OutputError(directory.string() + ": cannot " + what + " a file to keep tensors in: " + cause);
  };
  std::string name = (directory / "tessera-XXXXXX").string();
  file_ = mkostemp(name.data(), O_CLOEXEC);
  if (file_ < 0) refuse("make");
  unlink(name.c_str());  // gone when this process is
  if (ftruncate(file_, capacity_) != 0) refuse("size");
  void* const p = mmap(nullptr, static_cast<size_t>(capacity_), PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
  if (p == MAP_FAILED) refuse("map");
  base_ = static_cast<std::byte*>(p);
}

Arena::~Arena() {
  permit(base_, top_);
  munmap(base_, static_cast<size_t>(capacity_));
  if (file_ >= 0) close(file_);
}

// A page of a file that finds no room on the disk when it is written to ends the process, so room is made before.
void Arena::make_room_in_file() {
  if (file_ < 0 || top_ <= file_bytes_) return;
  const int64_t wanted = (top_ + kFileGrowth - 1) / kFileGrowth * kFileGrowth;
  if (const int error = posix_fallocate(file_, 0, wanted); error != 0)
    throw OutputError("no room for " + std::to_string(wanted) +
                      " bytes of tensors kept in a file: " + std::strerror(error));
  file_bytes_ = wanted;
}

std::byte* Arena::allocate(int64_t bytes, Category category) {
  const int64_t need = rounded(bytes);
  std::lock_guard lock(mutex_);
  auto fit = free_.end();
  for (auto hole = free_.begin(); hole != free_.end(); ++hole)
    if (hole->second >= need && (fit == free_.end() || hole->second < fit->second)) fit = hole;
  int64_t at = top_;
  if (fit != free_.end()) {
    at = fit->first;
    const int64_t rest = fit->second - need;
    const auto next = free_.erase(fit);
    if (rest > 0) free_.emplace_hint(next, at + need, rest);
  } else {
    // A free block at the very end is extended rather than passed over.
    const auto last = free_.empty() ? free_.end() : std::prev(free_.end());
    const bool extends = last != free_.end() && last->first + last->second == top_;
    if (extends) at = last->first;
    if (need > capacity_ - at) throw std::bad_alloc();
    const int64_t before = std::exchange(top_, at + need);
    try {
      make_room_in_file();
    } catch (...) {
      top_ = before;
      throw;
    }
    if (extends) free_.erase(last);
  }
  forbid(base_ + at, need);
  permit(base_ + at, bytes);
  count(category, bytes);
  return base_ + at;
}

void Arena::release(std::byte* block, int64_t bytes, Category category) {
  std::lock_guard lock(mutex_);
  int64_t at = block - base_, size = rounded(bytes);
  forbid(block, size);
  auto next = free_.lower_bound(at);
  if (next != free_.end() && next->first == at + size) {
    size += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == at) {
      at = before->first;
      size += before->second;
      free_.erase(before);
    }
  }
  free_.emplace(at, size);
  count(category, -bytes);
}

void Arena::count(Category category, int64_t bytes) {
  for (Usage* u : {&usage_[static_cast<size_t>(category)], &total_}) {
    u->live += bytes;
    u->peak = std::max(u->peak, u->live);
  }
}

Usage Arena::usage(Category category) const {
  std::lock_guard lock(mutex_);
  return usage_[static_cast<size_t>(category)];
}

Usage Arena::total() const {
  std::lock_guard lock(mutex_);
  return total_;
}

int64_t Arena::footprint() const {
  std::lock_guard lock(mutex_);
  return top_;
}

void Arena::reset_peaks() {
  std::lock_guard lock(mutex_);
  for (Usage& u : usage_) u.peak = u.live;
  total_.peak = total_.live;
}

}  // namespace tessera
