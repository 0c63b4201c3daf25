// Steps of strategies and pipeline schedules, alternating with one rank.
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "bench/ranks.h"
#include "optim/grad_norm.h"
#include "parallel/pipeline/simulate.h"
#include "train/async/trainer.h"
#include "train/expected_bytes.h"
#include "train/memory.h"
#include "train/trainer.h"

namespace tessera::bench {

namespace {

constexpr int64_t kSteps = 9, kPipelined = 4;  // kPipelined: micro-batches

Sequences sequences_for(const TrainConfig& job) {
  return synthetic_sequences(job.model.vocab, job.model.context, job.optim.batch,
                             static_cast<uint64_t>(job.optim.seed));
}

// Reference for the trainer on one rank: load, forward, backward, clip and update.
class PlainLoop {
 public:
  PlainLoop(const TrainConfig& job, Sequences sequences)
      : optim_(job.optim), sequences_(std::move(sequences)), model_(full_model(job, sequences_.vocab)) {
    const DataOptions d = data_options(job);
    model_->materialize(d.seed, arena_, d.dtype, d.grad_dtype);
    optimizer_ = make_optimizer(job, model_->units());
  }
  void step() {
    const int64_t context = model_->config.context;
    const Tensor ids = Tensor::empty({optim_.batch, context}, DType::int32, arena_, Category::activations),
                 targets = Tensor::empty({optim_.batch, context}, DType::int32, arena_, Category::activations);
    sequences_.load(optimizer_->steps(), 0, optim_.batch, ids.data<int32_t>(), targets.data<int32_t>());
    model_->set_step({.seed = static_cast<uint64_t>(optim_.seed), .step = optimizer_->steps(), .training = true});
    model_->clear_gradients();
    backward(model_->loss(ids, targets, 1.0 / static_cast<double>(optim_.batch * context)).mean);
    optimizer_->step(optim_.lr, clip_factor(grad_norm(model_->units()), optim_.clip));
  }
  int64_t peak() const { return arena_->total().peak; }

 private:
  Optimisation optim_;
  Sequences sequences_;
  ArenaPtr arena_ = make_arena();
  std::unique_ptr<LanguageModel> model_;
  std::unique_ptr<Optimizer> optimizer_;
};

// Collective: adds the measured and predicted peak memory over all ranks.
void add_peak(Measured& m, const TrainConfig& job, Communicator& world, int64_t own_peak) {
  int64_t expected = 0;
  for (const RankMemory& rank : memory_of_ranks(job)) expected = std::max(expected, rank.total());
  m.add("peak_bytes", world.max(static_cast<double>(own_peak)));
  m.add("peak_expected", static_cast<double>(expected));
}

class TimedSteps {
 public:
  static constexpr int64_t kWarmUp = 2;
  // Collective; `world` and `trace` must outlive this object.
  TimedSteps(const TrainConfig& job, Communicator& world, Trace* trace = nullptr) : job_(job), world_(world) {
    world.set_stall_timer(&stall_timer_);
    trainer_ = std::make_unique<Trainer>(job, sequences_for(job), world, trace);
  }
  ~TimedSteps() { world_.set_stall_timer(nullptr); }

  // The first two steps are warm-up (cold caches, unpacked weights). Returns the seconds of the slowest rank.
  double step() {
    world_.barrier();
    const int64_t sent_before = sent();
    const double waited_before = stall_timer_.seconds(), own = measure_seconds([&] { trainer_->step(); });
    const double waited = stall_timer_.seconds() - waited_before;
    const int64_t sent_now = sent() - sent_before;
    const double slowest = world_.max(own);
    if (++made_ <= kWarmUp) {
      trainer_->state().arena->reset_peaks();
      return slowest;
    }
    sent_ += sent_now;
    waited_ += waited;
    seconds_.push_back(slowest);
    machine_.push_back(slowest_machine(world_));
    return slowest;
  }
  // Collective: median step time, tokens/s, bytes sent and peak memory with their closed forms, and exposed
  // communication.
  Measured result() {
    const auto steps = static_cast<double>(seconds_.size());
    Measured m(seconds_);
    m.machine = machine_;
    m.add("tokens/s", static_cast<double>(tokens_per_step(job_, sequences_for(job_))) / m.seconds);
    double expected = 0;
    for (const SentBytes& s : expected_bytes(job_, 1)) expected += static_cast<double>(s.bytes);
    const double counted = world_.sum(static_cast<double>(sent_)) / steps;
    m.add_sent(counted, expected);
    const double waited = world_.sum(waited_) / steps / world_.size();
    m.add("exposed_s", job_.plan.device == Device::cpu ? waited : kNone);
    add_peak(m, job_, world_, peak());
    return m;
  }
  int64_t peak() const { return trainer_->state().arena->total().peak; }
  const Schedule& schedule() const { return trainer_->state().part().runtime().schedule(); }

 private:
  int64_t sent() const {
    int64_t sent = 0;
    for (const Communicator* axis : trainer_->state().communicators()) sent += sent_by(*axis);
    return sent;
  }

  TrainConfig job_;
  Communicator& world_;
  StallTimer stall_timer_;
  std::unique_ptr<Trainer> trainer_;
  std::vector<double> seconds_, machine_;
  int64_t made_ = 0, sent_ = 0;
  double waited_ = 0;
};

std::vector<std::pair<std::string, Plan>> strategies(int64_t n) {
  std::vector<std::pair<std::string, Plan>> out = {
      {"ddp", {.dp = n}},
      {"zero-1", {.dp = n, .zero = ZeroStage::one}},
      {"zero-2", {.dp = n, .zero = ZeroStage::two}},
      {"zero-3", {.dp = n, .zero = ZeroStage::three}},
      {"dataparallel", {.dp = n, .dp_mode = DataMode::dataparallel}},
      {"ps-sync", {.dp = n, .dp_mode = DataMode::ps_sync}},
      {"ps-sync-everywhere", {.dp = n, .dp_mode = DataMode::ps_sync, .servers = n}},
      {"ps-async", {.dp = n, .dp_mode = DataMode::ps_async}},
      {"offload", {.dp = n, .offload = Offload::optimizer}},
      {"tp", {.tp = n}},
      {"tp+sp", {.tp = n, .sp = true}},
      {"cp-ring", {.cp = n}},
      {"cp-ulysses", {.cp = n, .cp_mode = ContextMode::ulysses}},
  };
  for (size_t i = 0; i < kScheduleNames.size(); ++i)
    out.push_back({fmt::format("pp-{}", kScheduleNames[i]),
                   {.pp = n, .schedule = static_cast<ScheduleKind>(i), .microbatches = kPipelined}});
  if (n != 4) return out;
  out.push_back({"dp2+tp2", {.dp = 2, .tp = 2}});
  out.push_back({"dp2+cp2", {.dp = 2, .cp = 2}});
  out.push_back({"cp2+tp2", {.cp = 2, .tp = 2}});
  out.push_back({"pp2+dp2", {.pp = 2, .dp = 2, .microbatches = 2}});
  out.push_back({"pp2+tp2", {.pp = 2, .tp = 2, .microbatches = kPipelined}});
  return out;
}

// Reference steps alternate with a row's steps: rank 0 runs them while the other ranks wait.
struct ReferenceSteps {
  std::string name;                   // "one_rank"
  std::function<double()> step = {};  // returns seconds; empty on other ranks
  std::function<int64_t()> peak = {};
  std::vector<double> seconds = {};

  void steps(int64_t count) {
    for (int64_t i = 0; step && i < count; ++i) seconds.push_back(step());
  }
  void add_to(Measured& m) const {
    const size_t rounds = m.rounds.size(),
                 each = (seconds.size() - TimedSteps::kWarmUp) / rounds;  // reference steps per round
    for (size_t i = 0; i < (step ? rounds : 0); ++i) {
      const auto end = seconds.end() - static_cast<std::ptrdiff_t>((rounds - 1 - i) * each);
      m.reference.push_back(std::accumulate(end - static_cast<std::ptrdiff_t>(each), end, 0.0) /
                            static_cast<double>(each));
    }
    for (const std::string any : {"one_rank", "plain_loop"}) {
      const bool is_it = step && any == name;
      m.add("of_" + any, is_it ? m.seconds / median({seconds.begin() + TimedSteps::kWarmUp, seconds.end()}) : kNone);
      m.add("peak_of_" + any, is_it ? static_cast<double>(peak()) : kNone);
    }
  }
};

ReferenceSteps plain_loop(const TrainConfig& job) {
  const auto loop = std::make_shared<PlainLoop>(job, sequences_for(job));
  return {.name = "plain_loop",
          .step = [loop] { return measure_seconds([&] { loop->step(); }); },
          .peak = [loop] { return loop->peak(); }};
}

ReferenceSteps one_rank(const TrainConfig& job, Communicator& world) {
  const std::shared_ptr<Communicator> axis = world.split(world.rank(), 0, "alone");
  if (world.rank() > 0) return {.name = "one_rank"};
  TrainConfig one = job;
  one.plan = {.device = job.plan.device, .threads_per_rank = 1};
  const std::shared_ptr<TimedSteps> steps(new TimedSteps(one, *axis), [axis](TimedSteps* s) { delete s; });
  return {.name = "one_rank", .step = [steps] { return steps->step(); }, .peak = [steps] { return steps->peak(); }};
}

Measured measure_alternating(ReferenceSteps one, const TrainConfig& job, Communicator& world, int64_t steps) {
  TimedSteps all(job, world);
  for (int64_t i = 0; i < TimedSteps::kWarmUp + steps; ++i) {
    one.steps(1);
    all.step();
  }
  Measured m = all.result();
  one.add_to(m);
  return m;
}

Measured measure_one_rank(const TrainConfig& job, Communicator& world, int64_t steps) {
  return measure_alternating(plain_loop(job), job, world, steps);
}

Measured measure_steps(const TrainConfig& job, Communicator& world, int64_t steps) {
  return measure_alternating(one_rank(job, world), job, world, steps);
}

// Workers are not synchronized per step, so a round has several steps of each worker. Stops before the job's last step,
// in which each worker would pull the parameters again.
Measured measure_async(const TrainConfig& requested, Communicator& world, int64_t steps) {
  constexpr int64_t kTurn = 3;
  const int64_t turns = steps + 1;  // the first is warm-up
  TrainConfig job = requested;
  job.optim.steps = turns * kTurn + 1;
  ReferenceSteps one = one_rank(job, world);
  AsyncTrainer trainer(job, sequences_for(job), world);
  AsyncServer& server = trainer.server();
  std::vector<double> seconds, machine;
  for (int64_t turn = 0; turn < turns; ++turn) {
    one.steps(kTurn);
    world.barrier();
    const double own = measure_seconds([&] {
      server.run((turn + 1) * kTurn,
                 {.step = [&](int worker, int64_t clock) { return trainer.worker_step(worker, clock); }});
    });
    const double slowest = world.max(own);
    if (turn > 0) seconds.push_back(slowest / kTurn), machine.push_back(slowest_machine(world));
  }
  Measured m(seconds);
  m.machine = machine;
  m.add("tokens/s", static_cast<double>(tokens_per_step(job, sequences_for(job))) / m.seconds);
  const PlanSizes s(job);
  const double per_worker = static_cast<double>(s.shards[0][0].full() * (s.value + s.grad));
  m.add_sent(world.sum(static_cast<double>(server.pushed_bytes() + server.pulled_bytes())) /
                 static_cast<double>(turns * kTurn),
             static_cast<double>(s.plan.dp - 1) * per_worker);
  add_peak(m, job, world, trainer.arena()->total().peak);
  m.add("exposed_s", kNone);
  one.add_to(m);
  return m;
}

bool is_valid(const TrainConfig& job) try {
  check_sizes(job);
  check_layout(job.plan, job.model, job.optim.batch);
  return make_schedule(job.plan).stages <= job.model.layers;
} catch (const FieldError&) {
  return false;
}

// Skips invalid jobs.
struct JobRows {
  Place place;
  std::vector<RankRow> rows = {};

  void add(std::string name, TrainConfig job, Measured (*measure)(const TrainConfig&, Communicator&, int64_t),
           int64_t steps) {
    if (!place.model.empty()) name += "/" + place.model, job.model = place.sizes;
    if (!is_valid(job)) return;
    job.plan.device = place.device;
    job.plan.backend = place.backend();
    job.plan.threads_per_rank = 1;
    if (job.plan.backend == Backend::nccl) job.plan.all_reduce = Algorithm::native;
    rows.push_back(
        {.name = std::move(name),
         .ranks = static_cast<int>(job.plan.ranks()),
         .measure = [job, measure](Communicator& world, int64_t iterations) { return measure(job, world, iterations); },
         .iterations = steps,
         .backend = job.plan.backend});
  }
};

}  // namespace

std::vector<RankRow> strategy_rows(const Place& place) {
  JobRows out{place};
  for (const DType dtype : {DType::float32, DType::bfloat16}) {
    const auto add = [&](const std::string& name, const Plan& plan, auto* measure, int64_t steps) {
      out.add(fmt::format("strategy/{}/{}/{}", name, value_name(dtype), plan.ranks()),
              {.model = {.layers = 4, .heads = 4, .channels = 128, .context = 64, .vocab = 65},
               .optim = {.batch = 12, .dtype = dtype},
               .plan = plan},
              measure, steps);
    };
    if (!place.processes() && place.device == Device::cpu) add("one-rank", {}, measure_one_rank, 5 * kSteps);
    for (const int n : place.several({2, 4}))
      for (const auto& [name, plan] : strategies(n))
        add(name, plan, plan.dp_mode == DataMode::ps_async ? measure_async : measure_steps, kSteps);
  }
  return out.rows;
}

// Traced steps of pipelines, replayed by the simulator.

namespace {

constexpr int64_t kScheduleSteps = 5, kSequences = 2;  // kSequences: per micro-batch
constexpr int64_t kFields = 6;                         // per action in the exchange between ranks

// Per rank: wall-clock intervals (host-wide clock), and CPU time of passes.
struct Actions {
  TimedLists happened, lengths;
};

// Collective.
Actions make_actions(Communicator& world, const Trace& trace) {
  std::vector<double> own;
  for (const TraceEvent& e : trace.events()) {
    if (e.kind != TraceKind::action) continue;
    const Action a = Action::parse(e.what);
    own.insert(own.end(), {static_cast<double>(a.what), static_cast<double>(a.stage), static_cast<double>(a.microbatch),
                           trace.origin() + e.begin, trace.origin() + e.end, e.cpu_s});
  }
  const auto width = static_cast<int64_t>(world.max(static_cast<double>(own.size())));
  own.resize(static_cast<size_t>(width), -1);  // padding
  const ArenaPtr arena = make_arena();
  const Tensor all = Tensor::empty({width * world.size()}, DType::float64, arena);
  world.all_gather(Tensor::of<double>(own, {width}, arena), all);
  Actions out;
  for (int rank = 0; rank < world.size(); ++rank) {
    std::vector<TimedAction>&happened = out.happened.emplace_back(), &lengths = out.lengths.emplace_back();
    const double* at = all.data<double>() + rank * width;
    for (int64_t i = 0; i < width / kFields && at[0] >= 0; ++i, at += kFields) {
      const Action a{static_cast<PassKind>(at[0]), static_cast<int>(at[1]), static_cast<int>(at[2])};
      happened.push_back({a, at[3], at[4]});
      if (!a.is_message()) lengths.push_back({a, 0, at[5]});
    }
  }
  return out;
}

// Values per step by name.
using Figures = std::map<std::string, std::vector<double>>;

void note(Figures& figures, const Schedule& schedule, const Actions& step, bool shared) {
  const Times times = simulate_times(schedule, shared ? step.lengths : step.happened);
  figures["bubble_replayed"].push_back(simulate(schedule, times).bubble_fraction());
  if (!shared) figures["bubble_measured"].push_back(as_measured(schedule, step.happened).bubble_fraction());
  std::map<std::string, double> totals;  // sum over stages, per micro-batch
  for (const StageTimes& t : times.stages) {
    totals["forward_s"] += t.forward;
    if (schedule.has(PassKind::B)) totals["backward_s"] += t.backward;
    if (schedule.has(PassKind::I)) totals["input_s"] += t.input;
    if (schedule.has(PassKind::W)) totals["weight_s"] += t.weight;
  }
  for (const auto& [name, seconds] : totals) figures[name].push_back(seconds);
}

Measured measure_schedule(const TrainConfig& job, Communicator& world, int64_t steps) {
  const unsigned cores = std::thread::hardware_concurrency();
  const bool shared = static_cast<unsigned>(world.size()) > cores;
  Trace trace(1);
  ReferenceSteps one = one_rank(job, world);
  TimedSteps timed(job, world, &trace);
  Figures figures;
  for (int64_t i = 0; i < TimedSteps::kWarmUp + steps; ++i) {
    one.steps(1);
    trace.begin_step(i + 1);
    timed.step();
    trace.end_step();
    const Actions step = make_actions(world, trace);
    if (i >= TimedSteps::kWarmUp) note(figures, timed.schedule(), step, shared);
  }
  Measured m = timed.result();
  m.add("bubble_predicted", simulate(timed.schedule()).bubble_fraction());
  m.add("bubble_formula", bubble_formula(timed.schedule()).value_or(kNone));
  for (const char* name : {"bubble_replayed", "bubble_measured", "forward_s", "backward_s", "input_s", "weight_s"})
    m.add(name, figures[name].empty() ? kNone : median(figures[name]));
  one.add_to(m);
  if (shared) m.label = fmt::format("no bubble_measured: {} ranks share {} cores", world.size(), cores);
  return m;
}

}  // namespace

std::vector<RankRow> schedule_rows(const Place& place) {
  JobRows out{place};
  if (place.device == Device::cuda) return {};  // GPU traces contain enqueue times
  for (size_t kind = 0; kind < kScheduleNames.size(); ++kind)
    for (const int p : place.several({2, 4}))
      for (const int m : {p, 2 * p, 4 * p})
        out.add(fmt::format("schedule/{}/{}/{}", kScheduleNames[kind], p, m),
                {.model = {.layers = 8, .heads = 4, .channels = 128, .context = 64, .vocab = 256},
                 .optim = {.batch = kSequences * m},
                 .plan = {.pp = p, .schedule = static_cast<ScheduleKind>(kind), .microbatches = m}},
                measure_schedule, kScheduleSteps);
  return out.rows;
}

}  // namespace tessera::bench
