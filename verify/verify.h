// The contract: a run under a plan is the run of one rank. One implementation for `tessera verify` and the test suite.
//
// The plan trains for some steps, and after each of them the loss, every gradient, every parameter and every tensor of
// the optimizer are gathered and held against the oracle (verify/reference.h). Two kinds of plan:
//
//   data and pipeline axes     equal to the last bit, over the whole run
//   with tp or cp              sums are split inside products and softmaxes: loss, norm and every gradient agree to a
//                              relative error (2-norms) of at most 1e-12 in float64; in fp32 and bf16 the bound is
//                              calibrated (verify/tolerance.h). Then the oracle goes on with the plan's gradients,
//                              so that parameters and optimizer state are equal to the last bit again, and every step
//                              begins with the same state on both sides
//
// What was sent and what is held is counted and held against closed forms (verify/expected.h), the peak of what is
// held against a bound that is worked out from single micro-batches (verify/stage_memory.h), and so are the
// micro-batches in flight and the pipeline's bubble on the simulated clock. And it is checked that the plan did run:
// ranks communicated, what they hold is what the plan says, and after forty steps the loss has fallen.
#pragma once
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "train/usage.h"
#include "verify/expected.h"

namespace tessera {

// A defect that is planted in the plan, never in the oracle, to see that the contract turns red.
enum class Mutation {
  none,
  drop_reduction,    // the first collective does not happen
  divide_twice,      // the gradient is divided by the number of ranks once more
  skip_microbatch,   // the last micro-batch of the last rank teaches nothing
  shift_sequences,   // ranks but the first compute each other's sequences
  stale_shard,       // after a step one rank goes on with old values in a part of its parameters
  other_order,       // sums go around a ring where the plan says rank order
  unclipped,         // one rank does not clip
  unsummed_input,    // a column layer does not sum the gradient of its input: R where the plan says I
  unsummed_norm,     // under sequence parallelism a norm's gradient is not summed: I where the plan says R
  wrong_mask,        // attention over context ranks takes the tokens to lie in another order
  other_microbatch,  // the last stage compares with the targets of the next micro-batch
  untied,            // the two copies of the tied weight are not summed
};

struct VerifyResult {
  int64_t steps = 0;
  bool exact = true;  // the plan is held to bits; otherwise to `bound`
  double bound = 0;   // of relative errors
  std::string bound_text = {};
  bool bitwise = true;
  double loss_max_rel = 0, grad_max_rel = 0, param_max_rel = 0;  // 2-norms, the largest over tensors and steps
  std::string worst;                                             // the tensor with the largest difference
  std::vector<double> losses;
  std::vector<SentBytes> sent, expected_sent;
  std::vector<HeldBytes> held, expected_held;          // by rank
  std::vector<int64_t> peak, expected_peak;            // by rank, with activations
  std::vector<int64_t> in_flight, expected_in_flight;  // by pipeline rank: stages times micro-batches
  std::optional<double> bubble, bubble_formula;        // share of the time, where there is a pipeline
  bool known = true;                                   // false in a process without rank 0, which knows nothing
  std::vector<std::string> failures;                   // one line for each bound that is broken
  bool passed() const { return failures.empty(); }
};

// The job that verify() compares, with what `job` leaves open: a vocabulary, kernels between which no clock decides,
// and attention by those that keep a row's bits in any batch.
Job verifiable(Job job);

// Trains job.optim.steps steps of counted random tokens under the plan, on ranks of its own or those of the MPI job,
// and compares. `shown`: see LaunchOptions. Throws what training throws.
VerifyResult verify(const Job& job, Mutation mutation = Mutation::none,
                    const std::function<std::string(const std::string& cause)>& shown = {});

}  // namespace tessera
