// The command `plan`.
#include "app/commands.h"
#include "app/plan_cases.h"
#include "tensor/error.h"

namespace tessera {

int run_plan(const PlanOptions& o) {
  if (!o.cases) throw Error("--cases: expected a file of cases, found none");
  if (o.format != "json") throw Error("--format: expected json with --cases, found '" + o.format + "'");
  return predict_cases(*o.cases);
}

}  // namespace tessera
