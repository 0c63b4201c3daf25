// What of a plan cannot be on the data axis, and with the updates of its parameters.
#pragma once
#include "train/job.h"

namespace tessera {

// Throw FieldError.
void check_data(const Plan& plan);
void check_modes(const Plan& plan);
void check_updates(const Job& job);

}  // namespace tessera
