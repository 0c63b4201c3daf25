// Derives a plan's time breakdown from the traces of its ranks.
#include "planner/measured.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <map>
#include <string_view>

#include "parallel/comm/launch.h"
#include "parallel/comm/trace.h"
#include "parallel/pipeline/simulate.h"
#include "planner/pipeline.h"
#include "train/trainer.h"
#include "train/usage.h"

namespace tessera::planner {
namespace {

constexpr int kWarmUp = 3, kMinSteps = 3;
constexpr std::chrono::minutes kLongest{1};

bool within(const TraceEvent& e, const TraceStep& step) { return e.begin >= step.begin && e.begin < step.end; }

// Seconds of the compute thread in one step, without communication inside passes.
struct RankStep {
  Parts parts = {};
  std::vector<TimedAction> actions = {};
};

double overlap(const TraceEvent& a, const TraceEvent& b) {
  return std::max(0.0, std::min(a.end, b.end) - std::max(a.begin, b.begin));
}

// Communication on the compute thread (tp, cp) is fully exposed; background communication (dp) only while no pass
// overlaps it.
RankStep analyze_step(const std::vector<TraceEvent>& events, const TraceStep& step) {
  RankStep out;
  std::vector<const TraceEvent*> passes, phases;
  for (const TraceEvent& e : events) {
    if (!within(e, step)) continue;
    if (e.kind == TraceKind::action) {
      const Action action = Action::parse(e.what);
      out.actions.push_back({action, e.begin, e.end});
      if (!action.is_message()) passes.push_back(&e);
    }
    if (e.kind == TraceKind::phase) phases.push_back(&e);
  }
  for (const TraceEvent* p : passes) out.parts.compute += p->end - p->begin;
  for (const TraceEvent* p : phases) out.parts.optimizer += p->end - p->begin;
  for (const TraceEvent& e : events) {
    if (!within(e, step) || e.kind != TraceKind::communication || e.axis == "pp") continue;
    double inside = 0, after = 0;
    for (const TraceEvent* p : passes) inside += overlap(e, *p);
    for (const TraceEvent* p : phases) after += overlap(e, *p);
    if (e.axis == "tp" || e.axis == "cp") {
      (e.axis == "tp" ? out.parts.tp : out.parts.cp) += inside + after;
      out.parts.compute -= inside;
    } else {
      out.parts.dp += after;
      const bool gathers = e.what == "all_gather" && inside > 0;  // ZeRO-3: the pass waits for it
      if (gathers) out.parts.dp += inside, out.parts.compute -= inside;
    }
    out.parts.optimizer -= after;
  }
  out.parts.optimizer = std::max(0.0, out.parts.optimizer);
  return out;
}

struct Log {
  Trace trace;
  Schedule schedule;
  MemoryParts memory;
  int pp = 0;
};

MemoryParts memory_parts(const Arena& arena) {
  const auto peak = [&](Category c) { return static_cast<double>(arena.usage(c).peak); };
  MemoryParts m{.parameters = peak(Category::parameters),
                .gradients = peak(Category::gradients),
                .optimizer = peak(Category::optimizer),
                .communication = peak(Category::communication)};
  m.activations = static_cast<double>(arena.total().peak) - m.peak();  // includes workspace
  return m;
}

}  // namespace

Measured measure(const TrainConfig& job, const std::function<void(int done)>& working, int steps) {
  const auto ranks = static_cast<size_t>(job.plan.ranks());
  std::vector<Log> logs(ranks);
  launch(launch_options(job.plan), [&](Communicator& world) {
    Log& log = logs[static_cast<size_t>(world.rank())];
    Trainer trainer(
        job,
        synthetic_sequences(job.model.vocab, job.model.context, job.optim.batch, static_cast<uint64_t>(job.optim.seed)),
        world, &log.trace);
    const auto start = std::chrono::steady_clock::now();
    for (int s = 0; s < steps + kWarmUp; ++s) {
      if (s == 1) trainer.state().arena->reset_peaks();
      if (world.rank() == 0) working(s);
      const std::chrono::duration<double> so_far = std::chrono::steady_clock::now() - start;
      if (world.max(so_far > kLongest ? 1 : 0) > 0 && s >= kMinSteps + kWarmUp) break;  // also a barrier
      log.trace.begin_step(s + 1);
      trainer.step();
      log.trace.end_step();
    }
    log.schedule = trainer.state().part().runtime().schedule();
    log.pp = trainer.state().groups.mesh.coordinate("pp");
    log.memory = memory_parts(*trainer.state().arena);
  });
  Measured out;
  std::vector<double> seconds, bubbles;
  std::map<std::pair<int, PassKind>, std::vector<double>> passes;
  std::array<std::vector<double>, kParts.size()> parts;
  for (size_t s = kWarmUp; s < logs[0].trace.steps().size(); ++s) {
    double longest = 0;
    Parts mean;
    TimedLists lists(static_cast<size_t>(job.plan.pp));
    for (const Log& log : logs) {
      const TraceStep step = log.trace.steps()[s];
      longest = std::max(longest, step.end - step.begin);
      const RankStep r = analyze_step(log.trace.events(), step);
      for (const auto& [name, part] : kParts) mean.*part += r.parts.*part;
      for (const TimedAction& t : r.actions)
        if (!t.action.is_message()) passes[{t.action.stage, t.action.what}].push_back(t.end - t.start);
      if (lists[static_cast<size_t>(log.pp)].empty()) {
        lists[static_cast<size_t>(log.pp)] = r.actions;
        const double offset = log.trace.origin() - logs[0].trace.origin();
        for (TimedAction& t : lists[static_cast<size_t>(log.pp)]) t.start += offset, t.end += offset;
      }
    }
    seconds.push_back(longest);
    const Simulation sim = as_measured(logs[0].schedule, lists);
    bubbles.push_back(job.plan.pp > 1 ? sim.bubble_fraction() * sim.makespan / longest : 0);
    for (size_t i = 0; i < parts.size(); ++i) parts[i].push_back(mean.*kParts[i].second / static_cast<double>(ranks));
  }
  out.step_s = median(seconds);
  out.bubble = median(bubbles);
  for (size_t i = 0; i < parts.size(); ++i) out.parts.*kParts[i].second = median(parts[i]);
  out.parts.bubble = out.bubble * out.step_s;
  out.stages.assign(static_cast<size_t>(logs[0].schedule.stages), {0, 0, 0, 0});
  for (const auto& [at, times] : passes)
    pass_time(out.stages[static_cast<size_t>(at.first)], at.second) = median(times);
  for (const Log& log : logs)
    if (log.memory.peak() > out.memory.peak()) out.memory = log.memory;
  return out;
}

std::vector<Compared> compare(const Prediction& p, const Measured& m) {
  constexpr double kOff = 0.15, kSeen = 0.01;
  std::vector<Compared> out;
  const auto add = [&](std::string part, double predicted, double measured, double full) {
    const double apart = std::abs(predicted - measured);
    out.push_back({std::move(part), predicted, measured, apart > kOff * measured && apart > kSeen * full});
  };
  add("step", p.step_s, m.step_s, m.step_s);
  for (size_t s = 0; s < m.stages.size(); ++s) {
    StageTimes a = p.stages[s], b = m.stages[s];
    for (const PassKind pass : {PassKind::F, PassKind::B, PassKind::I, PassKind::W})
      if (const double measured = pass_time(b, pass); measured > 0)
        add(fmt::format("{} of stage {}", to_string(pass), s), pass_time(a, pass), measured, measured);
  }
  add("compute", p.parts.compute + p.parts.recompute, m.parts.compute, m.step_s);
  for (const auto& [name, part] : {std::pair{"tp", &Parts::tp}, {"cp", &Parts::cp}, {"dp", &Parts::dp}})
    add(fmt::format("{} exposed", name), p.parts.*part, m.parts.*part, m.step_s);
  add("bubble", p.bubble * p.step_s, m.parts.bubble, m.step_s);
  add("optimizer", p.parts.optimizer, m.parts.optimizer, m.step_s);
  const MemoryParts& a = p.memory[p.peak_rank];
  const auto memory = [&](std::string_view name, double predicted, double measured) {
    add(fmt::format("memory, {}", name), predicted, measured, m.memory.peak());
  };
  for (const auto& [name, part] : kMemoryParts)
    if (part != &MemoryParts::workspace) memory(name, a.*part, m.memory.*part);  // measured as part of activations
  memory("peak", a.peak(), m.memory.peak());
  return out;
}

}  // namespace tessera::planner
