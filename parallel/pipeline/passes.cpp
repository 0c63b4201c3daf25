// Each pass writes the lists anew.
#include "parallel/pipeline/passes.h"

#include <utility>
#include <vector>

#include "parallel/pipeline/walk.h"
#include "tensor/error.h"

namespace tessera {
namespace {

using List = std::vector<Action>;

template <class Rewrite>
Schedule rewritten(Schedule schedule, const Rewrite& rewrite) {
  for (List& list : schedule.actions) list = rewrite(std::exchange(list, {}));
  return schedule;
}

bool is_backward(Do what) { return what == Do::B || what == Do::I; }

}  // namespace

Schedule insert_messages(const Schedule& schedule) {
  if (has_messages(schedule))
    throw Error("[schedule] " + schedule.name + ": it has messages already; insert_messages() adds them once");
  return rewritten(schedule, [&](const List& list) {
    List out;
    for (const Action& a : list) {
      const bool before = schedule.crosses(a.stage - 1), after = schedule.crosses(a.stage);
      if (a.what == Do::F && before) out.push_back({Do::recv_forward, a.stage, a.microbatch});
      if (is_backward(a.what) && after) out.push_back({Do::recv_backward, a.stage, a.microbatch});
      out.push_back(a);
      if (a.what == Do::F && after) out.push_back({Do::send_forward, a.stage, a.microbatch});
      if (is_backward(a.what) && before) out.push_back({Do::send_backward, a.stage, a.microbatch});
    }
    return out;
  });
}

Schedule split_backward(const Schedule& schedule) {
  return rewritten(schedule, [](const List& list) {
    List out;
    for (size_t i = 0; i < list.size(); ++i) {
      const Action a = list[i];
      if (a.what != Do::B) {
        out.push_back(a);
        continue;
      }
      out.push_back({Do::I, a.stage, a.microbatch});
      if (i + 1 < list.size() && list[i + 1].what == Do::send_backward) out.push_back(list[++i]);
      out.push_back({Do::W, a.stage, a.microbatch});
    }
    return out;
  });
}

}  // namespace tessera
