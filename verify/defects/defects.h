// Known faults of distributed training, injected into a plan one at a time and never into the oracle; used by `tessera
// verify --defect NAME` and by the tests.
//
//   const Defect& d = defect("missing-gradient-sum");
//   check_applies(d, job);                                          // throws FieldError: what the plan lacks
//   const VerifyResult r = explain(job, [&](const Job& j) { return planted_if_it_applies(d, j); });
//   r.diagnosis[0].cause == d.cause;
#pragma once

#include "verify/verify.h"

namespace tessera {

// A field of a job, and a value that permits the injection of a fault.
struct Need {
  std::string field, value;
};

// A condition of a fault, and its test.
struct Requirement {
  const char *field, *value;
  bool (*there)(const Job& job);
};

struct InjectedFault {
  std::string_view name;   // "missing-gradient-sum"
  std::string_view what;   // a sentence: the behaviour of the faulty code
  std::string_view cause;  // the diagnosis (a name of its table) that the fault should produce
  std::string place;       // "in block {block}", expanded by where()
  std::vector<Requirement> wants;
  std::function<void(VerifyHooks&, const Job&)> plant;
  int64_t sequences = 1;  // minimum sequences per micro-batch

  // The nearest field values that satisfy the unmet requirements; empty if it applies.
  std::vector<Need> needs(const Job& job) const;
  // The location of the fault in this job: "on rank 3".
  std::string where(const Job& job) const;
};

const std::vector<InjectedFault>& defects();
// The fault of that name. Throws FieldError listing all names.
const InjectedFault& defect(std::string_view name);
// A random applicable fault, selected by `draw`. Throws FieldError if none applies.
const InjectedFault& random_defect(const Job& job, uint64_t draw);

// Throws FieldError with the field values that the fault requires.
void check_applies(const InjectedFault& defect, const Job& job);
// Hooks that inject the fault; the failure of a rank then counts as a violated bound. Throws as check_applies() does.
VerifyHooks planted(const InjectedFault& defect, const Job& job, VerifyHooks hooks = {});
// The same for explain(), which also tries plans without the faulty operation: nothing is injected there.
VerifyHooks planted_if_it_applies(const InjectedFault& defect, const Job& job, VerifyHooks hooks = {});

}  // namespace tessera
