// Communicators, and the calls of a group on their way to a stream.

#include <algorithm>
#include <cstdlib>
#include <system_error>
#include <thread>

#include "tests/cuda_emulator/nccl_exchange.h"
#include "tests/cuda_emulator/streams.h"

namespace tessera::emulator {
namespace {

constexpr int kAsks = 2;  // that a communicator which does not block answers "in progress", after each call

// The part of a communicator that a rank's tasks use; they may outlive the communicator.
struct Rank {
  std::shared_ptr<NcclExchange> exchange;
  int rank = 0;
  std::atomic<bool> aborted = false;
};

struct Launch {
  cudaStream_t stream;
  std::vector<NcclCall> calls;
};

// Comes to each call when it is run, and is done when all of them are.
class Collective {
 public:
  Collective(std::shared_ptr<Rank> rank, std::vector<NcclCall> calls)
      : rank_(std::move(rank)), calls_(std::move(calls)) {}
  bool done() {
    if (rank_->aborted) return true;
    if (ends_.empty())
      for (const NcclCall& call : calls_) ends_.push_back(rank_->exchange->come(rank_->rank, call));
    return std::all_of(ends_.begin(), ends_.end(), [](const auto& is_done) { return is_done(); });
  }

 private:
  std::shared_ptr<Rank> rank_;
  std::vector<NcclCall> calls_;
  std::vector<std::function<bool()>> ends_;
};

}  // namespace
}  // namespace tessera::emulator

using namespace tessera::emulator;

struct EmulatedCommunicator {
  std::shared_ptr<Rank> rank;
  bool blocking = true;
  int asks = 0;                                              // still to be answered "in progress"
  std::vector<Launch> waiting = {};                          // for the stream
  std::shared_ptr<int> in_graphs = std::make_shared<int>();  // held by what was captured

  void launch() {
    for (const Launch& each : std::exchange(waiting, {}))
      push(each.stream, [of = rank, calls = each.calls, held = each.stream->capture ? in_graphs : nullptr] {
        return [collective = std::make_shared<Collective>(of, calls)] { return collective->done(); };
      });
  }
  void add(const Launch& launched) {
    waiting.push_back(launched);
    asks = blocking ? 0 : kAsks;
    if (blocking) launch();
  }
};

namespace {

struct Group {
  struct Entry {
    ncclComm_t comm;
    Launch launch;
  };
  int depth = 0;
  std::vector<Entry> entries;
};
thread_local Group group;

void end_group() {
  for (const Group::Entry& entry : std::exchange(group.entries, {})) entry.comm->add(entry.launch);
}

// A captured collective whose buffers NCCL would register as one piece of memory.
bool registers_pieces(cudaStream_t stream) {
  const char* const said = std::getenv("NCCL_GRAPH_REGISTER");
  return stream->capture && (!said || std::strcmp(said, "0") != 0);
}

ncclResult_t call(ncclComm_t comm, cudaStream_t stream, const NcclCall& made) {
  if (!comm || !stream || made.root < 0 || made.root >= comm->rank->exchange->ranks()) return ncclInvalidArgument;
  if (registers_pieces(stream)) return ncclSystemError;
  Group::Entry* last = nullptr;
  for (Group::Entry& entry : group.entries)
    if (entry.comm == comm && entry.launch.stream == stream) last = &entry;
  if (last)
    last->launch.calls.push_back(made);
  else
    group.entries.push_back({comm, {stream, {made}}});
  if (group.depth == 0) end_group();
  return comm->blocking ? ncclSuccess : ncclInProgress;
}

}  // namespace

const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclInvalidArgument:
      return "invalid argument";
    case ncclInvalidUsage:
      return "invalid usage: the ranks ask for different things";
    case ncclInProgress:
      return "NCCL operation in progress";
    case ncclSystemError:
      return "system error: the process that has made the id cannot be reached, or NCCL_GRAPH_REGISTER is not 0";
    default:
      return "internal error";
  }
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::memset(id->internal, 0, sizeof(id->internal));
  const std::string name = new_exchange();
  std::memcpy(id->internal, name.data(), name.size());
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t* config) {
  if (ranks < 1 || rank < 0 || rank >= ranks) return ncclInvalidArgument;
  auto own = std::make_shared<Rank>();
  try {
    own->exchange = exchange_named(id.internal, ranks);
  } catch (const std::system_error&) {
    return ncclSystemError;
  }
  own->rank = rank;
  own->exchange->join();
  *comm = new EmulatedCommunicator{.rank = own, .blocking = config->blocking != 0};
  while ((*comm)->blocking && !own->exchange->complete()) std::this_thread::yield();
  return (*comm)->blocking ? ncclSuccess : ncclInProgress;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* state) {
  if (!comm) return ncclInvalidArgument;
  const bool on_its_way = comm->asks > 0 || !comm->rank->exchange->complete();
  if (comm->asks > 0) --comm->asks;
  if (!on_its_way) comm->launch();
  *state = comm->rank->exchange->mismatched() ? ncclInvalidUsage : on_its_way ? ncclInProgress : ncclSuccess;
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  if (!comm) return ncclInvalidArgument;
  comm->rank->exchange->close();
  comm->rank->aborted = true;
  while (comm->in_graphs.use_count() > 1) std::this_thread::yield();
  delete comm;
  return ncclSuccess;
}

ncclResult_t ncclGroupStart() {
  ++group.depth;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  if (group.depth == 0) return ncclInvalidUsage;
  if (--group.depth == 0) end_group();
  return ncclSuccess;
}

ncclResult_t ncclAllReduce(const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
  return call(comm, stream,
              {.kind = NcclCall::Kind::all_reduce, .in = in, .out = out, .count = count, .type = type, .op = op});
}
ncclResult_t ncclReduceScatter(const void* in, void* out, size_t count_each, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
  return call(
      comm, stream,
      {.kind = NcclCall::Kind::reduce_scatter, .in = in, .out = out, .count = count_each, .type = type, .op = op});
}
ncclResult_t ncclAllGather(const void* in, void* out, size_t count_each, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
  return call(comm, stream,
              {.kind = NcclCall::Kind::all_gather, .in = in, .out = out, .count = count_each, .type = type});
}
ncclResult_t ncclBroadcast(const void* in, void* out, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream) {
  return call(comm, stream,
              {.kind = NcclCall::Kind::broadcast, .in = in, .out = out, .count = count, .type = type, .root = root});
}
ncclResult_t ncclReduce(const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                        ncclComm_t comm, cudaStream_t stream) {
  return call(
      comm, stream,
      {.kind = NcclCall::Kind::reduce, .in = in, .out = out, .count = count, .type = type, .op = op, .root = root});
}
ncclResult_t ncclSend(const void* data, size_t count, ncclDataType_t type, int to, ncclComm_t comm,
                      cudaStream_t stream) {
  return call(comm, stream, {.kind = NcclCall::Kind::send, .in = data, .count = count, .type = type, .root = to});
}
ncclResult_t ncclRecv(void* data, size_t count, ncclDataType_t type, int from, ncclComm_t comm, cudaStream_t stream) {
  return call(comm, stream, {.kind = NcclCall::Kind::recv, .out = data, .count = count, .type = type, .root = from});
}
