// A transport with planted faults, to show that no fault hangs a run and each is named.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "parallel/comm/transport.h"

namespace tessera {

// What happens to one rank when it comes to its call number `call` (counted from 0 over sends, receives and
// collectives).
struct Fault {
  enum class Kind {
    delay,  // it comes `seconds` late
    drop,   // it does not take part, or its message is lost: somebody waits in vain
    fail,   // it throws
    kill,   // its process is killed (SIGKILL)
  };
  Kind kind = Kind::delay;
  int64_t call = 0;
  double seconds = 0;
};

class FaultTransport final : public Transport {
 public:
  FaultTransport(std::unique_ptr<Transport> inner, std::vector<Fault> faults);
  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  int world_rank(int rank) const override { return inner_->world_rank(rank); }
  int rank_here() const override { return inner_->rank_here(); }
  std::string_view kind() const override { return inner_->kind(); }
  void set_axis(const std::string& axis) override { inner_->set_axis(axis); }
  void send(int to, int tag, const std::byte* data, int64_t bytes) override;
  void recv(int from, int tag, std::byte* data, int64_t bytes) override;
  void send_from_gpu(int to, int tag, const std::byte* data, int64_t bytes, Arena& gpu) override;
  void recv_to_gpu(int from, int tag, std::byte* data, int64_t bytes, Arena& gpu) override;
  int64_t direct(const Call& call) override;
  int64_t native(const Call& call) override;
  bool only_queues(const Call& call) const override { return inner_->only_queues(call); }
  std::function<void()> native_beside(const Call& call) override;
  std::shared_ptr<CommWorker> background() override { return inner_->background(); }
  void look_after(double waited_s, const std::string& during) override { inner_->look_after(waited_s, during); }
  // The groups made of this one count on with the same calls.
  std::unique_ptr<Transport> split(int color, int key) override;
  void fail(const std::string& cause) override { inner_->fail(cause); }
  bool only_native(const Call& call) const override { return inner_->only_native(call); }
  int failed_rank() const override { return inner_->failed_rank(); }
  std::string failure() const override { return inner_->failure(); }
  std::vector<CallLog*> logs() override { return inner_->logs(); }
  bool maps_peers() const override { return inner_->maps_peers(); }

 private:
  struct Plan;
  FaultTransport(std::unique_ptr<Transport> inner, std::shared_ptr<Plan> plan);
  bool takes_part();
  std::unique_ptr<Transport> inner_;
  std::shared_ptr<Plan> plan_;
};

}  // namespace tessera
