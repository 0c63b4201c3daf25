// Launching, following and reporting.
#include "bench/ranks.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "optim/grad_norm.h"
#include "train/expected_bytes.h"
#include "train/job.h"
#include "train/memory.h"
#include "train/usage.h"

namespace tessera::bench {

namespace {

constexpr double kTimeout = 120;  // seconds: no row lets a rank wait so long

void report(benchmark::State& state, const Measured& m) {
  if (!m.error.empty()) return state.SkipWithError(m.error.c_str());
  for (auto _ : state) state.SetIterationTime(m.seconds);
  for (const auto& [name, value] : m.counters) state.counters[name] = value;
  if (!m.label.empty()) state.SetLabel(m.label);
}

}  // namespace

void Measured::add_sent(double counted, double closed_form) {
  add("sent", counted);
  add("sent_expected", closed_form);
  if (counted != closed_form)
    error = fmt::format("{} bytes were sent in an iteration; by the closed form it is {}", counted, closed_form);
}

std::vector<int> Place::ranks(std::vector<int> wanted) const {
  return processes() ? std::vector<int>{job->size()} : std::move(wanted);
}

Backend Place::backend() const {
  if (!processes()) return Backend::threads;
  return device == Device::cuda ? Backend::nccl : Backend::mpi;
}

std::string Place::backend_name() const { return std::string(text_of(backend())); }

std::vector<Row> RankRows::rows() const {
  std::vector<Row> out;
  for (size_t i = 0; i < rows_.size(); ++i)
    out.push_back({.name = rows_[i].name,
                   .run = [this, i](benchmark::State& state) { report(state, measured(i, state.max_iterations)); },
                   .unit = rows_[i].unit,
                   .iterations = rows_[i].iterations});
  return out;
}

// Rank 0 is the calling thread, so what it finds can be written here.
Measured RankRows::measured(size_t i, int64_t iterations) const {
  const RankRow& row = rows_[i];
  if (place_.processes()) {
    told(static_cast<int64_t>(i), iterations);
    return row.measure(*place_.job, iterations);
  }
  Measured found;
  launch({.backend = row.backend, .ranks = row.ranks, .threads_per_rank = 1, .timeout_s = kTimeout},
         [&](Communicator& world) {
           Measured mine = row.measure(world, iterations);
           if (world.rank() == 0) found = std::move(mine);
         });
  return found;
}

// Returns on every rank what rank 0 says.
std::pair<int64_t, int64_t> RankRows::told(int64_t row, int64_t iterations) const {
  const Tensor order = Tensor::of<int64_t>(std::vector<int64_t>{row, iterations}, {2}, make_arena());
  place_.job->broadcast(order, 0);
  return {order.data<int64_t>()[0], order.data<int64_t>()[1]};
}

void RankRows::follow() const {
  for (;;) {
    const auto [row, iterations] = told(-1, 0);
    if (row < 0) return;
    rows_[static_cast<size_t>(row)].measure(*place_.job, iterations);
  }
}

void RankRows::dismiss() const {
  if (place_.processes()) told(-1, 0);
}

// Load, forward, backward, clip, update.

PlainLoop::PlainLoop(const Job& job, Sequences sequences)
    : optim_(job.optim), sequences_(std::move(sequences)), model_(whole_model(job, sequences_.vocab)) {
  const DataOptions d = data_options(job);
  model_->materialize(d.seed, arena_, d.dtype, d.grad_dtype);
  optimizer_ = make_optimizer(job, model_->units());
}

void PlainLoop::step() {
  const int64_t context = model_->config.context;
  const Tensor ids = Tensor::empty({optim_.batch, context}, DType::int32, arena_, Category::activations),
               targets = Tensor::empty({optim_.batch, context}, DType::int32, arena_, Category::activations);
  sequences_.load(optimizer_->steps(), 0, optim_.batch, ids.data<int32_t>(), targets.data<int32_t>());
  model_->set_step({.seed = static_cast<uint64_t>(optim_.seed), .step = optimizer_->steps(), .training = true});
  model_->clear_gradients();
  backward(model_->loss(ids, targets, 1.0 / static_cast<double>(optim_.batch * context)).mean);
  optimizer_->step(optim_.lr, clip_factor(grad_norm(model_->units()), optim_.clip));
}

// Counting around steps.

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
