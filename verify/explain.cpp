// A verification, and where it is broken the same run with one thing changed at a time.
#include <functional>
#include <utility>
#include <vector>

#include "tensor/error.h"
#include "verify/symptoms.h"
#include "verify/verify.h"

namespace tessera {
namespace {

// Every change that makes the job another one, and the smaller one.
std::vector<std::pair<Probe::Without, Job>> changes_of(const Job& job) {
  std::vector<std::pair<Probe::Without, Job>> out;
  const auto add = [&](bool there, Probe::Without without, const std::function<void(Job&)>& change) {
    if (!there) return;
    change(out.emplace_back(without, job).second);
  };
  add(job.model.dropout > 0 || job.model.lora.dropout > 0, Probe::Without::dropout, [](Job& j) {
    j.model.dropout = 0;
    j.model.lora.dropout = 0;
  });
  add(job.optim.document_mask, Probe::Without::documents, [](Job& j) { j.optim.document_mask = false; });
  add(job.plan.cp > 1, Probe::Without::context_axis, [](Job& j) { j.plan.cp = 1; });
  add(job.plan.pp > 1, Probe::Without::pipeline, [](Job& j) {
    j.plan.pp = 1;
    j.plan.schedule = ScheduleKind::one_f_one_b;
    j.plan.schedule_file.clear();
    j.plan.chunks = 0;
  });
  return out;
}

// What bytes, tokens and factors do not tell.
bool asks_for_probes(const VerifyResult& r) {
  const Symptoms s(r.seen);
  return s.step() > 0 && !s.right_gradients() && r.seen.sent.empty() && r.seen.given.empty() &&
         r.seen.stopped.empty() && !s.only_rounding() && s.common_factor() == 0;
}

}  // namespace

VerifyResult explain(const Job& job, const HooksOf& hooks) {
  VerifyResult r = verify(job, hooks(job));
  if (!r.known || r.passed()) return r;
  if (asks_for_probes(r))
    for (auto& [without, changed] : changes_of(job)) {
      changed.optim.steps = Symptoms(r.seen).step();
      try {
        const VerifyResult again = verify(changed, hooks(changed));
        r.seen.probes.push_back({without, again.wrong_steps.empty() && again.seen.stopped.empty()});
      } catch (const Error&) {  // a plan that cannot be
        continue;
      }
    }
  r.diagnosis = diagnose(r.seen);
  return r;
}

}  // namespace tessera
