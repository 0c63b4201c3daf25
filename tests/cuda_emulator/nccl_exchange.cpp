// Meetings, and sums in the order of ranks.
#include "tests/cuda_emulator/nccl_exchange.h"

#include <algorithm>
#include <cstring>
#include <tuple>
#include <type_traits>

#include "tensor/dtype.h"

namespace tessera::emulator {
namespace {

// Whether two ranks mean the same.
bool agree(const NcclCall& a, const NcclCall& b) {
  if (a.is_message()) return a.count == b.count && a.type == b.type;
  return a.kind == b.kind && a.count == b.count && a.type == b.type && a.op == b.op && a.root == b.root;
}

template <class F>
void with_type(ncclDataType_t type, const F& f) {
  switch (type) {
    case ncclInt32:
      return f(int32_t{});
    case ncclInt64:
      return f(int64_t{});
    case ncclFloat32:
      return f(float{});
    case ncclFloat64:
      return f(double{});
    case ncclBfloat16:
      return f(bfloat16{});
  }
}

using Bytes = std::vector<std::byte>;

// Elements [first, first + count) of all ranks' arrays, added up.
Bytes sum_of(const std::vector<NcclCall>& calls, size_t first, size_t count) {
  Bytes out(count * size_of(calls[0].type));
  with_type(calls[0].type, [&](auto type) {
    using T = decltype(type);
    using Wide = std::conditional_t<std::is_same_v<T, bfloat16>, float, T>;
    T* const to = reinterpret_cast<T*>(out.data());
    for (size_t i = 0; i < count; ++i) {
      const auto of = [&](const NcclCall& call) {
        return static_cast<Wide>(static_cast<const T*>(call.in)[first + i]);
      };
      Wide total = of(calls[0]);
      for (size_t r = 1; r < calls.size(); ++r)
        total = calls[0].op == ncclMax ? std::max(total, of(calls[r])) : static_cast<Wide>(total + of(calls[r]));
      to[i] = static_cast<T>(total);
    }
  });
  return out;
}

void put(void* to, const Bytes& bytes) {
  if (!bytes.empty()) std::memcpy(to, bytes.data(), bytes.size());
}

}  // namespace

size_t size_of(ncclDataType_t type) {
  size_t size = 0;
  with_type(type, [&](auto t) { size = sizeof(t); });
  return size;
}

// Everything is read before anything is written, since arrays may lie in their own results.
void move_data(const std::vector<NcclCall>& calls) {
  const NcclCall& first = calls[0];
  const size_t ranks = calls.size(), bytes = first.count * size_of(first.type);
  const auto* const root_in =
      static_cast<const std::byte*>(calls[first.is_message() ? 0 : static_cast<size_t>(first.root)].in);
  std::vector<Bytes> results;
  switch (first.kind) {
    case NcclCall::Kind::all_reduce:
      results.assign(ranks, sum_of(calls, 0, first.count));
      break;
    case NcclCall::Kind::reduce_scatter:
      for (size_t r = 0; r < ranks; ++r) results.push_back(sum_of(calls, r * first.count, first.count));
      break;
    case NcclCall::Kind::all_gather: {
      Bytes all;
      for (const NcclCall& call : calls) {
        const auto* const piece = static_cast<const std::byte*>(call.in);
        all.insert(all.end(), piece, piece + bytes);
      }
      results.assign(ranks, all);
      break;
    }
    case NcclCall::Kind::broadcast:
      results.assign(ranks, Bytes(root_in, root_in + bytes));
      break;
    case NcclCall::Kind::reduce:
      results.resize(ranks);
      results[static_cast<size_t>(first.root)] = sum_of(calls, 0, first.count);
      break;
    default:  // a message
      results = {Bytes(), Bytes(root_in, root_in + bytes)};
  }
  for (size_t r = 0; r < ranks; ++r) put(calls[r].out, results[r]);
}

void NcclExchange::join() {
  const std::lock_guard lock(mutex_);
  ++joined_;
}
bool NcclExchange::complete() {
  const std::lock_guard lock(mutex_);
  return joined_ == ranks_;
}
bool NcclExchange::is_done(const Meeting& meeting) {
  const std::lock_guard lock(mutex_);
  return meeting.done;
}
bool NcclExchange::mismatched() {
  const std::lock_guard lock(mutex_);
  return mismatched_;
}
void NcclExchange::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
}

// A meeting lives as long as a rank waits for its end.
std::shared_ptr<NcclExchange::Meeting> NcclExchange::place_of(int rank, const NcclCall& call) {
  const auto found = [](std::weak_ptr<Meeting>& place, size_t members) {
    std::shared_ptr<Meeting> meeting = place.lock();
    if (!meeting) {
      meeting = std::make_shared<Meeting>();
      meeting->calls.resize(members);
      meeting->came.resize(members, false);
      place = meeting;
    }
    return meeting;
  };
  if (!call.is_message())
    return found(meetings_[collectives_[static_cast<size_t>(rank)]++], static_cast<size_t>(ranks_));
  const bool sends = call.kind == NcclCall::Kind::send;
  const int from = sends ? rank : call.root, to = sends ? call.root : rank;
  auto& [sent, received] = counts_[{from, to}];
  return found(messages_[{from, to, sends ? sent++ : received++}], 2);
}

std::shared_ptr<NcclExchange::Meeting> NcclExchange::come(int rank, const NcclCall& call) {
  const std::lock_guard lock(mutex_);
  std::shared_ptr<Meeting> meeting = place_of(rank, call);
  const size_t at = call.is_message() ? (call.kind == NcclCall::Kind::send ? 0 : 1) : static_cast<size_t>(rank);
  meeting->calls[at] = call;
  meeting->came[at] = true;
  for (size_t r = 0; r < meeting->calls.size(); ++r)
    if (meeting->came[r] && !agree(meeting->calls[r], call)) mismatched_ = true;
  if (mismatched_ || closed_ || std::count(meeting->came.begin(), meeting->came.end(), false) > 0) return meeting;
  move_data(meeting->calls);
  meeting->done = true;
  return meeting;
}

}  // namespace tessera::emulator
