// One piece of a GPU's memory, taken at once: for drivers without virtual memory management, and for who asks for it.
#include <charconv>
#include <cstdlib>
#include <string_view>

#include "tensor/cuda/gpus.h"
#include "tensor/cuda/region.h"
#include "tensor/cuda/runtime.h"

namespace tessera::cuda {
namespace {

constexpr std::string_view kAsked = "plain";
constexpr int64_t kPage = int64_t{2} << 20;

class PlainRegion final : public Region {
 public:
  PlainRegion(int64_t bytes, const std::string& why) : Region(Device::cuda) {
    if (const int gpus = gpu_count(); gpus > 1)
      throw Error("[arena] memory that is taken at once is for a machine with one GPU, found " + std::to_string(gpus));
    size_t room = 0, all = 0;
    check(cudaMemGetInfo(&room, &all), "arena");
    if (bytes == 0) bytes = static_cast<int64_t>(room / 10 * 9) / kPage * kPage;
    void* at = nullptr;
    if (const cudaError_t result = expected(cudaMalloc(&at, static_cast<size_t>(bytes))); result != cudaSuccess)
      throw OutOfMemory("[arena] CUDA: cannot take " + std::to_string(bytes) + " bytes at once of the " +
                        std::to_string(room) + " that are free: " + cudaGetErrorString(result) +
                        "; where ranks share a GPU, TESSERA_GPU_ARENA=plain:GIB says what each of them takes");
    base_ = static_cast<std::byte*>(at);
    capacity_ = bytes;
    note_ = "memory of the GPU is taken at once, " + std::to_string(bytes >> 20) + " MiB (" + why + ")";
  }
  ~PlainRegion() override { cudaFree(base_); }
  void commit(int64_t) override {}
};

}  // namespace

std::unique_ptr<Region> plain_region(const std::string& why) { return std::make_unique<PlainRegion>(0, why); }

std::unique_ptr<Region> asked_region() {
  const char* const asked = std::getenv("TESSERA_GPU_ARENA");
  if (!asked || *asked == 0) return nullptr;
  const std::string_view text = asked;
  int64_t gib = 0;
  if (text.starts_with("plain:")) {
    const char* const end = text.data() + text.size();
    const auto [at, error] = std::from_chars(text.data() + 6, end, gib);
    if (error != std::errc() || at != end || gib < 1 || gib > 4096) gib = -1;
  }
  if (gib < 0 || (gib == 0 && text != kAsked))
    throw Error("TESSERA_GPU_ARENA: expected plain, or plain:GIB with a whole number of GiB, found '" +
                std::string(text) + "'");
  return std::make_unique<PlainRegion>(gib << 30, "TESSERA_GPU_ARENA is " + std::string(text));
}

}  // namespace tessera::cuda
