// A plan as JSON, for records that programs read.
#pragma once
#include <nlohmann/json.hpp>

#include "app/plan.h"

namespace tessera {

inline nlohmann::ordered_json plan_json(const TrainOptions& o) {
  const Axes a = axes_of(o);
  nlohmann::ordered_json out = {{"ranks", a.ranks()},
                                {"pp", a.pp},
                                {"dp", a.dp},
                                {"cp", a.cp},
                                {"tp", a.tp},
                                {"sp", o.sp},
                                {"dp_mode", o.dp_mode},
                                {"zero", o.zero},
                                {"microbatches", o.microbatches},
                                {"all_reduce", o.all_reduce},
                                {"recompute", o.recompute},
                                {"device", o.device}};
  if (a.pp > 1) out["schedule"] = o.schedule;
  if (a.cp > 1) out["cp_mode"] = o.cp_mode;
  return out;
}

}  // namespace tessera
