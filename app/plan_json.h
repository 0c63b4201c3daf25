// A plan's rank layout as JSON for records.
#pragma once
#include "base/setting_json.h"
#include "train/config.h"

namespace tessera {

inline nlohmann::ordered_json plan_json(Plan p) {
  Plan defaults;
  const Settings all = field_descriptors(p);
  nlohmann::ordered_json out = {{"ranks", p.ranks()}};
  for (const char* field :
       {"pp", "dp", "cp", "tp", "sp", "dp_mode", "zero", "microbatches", "all_reduce", "recompute", "device"})
    out[field] = to_json(all.at(field));
  if (p.pp > 1) out["schedule"] = schedule_name(p);
  out.update(nlohmann::ordered_json(identity_fields(all, field_descriptors(defaults), &Field::recorded)));
  if (p.cp > 1) out["cp_mode"] = to_json(all.at("cp_mode"));
  return out;
}

}  // namespace tessera
