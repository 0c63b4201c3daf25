// Rules of the diagnosis about groups of ranks, owners and experts: evidence where the pattern is there.
#pragma once
#include <optional>
#include <string>

#include "verify/symptoms.h"

namespace tessera {

std::optional<std::string> wrong_group(const Symptoms& symptoms);
std::optional<std::string> group_not_summed(const Symptoms& symptoms);
std::optional<std::string> outer_step(const Symptoms& symptoms);
std::optional<std::string> silent_owner(const Symptoms& symptoms);
std::optional<std::string> wrong_expert(const Symptoms& symptoms);
std::optional<std::string> wrong_expert_sum(const Symptoms& symptoms);

}  // namespace tessera
