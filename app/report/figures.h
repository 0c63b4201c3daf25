// Single figures of one run or of several beside each other, and of plans that have not run.
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "app/report/record.h"
#include "app/report/svg.h"

namespace tessera::report {

inline constexpr std::string_view kFigures = "pipeline|memory|timeline|bytes|loss";

// One of kFigures, of pictures that together are so wide. Runs have one scale. Throws Error (usage) that says which run
// lacks what the figure shows.
Figure figure_of(std::string_view name, const std::vector<Record>& runs, double width = kFigureWidth);

}  // namespace tessera::report
