// Known faults of distributed training, injected into a plan one at a time and never into the oracle (`tessera verify
// --defect NAME`, tests).
//
//   const InjectedFault& d = find_fault("missing-gradient-sum");
//   check_applies(d, job);                                          // throws FieldError: unmet requirements
//   const VerifyResult r = explain(job, [&](const TrainConfig& j) { return with_fault_if_applicable(d, j); });
//   r.diagnosis[0].cause == d.cause;
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "verify/verify.h"

namespace tessera {

// A job's field, and a value that permits the injection.
struct Need {
  std::string field, value;
};

struct Requirement {
  const char *field, *value;
  bool (*there)(const TrainConfig& job);
};

struct InjectedFault {
  std::string_view name;   // "missing-gradient-sum"
  std::string_view what;   // the behaviour of the faulty code, as a sentence
  std::string_view cause;  // the expected diagnosis
  std::string place;       // "in block {block}", expanded by where()
  std::vector<Requirement> wants;
  std::function<void(VerifyHooks&, const TrainConfig&)> inject;
  int64_t sequences = 1;  // minimum sequences per micro-batch

  // Nearest field values that satisfy the unmet requirements; empty if the fault applies.
  std::vector<Need> needs(const TrainConfig& job) const;
  // "on rank 3".
  std::string where(const TrainConfig& job) const;
};

const std::vector<InjectedFault>& all_faults();
// Throws FieldError listing all names.
const InjectedFault& find_fault(std::string_view name);
// An applicable fault, selected by `random`. Throws FieldError if none applies.
const InjectedFault& random_fault(const TrainConfig& job, uint64_t random);

// Throws FieldError with the required field values.
void check_applies(const InjectedFault& fault, const TrainConfig& job);
// With these hooks, a rank's failure counts as a violated bound. Throws as check_applies() does.
VerifyHooks with_fault(const InjectedFault& fault, const TrainConfig& job, VerifyHooks hooks = {});
// The same for explain(), which also tries plans without the faulty operation: these remain correct.
VerifyHooks with_fault_if_applicable(const InjectedFault& fault, const TrainConfig& job, VerifyHooks hooks = {});

}  // namespace tessera
