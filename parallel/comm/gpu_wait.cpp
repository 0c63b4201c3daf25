// The host's wait for a GPU that waits for other ranks.
#include <chrono>
#include <string>
#include <thread>

#include "parallel/comm/communicator.h"
#include "parallel/comm/cuda/streams.h"
#include "parallel/comm/flight.h"

namespace tessera {

void Communicator::wait_for_gpu(Arena& gpu, const std::string& during) {
  using Clock = std::chrono::steady_clock;
  constexpr int kSpins = 1000;
  constexpr auto kNap = std::chrono::microseconds(20);
  const auto start = Clock::now();
  Reminder reminder;
  const auto still_busy = [&] {
    if constexpr (kWithCuda)
      return !cuda::is_done(gpu);
    else
      return false;
  };
  try {
    for (int spins = 0; still_busy(); ++spins) {
      if (spins % 64 == 0) {
        const double waited = std::chrono::duration<double>(Clock::now() - start).count();
        transport_->look_after(waited, during);
        if (flight_ && size() > 1 && reminder.is_due(waited))
          flight_->overdue(axis_, during, -1, "", waited, reminder.again());
      }
      spins < kSpins ? std::this_thread::yield() : std::this_thread::sleep_for(kNap);
    }
  } catch (const CommError&) {
    while (still_busy()) std::this_thread::sleep_for(kNap);  // the rest is queued behind what was ended
    throw;
  }
}

}  // namespace tessera
