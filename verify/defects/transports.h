// Fault-injecting transport decorators, which alter, delay or lose calls, or fail a rank. Tests show that no fault
// hangs a run and that each is reported.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "parallel/comm/forwarding_transport.h"

namespace tessera {

class AroundTransport : public ForwardingTransport {
 public:
  using ForwardingTransport::ForwardingTransport;
  bool supports_row_slices() const override { return inner().supports_row_slices(); }
  int64_t native(const Call& call) override { return inner().native(call); }
  bool only_queues(const Call& call) const override { return inner().only_queues(call); }
  std::function<void()> start_native(const Call& call) override { return inner().start_native(call); }
  std::shared_ptr<CommWorker> background() override { return inner().background(); }
  void check_progress(double waited_s, const std::string& during) override { inner().check_progress(waited_s, during); }
  // Subgroups are wrapped in the same way.
  std::unique_ptr<Transport> split(int color, int key) override { return around(inner().split(color, key)); }
  bool only_native(const Call& call) const override { return inner().only_native(call); }
  std::vector<CallLog*> logs() override { return inner().logs(); }

 protected:
  virtual std::unique_ptr<Transport> around(std::unique_ptr<Transport> inner) const = 0;
};

// A fault of one rank at its call number `call` (counted from 0 over sends, receives and collectives).
struct Fault {
  enum class Kind {
    delay,  // proceeds `seconds` late
    drop,   // skips the call or loses the message, so that a peer times out
    fail,   // throws
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
    if (!takes_part()) inner().recv(from, tag, data, bytes);  // the message is lost: wait for the next
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
  std::function<void()> start_native(const Call& call) override {
    if (takes_part()) return inner().start_native(call);
    return [] {};
  }

 protected:
  // Subgroups share the call counter.
  std::unique_ptr<Transport> around(std::unique_ptr<Transport> made) const override {
    return std::unique_ptr<Transport>(new FaultTransport(std::move(made), plan_));
  }

 private:
  struct Plan {
    std::vector<Fault> faults;
    std::atomic<int64_t> calls{0};  // of the main and the background thread
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
          throw CommError("an injected fault at call " + std::to_string(now));
      }
    }
    return present;
  }
  std::shared_ptr<Plan> plan_;
};

using Faults = std::map<int, std::vector<Fault>>;  // by world rank

// For LaunchOptions::around.
inline auto with_faults(Faults faults) {
  return [faults = std::move(faults)](std::unique_ptr<Transport> transport) -> std::unique_ptr<Transport> {
    const auto injected = faults.find(transport->world_rank(transport->rank()));
    if (injected == faults.end()) return transport;
    return std::make_unique<FaultTransport>(std::move(transport), injected->second);
  };
}

// Faulty collectives: `which` selects the calls, `instead` replaces them and returns the bytes sent.
struct FaultyCall {
  std::function<bool(const std::string& axis, const Call& call)> which;
  std::function<int64_t(Transport& transport, const Call& call)> instead;
};

class FaultyCallTransport final : public AroundTransport {
 public:
  FaultyCallTransport(std::unique_ptr<Transport> inner, FaultyCall faulty)
      : AroundTransport(std::move(inner)), faulty_(std::move(faulty)) {}
  int64_t direct(const Call& call) override {
    return faulty_.which(axis_, call) ? faulty_.instead(inner(), call) : inner().direct(call);
  }

 protected:
  std::unique_ptr<Transport> around(std::unique_ptr<Transport> made) const override {
    return std::make_unique<FaultyCallTransport>(std::move(made), faulty_);
  }

 private:
  FaultyCall faulty_;
};

}  // namespace tessera
