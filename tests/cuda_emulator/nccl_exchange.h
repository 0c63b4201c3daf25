// Where the ranks of one emulated NCCL communicator meet: who has come with which operation, and what is moved when all
// have.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <utility>
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
  int root = 0;  // or the other end of a message

  bool is_message() const { return kind == Kind::send || kind == Kind::recv; }
};

class NcclExchange {
 public:
  // An operation of all ranks, or a message between two.
  struct Meeting {
    std::vector<NcclCall> calls;  // by rank; of a message the sender's, then the receiver's
    std::vector<bool> came;
    bool done = false;
  };
  explicit NcclExchange(int ranks) : ranks_(ranks), collectives_(static_cast<size_t>(ranks), 0) {}

  int ranks() const { return ranks_; }
  void join();
  bool complete();  // all have joined
  // A rank has come to a call of its own; the last one moves the data.
  std::shared_ptr<Meeting> come(int rank, const NcclCall& call);
  bool is_done(const Meeting& meeting);
  bool mismatched();
  // From now on nothing is moved: the memory of a rank may go.
  void close();

 private:
  std::shared_ptr<Meeting> place_of(int rank, const NcclCall& call);
  void move(Meeting& meeting);

  const int ranks_;
  std::mutex mutex_;
  int joined_ = 0;
  bool mismatched_ = false, closed_ = false;
  std::vector<uint64_t> collectives_;                                    // that each rank has come to
  std::map<uint64_t, std::weak_ptr<Meeting>> meetings_;                  // by number
  std::map<std::pair<int, int>, std::pair<uint64_t, uint64_t>> counts_;  // from, to -> messages sent, received
  std::map<std::tuple<int, int, uint64_t>, std::weak_ptr<Meeting>> messages_;
};

size_t size_of(ncclDataType_t type);
// What the calls of all ranks, which agree, do.
void move_data(const std::vector<NcclCall>& calls);

}  // namespace tessera::emulator
