// Ranks that are threads of one process. They see each other's memory, so the direct exchange needs no copies: each
// rank adds its piece of everybody's array and writes the sum to everybody. Nothing has to be installed; the oracle of
// all other backends.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "parallel/comm/in_place.h"
#include "parallel/comm/transport.h"
#include "parallel/comm/wait.h"

namespace tessera {

class ThreadGroup;
struct Letter;

class ThreadTransport final : public Transport {
 public:
  ThreadTransport(std::shared_ptr<ThreadGroup> group, int rank);
  ~ThreadTransport() override;

  int rank() const override { return rank_; }
  int size() const override;
  int world_rank(int rank) const override;
  std::string_view kind() const override { return "threads"; }
  void send(int to, int tag, const std::byte* data, int64_t bytes) override;
  void recv(int from, int tag, std::byte* data, int64_t bytes) override;
  void send_from_gpu(int to, int tag, const std::byte* data, int64_t bytes, Arena& gpu) override;
  void recv_to_gpu(int from, int tag, std::byte* data, int64_t bytes, Arena& gpu) override;
  int64_t direct(const Call& call) override;
  std::unique_ptr<Transport> split(int color, int key) override;
  void fail(const std::string& cause) override;
  int failed_rank() const override;
  std::vector<CallLog*> logs() override;

 private:
  void arrive(const Call& call);
  void depart(const Call& call);
  void wait_for_all();
  void begin_work();
  void end_work();
  // Called before anything is thrown out of a meeting: when it returns, nobody reads or writes this rank's memory.
  void leave_meeting();
  std::string last_of(int rank) const;
  [[noreturn]] void give_up(Waited why, int waiting_for, const Call& call);
  const Call& post(int rank) const;
  void put(int to, Letter letter);
  Letter take(int from, int tag, int64_t bytes);
  int64_t all_reduce_small(const Call& call);
  int64_t exchange(const Call& call);

  std::shared_ptr<ThreadGroup> group_;
  int rank_;
  uint32_t sequence_ = 0;  // of this rank's flag
  uint32_t calls_ = 0;     // which of the two posts is in use: their parity
  InPlaceExchange exchange_;
};

// The group of all ranks of a launch, for each of its threads to take its transport from.
std::shared_ptr<ThreadGroup> make_thread_group(int ranks, double timeout_s, bool crowded, std::shared_ptr<Board> board);

}  // namespace tessera
