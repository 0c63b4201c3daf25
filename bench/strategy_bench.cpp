// The strategies, each in turn with one rank.
#include "bench/strategy_bench.h"

#include <fmt/format.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "bench/plain_loop.h"
#include "bench/timed_steps.h"
#include "train/async_trainer.h"
#include "train/median.h"
#include "train/names.h"
#include "train/plan_sizes.h"

namespace tessera::bench {
namespace {

constexpr int64_t kSteps = 9, kPipelined = 4;  // kPipelined: micro-batches

struct Strategy {
  std::string name;
  Plan plan;
};

std::vector<Strategy> strategies(int64_t n) {
  std::vector<Strategy> out = {
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

Job job_of(const Plan& plan, DType dtype) {
  Job job{.model = {.layers = 4, .heads = 4, .channels = 128, .context = 64, .vocab = 65},
          .optim = {.batch = 12, .dtype = dtype},
          .plan = plan};
  job.plan.threads_per_rank = 1;
  return job;
}

// One rank for itself, on rank 0 of a world whose other ranks wait meanwhile.
class Alone {
 public:
  Alone(const Job& job, Communicator& world) : axis_(world.split(world.rank(), 0, "alone")) {
    if (world.rank() > 0) return;
    Job one = job;
    one.plan = {.device = job.plan.device, .threads_per_rank = 1};
    steps_ = std::make_unique<TimedSteps>(one, *axis_);
  }
  void steps(int64_t count, std::vector<double>& seconds) {
    for (int64_t i = 0; steps_ && i < count; ++i) seconds.push_back(steps_->step());
  }
  int64_t peak() const { return steps_ ? steps_->peak() : 0; }

 private:
  std::unique_ptr<Communicator> axis_;
  std::unique_ptr<TimedSteps> steps_;
};

std::vector<double> without_warm_up(const std::vector<double>& seconds) {
  return {seconds.begin() + TimedSteps::kWarmUp, seconds.end()};
}

void add_one_rank(Measured& m, const std::vector<double>& alone, int64_t peak) {
  if (alone.empty()) return;  // on another rank
  m.add("of_one_rank", m.seconds / median(without_warm_up(alone)));
  m.add("peak_of_one_rank", static_cast<double>(peak));
}

Measured measure(const Job& job, Communicator& world, int64_t steps) {
  Alone one(job, world);
  TimedSteps all(job, world);
  std::vector<double> alone;
  for (int64_t i = 0; i < TimedSteps::kWarmUp + steps; ++i) {
    one.steps(1, alone);
    all.step();
  }
  Measured m = all.result();
  add_one_rank(m, alone, one.peak());
  return m;
}

// Workers have no step in common, so a turn is several of each. It is left before its last step, at which every worker
// would get the parameters once more.
Measured measure_async(const Job& given, Communicator& world, int64_t steps) {
  constexpr int64_t kTurn = 3;
  const int64_t turns = (steps + kTurn - 1) / kTurn + 1;  // the first warms up
  Job job = given;
  job.optim.steps = turns * kTurn + 1;
  Alone one(job, world);
  AsyncTrainer trainer(job, sequences_for(job), world);
  AsyncServer& server = trainer.server();
  std::vector<double> alone, seconds;
  for (int64_t turn = 0; turn < turns; ++turn) {
    one.steps(kTurn, alone);
    world.barrier();
    const double own = seconds_of([&] {
      server.run((turn + 1) * kTurn,
                 {.step = [&](int worker, int64_t clock) { return trainer.worker_step(worker, clock); }});
    });
    const double slowest = world.max(own);
    if (turn > 0) seconds.push_back(slowest / kTurn);
  }
  Measured m{.seconds = median(seconds)};
  m.add("tokens/s", static_cast<double>(trainer.tokens_per_step()) / m.seconds);
  const PlanSizes s(job);
  const double per_worker = static_cast<double>(s.parts[0][0].whole() * (s.value + s.grad));
  m.add_sent(world.sum(static_cast<double>(server.pushed_bytes() + server.pulled_bytes())) /
                 static_cast<double>(turns * kTurn),
             static_cast<double>(s.plan.dp - 1) * per_worker);
  add_peak(m, job, world, trainer.arena()->total().peak);
  add_one_rank(m, alone, one.peak());
  return m;
}

Measured measure_one_rank(const Job& job, Communicator& world, int64_t steps) {
  PlainLoop plain(job, sequences_for(job));
  TimedSteps trainer(job, world);
  std::vector<double> by_hand;
  for (int64_t i = 0; i < TimedSteps::kWarmUp + steps; ++i) {
    by_hand.push_back(seconds_of([&] { plain.step(); }));
    trainer.step();
  }
  Measured m = trainer.result();
  m.add("of_plain_loop", m.seconds / median(without_warm_up(by_hand)));
  m.add("peak_of_plain_loop", static_cast<double>(plain.peak()));
  return m;
}

using Measure = Measured (*)(const Job&, Communicator&, int64_t);

}  // namespace

std::vector<RankRow> strategy_rows(const Place& place) {
  std::vector<RankRow> rows;
  const auto add = [&](const std::string& name, Plan plan, DType dtype, Measure measure, int64_t steps) {
    plan.device = place.device;
    plan.backend = place.backend();
    if (plan.backend == Backend::nccl) plan.all_reduce = Algorithm::native;
    const Job job = job_of(plan, dtype);
    const auto ranks = static_cast<int>(plan.ranks());
    rows.push_back(
        {.name = fmt::format("strategy/{}/{}/{}", name, text_of(dtype), ranks),
         .ranks = ranks,
         .measure = [job, measure](Communicator& world, int64_t iterations) { return measure(job, world, iterations); },
         .iterations = steps,
         .backend = plan.backend});
  };
  for (const DType dtype : {DType::float32, DType::bfloat16}) {
    if (!place.processes() && place.device == Device::cpu) add("one-rank", {}, dtype, measure_one_rank, 5 * kSteps);
    for (const int n : place.ranks({2, 4}))
      for (const auto& [name, plan] : strategies(n)) {
        if (schedule_of(plan).stages > job_of(plan, dtype).model.layers) continue;  // a stage has a layer
        add(name, plan, dtype, plan.dp_mode == DataMode::ps_async ? measure_async : measure, kSteps);
      }
  }
  return rows;
}

}  // namespace tessera::bench
