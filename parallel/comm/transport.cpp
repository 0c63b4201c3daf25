// Default implementations of Transport.
#include "parallel/comm/transport.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "parallel/comm/algorithms.h"
#include "parallel/comm/cuda/streams.h"
#include "parallel/comm/trace.h"
#include "tensor/cuda/copy.h"

namespace tessera {

void PeerWait::overdue(double seconds, bool again) {
  if (!transport_.flight_) return;
  const auto [during, last] = what_();
  transport_.flight_->overdue(transport_.axis_, during, transport_.world_rank(rank_), last, seconds, again);
}

void PeerWait::waited(double seconds) {
  if (transport_.flight_) transport_.flight_->waited(transport_.world_rank(rank_), seconds);
}

void Transport::send_from_gpu(int to, int tag, const std::byte* data, int64_t bytes, Arena& gpu) {
  std::vector<std::byte> copy(static_cast<size_t>(bytes));
  if constexpr (kWithCuda) {
    cuda::copy(gpu, copy.data(), data, bytes);
    cuda::synchronize(gpu);
  }
  send(to, tag, copy.data(), bytes);
}

void Transport::recv_to_gpu(int from, int tag, std::byte* data, int64_t bytes, Arena& gpu) {
  std::vector<std::byte> copy(static_cast<size_t>(bytes));
  recv(from, tag, copy.data(), bytes);
  if constexpr (kWithCuda) {
    cuda::copy(gpu, data, copy.data(), bytes);
    cuda::synchronize(gpu);
  }
}

int64_t Transport::direct(const Call& call) { return direct_by_messages(*this, call); }

std::vector<int> Transport::group_members(int color, int key) {
  struct ColorKey {
    int32_t color, key;
  };
  std::vector<ColorKey> color_keys(static_cast<size_t>(size()));
  const auto color_key = [&](int r) -> ColorKey& { return color_keys[static_cast<size_t>(r)]; };
  color_key(rank()) = {color, key};
  if (size() > 1)
    direct({.op = Op::all_gather,
            .dtype = DType::int64,
            .count = size(),
            .in = reinterpret_cast<const std::byte*>(&color_key(rank())),
            .out = reinterpret_cast<std::byte*>(color_keys.data())});
  std::vector<int> members;
  for (int r = 0; r < size(); ++r)
    if (color_key(r).color == color) members.push_back(r);
  std::ranges::stable_sort(members, {}, [&](int r) { return color_key(r).key; });
  return members;
}

void Transport::await_message(int from, int64_t bytes, double timeout_s, const std::function<bool(double)>& arrived) {
  AwakeTimer timer;
  const std::string what = receiving(bytes);
  PeerWait observer(*this, from, [&what] { return std::pair(what, std::string()); });
  ReportInterval reminder;
  double waited = 0;
  while (!arrived(waited)) {
    waited = timer.seconds();
    if (reminder.is_due(waited)) observer.overdue(waited, reminder.again());
    if (failed_rank() >= 0) throw PeerFailed(what + ": " + failure());
    if (waited > timeout_s) throw CommError(what + ": " + sent_nothing(world_rank(from), timeout_s));
  }
  observer.waited(timer.seconds());
}

void Transport::check_size(int from, int64_t bytes, int64_t sent) const {
  if (sent != bytes) throw CommError(fmt::format("{}: rank {} sent {}", receiving(bytes), world_rank(from), sent));
}

std::function<void()> Transport::start_native(const Call& call) {
  throw Error("[comm] " + std::string(kind()) + " cannot queue " + describe(call));
}

int64_t Transport::native(const Call& call) {
  throw Error("[comm] " + std::string(kind()) + " have no native collective for " + describe(call) + "; expected " +
              expected_algorithms());
}

std::string_view to_string(Op op) {
  constexpr std::array<std::string_view, kOps> names = {"all_reduce", "reduce_scatter", "all_gather", "broadcast",
                                                        "reduce",     "gather",         "scatter",    "all_to_all",
                                                        "send",       "recv",           "barrier"};
  return names.at(static_cast<size_t>(op));
}

std::string describe(const Call& call) {
  std::string text(to_string(call.op));
  if (call.op == Op::barrier) return text;
  text += " of " + std::to_string(call.bytes()) + " bytes (" + std::string(to_string(call.dtype));
  if (call.reduction == Reduction::max) text += ", max";
  if (call.op == Op::broadcast || call.op == Op::reduce || call.op == Op::gather || call.op == Op::scatter)
    text += ", root " + std::to_string(call.root);
  if (call.splits) text += ", uneven chunks";
  if (call.gpu) text += ", on a GPU";
  return text + ")";
}

std::string seconds_text(double seconds) { return fmt::format("{:.3g} s", seconds); }

std::string receiving(int64_t bytes) { return fmt::format("recv of {} bytes", bytes); }

std::string sent_nothing(int world_rank, double timeout_s) {
  return fmt::format("rank {} sent nothing within {}", world_rank, seconds_text(timeout_s));
}

std::string did_not_arrive(int world_rank, double timeout_s, const std::string& last) {
  return fmt::format("rank {} did not arrive within {}; {}", world_rank, seconds_text(timeout_s), last);
}

CommError mismatch(const Call& mine, int world_rank, const Call& theirs) {
  return CommError(
      fmt::format("{}: rank {} calls {} at the same time; all ranks must make the same calls in the same order",
                  describe(mine), world_rank, describe(theirs)));
}

}  // namespace tessera
