// Completes typed options to a configuration, and rejects invalid combinations.
#pragma once
#include <string>

#include "app/options.h"

namespace tessera {

// Fills in preset sizes and mesh axes. A given number of ranks (--ranks or an MPI job) determines --dp or, if --dp is
// given, the only other axis without a value. All other axes are 1. Without rank options, the job uses two
// data-parallel ranks if the machine and the batch allow it. The mesh may have a different number of ranks, which
// check_plan() rejects. Throws Error (usage) for an unknown schedule.
TrainConfig resolve(const TypedOptions& typed);
// Whether the ranks will be processes rather than threads of this process.
bool starts_processes(const TypedOptions& typed);
// Throws Error (usage) naming options and the nearest valid values.
void check_plan(const TypedOptions& typed, const TrainConfig& config);
// Throws Error (usage) for `found` and invalid combinations of options. Individual values were checked when set.
void check(const TypedOptions& typed, const TrainConfig& config, ErrorList found = {});
// Calls resolve() and check(), and reports the errors of both.
TrainConfig checked(TypedOptions typed);
// Launch options of a command. All processes must run the same program and command with the same options, except output
// options.
LaunchOptions launch_options(const std::string& command, const TrainCommand& options, const Plan& plan);
// A warning about options without effect, or empty.
std::string useless_options(const TrainConfig& config);

}  // namespace tessera
