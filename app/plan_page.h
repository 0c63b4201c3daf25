// An answer of the planner as one self-contained HTML file.
#pragma once
#include <string>

#include "app/plan/text.h"

namespace tessera {

std::string plan_page(const PlanAnswer& answer);

}  // namespace tessera
