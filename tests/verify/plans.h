// Small plans for the contract, and the command that repeats one.
#pragma once
#include <fmt/format.h>

#include <string>

#include "app/job_of.h"
#include "app/options.h"

namespace tessera::test {

// A model that trains twenty steps in a fraction of a second, dropout on, one thread per rank.
inline TrainOptions small_plan() {
  TrainOptions o = verify_defaults();
  o["layers"] = 2;
  o["heads"] = 2;
  o["channels"] = 32;
  o["context"] = 16;
  o["vocab"] = 40;
  o["threads_per_rank"] = 1;
  o["timeout"] = 30;
  return o;
}

// "tessera verify --layers 2 ..." of everything that differs from the defaults.
inline std::string command_of(const TrainOptions& o) {
  std::string text = "tessera verify";
  const auto defaults = config_values(verify_defaults());
  for (const auto& [key, value] : config_values(o)) {
    bool usual = false;
    for (const auto& [k, v] : defaults) usual = usual || (k == key && v == value);
    if (!usual) text += fmt::format(" --{} {}", key, value);
  }
  return text;
}

}  // namespace tessera::test
