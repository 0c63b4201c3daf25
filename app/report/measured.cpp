// Means and medians of a trace.
#include "app/report/measured.h"

#include <algorithm>
#include <limits>
#include <map>
#include <utility>

namespace tessera::report {
namespace {

// The world rank of each rank of the pipeline.
std::vector<size_t> pipeline_ranks(const Record& record) {
  std::vector<size_t> out(static_cast<size_t>(record.schedule.ranks), record.ranks.size());
  for (size_t r = 0; r < record.ranks.size(); ++r) {
    int64_t pp = 0;
    bool alike = true;
    for (const auto& [axis, at] : record.ranks[r].at)
      if (axis == "pp")
        pp = at;
      else
        alike = alike && at == 0;
    if (alike && pp < static_cast<int64_t>(out.size())) out[static_cast<size_t>(pp)] = r;
  }
  return out;
}

struct Mean {
  double sum = 0;
  int64_t count = 0;
  void add(double x) {
    sum += x;
    ++count;
  }
  double value() const { return count > 0 ? sum / static_cast<double>(count) : 0; }
};

Times mean_times(const Schedule& s, const std::vector<std::vector<TimedAction>>& ranks) {
  std::map<std::pair<int, Do>, Mean> means;
  std::map<Action, double> sent;  // when
  for (const auto& list : ranks)
    for (const TimedAction& t : list) {
      means[{t.action.stage, t.action.what}].add(t.end - t.start);
      if (t.action.is_message()) sent[t.action] = t.end;
    }
  Mean message;  // from when both sides were ready
  for (const auto& list : ranks)
    for (const TimedAction& t : list) {
      Action from = t.action;
      if (t.action.what == Do::recv_forward)
        from = {Do::send_forward, t.action.stage - 1, t.action.microbatch};
      else if (t.action.what == Do::recv_backward)
        from = {Do::send_backward, t.action.stage + 1, t.action.microbatch};
      else
        continue;
      if (const auto found = sent.find(from); found != sent.end())
        message.add(std::max(0.0, t.end - std::max(t.start, found->second)));
    }
  Times times{.stages = {}, .message = message.value()};
  for (int stage = 0; stage < s.stages; ++stage) {
    const auto of = [&](Do what) { return means[{stage, what}].value(); };
    times.stages.push_back({.forward = of(Do::F), .backward = of(Do::B), .input = of(Do::I), .weight = of(Do::W)});
  }
  return times;
}

size_t passes_in(const std::vector<TimedAction>& list) {
  return static_cast<size_t>(
      std::count_if(list.begin(), list.end(), [](const TimedAction& t) { return !t.action.is_message(); }));
}

// Idle times of what happened; the clock begins with the first pass of a stage.
void sum_up(Simulation& sim) {
  double first = std::numeric_limits<double>::infinity(), last = 0;
  for (const auto& list : sim.actions)
    for (const TimedAction& t : list) {
      if (t.action.is_message()) continue;
      first = std::min(first, t.start);
      last = std::max(last, t.end);
    }
  sim.makespan = last - first;
  for (auto& list : sim.actions) {
    double busy = 0;
    for (TimedAction& t : list) {
      t.start = std::max(0.0, t.start - first);
      t.end = std::clamp(t.end - first, t.start, sim.makespan);
      if (!t.action.is_message()) busy += t.end - t.start;
    }
    sim.idle.push_back(sim.makespan - busy);
  }
}

}  // namespace

StepSpan median_step(const Record& record) {
  std::map<int64_t, StepSpan> steps;
  for (const Rank& rank : record.ranks)
    for (const Event& e : rank.events) {
      if (e.track != "step") continue;
      StepSpan& s = steps.try_emplace(e.step, StepSpan{e.step, e.begin, e.end}).first->second;
      s.begin = std::min(s.begin, e.begin);
      s.end = std::max(s.end, e.end);
    }
  std::vector<StepSpan> all;
  for (const auto& [step, span] : steps) all.push_back(span);
  if (all.empty()) return {};
  const auto middle = all.begin() + static_cast<std::ptrdiff_t>(all.size() / 2);
  std::nth_element(all.begin(), middle, all.end(),
                   [](const StepSpan& a, const StepSpan& b) { return a.end - a.begin < b.end - b.begin; });
  return *middle;
}

std::optional<MeasuredPipeline> measure_pipeline(const Record& record, const StepSpan& step) {
  const Schedule& s = record.schedule;
  if (s.ranks < 2) return std::nullopt;
  MeasuredPipeline p;
  p.equal = simulate(s);
  p.formula = bubble_formula(s);
  p.measured.schedule = s;
  size_t found = 0, planned = 0;
  for (const size_t rank : pipeline_ranks(record)) {
    if (rank == record.ranks.size()) return std::nullopt;
    std::vector<TimedAction>& list = p.measured.actions.emplace_back();
    for (const Event& e : record.ranks[rank].events)
      if (e.step == step.step && e.stage >= 0) list.push_back({Action::parse(e.name), e.begin, e.end});
    if (list.empty()) return std::nullopt;
    found += passes_in(list);
  }
  for (const auto& list : p.equal.actions) planned += passes_in(list);
  if (found != planned) return std::nullopt;
  p.times = mean_times(s, p.measured.actions);
  p.replayed = simulate(s, p.times);
  sum_up(p.measured);
  return p;
}

}  // namespace tessera::report
