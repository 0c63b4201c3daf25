// Completes typed options to a configuration, and rejects invalid combinations.
#pragma once
#include <string>

#include "app/options.h"

namespace tessera {

// Fills in preset sizes and mesh axes. A given number of ranks (--ranks or an MPI job) determines --dp or, if --dp is
// given, the only other axis without a value. All other axes are 1. Without rank options, the job uses two
// data-parallel ranks if the machine and the batch allow it. The mesh may have a different number of ranks, which
// check_trainer() (train/check.h) rejects.
TrainConfig resolve(const TypedOptions& typed);
// Checks the configuration (train/check.h) and the options of the start, which are not part of it. Individual values
// were checked when set.
void check(const TypedOptions& typed, const TrainConfig& config);
// resolve() and check().
TrainConfig checked(const TypedOptions& typed);
// Launch options of a command. All processes must run the same program and command with the same options, except output
// options.
LaunchOptions launch_options(const std::string& command, const TrainCommand& options, const Plan& plan);
// A warning about options without effect, or empty.
std::string useless_options(const TrainConfig& config);

}  // namespace tessera
