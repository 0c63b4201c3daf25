// Data movement of collectives: reduction in rank order, and transfers between processes.
#include <sys/uio.h>

#include "tensor/dtype.h"
#include "tests/cuda_emulator/nccl_exchange.h"

namespace tessera::emulator {
namespace {

using Bytes = std::vector<std::byte>;

template <class F>
void with_type(ncclDataType_t type, const F& f) {
  if (type == ncclUint8) return f(uint8_t{});
  if (type == ncclInt32) return f(int32_t{});
  if (type == ncclInt64) return f(int64_t{});
  if (type == ncclFloat32) return f(float{});
  if (type == ncclFloat64) return f(double{});
  if (type == ncclBfloat16) return f(bfloat16{});
}

bool get(const NcclCall& call, Bytes& bytes) {
  if (bytes.empty()) return true;
  if (call.process == 0) return std::memcpy(bytes.data(), call.in, bytes.size());
  const iovec here{bytes.data(), bytes.size()}, there{const_cast<void*>(call.in), bytes.size()};
  return process_vm_readv(call.process, &here, 1, &there, 1, 0) == static_cast<ssize_t>(bytes.size());
}

bool put(const NcclCall& call, Bytes bytes) {
  if (bytes.empty()) return true;
  if (call.process == 0) return std::memcpy(call.out, bytes.data(), bytes.size());
  const iovec here{bytes.data(), bytes.size()}, there{call.out, bytes.size()};
  return process_vm_writev(call.process, &here, 1, &there, 1, 0) == static_cast<ssize_t>(bytes.size());
}

// Number of chunks of `count` elements that the rank contributes.
size_t chunks_from(const NcclCall& call, size_t rank, size_t ranks) {
  using Kind = NcclCall::Kind;
  if (call.kind == Kind::reduce_scatter) return ranks;
  if (call.kind == Kind::recv || (call.kind == Kind::broadcast && rank != static_cast<size_t>(call.root))) return 0;
  return 1;
}

// The sum over ranks of elements [first, first + count) of their arrays.
Bytes sum_arrays(const NcclCall& call, const std::vector<Bytes>& arrays, size_t first) {
  Bytes out(call.count * element_size(call.type));
  with_type(call.type, [&](auto type) {
    using T = decltype(type);
    using Wide = std::conditional_t<std::is_same_v<T, bfloat16>, float, T>;
    T* const to = reinterpret_cast<T*>(out.data());
    for (size_t i = 0; i < call.count; ++i) {
      const auto of = [&](const Bytes& array) {
        return static_cast<Wide>(reinterpret_cast<const T*>(array.data())[first + i]);
      };
      Wide total = of(arrays[0]);
      for (size_t r = 1; r < arrays.size(); ++r)
        total = call.op == ncclMax ? std::max(total, of(arrays[r])) : static_cast<Wide>(total + of(arrays[r]));
      to[i] = static_cast<T>(total);
    }
  });
  return out;
}

// The bytes that the rank receives.
Bytes result_for(size_t rank, const NcclCall& call, const std::vector<Bytes>& arrays) {
  using Kind = NcclCall::Kind;
  if (call.is_message()) return rank == 1 ? arrays[0] : Bytes();  // the sender's call comes first
  if (call.kind == Kind::broadcast) return arrays[static_cast<size_t>(call.root)];
  if (call.kind == Kind::reduce && rank != static_cast<size_t>(call.root)) return {};
  if (call.kind != Kind::all_gather)
    return sum_arrays(call, arrays, call.kind == Kind::reduce_scatter ? rank * call.count : 0);
  Bytes all;
  for (const Bytes& one_array : arrays) all.insert(all.end(), one_array.begin(), one_array.end());
  return all;
}

}  // namespace

size_t element_size(ncclDataType_t type) {
  size_t size = 0;
  with_type(type, [&](auto t) { size = sizeof(t); });
  return size;
}

// Reads everything before writing anything, since inputs may overlap outputs.
bool move_data(const std::vector<NcclCall>& calls) {
  std::vector<Bytes> arrays;
  for (size_t r = 0; r < calls.size(); ++r) {
    const size_t chunks = chunks_from(calls[r], r, calls.size());
    arrays.emplace_back(chunks * calls[r].count * element_size(calls[r].type));
    if (!get(calls[r], arrays.back())) return false;
  }
  for (size_t r = 0; r < calls.size(); ++r)
    if (!put(calls[r], result_for(r, calls[0], arrays))) return false;
  return true;
}

}  // namespace tessera::emulator
