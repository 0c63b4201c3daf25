// Regions of the host: anonymous memory, memory that processes share, and a mapped file.
#include "tensor/region.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <mutex>
#include <new>
#include <set>
#include <string>

#include "tensor/error.h"
#include "tensor/file_system.h"

namespace tessera {
namespace {

constexpr int64_t kLeastReserved = int64_t{1} << 30;
constexpr int64_t kFileCapacity = int64_t{1} << 38, kFileGrowth = int64_t{1} << 22;

// ThreadSanitizer knows 1.5 TB of addresses, and the arenas of many ranks reserve more.
#ifdef __SANITIZE_THREAD__
constexpr int64_t kMostReserved = int64_t{4} << 30;
#else
constexpr int64_t kMostReserved = std::numeric_limits<int64_t>::max();
#endif

// Places for regions that grow, far from where the system puts what it is asked for without an address.
class Places {
 public:
  static constexpr int64_t kSize = int64_t{1} << 36;
  static int64_t take() {
    const std::lock_guard lock(mutex());
    int64_t place = 0;
    while (taken().contains(place)) ++place;
    taken().insert(place);
    return place;
  }
  static void give_back(int64_t place) {
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
    capacity_ = std::min(capacity, kMostReserved);
    void* const p = mmap(nullptr, static_cast<size_t>(capacity_), PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p != MAP_FAILED) {
      use(p, capacity_);
      base_ = static_cast<std::byte*>(p);
      return;
    }
    // A limit on address space (ulimit -v, strict overcommit): all regions share it, and each takes what it uses.
    place_ = Places::take();
    capacity_ = std::min(capacity_, Places::kSize);
    base_ = Places::address(place_);
  }
  ~HostRegion() override {
    if (mapped_ > 0) munmap(base_, static_cast<size_t>(mapped_));
    if (place_ >= 0) Places::give_back(place_);
  }
  void commit(int64_t bytes) override {  // memory comes by the first touch
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
    madvise(p, static_cast<size_t>(bytes), MADV_HUGEPAGE);  // a hint: without huge pages all is slower, nothing else
    mapped_ += bytes;
  }

  int64_t mapped_ = 0, place_ = -1;
};

class SharedRegion final : public Region {
 public:
  SharedRegion() : Region(Device::cpu) {
    static std::atomic<int64_t> made{0};
    capacity_ = std::min(2 * int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE), kMostReserved);
    file_ = {memfd_create("tessera", MFD_CLOEXEC), made++};
    void* p = reserve();
    // A limit on address space may leave room for less.
    while (p == MAP_FAILED && file_.descriptor >= 0 && capacity_ > kLeastReserved) {
      capacity_ /= 2;
      p = reserve();
    }
    if (p == MAP_FAILED) {
      const std::string cause = std::strerror(errno);
      if (file_.descriptor >= 0) close(file_.descriptor);
      throw Error("[arena] cannot make " + std::to_string(capacity_) + " bytes of shared memory: " + cause);
    }
    madvise(p, static_cast<size_t>(capacity_), MADV_HUGEPAGE);  // a hint
    base_ = static_cast<std::byte*>(p);
  }
  // Others may have it mapped for as long as they live, so unmapping alone would free nothing.
  ~SharedRegion() override {
    fallocate(file_.descriptor, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, capacity_);
    munmap(base_, static_cast<size_t>(capacity_));
    close(file_.descriptor);
  }
  void commit(int64_t) override {}  // by the first touch

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
    capacity_ = kFileCapacity;
    const auto refuse = [&](const char* what) {
      const std::string cause = std::strerror(errno);
      if (backing_ >= 0) close(backing_);
      throw OutputError(directory.string() + ": cannot " + what + " a file to keep tensors in: " + cause +
                        "; TMPDIR names another folder");
    };
    std::string name = (directory / "tessera-XXXXXX").string();
    backing_ = mkostemp(name.data(), O_CLOEXEC);
    if (backing_ < 0) refuse("make");
    unlink(name.c_str());  // gone when this process is
    if (ftruncate(backing_, capacity_) != 0) refuse("size");
    void* const p = mmap(nullptr, static_cast<size_t>(capacity_), PROT_READ | PROT_WRITE, MAP_SHARED, backing_, 0);
    if (p == MAP_FAILED) refuse("map");
    base_ = static_cast<std::byte*>(p);
  }
  ~FileRegion() override {
    munmap(base_, static_cast<size_t>(capacity_));
    close(backing_);
  }

  // A page of a file that finds no room on the disk when it is written to ends the process, so room is made before.
  void commit(int64_t bytes) override {
    if (bytes <= promised_) return;
    const int64_t wanted = (bytes + kFileGrowth - 1) / kFileGrowth * kFileGrowth;
    if (const int error = make_room(backing_, promised_, wanted); error != 0)
      throw OutputError("no room for " + std::to_string(wanted) +
                        " bytes of tensors kept in a file: " + std::strerror(error));
    promised_ = wanted;
  }

 private:
  int backing_ = -1;
  int64_t promised_ = 0;  // bytes of room that the disk has promised
};

}  // namespace

std::unique_ptr<Region> host_region(int64_t capacity) { return std::make_unique<HostRegion>(capacity); }
std::unique_ptr<Region> shared_region() { return std::make_unique<SharedRegion>(); }
std::unique_ptr<Region> file_region(const std::filesystem::path& directory) {
  return std::make_unique<FileRegion>(directory);
}

}  // namespace tessera
