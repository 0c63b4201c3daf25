// Communicators and grouped calls.

#include <algorithm>
#include <cstdlib>
#include <system_error>
#include <thread>

#include "tests/cuda_emulator/nccl_exchange.h"
#include "tests/cuda_emulator/streams.h"

namespace tessera::emulator {
namespace {

constexpr int kAsks = 2;  // number of "in progress" answers of a nonblocking communicator after each call

// State of a communicator used by a rank's tasks, which may outlive the communicator.
struct Rank {
  std::shared_ptr<NcclExchange> exchange;
  int rank = 0;
  std::atomic<bool> aborted = false;
};

// Calls of a group on one communicator and stream.
struct Launch {
  ncclComm_t comm;
  cudaStream_t stream;
  std::vector<NcclCall> calls;
};

}  // namespace
}  // namespace tessera::emulator

using namespace tessera::emulator;

struct EmulatedCommunicator {
  std::shared_ptr<Rank> rank;
  bool blocking = true;
  int asks = 0;                                              // remaining "in progress" answers
  std::vector<Launch> waiting = {};                          // not yet queued on the stream
  std::shared_ptr<int> in_graphs = std::make_shared<int>();  // shared with captured work

  void launch() {
    for (const Launch& each : std::exchange(waiting, {}))
      push(each.stream, [of = rank, calls = each.calls, held = each.stream->capture ? in_graphs : nullptr] {
        // The task issues its calls when it first runs, and is done when all of them are.
        return [of, calls, ends = std::vector<std::function<bool()>>()]() mutable {
          if (of->aborted) return true;
          if (ends.empty())
            for (const NcclCall& call : calls) ends.push_back(of->exchange->come(of->rank, call));
          return std::ranges::all_of(ends, [](const auto& is_done) { return is_done(); });
        };
      });
  }
  void add(const Launch& launched) {
    waiting.push_back(launched);
    asks = blocking ? 0 : kAsks;
    if (blocking) launch();
  }
};

namespace {

using Kind = NcclCall::Kind;

thread_local int depth = 0;  // nesting depth of the thread's groups
thread_local std::vector<Launch> group;

void end_group() {
  for (const Launch& launch : std::exchange(group, {})) launch.comm->add(launch);
}

// Whether NCCL would register the buffers of a captured collective as one allocation.
bool registers_buffers(cudaStream_t stream) {
  const char* const setting = std::getenv("NCCL_GRAPH_REGISTER");
  return stream->capture && (!setting || std::strcmp(setting, "0") != 0);
}

ncclResult_t call(ncclComm_t comm, cudaStream_t stream, const NcclCall& made) {
  if (!comm || !stream || made.root < 0 || made.root >= comm->rank->exchange->ranks()) return ncclInvalidArgument;
  if (registers_buffers(stream)) return ncclSystemError;
  const auto same = [&](const Launch& launch) { return launch.comm == comm && launch.stream == stream; };
  if (const auto place = std::find_if(group.begin(), group.end(), same); place != group.end())
    place->calls.push_back(made);
  else
    group.push_back({comm, stream, {made}});
  if (depth == 0) end_group();
  return comm->blocking ? ncclSuccess : ncclInProgress;
}

}  // namespace

const char* ncclGetErrorString(ncclResult_t result) {
  constexpr std::pair<ncclResult_t, const char*> kWords[] = {
      {ncclSuccess, "no error"},
      {ncclInvalidArgument, "invalid argument"},
      {ncclInvalidUsage, "invalid usage: the ranks ask for different things"},
      {ncclInProgress, "NCCL operation in progress"},
      {ncclSystemError,
       "system error: the process that has made the id cannot be reached, or NCCL_GRAPH_REGISTER is not 0"}};
  for (const auto& [known, words] : kWords)
    if (known == result) return words;
  return "internal error";
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
  while ((*comm)->blocking && own->exchange->state() == ncclInProgress) std::this_thread::yield();
  return (*comm)->blocking ? ncclSuccess : ncclInProgress;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* state) {
  if (!comm) return ncclInvalidArgument;
  const bool in_transit = comm->asks > 0 || comm->rank->exchange->state() == ncclInProgress;
  if (comm->asks > 0) --comm->asks;
  if (!in_transit) comm->launch();
  *state = comm->rank->exchange->state();
  if (*state == ncclSuccess && in_transit) *state = ncclInProgress;
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
  ++depth;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  if (depth == 0) return ncclInvalidUsage;
  if (--depth == 0) end_group();
  return ncclSuccess;
}

ncclResult_t ncclAllReduce(const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
  return call(comm, stream, {Kind::all_reduce, in, out, count, type, op});
}
ncclResult_t ncclReduceScatter(const void* in, void* out, size_t count_each, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
  return call(comm, stream, {Kind::reduce_scatter, in, out, count_each, type, op});
}
ncclResult_t ncclAllGather(const void* in, void* out, size_t count_each, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
  return call(comm, stream, {Kind::all_gather, in, out, count_each, type});
}
ncclResult_t ncclBroadcast(const void* in, void* out, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream) {
  return call(comm, stream, {Kind::broadcast, in, out, count, type, ncclSum, root});
}
ncclResult_t ncclReduce(const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                        ncclComm_t comm, cudaStream_t stream) {
  return call(comm, stream, {Kind::reduce, in, out, count, type, op, root});
}
ncclResult_t ncclSend(const void* data, size_t count, ncclDataType_t type, int to, ncclComm_t comm,
                      cudaStream_t stream) {
  return call(comm, stream, {Kind::send, data, nullptr, count, type, ncclSum, to});
}
ncclResult_t ncclRecv(void* data, size_t count, ncclDataType_t type, int from, ncclComm_t comm, cudaStream_t stream) {
  return call(comm, stream, {Kind::recv, nullptr, data, count, type, ncclSum, from});
}
