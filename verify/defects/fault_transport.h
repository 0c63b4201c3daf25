// A transport with planted faults, to show that no fault hangs a run and each is named.
#pragma once
#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "verify/defects/around_transport.h"

namespace tessera {

// What happens to one rank when it comes to its call number `call` (counted from 0 over sends, receives and
// collectives).
struct Fault {
  enum class Kind {
    delay,  // it comes `seconds` late
    drop,   // it does not take part, or its message is lost: somebody waits in vain
    fail,   // it throws
  };
  Kind kind = Kind::delay;
  int64_t call = 0;
  double seconds = 0;
};

class FaultTransport final : public AroundTransport {
 public:
  FaultTransport(std::unique_ptr<Transport> inner, std::vector<Fault> faults)
      : FaultTransport(std::move(inner), std::make_shared<Plan>()) {
    plan_->faults = std::move(faults);
  }
  void send(int to, int tag, const std::byte* data, int64_t bytes) override {
    if (takes_part()) inner().send(to, tag, data, bytes);
  }
  void recv(int from, int tag, std::byte* data, int64_t bytes) override {
    if (!takes_part()) inner().recv(from, tag, data, bytes);  // the message is lost: the next one is waited for
    inner().recv(from, tag, data, bytes);
  }
  void send_from_gpu(int to, int tag, const std::byte* data, int64_t bytes, Arena& gpu) override {
    if (takes_part()) inner().send_from_gpu(to, tag, data, bytes, gpu);
  }
  void recv_to_gpu(int from, int tag, std::byte* data, int64_t bytes, Arena& gpu) override {
    if (!takes_part()) inner().recv_to_gpu(from, tag, data, bytes, gpu);
    inner().recv_to_gpu(from, tag, data, bytes, gpu);
  }
  int64_t direct(const Call& call) override { return takes_part() ? inner().direct(call) : 0; }
  int64_t native(const Call& call) override { return takes_part() ? inner().native(call) : 0; }
  std::function<void()> native_beside(const Call& call) override {
    if (takes_part()) return inner().native_beside(call);
    return [] {};
  }

 protected:
  // The groups made of this one count on with the same calls.
  std::unique_ptr<Transport> around(std::unique_ptr<Transport> made) const override {
    return std::unique_ptr<Transport>(new FaultTransport(std::move(made), plan_));
  }

 private:
  struct Plan {
    std::vector<Fault> faults;
    std::atomic<int64_t> calls{0};  // main thread and background together
  };
  FaultTransport(std::unique_ptr<Transport> inner, std::shared_ptr<Plan> plan)
      : AroundTransport(std::move(inner)), plan_(std::move(plan)) {}
  bool takes_part() {
    const int64_t now = plan_->calls++;
    bool present = true;
    for (const Fault& fault : plan_->faults) {
      if (fault.call != now) continue;
      switch (fault.kind) {
        case Fault::Kind::delay:
          std::this_thread::sleep_for(std::chrono::duration<double>(fault.seconds));
          break;
        case Fault::Kind::drop:
          present = false;
          break;
        case Fault::Kind::fail:
          throw CommError("a planted fault at call " + std::to_string(now));
      }
    }
    return present;
  }
  std::shared_ptr<Plan> plan_;
};

using Faults = std::map<int, std::vector<Fault>>;  // by rank of the world

// For LaunchOptions::around.
inline auto with_faults(Faults faults) {
  return [faults = std::move(faults)](std::unique_ptr<Transport> transport) -> std::unique_ptr<Transport> {
    const auto planted = faults.find(transport->world_rank(transport->rank()));
    if (planted == faults.end()) return transport;
    return std::make_unique<FaultTransport>(std::move(transport), planted->second);
  };
}

}  // namespace tessera
