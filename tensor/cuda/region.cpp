// Pinned memory of the host, registered with the GPUs piece by piece as it is handed out.
#include "tensor/cuda/region.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <vector>

#include "tensor/cuda/runtime.h"

namespace tessera::cuda {

namespace {

constexpr int64_t kCapacity = int64_t{1} << 38, kPinnedAtOnce = int64_t{16} << 20;

class PinnedRegion final : public Region {
 public:
  PinnedRegion() : Region(Device::cpu) {
    int gpu = 0, same_address = 0;
    check(cudaGetDevice(&gpu), "offload");
    check(cudaDeviceGetAttribute(&same_address, cudaDevAttrCanUseHostPointerForRegisteredMem, gpu), "offload");
    if (same_address == 0) throw Error("`offload`: this GPU cannot reach the host's memory at the host's addresses");
    void* const p =
        mmap(nullptr, kCapacity, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED)
      throw Error("[arena] cannot reserve " + std::to_string(kCapacity) +
                  " bytes of address space: " + std::strerror(errno));
    base_ = static_cast<std::byte*>(p);
    capacity_ = kCapacity;
  }
  ~PinnedRegion() override {
    cudaDeviceSynchronize();  // kernels may still use it
    for (int64_t at = 0; at < pinned_; at += kPinnedAtOnce) cudaHostUnregister(base_ + at);
    munmap(base_, kCapacity);
  }

  void commit(int64_t bytes) override {
    for (; pinned_ < bytes; pinned_ += kPinnedAtOnce)
      if (const cudaError_t result = expected(cudaHostRegister(base_ + pinned_, static_cast<size_t>(kPinnedAtOnce),
                                                               cudaHostRegisterPortable | cudaHostRegisterMapped));
          result != cudaSuccess)
        throw Error("[arena] CUDA: cannot pin " + std::to_string(kPinnedAtOnce) +
                    " bytes of the host's memory beside the " + std::to_string(pinned_) +
                    " in use: " + cudaGetErrorString(result));
  }

 private:
  int64_t pinned_ = 0;
};

}  // namespace

std::unique_ptr<Region> pinned_region() { return std::make_unique<PinnedRegion>(); }

}  // namespace tessera::cuda
