// What the NCCL transport needs of NCCL and CUDA, so that a test can stand in for both and see every call.
//
// All calls of one communicator come from one thread at a time. None of them waits for other ranks: finished() says
// when what was asked for is done. What NCCL does runs on a stream of the communicator's own, beside the rank's
// kernels.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "parallel/comm/call.h"

namespace tessera {

struct NcclId {
  alignas(8) std::array<char, 128> bytes{};
};

class NcclApi {
 public:
  NcclApi() = default;
  virtual ~NcclApi() = default;
  NcclApi(const NcclApi&) = delete;
  NcclApi& operator=(const NcclApi&) = delete;

  virtual NcclId make_id() = 0;
  virtual void begin(int ranks, const NcclId& id, int rank) = 0;  // joins the communicator
  virtual bool finished() = 0;                                    // throws CommError when NCCL has met an error
  virtual void abort() = 0;                                       // ends what is under way; nothing may follow

  virtual void group_start() = 0;
  virtual void group_end() = 0;
  virtual void all_reduce(const void* in, void* out, int64_t count, DType dtype, Reduction reduction) = 0;
  virtual void reduce_scatter(const void* in, void* out, int64_t count_each, DType dtype, Reduction reduction) = 0;
  virtual void all_gather(const void* in, void* out, int64_t count_each, DType dtype) = 0;
  virtual void broadcast(const void* in, void* out, int64_t count, DType dtype, int root) = 0;
  virtual void reduce(const void* in, void* out, int64_t count, DType dtype, Reduction reduction, int root) = 0;
  virtual void send(const void* data, int64_t count, DType dtype, int to) = 0;
  virtual void recv(void* data, int64_t count, DType dtype, int from) = 0;

  // What is asked for from now on comes after all that is queued on the arena's stream.
  virtual void after(Arena& gpu) = 0;
  // The same library and device, for another communicator.
  virtual std::unique_ptr<NcclApi> another() const = 0;
};

// NCCL and CUDA as they are. `device`: of this rank. Throws Error where this build or this machine has none, or fewer
// devices. Defined where NCCL is on.
std::unique_ptr<NcclApi> real_nccl(int device, int devices_needed);

}  // namespace tessera
