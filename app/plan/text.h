// An answer of the planner, as text and as JSON lines.
#pragma once
#include <string>

#include "app/options.h"
#include "app/plan/plan.h"
#include "app/plan_question.h"
#include "planner/recommend.h"
#include "tensor/findings.h"

namespace tessera {

struct PlanAnswer {
  PlanQuestion asked = {};
  planner::Answer found = {};
  planner::Recommendation recommended = {};  // where a plan fits
  std::string command = {};                  // that trains under it; may be empty
  std::vector<MeasuredPlan> measured = {};
  bool fits() const { return !found.best.empty(); }
  // Its memory is by a formula, where a dry run would tell it.
  bool is_rough(const planner::Candidate& c) const { return c.described && asked.question.software.name == "tessera"; }
};

// "pp 2 x dp 4 x tp 2+sp", "one rank".
std::string axes_words(const planner::Layout& layout);
// "zb-h1", "interleaved, 4 chunks", "-" where there is no pipeline.
std::string schedule_words(const planner::Layout& layout);
// The question that was asked, in two lines.
std::string question_words(const PlanQuestion& asked);
// "10.2", and where hardware has a range "10.2 (9.1-11.3)".
std::string step_words(const planner::Prediction& prediction);

std::string plan_text(const PlanAnswer& answer);
std::string plan_json_lines(const PlanAnswer& answer);
// A self-contained HTML file (app/plan/page.cpp).
std::string plan_page(const PlanAnswer& answer);

// The options of `plan` that no run has, and its examples.

}  // namespace tessera
