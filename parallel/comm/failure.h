// Failure reports of all kinds of ranks: the first failed rank and its cause.
#pragma once
#include <array>
#include <atomic>
#include <limits>
#include <string>

namespace tessera {

// Without locks and pointers, because it may reside in memory shared by processes. Only the first failure is recorded.
class FailureState {
 public:
  static constexpr int kUnknown = std::numeric_limits<int>::max();  // the job ends, but no rank is known to have failed

  // Returns false if another rank's failure was recorded first. A missing cause may be added later. `silent`: the rank
  // cannot report its cause itself.
  bool fail(int world_rank, const std::string& cause, bool silent = false);
  int failed_rank() const { return failed_.load(std::memory_order_acquire); }  // negative: none
  bool is_silent() const { return silent_.load(std::memory_order_acquire); }
  const std::atomic<int>& flag() const { return failed_; }
  // Waits briefly for a cause that is being written.
  std::string cause() const;
  // "rank 1 has failed: its process 77 is gone", with the cause if known.
  std::string describe() const;

 private:
  std::atomic<int> failed_{-1};
  std::atomic<bool> silent_{false}, unexplained_{false}, claimed_{false}, written_{false};
  std::array<char, 4096> cause_{};
};

}  // namespace tessera
