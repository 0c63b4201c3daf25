// What communication costs a step: how long it held up the threads that compute, and how much of it they did not
// notice.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "app/report/measured.h"
#include "app/report/record.h"

namespace tessera::report {

// Of one rank in one step, in milliseconds. A rank's own thread is held up while another is not there yet (`waiting`),
// and while bytes are moved and added (`transfer`); what runs beside it is `hidden`.
struct Exposure {
  double step = 0, waiting = 0, transfer = 0, hidden = 0;
  double exposed() const { return waiting + transfer; }
};
// Of each rank. Nothing where the trace does not say how long threads were held up: one of an older version, or of
// ranks that compute on GPUs, whose host waits for nothing.
std::optional<std::vector<Exposure>> exposures(const Record& record, const StepSpan& step);
// The mean of ranks.
Exposure mean(const std::vector<Exposure>& all);

// Of the calls of one operation on an axis, milliseconds of a step in which a rank was in one: in all, and while one
// held it up. The mean of ranks.
struct Overlap {
  double all = 0, exposed = 0;
};
Overlap overlap_of(const Record& record, const StepSpan& step, const std::string& axis, const std::string& operation);

}  // namespace tessera::report
