// The clock.
#include "parallel/pipeline/simulate.h"

#include <algorithm>
#include <numeric>
#include <optional>

#include "parallel/pipeline/validate.h"
#include "parallel/pipeline/walk.h"
#include "tensor/error.h"

namespace tessera {
namespace {

double duration(const Action& a, const Times& times) {
  if (const auto own = times.actions.find(a); own != times.actions.end()) return own->second;
  const StageTimes& t = times.stages[times.stages.size() == 1 ? 0 : static_cast<size_t>(a.stage)];
  switch (a.what) {
    case Do::F:
      return t.forward;
    case Do::B:
      return t.backward;
    case Do::I:
      return t.input;
    case Do::W:
      return t.weight;
    default:
      return 0;
  }
}

void check_times(const Schedule& s, const Times& times) {
  if (times.stages.size() != 1 && times.stages.size() != static_cast<size_t>(s.stages))
    throw Error("[simulate] " + std::to_string(times.stages.size()) + " times of stages for " +
                std::to_string(s.stages) + " stages; expected one for each, or one for all");
  const auto check = [](double x) {
    if (!(x >= 0)) throw Error("[simulate] a time is " + std::to_string(x) + " s; expected 0 or more");
  };
  for (const StageTimes& t : times.stages)
    for (const double x : {t.forward, t.backward, t.input, t.weight, times.message}) check(x);
  for (const auto& [action, x] : times.actions) check(x);
}

// When the last of what the action needs is there.
double there(const Schedule& s, const Action& a, ActionTable& ends, const Times& times, bool messages) {
  double latest = 0;
  for (const Action& n : needs(s, a, messages)) {
    const bool crosses = s.rank_of_stage[static_cast<size_t>(n.stage)] != s.rank_of_stage[static_cast<size_t>(a.stage)];
    latest = std::max(latest, ends.of_need(n) + (crosses ? times.message : 0));
  }
  return latest;
}

}  // namespace

Simulation simulate(const Schedule& schedule, const Times& times) {
  validate(schedule);
  check_times(schedule, times);
  Simulation sim{.schedule = schedule};
  sim.actions.resize(static_cast<size_t>(schedule.ranks));
  ActionTable ends(schedule);
  const bool messages = has_messages(schedule);
  walk(schedule, ends, [&](const ActionPlace& p) {
    const auto rank = static_cast<size_t>(p.rank);
    const Action& a = schedule.actions[rank][p.index];
    auto& done = sim.actions[rank];
    const double before = done.empty() ? 0 : done.back().end;
    const double start = std::max(before, there(schedule, a, ends, times, messages));
    return done.emplace_back(TimedAction{a, start, start + duration(a, times)}).end;
  });
  sim.sum_up();
  return sim;
}

void Simulation::sum_up() {
  makespan = 0;
  for (const auto& list : actions)
    for (const TimedAction& t : list)
      if (!t.action.is_message()) makespan = std::max(makespan, t.end);
  idle.clear();
  idle_inside.clear();
  for (const auto& list : actions) {
    double busy = 0, first = -1, last = 0;
    for (const TimedAction& t : list) {
      if (t.action.is_message()) continue;
      if (first < 0) first = t.start;
      busy += t.end - t.start;
      last = t.end;
    }
    idle.push_back(makespan - busy);
    idle_inside.push_back(std::max(0.0, last - std::max(0.0, first) - busy));
  }
  in_flight = peak_in_flight(schedule);
}

std::optional<double> bubble_formula(const Schedule& s) {
  const double p = s.ranks, m = s.microbatches, v = s.chunks();
  if (s.name == "naive") return (p - 1) / p;
  if (s.name == "gpipe" || s.name == "1f1b") return (p - 1) / (m + p - 1);
  if (s.name == "interleaved") return (p - 1) / (v * m + p - 1);
  if (s.name == "zb-h1" && m >= p) return (p - 1) / (3 * m + p - 1);
  if (s.name == "v-min" && p > 1) return (4 * p - 5) / (6 * m + 4 * p - 5);
  return std::nullopt;
}

double Simulation::bubble_share() const {
  const double all = makespan * static_cast<double>(idle.size());
  return all > 0 ? std::accumulate(idle.begin(), idle.end(), 0.0) / all : 0;
}

}  // namespace tessera
