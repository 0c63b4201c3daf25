// How long communications hold up a rank's own thread: in those that return when they are done, and in wait() for those
// in the background. What a background thread waits while the rank computes is not in it.
#pragma once
#include <chrono>

namespace tessera {

// Of one rank, on whose own thread it is used.
class HeldUp {
 public:
  double seconds() const { return std::chrono::duration<double>(total_).count(); }

 private:
  friend class HeldUpSpan;
  std::chrono::steady_clock::duration total_{};
};

// From here to the end of the scope; nothing without somewhere to add it.
class HeldUpSpan {
 public:
  explicit HeldUpSpan(HeldUp* to) : to_(to) {
    if (to_) begin_ = std::chrono::steady_clock::now();
  }
  ~HeldUpSpan() {
    if (to_) to_->total_ += std::chrono::steady_clock::now() - begin_;
  }
  HeldUpSpan(const HeldUpSpan&) = delete;
  HeldUpSpan& operator=(const HeldUpSpan&) = delete;

 private:
  HeldUp* to_;
  std::chrono::steady_clock::time_point begin_{};
};

}  // namespace tessera
