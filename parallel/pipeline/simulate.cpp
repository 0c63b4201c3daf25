// Simulation of schedules.
#include "parallel/pipeline/simulate.h"

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>
#include <string>

#include "base/error.h"
#include "parallel/pipeline/validate.h"

namespace tessera {

namespace {

double duration(const Action& a, const Times& times) {
  if (const auto own = times.actions.find(a); own != times.actions.end()) return own->second;
  const StageTimes& t = times.stages[times.stages.size() == 1 ? 0 : static_cast<size_t>(a.stage)];
  const std::array by_pass{t.forward, t.backward, t.input, t.weight};  // in the order of PassKind
  return a.is_message() ? 0 : by_pass.at(static_cast<size_t>(a.what));
}

void check_times(const Schedule& s, const Times& times) {
  if (times.stages.size() != 1 && times.stages.size() != static_cast<size_t>(s.stages))
    throw Error("[simulate] " + std::to_string(times.stages.size()) + " stage times for " + std::to_string(s.stages) +
                " stages; expected one per stage or one in total");
  const auto check = [](double x) {
    if (!(x >= 0)) throw Error("[simulate] a time is " + std::to_string(x) + " s; expected 0 or more");
  };
  for (const StageTimes& t : times.stages)
    for (const double x : {t.forward, t.backward, t.input, t.weight, times.message}) check(x);
  for (const auto& [action, x] : times.actions) check(x);
}

double ready_time(const Schedule& s, const Action& a, ActionTable& ends, const Times& times, bool messages) {
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
    const double start = std::max(before, ready_time(schedule, a, ends, times, messages));
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

double Simulation::bubble_fraction() const {
  const double all = makespan * static_cast<double>(idle.size());
  return all > 0 ? std::accumulate(idle.begin(), idle.end(), 0.0) / all : 0;
}

Action sent_as(const Action& received) {
  return received.what == PassKind::recv_forward
             ? Action{PassKind::send_forward, received.stage - 1, received.microbatch}
             : Action{PassKind::send_backward, received.stage + 1, received.microbatch};
}

namespace {

struct Mean {
  double sum = 0;
  int count = 0;
  void add(double x) {
    sum += x;
    ++count;
  }
  double value() const { return count > 0 ? sum / count : 0; }
};

double message_time(const TimedLists& lists) {
  std::map<Action, double> sent;
  for (const auto& list : lists)
    for (const TimedAction& t : list)
      if (t.action.is_message()) sent[t.action] = t.end;
  Mean message;
  for (const auto& list : lists)
    for (const TimedAction& t : list) {
      if (t.action.what != PassKind::recv_forward && t.action.what != PassKind::recv_backward) continue;
      if (const auto found = sent.find(sent_as(t.action)); found != sent.end())
        message.add(std::max(0.0, t.end - std::max(t.start, found->second)));
    }
  return message.value();
}

}  // namespace

Simulation as_measured(const Schedule& schedule, TimedLists lists) {
  double first = std::numeric_limits<double>::infinity(), last = 0;
  for (const auto& list : lists)
    for (const TimedAction& t : list) {
      if (t.action.is_message()) continue;
      first = std::min(first, t.start);
      last = std::max(last, t.end);
    }
  for (auto& list : lists)
    for (TimedAction& t : list) {
      t.start = std::clamp(t.start - first, 0.0, last - first);
      t.end = std::clamp(t.end - first, t.start, last - first);
    }
  Simulation sim{.schedule = schedule};
  sim.actions = std::move(lists);
  sim.sum_up();
  return sim;
}

Times simulate_times(const Schedule& schedule, const TimedLists& lists) {
  std::map<std::pair<int, PassKind>, Mean> means;
  Times times{.stages = {}, .message = message_time(lists)};
  for (const auto& list : lists)
    for (const TimedAction& t : list) {
      if (t.action.is_message()) continue;
      means[{t.action.stage, t.action.what}].add(t.end - t.start);
      times.actions[t.action] = t.end - t.start;
    }
  for (int stage = 0; stage < schedule.stages; ++stage) {
    const auto of = [&](PassKind what) { return means[{stage, what}].value(); };
    times.stages.push_back(
        {.forward = of(PassKind::F), .backward = of(PassKind::B), .input = of(PassKind::I), .weight = of(PassKind::W)});
  }
  return times;
}

}  // namespace tessera
