// The contract: a run under a plan is the run of one rank. One implementation for `tessera verify` and the test suite.
//
// The plan trains for some steps, and after each of them the loss, every gradient, every parameter and every tensor of
// the optimizer are gathered and held against the oracle (verify/reference.h). Two kinds of plan:
//
//   data and pipeline axes     equal to the last bit, over the whole run
//   with tp or cp              sums are split inside products and softmaxes: loss, norm and every gradient agree to a
//                              relative error (2-norms) of at most 1e-12 in float64; in fp32 and bf16 the bound is
//                              calibrated (verify/comparison.h). Of a mixture of experts the oracle takes the plan's
//                              choices, after those that are not its own were seen to be within the bound
//                              (verify/experts/routing.h). Then the oracle goes on with the plan's gradients,
//                              so that parameters and optimizer state are equal to the last bit again, and every step
//                              begins with the same state on both sides
//
// Bytes that were sent and are held are counted and held against closed forms (train/expected_bytes.h,
// train/memory.h), the peak of what is held against a bound worked out from single micro-batches
// (train/memory.h), and so are the micro-batches in flight and the pipeline's bubble on the simulated clock. And
// it is checked that the plan did run: ranks communicated, what they hold is what the plan says, and after forty steps
// the loss has fallen.
#pragma once

#include "train/expected_bytes.h"
#include "train/memory.h"
#include "train/trainer.h"
#include "verify/diagnosis/diagnosis.h"

namespace tessera {

// Told what a verification is at, and in which of its steps.
using Working = std::function<void(std::string_view work, int64_t step)>;

// How ranks are started, and where a run under a plan may be spoilt, never its oracle, to see that the contract turns
// red.
struct VerifyHooks {
  std::function<void(LaunchOptions& how)> launching = [](LaunchOptions&) {};
  // The ranks run this job, where the oracle runs `job`.
  std::function<Job(const Job& job)> running = [](const Job& job) { return job; };
  // Plan and oracle are trained on these.
  std::function<Sequences(const Job& job)> sequences = [](const Job& job) {
    return synthetic_sequences(job.model.vocab, job.model.context, job.optim.batch,
                               static_cast<uint64_t>(job.optim.seed));
  };
  // The sequences that a rank of the world loads.
  std::function<Sequences(Sequences sequences, const Job& job, int rank)> loading = [](Sequences s, const Job&, int) {
    return s;
  };
  std::function<void(Trainer& rank)> made = [](Trainer&) {};    // before the first step
  std::function<void(Trainer& rank)> summed = [](Trainer&) {};  // the gradients are, and are not looked at yet
  std::function<void(Trainer& rank, const StepReport& report)> update = [](Trainer& rank, const StepReport& report) {
    rank.update(report);
  };
  // Told where the bound is calibrated, in each process, and by rank 0 in each of its steps.
  Working working = [](std::string_view, int64_t) {};
  // A run that ends with the failure of a rank, or a loss that is no number, is a bound that is broken; else verify()
  // throws it.
  bool failure_is_seen = false;
};

struct VerifyResult {
  int64_t steps = 0;
  bool exact = true;  // the plan is held to bits; otherwise to `bound`
  double bound = 0;   // the most of relative errors
  std::string bound_text = {};
  bool bitwise = true;
  double loss_max_rel = 0, grad_max_rel = 0, param_max_rel = 0;  // 2-norms, the largest over tensors and steps
  std::string worst;                                             // the tensor with the largest difference
  std::vector<double> losses;
  int64_t strayed = 0;      // tokens that one rank would have sent to other experts than the plan did
  double stray_margin = 0;  // and by how much: of logits, by the largest
  double imbalance = 1;     // experts: rows that a rank got in a pass of a layer, by those of an even routing, at most
  std::vector<SentBytes> sent, expected_sent;
  std::vector<MemoryByCategory> held, expected_held;   // by rank
  std::vector<int64_t> peak, expected_peak;            // by rank, with activations
  std::vector<int64_t> in_flight, expected_in_flight;  // by pipeline rank: stages times micro-batches
  std::optional<double> bubble, bubble_formula;        // share of the time, where there is a pipeline
  bool known = true;                                   // false in a process without rank 0, which knows nothing
  std::vector<int64_t> wrong_steps;                    // in which a number or a tensor is not what it should be
  Observations seen;                                   // all that is
  std::vector<Diagnosis> diagnosis;                    // likely causes: explain() fills them in
  std::vector<std::string> failures;                   // one line for each bound that is broken
  bool passed() const { return failures.empty(); }
};

// The job that verify() compares, with what `job` leaves open: a vocabulary, kernels between which no clock decides,
// and attention by those that keep a row's bits in any batch.
Job verifiable(Job job);

// Trains job.optim.steps steps of counted random tokens under the plan, on ranks of its own or those of the MPI job,
// and compares. Throws what training throws.
VerifyResult verify(const Job& job, const VerifyHooks& hooks = {});

// The hooks of a job: planted defects ask what they spoil.
using HooksOf = std::function<VerifyHooks(const Job& job)>;
// verify(), and where it is broken what the likely cause is. Forward passes that are wrong are tried again without
// dropout, without the document mask, on one context rank and without a pipeline, as many steps as it takes to see.
VerifyResult explain(const Job& job, const HooksOf& hooks);

// The last part of verify(): adds a line to result.failures for each bound of the whole run that is broken, bytes and
// memory against the closed forms, and that there was something to see.
void check_totals(VerifyResult& result, const Plan& plan);
// 2% and a few small arrays over what is expected of a peak, which no formula gives to the byte.
int64_t peak_bound(int64_t expected);

}  // namespace tessera
