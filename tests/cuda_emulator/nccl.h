// The part of NCCL's interface that parallel/comm/nccl/library.cpp uses, for ranks with an emulated GPU each that are
// threads of one process or processes of one machine: so that what speaks to NCCL is compiled and run by tests.
//
// A collective is a task on its stream. It waits there until every rank of the communicator has come to its own of the
// same number; the last one moves the data, which it finds in the memory of all, and adds in the order of ranks,
// rounding once. Calls of a group are one task. On a stream that is captured they are a node, which is run by each
// launch of the graph.
//
// As with NCCL, a communicator that does not block answers ncclInProgress, and its calls reach the stream only when
// ncclCommGetAsyncError() has said ncclSuccess: who records an event before that records it too early. Every rank's
// communicator that is made from one id has to be made, or nobody's is ready. ncclCommAbort() ends what the rank waits
// for, and nothing is moved any more for the others, which have to abort as well; it returns when no graph holds a
// collective of the communicator.
//
// It differs from NCCL: ranks that ask for different collectives at the same time, or for other sizes, types or
// reductions, get ncclInvalidUsage, where NCCL would hang or move nonsense. A captured collective is ncclSystemError
// unless NCCL_GRAPH_REGISTER is 0: NCCL would register its buffers, and access memory beside a piece of an arena.
// Operations keep the order in which they come to run, as they do on a single stream; NCCL keeps that of the calls, on
// several streams too. No collective is cut into channels, so none disturbs another.
#pragma once

#include "tests/cuda_emulator/cuda_runtime.h"

enum ncclResult_t {
  ncclSuccess = 0,
  ncclSystemError = 2,
  ncclInternalError = 3,
  ncclInvalidArgument = 4,
  ncclInvalidUsage = 5,
  ncclInProgress = 7
};
enum ncclDataType_t { ncclUint8 = 1, ncclInt32 = 2, ncclInt64 = 4, ncclFloat32 = 7, ncclFloat64 = 8, ncclBfloat16 = 9 };
enum ncclRedOp_t { ncclSum = 0, ncclMax = 2 };
struct ncclUniqueId {
  char internal[128];
};
struct ncclConfig_t {
  int blocking;
};
inline constexpr ncclConfig_t NCCL_CONFIG_INITIALIZER{.blocking = 1};
using ncclComm_t = struct EmulatedCommunicator*;

const char* ncclGetErrorString(ncclResult_t result);
ncclResult_t ncclGetUniqueId(ncclUniqueId* id);
ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t* config);
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* state);
ncclResult_t ncclCommAbort(ncclComm_t comm);
ncclResult_t ncclGroupStart();
ncclResult_t ncclGroupEnd();
ncclResult_t ncclAllReduce(const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclReduceScatter(const void* in, void* out, size_t count_each, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclAllGather(const void* in, void* out, size_t count_each, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream);
ncclResult_t ncclBroadcast(const void* in, void* out, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream);
ncclResult_t ncclReduce(const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                        ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclSend(const void* data, size_t count, ncclDataType_t type, int to, ncclComm_t comm,
                      cudaStream_t stream);
ncclResult_t ncclRecv(void* data, size_t count, ncclDataType_t type, int from, ncclComm_t comm, cudaStream_t stream);
