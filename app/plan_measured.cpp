// Running plans, and tables of what came out.
#include "app/plan_measured.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "planner/own.h"
#include "tensor/error.h"

namespace tessera {
namespace {

bool is_memory(const planner::Compared& c) { return c.part.starts_with("memory"); }

std::string cell(const planner::Compared& c, double value) {
  return is_memory(c) ? fmt::format("{:.3f} MB", value / 1e6) : fmt::format("{:.3f} ms", value * 1e3);
}

std::string apart(const planner::Compared& c) {
  return c.measured > 0 ? fmt::format("{:+.1f}%", 100 * (c.predicted / c.measured - 1)) : "";
}

}  // namespace

std::vector<MeasuredPlan> measure_plans(const planner::Question& q, const planner::Answer& found,
                                        const std::vector<int64_t>& numbers) {
  for (const int64_t number : numbers)
    if (number > std::ssize(found.best))
      throw Error(
          fmt::format("--measure: expected numbers of the ranking, 1 to {}, found {}", found.best.size(), number));
  std::vector<MeasuredPlan> out;
  for (const int64_t number : numbers) {
    const planner::Candidate& c = found.best[static_cast<size_t>(number - 1)];
    const Job job = planner::own_job(case_of(q, c.layout)).value();
    check(job, true);
    out.push_back({static_cast<size_t>(number), c.layout, compare(c.prediction, planner::measure(job))});
  }
  return out;
}

std::string measured_text(const MeasuredPlan& plan) {
  std::string out = fmt::format("Measured: number {}, {}\n  {:<24} {:>14} {:>14}\n", plan.number,
                                to_text(plan.layout.plan), "", "predicted", "measured");
  std::string off;
  for (const planner::Compared& c : plan.parts) {
    out += fmt::format("  {:<24} {:>14} {:>14} {:>9}\n", c.part, cell(c, c.predicted), cell(c, c.measured), apart(c));
    if (c.off) off += (off.empty() ? "" : "; ") + c.part;
  }
  return out + (off.empty() ? "Every part is within 15%.\n" : fmt::format("Off by more than 15%: {}.\n", off));
}

nlohmann::ordered_json measured_json(const MeasuredPlan& plan) {
  nlohmann::ordered_json out = {{"event", "measured"}, {"number", plan.number}};
  out["parts"] = nlohmann::ordered_json::array();
  for (const planner::Compared& c : plan.parts)
    out["parts"].push_back({{"part", c.part}, {"predicted", c.predicted}, {"measured", c.measured}, {"off", c.off}});
  return out;
}

}  // namespace tessera
