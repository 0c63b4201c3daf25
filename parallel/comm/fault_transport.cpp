// Faults by the number of the call.
#include "parallel/comm/fault_transport.h"

#include <atomic>
#include <chrono>
#include <csignal>
#include <thread>
#include <utility>

namespace tessera {

struct FaultTransport::Plan {
  std::vector<Fault> faults;
  std::atomic<int64_t> calls{0};  // main thread and background together
};

FaultTransport::FaultTransport(std::unique_ptr<Transport> inner, std::vector<Fault> faults)
    : FaultTransport(std::move(inner), std::make_shared<Plan>()) {
  plan_->faults = std::move(faults);
}

FaultTransport::FaultTransport(std::unique_ptr<Transport> inner, std::shared_ptr<Plan> plan)
    : inner_(std::move(inner)), plan_(std::move(plan)) {}

bool FaultTransport::takes_part() {
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
      case Fault::Kind::kill:
        std::raise(SIGKILL);
    }
  }
  return present;
}

void FaultTransport::send(int to, int tag, const std::byte* data, int64_t bytes) {
  if (takes_part()) inner_->send(to, tag, data, bytes);
}
void FaultTransport::recv(int from, int tag, std::byte* data, int64_t bytes) {
  if (!takes_part()) inner_->recv(from, tag, data, bytes);  // the message is lost: the next one is waited for
  inner_->recv(from, tag, data, bytes);
}
void FaultTransport::send_from_gpu(int to, int tag, const std::byte* data, int64_t bytes, Arena& gpu) {
  if (takes_part()) inner_->send_from_gpu(to, tag, data, bytes, gpu);
}
void FaultTransport::recv_to_gpu(int from, int tag, std::byte* data, int64_t bytes, Arena& gpu) {
  if (!takes_part()) inner_->recv_to_gpu(from, tag, data, bytes, gpu);
  inner_->recv_to_gpu(from, tag, data, bytes, gpu);
}
int64_t FaultTransport::direct(const Call& call) { return takes_part() ? inner_->direct(call) : 0; }
int64_t FaultTransport::native(const Call& call) { return takes_part() ? inner_->native(call) : 0; }
std::function<void()> FaultTransport::native_beside(const Call& call) {
  if (takes_part()) return inner_->native_beside(call);
  return [] {};
}

std::unique_ptr<Transport> FaultTransport::split(int color, int key) {
  return std::unique_ptr<Transport>(new FaultTransport(inner_->split(color, key), plan_));
}

}  // namespace tessera
