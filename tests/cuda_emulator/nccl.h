// The subset of NCCL's interface that parallel/comm/nccl/library.cpp uses, for ranks on emulated GPUs that are threads
// of one process or processes of one machine, so that the NCCL transport is compiled and tested.
//
// A collective is a task on its stream. It waits until every rank of the communicator has reached its collective of the
// same number; the last one moves the data, which is in host-accessible memory, and reduces in rank order with a single
// rounding. The calls of a group are one task. On a captured stream they form a node, which each launch of the graph
// runs.
//
// As with NCCL, a nonblocking communicator returns ncclInProgress, and its calls reach the stream only after
// ncclCommGetAsyncError() has returned ncclSuccess: an event recorded before that is recorded too early. All ranks of
// an id must create their communicators before any is ready. ncclCommAbort() ends the rank's pending operations; no
// more data is moved for the other ranks, which must abort as well. It returns when no graph contains a collective of
// the communicator.
//
// Differences from NCCL: concurrent calls of different collectives, sizes, dtypes or reductions return
// ncclInvalidUsage, where NCCL would hang or corrupt data. A captured collective returns ncclSystemError unless
// NCCL_GRAPH_REGISTER is 0, because NCCL would register its buffers and access memory next to an arena's chunk.
// Operations are ordered by execution, as on a single stream; NCCL orders them by call, also across streams.
// Collectives are not split into channels, so they do not interfere with each other.
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
