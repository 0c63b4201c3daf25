// Best fit over a sorted free list; a neighbour that is free too is merged at once, so a step's pattern repeats itself.
#include "tensor/arena.h"

#include <algorithm>
#include <new>
#include <string>
#include <utility>

#include "tensor/arena_watch.h"
#include "tensor/cuda/region.h"
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

namespace tessera {
namespace {
constexpr int64_t kReserved = int64_t{1} << 40;
constexpr int64_t kHostAlignment = 64, kDeviceAlignment = 256;

// Under AddressSanitizer what is not handed out may not be touched, and a gap lies behind every block.
#ifdef __SANITIZE_ADDRESS__
constexpr bool kGaps = true;
void forbid(const std::byte* p, int64_t bytes) { __asan_poison_memory_region(p, static_cast<size_t>(bytes)); }
void permit(const std::byte* p, int64_t bytes) { __asan_unpoison_memory_region(p, static_cast<size_t>(bytes)); }
#else
constexpr bool kGaps = false;
void forbid(const std::byte*, int64_t) {}
void permit(const std::byte*, int64_t) {}
#endif

int64_t rounded(int64_t bytes, Device device) {
  const int64_t alignment = device == Device::cuda ? kDeviceAlignment : kHostAlignment;
  return std::max<int64_t>(alignment, (bytes + alignment - 1) / alignment * alignment) + (kGaps ? alignment : 0);
}
}  // namespace

std::string_view name_of(Category category) {
  constexpr std::array<std::string_view, kCategories> names = {"parameters",  "gradients", "optimizer",
                                                               "activations", "workspace", "communication"};
  return names[static_cast<size_t>(category)];
}

Arena::Arena(std::unique_ptr<Region> region) : region_(std::move(region)) {
  if (device() == Device::cpu) return;
  host_ = make_arena();
  if constexpr (kWithCuda) cuda::open_stream(*this);
}

Arena::~Arena() {
  permit(region_->base(), top_);
  if constexpr (kWithCuda)
    if (device() == Device::cuda) cuda::finish_stream(*this);
  while (!locals_.empty()) locals_.pop_back();
}

void* Arena::local(std::type_index type) const {
  const auto found = std::ranges::find(locals_, type, [](const auto& local) { return local.first; });
  return found == locals_.end() ? nullptr : found->second.get();
}

ArenaPtr Arena::host() { return host_ ? host_ : shared_from_this(); }

ArenaPtr make_arena() { return std::make_shared<Arena>(host_region(kReserved)); }
ArenaPtr make_shared_arena() { return std::make_shared<Arena>(shared_region()); }
ArenaPtr make_file_arena(const std::filesystem::path& directory) {
  return std::make_shared<Arena>(file_region(directory));
}
ArenaPtr make_pinned_arena() {
  if constexpr (kWithCuda)
    return std::make_shared<Arena>(cuda::pinned_region());
  else
    throw Error("this program was built without CUDA; configure with -DTESSERA_CUDA=ON");
}
ArenaPtr make_arena(Device device) {
  if (device == Device::cpu) return make_arena();
  if constexpr (kWithCuda) return std::make_shared<Arena>(cuda::device_region());
  throw Error("this program was built without CUDA; configure with -DTESSERA_CUDA=ON, or use `device` cpu");
}

std::byte* Arena::allocate(int64_t bytes, Category category) {
  const int64_t need = rounded(bytes, device());
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
    if (fixed_)
      throw Error("[arena] " + std::to_string(bytes) + " bytes of " + std::string(name_of(category)) +
                  " do not fit what is free of " + std::to_string(top_) +
                  " bytes, and nothing may be added while a step is captured; `cuda_graph` off runs without");
    const auto refuse = [&](const std::string& of) {
      throw OutOfMemory("[arena] " + std::to_string(bytes) + " bytes of " + std::string(name_of(category)) +
                        " do not fit beside the " + std::to_string(total_.live) + " in use" + of + " on the " +
                        std::string(name_of(device())));
    };
    if (need > region_->capacity() - at) refuse(" of " + std::to_string(region_->capacity()));
    const int64_t before = std::exchange(top_, at + need);
    try {
      region_->commit(top_);
    } catch (const std::bad_alloc&) {
      top_ = before;
      refuse("");
    } catch (...) {
      top_ = before;
      throw;
    }
    if (extends) free_.erase(last);
  }
  forbid(region_->base() + at, need);
  permit(region_->base() + at, bytes);
  count(category, bytes);
  return region_->base() + at;
}

void Arena::release(std::byte* block, int64_t bytes, Category category) {
  std::lock_guard lock(mutex_);
  int64_t at = block - region_->base(), size = rounded(bytes, device());
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

namespace {

// What is kept of a watcher in its arena. The arena's own lock is held when it is told, and its lock inside of that.
struct Watched {
  std::mutex mutex;
  ArenaWatcher watcher;
  void tell(const std::array<int64_t, kCategories>& live) {
    const std::lock_guard lock(mutex);
    if (watcher) watcher(live);
  }
};

}  // namespace

void watch(Arena& arena, ArenaWatcher watcher) {
  auto& watched = arena.local<Watched>();
  {
    const std::lock_guard lock(watched.mutex);
    watched.watcher = std::move(watcher);
  }
  std::array<int64_t, kCategories> live = {};
  for (size_t c = 0; c < live.size(); ++c) live[c] = arena.usage(static_cast<Category>(c)).live;
  watched.tell(live);
}

void Arena::count(Category category, int64_t bytes) {
  for (Usage* u : {&usage_[static_cast<size_t>(category)], &total_}) {
    u->live += bytes;
    u->peak = std::max(u->peak, u->live);
  }
  void* const watched = local(typeid(Watched));
  if (!watched) return;
  std::array<int64_t, kCategories> live = {};
  for (size_t c = 0; c < live.size(); ++c) live[c] = usage_[c].live;
  static_cast<Watched*>(watched)->tell(live);
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

Arena::Layout Arena::layout() const {
  std::lock_guard lock(mutex_);
  return {top_, free_};
}

void Arena::fix(bool fixed) {
  std::lock_guard lock(mutex_);
  fixed_ = fixed;
}

void Arena::lend(bool lent) {
  std::lock_guard lock(mutex_);
  lent_ += lent ? 1 : -1;
  if (lent_ != (lent ? 1 : 0)) return;  // one of several
  for (const auto& [at, bytes] : free_) (lent ? permit : forbid)(region_->base() + at, bytes);
}

void Arena::reset_peaks() {
  std::lock_guard lock(mutex_);
  for (Usage& u : usage_) u.peak = u.live;
  total_.peak = total_.live;
}

}  // namespace tessera
