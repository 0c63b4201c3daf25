// Schedules: transformation passes, traversal and validation.
#include "parallel/pipeline/validate.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"

namespace tessera {

namespace {

using List = std::vector<Action>;

template <class Rewrite>
Schedule rewritten(Schedule schedule, const Rewrite& rewrite) {
  for (List& list : schedule.actions) list = rewrite(std::exchange(list, {}));
  return schedule;
}

bool is_backward(PassKind what) { return what == PassKind::B || what == PassKind::I; }

}  // namespace

Schedule insert_messages(const Schedule& schedule) {
  if (has_messages(schedule))
    throw Error("[schedule] " + schedule.name + ": insert_messages() expects a schedule without messages");
  return rewritten(schedule, [&](const List& list) {
    List out;
    for (const Action& a : list) {
      const bool before = schedule.crosses(a.stage - 1), after = schedule.crosses(a.stage);
      if (a.what == PassKind::F && before) out.push_back({PassKind::recv_forward, a.stage, a.microbatch});
      if (is_backward(a.what) && after) out.push_back({PassKind::recv_backward, a.stage, a.microbatch});
      out.push_back(a);
      if (a.what == PassKind::F && after) out.push_back({PassKind::send_forward, a.stage, a.microbatch});
      if (is_backward(a.what) && before) out.push_back({PassKind::send_backward, a.stage, a.microbatch});
    }
    return out;
  });
}

Schedule split_backward(const Schedule& schedule) {
  return rewritten(schedule, [](const List& list) {
    List out;
    for (size_t i = 0; i < list.size(); ++i) {
      const Action a = list[i];
      if (a.what != PassKind::B) {
        out.push_back(a);
        continue;
      }
      out.push_back({PassKind::I, a.stage, a.microbatch});
      if (i + 1 < list.size() && list[i + 1].what == PassKind::send_backward) out.push_back(list[++i]);
      out.push_back({PassKind::W, a.stage, a.microbatch});
    }
    return out;
  });
}

bool has_messages(const Schedule& schedule) {
  for (const auto& list : schedule.actions)
    for (const Action& a : list)
      if (a.is_message()) return true;
  return false;
}

Needs needs(const Schedule& schedule, const Action& action, bool has_messages) {
  const int s = action.stage, i = action.microbatch;
  const bool first = s == 0, last = s + 1 == schedule.stages;
  const auto arrived = [&](PassKind message, int boundary, const Action& made) {
    return has_messages && schedule.crosses(boundary) ? Action{message, s, i} : made;
  };
  Needs out;
  switch (action.what) {
    case PassKind::F:
      if (!first) out.push_back(arrived(PassKind::recv_forward, s - 1, {PassKind::F, s - 1, i}));
      break;
    case PassKind::B:
    case PassKind::I:
      out.push_back({PassKind::F, s, i});
      if (!last) out.push_back(arrived(PassKind::recv_backward, s, {PassKind::B, s + 1, i}));
      break;
    case PassKind::W:
      out.push_back({PassKind::I, s, i});
      break;
    case PassKind::send_forward:
      out.push_back({PassKind::F, s, i});
      break;
    case PassKind::recv_forward:
      out.push_back({PassKind::send_forward, s - 1, i});
      break;
    case PassKind::send_backward:
      out.push_back({PassKind::B, s, i});
      break;
    case PassKind::recv_backward:
      out.push_back({PassKind::send_backward, s + 1, i});
      break;
  }
  return out;
}

std::vector<ActionPlace> walk(const Schedule& schedule, ActionTable& table,
                              const std::function<double(const ActionPlace&)>& visit) {
  const bool messages = has_messages(schedule);
  const auto ranks = static_cast<int>(schedule.actions.size());
  std::vector<size_t> next(static_cast<size_t>(ranks));
  const auto may_begin = [&](const Action& a) {
    const Needs all = needs(schedule, a, messages);
    return std::ranges::all_of(all, [&](const Action& n) { return table.of_need(n) >= 0; });
  };
  for (bool moved = true; moved;) {
    moved = false;
    for (int r = 0; r < ranks; ++r) {
      const auto& list = schedule.actions[static_cast<size_t>(r)];
      for (size_t& at = next[static_cast<size_t>(r)]; at < list.size() && may_begin(list[at]); ++at) {
        table[list[at]] = visit({r, at});
        moved = true;
      }
    }
  }
  std::vector<ActionPlace> stuck;
  for (int r = 0; r < ranks; ++r)
    if (const size_t at = next[static_cast<size_t>(r)]; at < schedule.actions[static_cast<size_t>(r)].size())
      stuck.push_back({r, at});
  return stuck;
}

namespace {

using Fault = std::optional<std::string>;

std::string at(const Schedule& s, const ActionPlace& p) {
  return fmt::format("rank {}, action {} ({}): ", p.rank, p.index,
                     s.actions[static_cast<size_t>(p.rank)][p.index].str());
}

std::string absent(const char* what, int number, int count) {
  return fmt::format("{} {} does not exist: {}", what, number,
                     count == 1 ? fmt::format("there is only {} 0", what) : fmt::format("expected 0 to {}", count - 1));
}

template <class Rule>
Fault each(const Schedule& s, const Rule& rule) {
  for (int r = 0; r < s.ranks; ++r) {
    const auto& list = s.actions[static_cast<size_t>(r)];
    for (size_t i = 0; i < list.size(); ++i)
      if (Fault f = rule(list[i], ActionPlace{r, i})) return f;
  }
  return {};
}

Fault wrong_form(const Schedule& s) {
  if (s.ranks < 1 || s.stages < 1 || s.microbatches < 1)
    return fmt::format("{} ranks, {} stages and {} micro-batches; expected 1 or more of each", std::max(0, s.ranks),
                       s.stages, s.microbatches);
  if (s.actions.size() != static_cast<size_t>(s.ranks))
    return fmt::format("{} lists of actions for {} ranks; expected one per rank", s.actions.size(), s.ranks);
  if (s.stages % s.ranks != 0) return fmt::format("{} stages are not divisible by {} ranks", s.stages, s.ranks);
  if (s.rank_of_stage.size() != static_cast<size_t>(s.stages))
    return fmt::format("rank_of_stage has {} entries for {} stages", s.rank_of_stage.size(), s.stages);
  for (int r = 0; r < s.ranks; ++r)
    if (const auto n = std::ranges::count(s.rank_of_stage, r); n != s.chunks())
      return fmt::format("rank {} has {} stages; expected {} on each", r, n, s.chunks());
  return {};
}

// Records the position of each action; returns the fault of a misplaced or duplicated one.
Fault misplaced(const Schedule& s, ActionTable& table) {
  return each(s, [&](const Action& a, const ActionPlace& p) -> Fault {
    if (a.stage < 0 || a.stage >= s.stages) return at(s, p) + absent("stage", a.stage, s.stages);
    if (a.microbatch < 0 || a.microbatch >= s.microbatches)
      return at(s, p) + absent("micro-batch", a.microbatch, s.microbatches);
    if (const int rank = s.rank_of_stage[static_cast<size_t>(a.stage)]; rank != p.rank)
      return fmt::format("{}stage {} is on rank {}", at(s, p), a.stage, rank);
    if (std::exchange(table[a], static_cast<double>(p.index)) >= 0) return at(s, p) + "occurs twice";
    const bool forward = a.what == PassKind::send_forward || a.what == PassKind::recv_backward;
    if (a.is_message() && !s.crosses(forward ? a.stage : a.stage - 1))
      return at(s, p) + "this stage boundary does not cross ranks";
    return {};
  });
}

Fault missing(const Schedule& s, ActionTable& table) {
  const bool messages = has_messages(s);
  for (int stage = 0; stage < s.stages; ++stage) {
    const int rank = s.rank_of_stage[static_cast<size_t>(stage)];
    for (int i = 0; i < s.microbatches; ++i) {
      const auto has = [&](PassKind what) { return table[{what, stage, i}] >= 0; };
      const auto lacks = [&](PassKind what) {
        return fmt::format("rank {}: {} is missing", rank, Action{what, stage, i}.str());
      };
      if (!has(PassKind::F)) return lacks(PassKind::F);
      if (has(PassKind::B) && (has(PassKind::I) || has(PassKind::W))) {
        const ActionPlace both{rank, static_cast<size_t>(table[{PassKind::B, stage, i}])};
        return at(s, both) + "the backward pass is both fused (B) and split (I, W); expected one of the two";
      }
      if (!has(PassKind::B) && !has(PassKind::I)) return lacks(has(PassKind::W) ? PassKind::I : PassKind::B);
      if (!has(PassKind::B) && !has(PassKind::W)) return lacks(PassKind::W);
      if (!messages) continue;
      if (s.crosses(stage))
        for (const PassKind what : {PassKind::send_forward, PassKind::recv_backward})
          if (!has(what)) return lacks(what);
      if (s.crosses(stage - 1))
        for (const PassKind what : {PassKind::recv_forward, PassKind::send_backward})
          if (!has(what)) return lacks(what);
    }
  }
  return {};
}

// F, I and W of a stage must each be in ascending order of micro-batches.
Fault disordered(const Schedule& s) {
  std::vector<std::array<int, 3>> last(static_cast<size_t>(s.stages), {-1, -1, -1});
  return each(s, [&](const Action& a, const ActionPlace& p) -> Fault {
    if (a.what > PassKind::W) return {};
    auto& of_stage = last[static_cast<size_t>(a.stage)];
    for (const size_t row : {0, 1, 2}) {
      const bool counts = row == 0   ? a.what == PassKind::F
                          : row == 1 ? a.what == PassKind::B || a.what == PassKind::I
                                     : a.what == PassKind::B || a.what == PassKind::W;
      if (!counts) continue;
      if (a.microbatch != of_stage[row] + 1)
        return fmt::format("{}precedes that of micro-batch {}; expected ascending micro-batches in each stage",
                           at(s, p), of_stage[row] + 1);
      of_stage[row] = a.microbatch;
    }
    return {};
  });
}

Fault stuck(const Schedule& s) {
  ActionTable done(s);
  const std::vector<ActionPlace> places = walk(s, done, [](const ActionPlace&) { return 0.0; });
  if (places.empty()) return {};
  const bool messages = has_messages(s);
  std::string all;
  for (const ActionPlace& p : places)
    for (const Action& need : needs(s, s.actions[static_cast<size_t>(p.rank)][p.index], messages))
      if (done.of_need(need) < 0) {
        const std::string waits = at(s, p) + "waits for " + need.str();
        // A dependency later on the same rank can never be satisfied and is the cause of all other waits.
        if (s.rank_of_stage[static_cast<size_t>(need.stage)] == p.rank)
          return waits + ", which comes later on the same rank";
        all += (all.empty() ? "" : "; ") + waits;
      }
  return "deadlock: " + all;
}

}  // namespace

std::optional<std::string> find_fault(const Schedule& s) {
  if (Fault f = wrong_form(s)) return f;
  ActionTable where(s);
  if (Fault f = misplaced(s, where)) return f;
  if (Fault f = missing(s, where)) return f;
  if (Fault f = disordered(s)) return f;
  return stuck(s);
}

void validate(const Schedule& schedule) {
  if (const auto fault = find_fault(schedule)) throw Error("[schedule] " + schedule.name + ": " + *fault);
}

std::vector<int> peak_in_flight(const Schedule& schedule) {
  std::vector<int> peaks;
  for (const auto& list : schedule.actions) {
    int now = 0, peak = 0;
    for (const Action& a : list) {
      now += (a.what == PassKind::F) - (a.what == PassKind::B || a.what == PassKind::W);
      peak = std::max(peak, now);
    }
    peaks.push_back(peak);
  }
  return peaks;
}

}  // namespace tessera
