// The verification contract: a run under a plan equals the run of one rank.
//
// The plan trains for some steps. After each step the loss, every gradient, every parameter and every optimizer tensor
// are gathered and compared with the oracle (verify/reference.h). Two kinds of plan:
//
//   data and pipeline axes     bitwise identical over all steps
//   with tp or cp              sums are split inside matmuls and softmaxes: loss, norm and every gradient agree up to a
//                              relative error (2-norms) of 1e-12 in float64; in fp32 and bf16 the bound is calibrated
//                              (verify/tolerance.h). For a mixture of experts the oracle replays the plan's choices,
//                              after checking that rerouted tokens are within the bound (verify/experts/routing.h). The
//                              oracle then adopts the plan's gradients, so parameters and optimizer state are bitwise
//                              identical again, and every step begins with the same state on both sides
//
// Traffic and persistent memory are compared with closed forms (train/expected_bytes.h, train/memory.h), peak memory
// with a bound from measurements of single micro-batches, and the micro-batches in flight and the pipeline bubble with
// the simulated clock. The plan must also be exercised: ranks communicate and hold the shards that it specifies, and
// after forty steps the loss is lower.
#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "train/expected_bytes.h"
#include "train/memory.h"
#include "train/trainer.h"
#include "verify/diagnosis/diagnosis.h"

namespace tessera {

using Working = std::function<void(std::string_view work, int64_t step)>;

// Launch options, and injection points for faults in the run under a plan (never in its oracle).
struct VerifyHooks {
  std::function<void(LaunchOptions& how)> launching = [](LaunchOptions&) {};
  // The job that the ranks run; the oracle runs `job`.
  std::function<TrainConfig(const TrainConfig& job)> running = [](const TrainConfig& job) { return job; };
  std::function<Sequences(const TrainConfig& job)> sequences = [](const TrainConfig& job) {
    return synthetic_sequences(job.model.vocab, job.model.context, job.optim.batch,
                               static_cast<uint64_t>(job.optim.seed));
  };
  std::function<Sequences(Sequences sequences, const TrainConfig& job, int rank)> loading =
      [](Sequences s, const TrainConfig&, int) { return s; };
  std::function<void(Trainer& rank)> made = [](Trainer&) {};    // before the first step
  std::function<void(Trainer& rank)> summed = [](Trainer&) {};  // gradients are reduced, not yet compared
  std::function<void(Trainer& rank, const StepReport& report)> update = [](Trainer& rank, const StepReport& report) {
    rank.update(report);
  };
  // Called in each process during calibration, and by rank 0 for each step.
  Working working = [](std::string_view, int64_t) {};
  // Whether the failure of a rank or a non-finite loss counts as a violated bound; otherwise verify() throws it.
  bool failure_is_seen = false;
};

struct VerifyResult {
  int64_t steps = 0;
  bool exact = true;  // requires bitwise equality; otherwise `bound`
  double bound = 0;   // maximum relative error
  std::string bound_text = {};
  bool bitwise = true;
  double loss_max_rel = 0, grad_max_rel = 0, param_max_rel = 0;  // 2-norms, maximum over tensors and steps
  std::string worst;                                             // tensor with the largest difference
  std::vector<double> losses;
  int64_t rerouted_tokens = 0;  // tokens that one rank would have routed to other experts
  double routing_margin = 0;    // and the largest margin in their logits
  double imbalance = 1;         // experts: maximum rows of a rank in a pass, relative to even routing
  std::vector<SentBytes> sent, expected_sent;
  std::vector<MemoryByCategory> held, expected_held;   // by rank
  std::vector<int64_t> peak, expected_peak;            // by rank, with activations
  std::vector<int64_t> in_flight, expected_in_flight;  // by pipeline rank: stages x micro-batches
  std::optional<double> bubble, bubble_formula;        // fraction of the time, with a pipeline
  bool known = true;                                   // false in a process without rank 0
  std::vector<int64_t> wrong_steps;                    // with a value or tensor that fails the comparison
  Observations seen;                                   // all differences
  std::vector<Diagnosis> diagnosis;                    // likely causes, filled in by explain()
  std::vector<std::string> failures;                   // one line per violated bound
  bool passed() const { return failures.empty(); }
};

// The job that verify() compares, with open choices resolved: vocabulary, kernels not selected by timing, attention
// kernels whose rows are independent of the batch.
TrainConfig verifiable(TrainConfig job);

// Trains job.optim.steps steps on random tokens (counter-based RNG) under the plan, on new ranks or in the MPI job, and
// compares. Throws as training does.
VerifyResult verify(const TrainConfig& job, const VerifyHooks& hooks = {});

using HooksOf = std::function<VerifyHooks(const TrainConfig& job)>;
// Runs verify(), and diagnoses a failure. Wrong forward passes are rerun without dropout, without the document mask, on
// one context rank and without a pipeline, for as many steps as needed to show the error.
VerifyResult explain(const TrainConfig& job, const HooksOf& hooks);

// The last step of verify(): adds a line to result.failures for each violated bound on totals (traffic and memory) and
// if the plan was not exercised.
void check_totals(VerifyResult& result, const Plan& plan);
// The entry with the axis and operation of `wanted`, or null.
const SentBytes* find_sent(const std::vector<SentBytes>& all, const SentBytes& wanted);
// 2% and a few small arrays above the predicted peak, which no formula predicts to the byte.
int64_t peak_bound(int64_t expected);

}  // namespace tessera
