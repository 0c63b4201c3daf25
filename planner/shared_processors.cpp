// Goes from one end of an action to the next.
#include "planner/shared_processors.h"

#include <algorithm>
#include <limits>

#include "parallel/pipeline/validate.h"
#include "tensor/error.h"

namespace tessera::planner {
namespace {

struct Rank {
  size_t next = 0;
  bool working = false;
  double left = 1, start = 0;  // left: of the action under way, from 1 down to 0
};

bool may_begin(const Schedule& s, const Action& action, ActionTable& ends, bool messages) {
  const Needs all = needs(s, action, messages);
  return std::ranges::all_of(all, [&](const Action& n) { return ends.of_need(n) >= 0; });
}

}  // namespace

Simulation simulate_shared(const Schedule& schedule, const SharedTime& time) {
  Simulation sim{.schedule = schedule};
  sim.actions.resize(schedule.actions.size());
  ActionTable ends(schedule);
  const bool messages = has_messages(schedule);
  std::vector<Rank> ranks(schedule.actions.size());
  for (double now = 0;;) {
    int working = 0;
    bool over = true;
    for (size_t r = 0; r < ranks.size(); ++r) {
      Rank& rank = ranks[r];
      const auto& list = schedule.actions[r];
      if (!rank.working && rank.next < list.size() && may_begin(schedule, list[rank.next], ends, messages))
        rank = {.next = rank.next, .working = true, .left = 1, .start = now};
      working += rank.working ? 1 : 0;
      over = over && rank.next == list.size();
    }
    if (over) break;
    if (working == 0) throw Error("[simulate] the ranks of schedule " + schedule.name + " wait for each other");
    double until = std::numeric_limits<double>::infinity();
    std::vector<double> takes(ranks.size());
    for (size_t r = 0; r < ranks.size(); ++r) {
      if (!ranks[r].working) continue;
      takes[r] = std::max(time(schedule.actions[r][ranks[r].next], working), 1e-12);
      until = std::min(until, ranks[r].left * takes[r]);
    }
    now += until;
    for (size_t r = 0; r < ranks.size(); ++r) {
      Rank& rank = ranks[r];
      if (!rank.working) continue;
      rank.left -= until / takes[r];
      if (rank.left > 1e-9) continue;
      const Action& done = schedule.actions[r][rank.next];
      ends[done] = now;
      sim.actions[r].push_back({done, rank.start, now});
      rank = {.next = rank.next + 1};
    }
  }
  sim.sum_up();
  return sim;
}

}  // namespace tessera::planner
