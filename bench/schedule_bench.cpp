// Steps with a trace, and what the simulator makes of them.
#include "bench/schedule_bench.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <thread>
#include <utility>

#include "bench/timed_steps.h"
#include "parallel/pipeline/replay.h"
#include "train/median.h"

namespace tessera::bench {
namespace {

constexpr int64_t kSteps = 5, kSequences = 2;  // of a micro-batch
constexpr int64_t kNumbers = 6;                // of an action, as ranks tell it each other

Job job_of(const Place& place, ScheduleKind kind, int64_t ranks, int64_t microbatches) {
  return {.model = {.layers = 8, .heads = 4, .channels = 128, .context = 64, .vocab = 256},
          .optim = {.batch = kSequences * microbatches},
          .plan = {.pp = ranks,
                   .schedule = kind,
                   .microbatches = microbatches,
                   .device = place.device,
                   .backend = place.backend(),
                   .threads_per_rank = 1}};
}

// The actions of a step by rank: as they were on the clock that the ranks of a host share, and the passes alone with
// the time for which they had a processor.
struct Actions {
  TimedLists happened, lengths;
};

// Every rank calls it, and hears of all.
Actions actions_of(Communicator& world, const Trace& trace) {
  std::vector<double> own;
  for (const TraceEvent& e : trace.events()) {
    if (e.kind != TraceKind::action) continue;
    const Action a = Action::parse(e.what);
    own.insert(own.end(), {static_cast<double>(a.what), static_cast<double>(a.stage), static_cast<double>(a.microbatch),
                           trace.origin() + e.begin, trace.origin() + e.end, e.processor});
  }
  const auto width = static_cast<int64_t>(world.max(static_cast<double>(own.size())));
  own.resize(static_cast<size_t>(width), -1);  // a rank with fewer says that these are none
  const ArenaPtr arena = make_arena();
  const Tensor all = Tensor::empty({width * world.size()}, DType::float64, arena);
  world.all_gather(Tensor::of<double>(own, {width}, arena), all);
  Actions out;
  for (int rank = 0; rank < world.size(); ++rank) {
    std::vector<TimedAction>&happened = out.happened.emplace_back(), &lengths = out.lengths.emplace_back();
    const double* at = all.data<double>() + rank * width;
    for (int64_t i = 0; i < width / kNumbers && at[0] >= 0; ++i, at += kNumbers) {
      const Action a{static_cast<Do>(at[0]), static_cast<int>(at[1]), static_cast<int>(at[2])};
      happened.push_back({a, at[3], at[4]});
      if (!a.is_message()) lengths.push_back({a, 0, at[5]});
    }
  }
  return out;
}

// Of steps, by name.
using Figures = std::map<std::string, std::vector<double>>;

void note(Figures& figures, const Schedule& schedule, const Actions& step, bool shared) {
  const Times times = times_of(schedule, shared ? step.lengths : step.happened);
  figures["bubble_replayed"].push_back(simulate(schedule, times).bubble_share());
  if (!shared) figures["bubble_measured"].push_back(as_measured(schedule, step.happened).bubble_share());
  std::map<std::string, double> whole;  // of all stages, for a micro-batch
  for (const StageTimes& t : times.stages) {
    whole["forward_s"] += t.forward;
    if (schedule.has(Do::B)) whole["backward_s"] += t.backward;
    if (schedule.has(Do::I)) whole["input_s"] += t.input;
    if (schedule.has(Do::W)) whole["weight_s"] += t.weight;
  }
  for (const auto& [name, seconds] : whole) figures[name].push_back(seconds);
}

Measured measure(const Job& job, Communicator& world, int64_t steps) {
  const unsigned processors = std::thread::hardware_concurrency();
  const bool shared = static_cast<unsigned>(world.size()) > processors;
  Trace trace(1);
  TimedSteps timed(job, world, &trace);
  Figures figures;
  for (int64_t i = 0; i < TimedSteps::kWarmUp + steps; ++i) {
    trace.begin_step(i + 1);
    timed.step();
    trace.end_step();
    const Actions step = actions_of(world, trace);
    if (i >= TimedSteps::kWarmUp) note(figures, timed.schedule(), step, shared);
  }
  Measured m = timed.result();
  m.add("bubble_predicted", simulate(timed.schedule()).bubble_share());
  if (const auto formula = bubble_formula(timed.schedule())) m.add("bubble_formula", *formula);
  for (auto& [name, values] : figures) m.add(name, median(std::move(values)));
  if (shared) m.label = fmt::format("no bubble_measured: {} ranks share {} processors", world.size(), processors);
  return m;
}

}  // namespace

std::vector<RankRow> schedule_rows(const Place& place) {
  std::vector<RankRow> rows;
  if (place.device == Device::cuda) return rows;  // there the times of a trace are those of queueing
  for (size_t kind = 0; kind < kScheduleNames.size(); ++kind)
    for (const int p : place.ranks({2, 4}))
      for (const int m : {p, 2 * p, 4 * p}) {
        const Job job = job_of(place, static_cast<ScheduleKind>(kind), p, m);
        if (schedule_of(job.plan).stages > job.model.layers) continue;  // a stage has a layer
        rows.push_back(
            {.name = fmt::format("schedule/{}/{}/{}", kScheduleNames[kind], p, m),
             .ranks = p,
             .measure = [job](Communicator& world, int64_t iterations) { return measure(job, world, iterations); },
             .iterations = kSteps,
             .backend = job.plan.backend});
      }
  return rows;
}

}  // namespace tessera::bench
