// A plan in the records that programs read: the fields that say how ranks were laid out.
#pragma once
#include <nlohmann/json.hpp>

#include "train/plan.h"

namespace tessera {

inline nlohmann::ordered_json plan_json(const Plan& p) {
  const auto all = nlohmann::ordered_json::parse(to_json(p));
  nlohmann::ordered_json out = {{"ranks", p.ranks()}};
  for (const char* field :
       {"pp", "dp", "cp", "tp", "sp", "dp_mode", "zero", "microbatches", "all_reduce", "recompute", "device"})
    out[field] = all.at(field);
  if (p.pp > 1) out["schedule"] = schedule_name(p);
  if (p.shard_ranks > 0) out["shard_ranks"] = p.shard_ranks;
  if (p.dp_mode == DataMode::diloco) out["sync_every"] = p.sync_every;
  if (p.sync_fragments > 1) out["sync_fragments"] = p.sync_fragments;
  if (p.cp > 1) out["cp_mode"] = all.at("cp_mode");
  return out;
}

}  // namespace tessera
