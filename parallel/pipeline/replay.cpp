// Means, messages and a shifted clock.
#include "parallel/pipeline/replay.h"

#include <algorithm>
#include <limits>
#include <map>
#include <utility>

namespace tessera {

Action sent_as(const Action& received) {
  return received.what == Do::recv_forward ? Action{Do::send_forward, received.stage - 1, received.microbatch}
                                           : Action{Do::send_backward, received.stage + 1, received.microbatch};
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
  std::map<Action, double> sent;  // when
  for (const auto& list : lists)
    for (const TimedAction& t : list)
      if (t.action.is_message()) sent[t.action] = t.end;
  Mean message;
  for (const auto& list : lists)
    for (const TimedAction& t : list) {
      if (t.action.what != Do::recv_forward && t.action.what != Do::recv_backward) continue;
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

Times times_of(const Schedule& schedule, const TimedLists& lists) {
  std::map<std::pair<int, Do>, Mean> means;
  Times times{.stages = {}, .message = message_time(lists)};
  for (const auto& list : lists)
    for (const TimedAction& t : list) {
      if (t.action.is_message()) continue;
      means[{t.action.stage, t.action.what}].add(t.end - t.start);
      times.actions[t.action] = t.end - t.start;
    }
  for (int stage = 0; stage < schedule.stages; ++stage) {
    const auto of = [&](Do what) { return means[{stage, what}].value(); };
    times.stages.push_back({.forward = of(Do::F), .backward = of(Do::B), .input = of(Do::I), .weight = of(Do::W)});
  }
  return times;
}

}  // namespace tessera
