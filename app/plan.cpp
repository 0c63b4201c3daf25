// The command `plan`.
#include <fmt/format.h>

#include "app/commands.h"
#include "app/option_values.h"
#include "app/output.h"
#include "app/plan_cases.h"
#include "app/plan_command.h"
#include "app/plan_machine.h"
#include "app/plan_page.h"
#include "app/plan_text.h"
#include "tensor/error.h"
#include "tensor/write_file.h"

namespace tessera {
namespace {

// With a whole layout there is no choice, and a plan that does not fit is an answer too.
bool is_whole(const planner::Question& q) {
  const std::vector<planner::Layout> all = bases(q);
  return all.size() == 1 && variants(q, all.front()).size() == 1;
}

// Fewer, of which the model fits more: the nearest power of two times these that has a plan.
std::string where_it_fits(planner::Question q) {
  constexpr int64_t most = 1 << 14;
  const int64_t asked = q.ranks;
  q.fixed.dp.reset();
  while ((q.ranks *= 2) <= most) try {
      if (!search(q, 1).best.empty()) return fmt::format("; on {} such ranks a plan fits", q.ranks);
    } catch (const Error&) {
      break;
    }
  q.ranks = asked;
  return "";
}

[[noreturn]] void refuse(const PlanAnswer& a) {
  const planner::Question& q = a.asked.question;
  const planner::Candidate& nearest = a.found.too_large.at(0);
  const planner::Prediction& p = nearest.prediction;
  throw Error(fmt::format("no plan fits {:.1f} GB: the nearest, {}, needs {:.1f} GB more, most of it {}{}",
                          a.asked.memory() / 1e9, to_text(nearest.layout.plan), p.over_bytes / 1e9, p.largest,
                          where_it_fits(q)));
}

}  // namespace

int run_plan(const PlanOptions& o) {
  if (o.cases) {
    if (o.format != "json") throw Error("--format: expected json with --cases, found '" + o.format + "'");
    return predict_cases(*o.cases);
  }
  if (o.calibrate && !o.hardware) {
    print(machine_words(*measured_here(true)));
    return 0;
  }
  if (o.hardware != "this" && (o.calibrate || !o.measure.empty()))
    throw Error(fmt::format("--{}: expected --hardware this with it, found {}", o.calibrate ? "calibrate" : "measure",
                            o.hardware.value_or("none")));
  PlanAnswer a = answer_of(o, question_of(o));
  if (a.fits()) a.measured = measure_plans(a.asked.question, a.found, o.measure);
  if (o.html) write_file(*o.html, plan_page(a));
  print(o.format == "json" ? plan_json_lines(a) : plan_text(a));
  if (!a.fits() && !is_whole(a.asked.question)) refuse(a);
  return 0;
}

}  // namespace tessera
