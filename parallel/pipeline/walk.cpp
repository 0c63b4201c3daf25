// Needs, and a walk that goes on wherever it can.
#include "parallel/pipeline/walk.h"

#include <algorithm>

namespace tessera {

bool has_messages(const Schedule& schedule) {
  for (const auto& list : schedule.actions)
    for (const Action& a : list)
      if (a.is_message()) return true;
  return false;
}

Needs needs(const Schedule& schedule, const Action& action, bool has_messages) {
  const int s = action.stage, i = action.microbatch;
  const bool first = s == 0, last = s + 1 == schedule.stages;
  const auto arrived = [&](Do message, bool crosses, const Action& made) {
    return has_messages && crosses ? Action{message, s, i} : made;
  };
  Needs out;
  switch (action.what) {
    case Do::F:
      if (!first) out.push_back(arrived(Do::recv_forward, schedule.crosses(s - 1), {Do::F, s - 1, i}));
      break;
    case Do::B:
    case Do::I:
      out.push_back({Do::F, s, i});
      if (!last) out.push_back(arrived(Do::recv_backward, schedule.crosses(s), {Do::B, s + 1, i}));
      break;
    case Do::W:
      out.push_back({Do::I, s, i});
      break;
    case Do::send_forward:
      out.push_back({Do::F, s, i});
      break;
    case Do::recv_forward:
      out.push_back({Do::send_forward, s - 1, i});
      break;
    case Do::send_backward:
      out.push_back({Do::B, s, i});
      break;
    case Do::recv_backward:
      out.push_back({Do::send_backward, s + 1, i});
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

}  // namespace tessera
