// Placeholder for the unimplemented function of an exercise.
#pragma once
#include <string>

#include "base/error.h"

namespace tessera::lab {

inline constexpr const char* kNotYet = "not written yet: ";

[[noreturn]] inline void not_yet(const char* function) { throw Error(std::string(kNotYet) + function); }

}  // namespace tessera::lab
