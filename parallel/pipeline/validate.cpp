// The rules, one function each.
#include "parallel/pipeline/validate.h"

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "tensor/error.h"

namespace tessera {
namespace {

using Fault = std::optional<ScheduleFault>;

Fault fault(std::string what, const ActionPlace& place) { return ScheduleFault{std::move(what), place, ""}; }

std::string at(const Schedule& s, const ActionPlace& p) {
  return "rank " + std::to_string(p.rank) + ", action " + std::to_string(p.index) + " (" +
         s.actions[static_cast<size_t>(p.rank)][p.index].str() + "): ";
}

// Behind the last action of the rank that has the stage.
ActionPlace end_of(const Schedule& s, int stage) {
  const int rank = s.rank_of_stage[static_cast<size_t>(stage)];
  return {rank, s.actions[static_cast<size_t>(rank)].size()};
}

// Calls rule(action, place) for all actions until one has a fault.
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
  const auto count = [](size_t n, const char* what) { return std::to_string(n) + " " + what; };
  if (s.ranks < 1 || s.stages < 1 || s.microbatches < 1)
    return fault(count(static_cast<size_t>(std::max(0, s.ranks)), "ranks, ") + std::to_string(s.stages) +
                     " stages and " + std::to_string(s.microbatches) + " micro-batches; expected 1 or more of each",
                 {});
  if (s.actions.size() != static_cast<size_t>(s.ranks))
    return fault(count(s.actions.size(), "lists of actions for ") + std::to_string(s.ranks) + " ranks", {});
  if (s.stages % s.ranks != 0)
    return fault(std::to_string(s.stages) + " stages are no multiple of " + std::to_string(s.ranks) + " ranks", {});
  if (s.rank_of_stage.size() != static_cast<size_t>(s.stages))
    return fault(count(s.rank_of_stage.size(), "ranks of stages for ") + std::to_string(s.stages) + " stages", {});
  for (int r = 0; r < s.ranks; ++r)
    if (const auto n = std::count(s.rank_of_stage.begin(), s.rank_of_stage.end(), r); n != s.chunks())
      return fault("rank " + std::to_string(r) + " has " + std::to_string(n) + " stages; expected " +
                       std::to_string(s.chunks()) + " on each",
                   {r, 0});
  return {};
}

// Where each action is; of one that is not where it may be, or there twice, the fault.
Fault misplaced(const Schedule& s, ActionTable& table) {
  return each(s, [&](const Action& a, const ActionPlace& p) -> Fault {
    if (a.stage < 0 || a.stage >= s.stages || a.microbatch < 0 || a.microbatch >= s.microbatches)
      return fault(at(s, p) + "there are " + std::to_string(s.stages) + " stages and " +
                       std::to_string(s.microbatches) + " micro-batches, counted from 0",
                   p);
    if (const int rank = s.rank_of_stage[static_cast<size_t>(a.stage)]; rank != p.rank)
      return fault(at(s, p) + "stage " + std::to_string(a.stage) + " is on rank " + std::to_string(rank), p);
    const bool again = std::exchange(table[a], static_cast<double>(p.index)) >= 0;
    if (again && a.what != Do::unshard && a.what != Do::reshard) return fault(at(s, p) + "is there twice", p);
    const bool forward = a.what == Do::send_forward || a.what == Do::recv_backward;
    if (a.is_message() && !s.crosses(forward ? a.stage : a.stage - 1))
      return fault(at(s, p) + "there is no boundary between ranks", p);
    return {};
  });
}

Fault missing(const Schedule& s, ActionTable& table) {
  const bool messages = has_messages(s);
  for (int stage = 0; stage < s.stages; ++stage) {
    const int rank = s.rank_of_stage[static_cast<size_t>(stage)];
    for (int i = 0; i < s.microbatches; ++i) {
      const auto has = [&](Do what) { return table[{what, stage, i}] >= 0; };
      const auto lacks = [&](Do what) {
        return fault("rank " + std::to_string(rank) + ": " + Action{what, stage, i}.str() + " is missing",
                     end_of(s, stage));
      };
      if (!has(Do::F)) return lacks(Do::F);
      if (has(Do::B) && (has(Do::I) || has(Do::W))) {
        const ActionPlace both{rank, static_cast<size_t>(table[{Do::B, stage, i}])};
        return fault(at(s, both) + "the backward pass is there whole and split; expected one of them", both);
      }
      if (!has(Do::B) && !has(Do::I)) return lacks(has(Do::W) ? Do::I : Do::B);
      if (!has(Do::B) && !has(Do::W)) return lacks(Do::W);
      if (!messages) continue;
      if (s.crosses(stage))
        for (const Do what : {Do::send_forward, Do::recv_backward})
          if (!has(what)) return lacks(what);
      if (s.crosses(stage - 1))
        for (const Do what : {Do::recv_forward, Do::send_backward})
          if (!has(what)) return lacks(what);
    }
  }
  return {};
}

// Forward passes, gradients of inputs and gradients of weights of a stage, each ascending.
Fault disordered(const Schedule& s) {
  std::vector<std::array<int, 3>> last(static_cast<size_t>(s.stages), {-1, -1, -1});
  return each(s, [&](const Action& a, const ActionPlace& p) -> Fault {
    if (a.what > Do::W) return {};
    auto& of_stage = last[static_cast<size_t>(a.stage)];
    for (const size_t row : {0, 1, 2}) {
      const bool counts = row == 0   ? a.what == Do::F
                          : row == 1 ? a.what == Do::B || a.what == Do::I
                                     : a.what == Do::B || a.what == Do::W;
      if (!counts) continue;
      if (a.microbatch != of_stage[row] + 1)
        return fault(at(s, p) + "comes before that of micro-batch " + std::to_string(of_stage[row] + 1) +
                         "; micro-batches of a stage ascend",
                     p);
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
        // A need that comes later on the same rank can never be met: that is the cause, wherever others wait.
        if (s.rank_of_stage[static_cast<size_t>(need.stage)] == p.rank)
          return fault(waits + ", which comes later on the same rank", p);
        all += (all.empty() ? "" : "; ") + waits;
      }
  return fault("deadlock: " + all, places[0]);
}

// A stage's parameters are whole when they are used, and given up at the end.
Fault unsharded(const Schedule& s) {
  if (!s.has(Do::unshard) && !s.has(Do::reshard)) return {};
  std::vector<bool> whole(static_cast<size_t>(s.stages));
  if (Fault f = each(s, [&](const Action& a, const ActionPlace& p) -> Fault {
        const auto stage = static_cast<size_t>(a.stage);
        if (a.what == Do::unshard || a.what == Do::reshard) {
          if (whole[stage] == (a.what == Do::unshard))
            return fault(at(s, p) + "the parameters are " + (whole[stage] ? "whole" : "sharded") + " already", p);
          whole[stage] = a.what == Do::unshard;
        }
        if (a.what < Do::W && !whole[stage]) return fault(at(s, p) + "the stage's parameters are not whole", p);
        return {};
      }))
    return f;
  for (int stage = 0; stage < s.stages; ++stage)
    if (whole[static_cast<size_t>(stage)])
      return fault("stage " + std::to_string(stage) + " is not resharded at the end", end_of(s, stage));
  return {};
}

// Gradients are summed once, or after each micro-batch, when they are there.
Fault unsummed(const Schedule& s) {
  if (!s.has(Do::reduce_grad)) return {};
  std::vector<int> gradients(static_cast<size_t>(s.stages), -1), summed = gradients, sums(gradients.size());
  if (Fault f = each(s, [&](const Action& a, const ActionPlace& p) -> Fault {
        const auto stage = static_cast<size_t>(a.stage);
        if (a.what == Do::B || a.what == Do::W) gradients[stage] = a.microbatch;
        if (a.what != Do::reduce_grad) return {};
        ++sums[stage];
        summed[stage] = a.microbatch;
        if (a.microbatch == gradients[stage]) return {};
        return fault(
            at(s, p) + "the last gradient of the stage is that of micro-batch " + std::to_string(gradients[stage]), p);
      }))
    return f;
  for (int stage = 0; stage < s.stages; ++stage) {
    const std::string name = "stage " + std::to_string(stage);
    if (summed[static_cast<size_t>(stage)] != s.microbatches - 1)
      return fault(name + " has gradients at the end that are not summed", end_of(s, stage));
    if (const int n = sums[static_cast<size_t>(stage)]; (n != 1 && n != s.microbatches) || n != sums[0])
      return fault(name + " sums its gradients " + std::to_string(n) + " times and stage 0 " + std::to_string(sums[0]) +
                       "; expected once, or after each of " + std::to_string(s.microbatches) + " micro-batches",
                   end_of(s, stage));
  }
  return {};
}

Fault crowded(const Schedule& s, int limit) {
  std::vector<int> now(static_cast<size_t>(s.ranks));
  return each(s, [&](const Action& a, const ActionPlace& p) -> Fault {
    int& count = now[static_cast<size_t>(p.rank)];
    count += (a.what == Do::F) - (a.what == Do::B || a.what == Do::W);
    if (limit == 0 || count <= limit) return {};
    return fault(at(s, p) + std::to_string(count) + " are in flight; expected at most " + std::to_string(limit), p);
  });
}

Fault first_fault(const Schedule& s, int in_flight) {
  if (Fault f = wrong_form(s)) return f;
  ActionTable where(s);
  if (Fault f = misplaced(s, where)) return f;
  if (Fault f = missing(s, where)) return f;
  if (Fault f = disordered(s)) return f;
  if (Fault f = stuck(s)) return f;
  if (Fault f = unsharded(s)) return f;
  if (Fault f = unsummed(s)) return f;
  return crowded(s, in_flight);
}

// The lists below one another, a window of them when they are long, with the place in brackets.
std::string draw_lists(const Schedule& s, const ActionPlace& marked) {
  constexpr size_t kAround = 6;
  const size_t begin = marked.index - std::min(marked.index, kAround), end = marked.index + kAround + 1;
  size_t width = 1;
  for (const auto& list : s.actions)
    for (size_t i = begin; i < std::min(end, list.size()); ++i) width = std::max(width, list[i].str().size());
  std::string text;
  for (int r = 0; r < static_cast<int>(s.actions.size()); ++r) {
    const auto& list = s.actions[static_cast<size_t>(r)];
    text += "rank " + std::to_string(r) + ": " + (begin > 0 ? "..." : "   ");
    for (size_t i = begin; i < end && i <= list.size(); ++i) {
      const bool here = marked == ActionPlace{r, i};
      const std::string word = i < list.size() ? list[i].str() : here ? "?" : "";
      text += (here ? "[" : " ") + word + (here ? "]" : " ") + std::string(width - std::min(width, word.size()), ' ');
    }
    text.erase(text.find_last_not_of(' ') + 1);
    text += end < list.size() ? " ...\n" : "\n";
  }
  return text;
}

}  // namespace

std::optional<ScheduleFault> find_fault(const Schedule& schedule, int in_flight) {
  Fault f = first_fault(schedule, in_flight);
  if (f) f->drawn = draw_lists(schedule, f->place);
  return f;
}

void validate(const Schedule& schedule, int in_flight) {
  if (const auto f = find_fault(schedule, in_flight)) throw Error("[schedule] " + schedule.name + ": " + f->what);
}

std::vector<int> peak_in_flight(const Schedule& schedule) {
  std::vector<int> peaks;
  for (const auto& list : schedule.actions) {
    int now = 0, peak = 0;
    for (const Action& a : list) {
      now += (a.what == Do::F) - (a.what == Do::B || a.what == Do::W);
      peak = std::max(peak, now);
    }
    peaks.push_back(peak);
  }
  return peaks;
}

}  // namespace tessera
