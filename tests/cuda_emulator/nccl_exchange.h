// Rendezvous of the ranks of an emulated NCCL communicator: matches their calls and moves the data when all have
// arrived. It resides in the process that created the communicator's id; ranks of other processes connect through a
// socket (nccl_processes.cpp), and their arrays are accessed in place.
#pragma once
#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "tests/cuda_emulator/nccl.h"

namespace tessera::emulator {

// One call of a rank. `count` is NCCL's count: elements per rank's chunk for collectives with chunks.
struct NcclCall {
  enum class Kind : uint8_t { all_reduce, reduce_scatter, all_gather, broadcast, reduce, send, recv };
  Kind kind = Kind::all_reduce;
  const void* in = nullptr;
  void* out = nullptr;
  size_t count = 0;
  ncclDataType_t type = ncclFloat32;
  ncclRedOp_t op = ncclSum;
  int root = 0;       // or the peer of a message
  pid_t process = 0;  // process that owns the arrays; 0: this one

  bool is_message() const { return kind == Kind::send || kind == Kind::recv; }
};

class NcclExchange {
 public:
  NcclExchange() = default;
  virtual ~NcclExchange() = default;
  NcclExchange(const NcclExchange&) = delete;
  NcclExchange& operator=(const NcclExchange&) = delete;

  virtual int ranks() const = 0;
  virtual void join() = 0;
  // In progress until all ranks have joined; invalid usage after two mismatched calls.
  virtual ncclResult_t state() = 0;
  // Registers a rank's next call; the last rank moves the data. Returns a function that reports whether that has
  // happened.
  virtual std::function<bool()> come(int rank, const NcclCall& call) = 0;
  // Stops moving data, because the memory of a rank may be freed.
  virtual void close() = 0;
};

std::string new_exchange();  // returns its name
// Throws std::system_error if the process that created the name cannot be reached.
std::shared_ptr<NcclExchange> exchange_named(const std::string& name, int ranks);
// Accepts ranks of other processes, and connects to those of another process (nccl_processes.cpp).
void accept_processes();
std::shared_ptr<NcclExchange> remote_exchange(pid_t process, const std::string& name, int ranks);

size_t element_size(ncclDataType_t type);
// Executes the matching calls of all ranks. Returns false if the memory of another process cannot be accessed.
bool move_data(const std::vector<NcclCall>& calls);

}  // namespace tessera::emulator
