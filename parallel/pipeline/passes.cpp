// Each pass writes the lists anew.
#include "parallel/pipeline/passes.h"

#include <optional>
#include <utility>
#include <vector>

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

// Copies what was sent of action list[i], which lies behind it; returns the last index that it took.
size_t take_sent(const List& list, size_t i, List& out) {
  while (i + 1 < list.size() && (list[i + 1].what == Do::send_forward || list[i + 1].what == Do::send_backward))
    out.push_back(list[++i]);
  return i;
}

void refuse_twice(const Schedule& schedule, Do what, const char* pass) {
  if (schedule.has(what))
    throw Error("[schedule] " + schedule.name + ": it has " + std::string(name_of(what)) + " already; " + pass +
                " is to be applied once");
}

}  // namespace

Schedule insert_messages(const Schedule& schedule) {
  for (const Do what : {Do::send_forward, Do::recv_forward, Do::send_backward, Do::recv_backward})
    refuse_twice(schedule, what, "insert_messages");
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
      i = take_sent(list, i, out);
      out.push_back({Do::W, a.stage, a.microbatch});
    }
    return out;
  });
}

Schedule shard_parameters(const Schedule& schedule) {
  refuse_twice(schedule, Do::unshard, "shard_parameters");
  return rewritten(schedule, [](const List& list) {
    List out;
    std::optional<Action> last;  // that used the stage that is whole
    size_t after_last = 0;       // its place behind it in `out`
    const auto reshard = [&] {
      if (last)
        out.insert(out.begin() + static_cast<std::ptrdiff_t>(after_last), {Do::reshard, last->stage, last->microbatch});
    };
    for (const Action& a : list) {
      const bool uses = a.what == Do::F || is_backward(a.what);
      if (uses && (!last || last->stage != a.stage)) {
        reshard();
        out.push_back({Do::unshard, a.stage, a.microbatch});
      }
      out.push_back(a);
      if (!uses) continue;
      last = a;
      after_last = out.size();
    }
    reshard();
    return out;
  });
}

Schedule reduce_gradients(const Schedule& schedule, Reduce when) {
  refuse_twice(schedule, Do::reduce_grad, "reduce_gradients");
  return rewritten(schedule, [&](const List& list) {
    List out;
    for (size_t i = 0; i < list.size(); ++i) {
      const Action a = list[i];
      out.push_back(a);
      if (a.what != Do::B && a.what != Do::W) continue;
      if (when == Reduce::once && a.microbatch + 1 < schedule.microbatches) continue;
      i = take_sent(list, i, out);
      out.push_back({Do::reduce_grad, a.stage, a.microbatch});
    }
    return out;
  });
}

}  // namespace tessera
