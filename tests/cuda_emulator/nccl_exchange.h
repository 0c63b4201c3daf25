// Where the ranks of one emulated NCCL communicator meet: who has come with which operation, and what is moved when all
// have. The place is in the process that has made the communicator's id; ranks of other processes come to it through a
// socket (nccl_processes.cpp), and their arrays are read and written where they are.
#pragma once
#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "tests/cuda_emulator/nccl.h"

namespace tessera::emulator {

// One call as a rank makes it. `count` is as NCCL counts it: of one rank's piece, where there are pieces.
struct NcclCall {
  enum class Kind : uint8_t { all_reduce, reduce_scatter, all_gather, broadcast, reduce, send, recv };
  Kind kind = Kind::all_reduce;
  const void* in = nullptr;
  void* out = nullptr;
  size_t count = 0;
  ncclDataType_t type = ncclFloat32;
  ncclRedOp_t op = ncclSum;
  int root = 0;       // or the other end of a message
  pid_t process = 0;  // where the arrays lie; 0: in this one

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
  // In progress until all have joined; invalid usage once two have come to calls that do not agree.
  virtual ncclResult_t state() = 0;
  // A rank has come to a call of its own; the last one moves the data. Says whether that has been done.
  virtual std::function<bool()> come(int rank, const NcclCall& call) = 0;
  // From now on nothing is moved: the memory of a rank may go.
  virtual void close() = 0;
};

std::string new_exchange();  // its name
// Throws std::system_error where the process that has made the name cannot be reached.
std::shared_ptr<NcclExchange> exchange_named(const std::string& name, int ranks);
// Ranks of other processes are let in, and the way to those of another process (nccl_processes.cpp).
void let_others_in();
std::shared_ptr<NcclExchange> exchange_of_another(pid_t process, const std::string& name, int ranks);

size_t element_size(ncclDataType_t type);
// Carries out the calls of all ranks, which agree. Returns false where the memory of another process cannot be reached.
bool move_data(const std::vector<NcclCall>& calls);

}  // namespace tessera::emulator
