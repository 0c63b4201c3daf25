// GPU memory through the driver's virtual memory management: the arena's address range is reserved at once and backed
// as it grows, so that blocks never move.
#include <cuda.h>
#include <fmt/format.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tensor/cuda/gpus.h"
#include "tensor/cuda/runtime.h"

namespace tessera::cuda {
namespace {

constexpr int64_t kMappedAtOnce = int64_t{64} << 20;

constexpr const char* kNeeded =
    "; GPU memory allocation requires CUDA virtual memory management, which this driver or container does not support";

// Looked up by name, so that the program starts on machines without a driver.
template <class F>
F* entry(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  check(cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result), name);
  if (result != cudaDriverEntryPointSuccess)
    throw Error(fmt::format("[arena] CUDA: the driver has no {}{}", name, kNeeded));
  return reinterpret_cast<F*>(found);
}

class DeviceRegion final : public Region {
 public:
  DeviceRegion() : Region(Device::cuda) {
    int gpu = 0;
    size_t free_bytes = 0, all = 0;
    check(cudaGetDevice(&gpu), "arena");
    check(cudaMemGetInfo(&free_bytes, &all), "arena");  // the thread's first call: creates the device context
    where_.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    where_.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = gpu};
    capacity_ = static_cast<int64_t>(all) / kMappedAtOnce * kMappedAtOnce;
    find_readers(gpu);
    CUdeviceptr at = 0;
    checked(reserve_(&at, static_cast<size_t>(capacity_), 0, 0, 0), "reserve", capacity_);
    base_ = reinterpret_cast<std::byte*>(at);
  }
  ~DeviceRegion() override {
    const auto at = reinterpret_cast<CUdeviceptr>(base_);
    if (mapped_ > 0) unmap_(at, static_cast<size_t>(mapped_));
    for (const CUmemGenericAllocationHandle handle : handles_) release_(handle);
    free_(at, static_cast<size_t>(capacity_));
  }

  void commit(int64_t bytes) override {
    if (bytes <= mapped_) return;
    const int64_t more = (bytes - mapped_ + kMappedAtOnce - 1) / kMappedAtOnce * kMappedAtOnce;
    CUmemGenericAllocationHandle handle = 0;
    checked(create_(&handle, static_cast<size_t>(more), &where_, 0), "allocate", more);
    handles_.push_back(handle);
    const auto at = reinterpret_cast<CUdeviceptr>(base_ + mapped_);
    checked(map_(at, static_cast<size_t>(more), 0, handle, 0), "map", more);
    mapped_ += more;
    checked(allow_(at, static_cast<size_t>(more), access_.data(), access_.size()), "enable access to", more);
    is_proven_ = true;
  }

 private:
  // Ranks that are threads access each other's arrays, so grant access to this GPU and its peers.
  void find_readers(int gpu) {
    int gpus = 0;
    check(cudaGetDeviceCount(&gpus), "arena");
    for (int other = 0; other < gpus; ++other) {
      int reaches = 1;
      if (other != gpu) check(cudaDeviceCanAccessPeer(&reaches, other, gpu), "arena");
      if (reaches != 0)
        access_.push_back({.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = other},
                           .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE});
    }
  }

  void checked(CUresult result, const char* what, int64_t bytes) const {
    if (result == CUDA_SUCCESS) return;
    const char* cause = nullptr;
    explain_(result, &cause);
    const std::string message = fmt::format("[arena] CUDA: cannot {} {} bytes in addition to the {} in use: {}", what,
                                            bytes, mapped_, cause ? cause : "unknown");
    if (result == CUDA_ERROR_OUT_OF_MEMORY) throw OutOfMemory(message);
    throw Error(message + (is_proven_ ? "" : kNeeded), Status::communication);
  }

  decltype(&cuMemAddressReserve) reserve_ = entry<decltype(cuMemAddressReserve)>("cuMemAddressReserve");
  decltype(&cuMemAddressFree) free_ = entry<decltype(cuMemAddressFree)>("cuMemAddressFree");
  decltype(&cuMemCreate) create_ = entry<decltype(cuMemCreate)>("cuMemCreate");
  decltype(&cuMemRelease) release_ = entry<decltype(cuMemRelease)>("cuMemRelease");
  decltype(&cuMemMap) map_ = entry<decltype(cuMemMap)>("cuMemMap");
  decltype(&cuMemUnmap) unmap_ = entry<decltype(cuMemUnmap)>("cuMemUnmap");
  decltype(&cuMemSetAccess) allow_ = entry<decltype(cuMemSetAccess)>("cuMemSetAccess");
  decltype(&cuGetErrorString) explain_ = entry<decltype(cuGetErrorString)>("cuGetErrorString");
  CUmemAllocationProp where_{};
  std::vector<CUmemAccessDesc> access_;
  std::vector<CUmemGenericAllocationHandle> handles_;
  int64_t mapped_ = 0;
  bool is_proven_ = false;
};

}  // namespace

// Commits a first chunk, because only a call reveals functions that a driver or container lacks.
std::unique_ptr<Region> device_region() {
  auto region = std::make_unique<DeviceRegion>();
  region->commit(1);
  return region;
}

}  // namespace tessera::cuda
