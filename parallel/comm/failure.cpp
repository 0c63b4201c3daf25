// Recording of failures: the first wins by compare-and-swap, and a flag publishes the first non-empty cause.
#include "parallel/comm/failure.h"

#include <atomic>
#include <chrono>
#include <string>
#include <thread>

namespace tessera {

bool FailureState::fail(int world_rank, const std::string& cause, bool silent) {
  int none = -1;
  const bool first = failed_.compare_exchange_strong(none, world_rank, std::memory_order_seq_cst);
  if (!first) {
    if (none != world_rank) return false;
  } else if (silent) {
    silent_.store(true, std::memory_order_release);
  }
  if (cause.empty()) {
    unexplained_.store(true, std::memory_order_release);
  } else if (!claimed_.exchange(true)) {
    cause.copy(cause_.data(), cause_.size() - 1);
    written_.store(true, std::memory_order_release);
  }
  return true;
}

std::string FailureState::cause() const {
  for (int i = 0; i < 100 && !written_.load(std::memory_order_acquire); ++i) {
    if (failed_rank() < 0 || unexplained_.load(std::memory_order_acquire)) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return written_.load(std::memory_order_acquire) ? cause_.data() : "";
}

std::string FailureState::describe() const {
  const std::string why = cause();
  if (failed_rank() == kUnknown) return why;
  return "rank " + std::to_string(failed_rank()) + " has failed" + (why.empty() ? "" : ": " + why);
}

}  // namespace tessera
