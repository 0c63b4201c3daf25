// Shards that equal each other: ranks that initialize their shards with the same random numbers.
#pragma once
#include <string>

#include "verify/audit/recording.h"

namespace tessera::audit {

// States which parameters have bitwise identical shards on ranks that must have different rows or columns; such shards
// have identical gradients, so they stay identical. Empty if there are none.
std::string identical_shards(const Recording& recording);

}  // namespace tessera::audit
