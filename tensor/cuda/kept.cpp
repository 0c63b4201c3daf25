// Values that come again in every step, in pinned memory of an arena.
#include <cstddef>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>

#include "tensor/cuda/copy.h"

namespace tessera::cuda {
namespace {

// Held by the arena (Arena::local), and so there as long as a captured copy may read it.
class KeptValues {
 public:
  const std::byte* find(std::span<const std::byte> values) {
    const std::string_view bytes(reinterpret_cast<const char*>(values.data()), values.size());
    const std::lock_guard lock(mutex_);
    auto found = pinned_.find(bytes);
    if (found == pinned_.end()) {
      const std::shared_ptr<std::byte> memory = pinned_memory(static_cast<int64_t>(bytes.size()));
      std::memcpy(memory.get(), bytes.data(), bytes.size());
      found = pinned_.emplace(bytes, memory).first;
    }
    return found->second.get();
  }

 private:
  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<std::byte>, std::less<>> pinned_;
};

}  // namespace

void copy_kept(const Tensor& to, std::span<const std::byte> values) {
  if (!values.empty()) copy_later(to, to.arena()->local<KeptValues>().find(values));
}

}  // namespace tessera::cuda
