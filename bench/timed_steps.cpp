// Counting around steps.
#include "bench/timed_steps.h"

#include <algorithm>
#include <memory>

#include "train/expected_bytes.h"
#include "train/median.h"
#include "train/rank_memory.h"

namespace tessera::bench {

Sequences sequences_for(const Job& job) {
  return counted_sequences(job.model.vocab, job.model.context, job.optim.batch, static_cast<uint64_t>(job.optim.seed));
}

TimedSteps::TimedSteps(const Job& job, Communicator& world, Trace* trace) : job_(job), world_(world) {
  world.set_held_up(&held_up_);
  trainer_ = std::make_unique<Trainer>(job, sequences_for(job), world, trace);
}

TimedSteps::~TimedSteps() { world_.set_held_up(nullptr); }

int64_t TimedSteps::sent() const {
  int64_t sent = 0;
  for (const Communicator* axis : trainer_->communicators())
    for (const OpCount& op : axis->counts()) sent += op.sent;
  return sent;
}

double TimedSteps::step() {
  world_.barrier();
  const int64_t sent_before = sent();
  const double waited_before = held_up_.seconds(), own = seconds_of([&] { trainer_->step(); });
  const double waited = held_up_.seconds() - waited_before;
  const int64_t sent_now = sent() - sent_before;
  const double slowest = world_.max(own);
  if (++made_ <= kWarmUp) {
    trainer_->arena()->reset_peaks();
    return slowest;
  }
  sent_ += sent_now;
  waited_ += waited;
  seconds_.push_back(slowest);
  return slowest;
}

Measured TimedSteps::result() {
  const auto steps = static_cast<double>(seconds_.size());
  Measured m{.seconds = median(seconds_)};
  m.add("tokens/s", static_cast<double>(trainer_->tokens_per_step()) / m.seconds);
  double expected = 0;
  for (const SentBytes& s : expected_bytes(job_, 1)) expected += static_cast<double>(s.bytes);
  const double counted = world_.sum(static_cast<double>(sent_)) / steps;
  m.add_sent(counted, expected);
  const double waited = world_.sum(waited_) / steps / world_.size();
  if (job_.plan.device == Device::cpu) m.add("exposed_s", waited);
  add_peak(m, job_, world_, peak());
  return m;
}

void add_peak(Measured& m, const Job& job, Communicator& world, int64_t own_peak) {
  int64_t expected = 0;
  for (const RankMemory& rank : memory_of_ranks(job)) expected = std::max(expected, rank.total());
  m.add("peak_bytes", world.max(static_cast<double>(own_peak)));
  m.add("peak_expected", static_cast<double>(expected));
}

}  // namespace tessera::bench
