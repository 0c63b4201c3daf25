// The stand-in for an exercise's function until a learner has written it.
#pragma once

#include "tensor/error.h"

namespace tessera::lab {

inline constexpr const char* kNotYet = "not written yet: ";

// Throws Error that names the function.
[[noreturn]] inline void not_yet(const char* function) { throw Error(std::string(kNotYet) + function); }

}  // namespace tessera::lab
