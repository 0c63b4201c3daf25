// Host regions: anonymous memory, memory shared between processes, mapped files.
#include "tensor/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "base/write_file.h"
#include "tensor/cuda/gpus.h"

namespace tessera {

namespace {

constexpr int64_t kMinReserved = int64_t{1} << 30;
constexpr int64_t kFileCapacity = int64_t{1} << 38, kFileGrowth = int64_t{1} << 22;

// Maximum size of one region: some 64-bit Arm kernels have 39-bit addresses, and ThreadSanitizer supports only 1.5 TB
// for all arenas together.
int64_t max_reserved() {
#ifdef __SANITIZE_THREAD__
  return int64_t{4} << 30;
#else
  static const bool narrow = [] {
    constexpr size_t kProbe = size_t{1} << 40;
    void* const p = mmap(nullptr, kProbe, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p != MAP_FAILED) munmap(p, kProbe);
    rlimit limit{};
    return p == MAP_FAILED && getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur == RLIM_INFINITY;
  }();
  return narrow ? int64_t{16} << 30 : std::numeric_limits<int64_t>::max();
#endif
}

// Addresses for regions that grow, far from where the system places mappings without a requested address.
class AddressSlots {
 public:
  static constexpr int64_t kSize = int64_t{1} << 36;
  static int64_t take() {
    const std::lock_guard lock(mutex());
    int64_t place = 0;
    while (taken().contains(place)) ++place;
    taken().insert(place);
    return place;
  }
  static void decommit(int64_t place) {
    const std::lock_guard lock(mutex());
    taken().erase(place);
  }
  static std::byte* address(int64_t place) { return reinterpret_cast<std::byte*>(kFirst + place * kSize); }

 private:
  static constexpr int64_t kFirst = int64_t{1} << 44;
  static std::mutex& mutex() {
    static std::mutex one;
    return one;
  }
  static std::set<int64_t>& taken() {
    static std::set<int64_t> all;
    return all;
  }
};

class HostRegion final : public Region {
 public:
  explicit HostRegion(int64_t capacity) : Region(Device::cpu) {
    capacity_ = std::min(capacity, max_reserved());
    void* const p = mmap(nullptr, static_cast<size_t>(capacity_), PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p != MAP_FAILED) {
      use(p, capacity_);
      base_ = static_cast<std::byte*>(p);
      return;
    }
    // Address space is limited (ulimit -v, strict overcommit), so each region maps only what it uses.
    slot_ = AddressSlots::take();
    capacity_ = std::min(capacity_, AddressSlots::kSize);
    base_ = AddressSlots::address(slot_);
  }
  ~HostRegion() override {
    if (mapped_ > 0) munmap(base_, static_cast<size_t>(mapped_));
    if (slot_ >= 0) AddressSlots::decommit(slot_);
  }
  void commit(int64_t bytes) override {
    if (bytes <= mapped_) return;
    const int64_t more = std::min(capacity_, (bytes + kStep - 1) / kStep * kStep) - mapped_;
    void* const p = mmap(base_ + mapped_, static_cast<size_t>(more), PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    use(p, more);
  }

 private:
  static constexpr int64_t kStep = int64_t{1} << 21;
  void use(void* p, int64_t bytes) {
    madvise(p, static_cast<size_t>(bytes), MADV_HUGEPAGE);  // only a hint
    mapped_ += bytes;
  }

  int64_t mapped_ = 0, slot_ = -1;
};

class SharedRegion final : public Region {
 public:
  SharedRegion() : Region(Device::cpu) {
    static std::atomic<int64_t> made{0};
    capacity_ = std::min(2 * int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE), max_reserved());
    file_ = {memfd_create("tessera", MFD_CLOEXEC), made++};
    void* p = reserve();
    // Address space may be limited.
    while (p == MAP_FAILED && file_.descriptor >= 0 && capacity_ > kMinReserved) {
      capacity_ /= 2;
      p = reserve();
    }
    if (p == MAP_FAILED) {
      const std::string cause = std::strerror(errno);
      if (file_.descriptor >= 0) close(file_.descriptor);
      throw Error("[arena] cannot reserve " + std::to_string(capacity_) + " bytes of shared memory: " + cause);
    }
    madvise(p, static_cast<size_t>(capacity_), MADV_HUGEPAGE);
    base_ = static_cast<std::byte*>(p);
  }
  // Punch a hole: unmapping frees nothing while another process has the memory mapped.
  ~SharedRegion() override {
    fallocate(file_.descriptor, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, capacity_);
    munmap(base_, static_cast<size_t>(capacity_));
    close(file_.descriptor);
  }
  void commit(int64_t) override {}  // the first touch allocates memory

 private:
  void* reserve() const {
    if (file_.descriptor < 0 || ftruncate(file_.descriptor, capacity_) != 0) return MAP_FAILED;
    return mmap(nullptr, static_cast<size_t>(capacity_), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE,
                file_.descriptor, 0);
  }
};

class FileRegion final : public Region {
 public:
  explicit FileRegion(const std::filesystem::path& directory) : Region(Device::cpu) {
    capacity_ = std::min(kFileCapacity, max_reserved());
    const auto refuse = [&](const char* what) {
      const std::string cause = std::strerror(errno);
      if (backing_ >= 0) close(backing_);
      throw OutputError(directory.string() + ": cannot " + what + " a file for tensors: " + cause +
                        "; set TMPDIR to another directory");
    };
    std::string name = (directory / "tessera-XXXXXX").string();
    backing_ = mkostemp(name.data(), O_CLOEXEC);
    if (backing_ < 0) refuse("create");
    unlink(name.c_str());  // the file disappears with this process
    if (ftruncate(backing_, capacity_) != 0) refuse("size");
    void* const p = mmap(nullptr, static_cast<size_t>(capacity_), PROT_READ | PROT_WRITE, MAP_SHARED, backing_, 0);
    if (p == MAP_FAILED) refuse("map");
    base_ = static_cast<std::byte*>(p);
  }
  ~FileRegion() override {
    munmap(base_, static_cast<size_t>(capacity_));
    close(backing_);
  }

  // Reserve disk space first: a write to a mapped page on a full disk kills the process.
  void commit(int64_t bytes) override {
    if (bytes <= reserved_) return;
    const int64_t wanted = (bytes + kFileGrowth - 1) / kFileGrowth * kFileGrowth;
    if (const int error = reserve_space(backing_, reserved_, wanted); error != 0)
      throw OutputError("no disk space for " + std::to_string(wanted) +
                        " bytes of file-backed tensors: " + std::strerror(error));
    reserved_ = wanted;
  }

 private:
  int backing_ = -1;
  int64_t reserved_ = 0;
};

}  // namespace

std::unique_ptr<Region> host_region(int64_t capacity) { return std::make_unique<HostRegion>(capacity); }
std::unique_ptr<Region> shared_region() { return std::make_unique<SharedRegion>(); }
std::unique_ptr<Region> file_region(const std::filesystem::path& directory) {
  return std::make_unique<FileRegion>(directory);
}

}  // namespace tessera

// Free neighbours are merged immediately, so every step sees the same free blocks.

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

namespace tessera {
namespace {
constexpr int64_t kReserved = int64_t{1} << 40;
constexpr int64_t kHostAlignment = 64, kDeviceAlignment = 256;

// Under AddressSanitizer, free memory is poisoned, and every block is followed by a gap.
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

std::string_view to_string(Category category) {
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
    const auto last = free_.empty() ? free_.end() : std::prev(free_.end());
    const bool extends = last != free_.end() && last->first + last->second == top_;
    if (extends) at = last->first;
    if (fixed_)
      throw Error("[arena] " + std::to_string(bytes) + " bytes of " + std::string(to_string(category)) +
                  " do not fit in the free blocks of " + std::to_string(top_) +
                  " bytes, and the arena cannot grow during a captured step; `cuda_graph` off disables capture");
    const auto refuse = [&](const std::string& of) {
      throw OutOfMemory("[arena] " + std::to_string(bytes) + " bytes of " + std::string(to_string(category)) +
                        " do not fit in addition to the " + std::to_string(total_.live) + " in use" + of + " on the " +
                        std::string(to_string(device())));
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

// This lock is acquired while the arena's lock is held.
struct Watched {
  std::mutex mutex;
  ArenaWatcher watcher;
  void notify(const std::array<int64_t, kCategories>& live) {
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
  watched.notify(live);
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
  static_cast<Watched*>(watched)->notify(live);
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

void Arena::allow_reuse(bool allowed) {
  std::lock_guard lock(mutex_);
  reuse_scopes_ += allowed ? 1 : -1;
  if (reuse_scopes_ != (allowed ? 1 : 0)) return;  // not the first scope to open or the last to close
  for (const auto& [at, bytes] : free_) (allowed ? permit : forbid)(region_->base() + at, bytes);
}

void Arena::reset_peaks() {
  std::lock_guard lock(mutex_);
  for (Usage& u : usage_) u.peak = u.live;
  total_.peak = total_.live;
}

}  // namespace tessera
