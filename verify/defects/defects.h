// Known defects of parallel training, to be planted in a plan, one at a time, and never in the oracle: `tessera verify
// --defect NAME` and the tests plant the same ones.
//
//   const Defect& d = defect("missing-gradient-sum");
//   check_applies(d, job);                                          // throws FieldError: what the plan lacks
//   const VerifyResult r = explain(job, [&](const Job& j) { return planted_if_it_applies(d, j); });
//   r.diagnosis[0].cause == d.cause;
#pragma once

#include "verify/verify.h"

namespace tessera {

// A field of a job, and a value with which a defect can be planted.
struct Need {
  std::string field, value;
};

// A need of a defect, and whether a job has it.
struct Requirement {
  const char *field, *value;
  bool (*there)(const Job& job);
};

struct InjectedFault {
  std::string_view name;   // "missing-gradient-sum"
  std::string_view what;   // a sentence: what the code does
  std::string_view cause;  // a name of the diagnosis' table, which should name it
  std::string place;       // "in block {block}": where() fills it in
  std::vector<Requirement> wants;
  std::function<void(VerifyHooks&, const Job&)> plant;
  int64_t sequences = 1;  // that a micro-batch has at least

  // The nearest values with which it could be planted, of fields that keep it from that; empty: none does.
  std::vector<Need> needs(const Job& job) const;
  // The place of it then: "on rank 3".
  std::string where(const Job& job) const;
};

const std::vector<InjectedFault>& defects();
// The defect of a name. Throws FieldError that names all of them.
const InjectedFault& defect(std::string_view name);
// One that applies, drawn by the number. Throws FieldError where none does.
const InjectedFault& random_defect(const Job& job, uint64_t draw);

// Throws FieldError that says with which fields it could be planted.
void check_applies(const InjectedFault& defect, const Job& job);
// Hooks with the defect in them: a run that ends with the failure of a rank is a bound that breaks. Throws what
// check_applies() throws.
VerifyHooks planted(const InjectedFault& defect, const Job& job, VerifyHooks hooks = {});
// These hooks for explain(), which also tries plans in which a defect may have no place: nothing is planted there.
VerifyHooks planted_if_it_applies(const InjectedFault& defect, const Job& job, VerifyHooks hooks = {});

}  // namespace tessera
