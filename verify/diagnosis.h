// From what was seen of a run to what is likely to be wrong with it: a table of rules, each a pattern of symptoms and
// the cause that makes it. docs/defects.md has the same table for people.
//
//   for (const Diagnosis& d : diagnose(seen)) print(d.text, d.evidence);   // the likeliest first
//
// A pure function: it knows no plan, no defect's name and no code, only the observations.
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "verify/observations.h"

namespace tessera {

enum class Cause : uint8_t {
  lost_call,             // a rank took no part in a collective, or a message was lost
  failed_rank,           // a rank ended with an error
  group_not_summed,      // shards are summed within groups of ranks only
  wrong_group,           // shards are summed over other ranks than those that have the same
  outer_step,            // ranks that train alone leave out a step that they should make together
  silent_owner,          // the owner of a matrix does not send its update
  missing_gradient_sum,  // the data axis does not sum gradients
  summed_twice,          // it sums them twice
  wrong_scale,           // gradients are multiplied or divided once too often
  narrow_sums,           // they are sent in a narrower dtype
  order_of_sums,         // they are added in another order
  microbatch_skipped,
  microbatch_repeated,
  wrong_sequences,       // ranks compute other sequences than the plan gives them
  wrong_targets,         // the last stage compares with other targets than belong to its inputs
  wrong_message,         // a pipeline stage computes with the activations of another micro-batch
  tied_copies,           // the two copies of a tied weight are not summed
  missing_forward_sum,   // a row layer's outputs are not summed over the tensor axis
  missing_backward_sum,  // a column layer's input gradient is not summed over it
  weight_not_summed,     // the gradient of one replicated weight is not: R and I are swapped
  context_positions,     // attention over context ranks takes tokens for others: positions or mask
  document_mask,         // attention sees another document, or not all of its own
  dropout_masks,         // ranks or micro-batches draw the same masks, or others than they should
  wrong_expert,          // tokens meet other experts than the router chose
  wrong_expert_sum,      // gradients of experts are summed over other ranks than those that have them
  missing_gather,        // updated shards are not gathered
  misplaced_gather,      // gathered shards are put in each other's places
  stale_part,            // a part of the parameters is not updated
  update_skipped,        // nothing is
  clipping,              // gradients are not clipped, or by another norm
  norm,                  // the gradient norm lacks the part of some ranks
  needless_communication,
  schedule,     // the pipeline executes another schedule
  kept_memory,  // something is kept that should be cut or freed
  unknown,
};
std::string_view name_of(Cause cause);  // "missing-gradient-sum"
std::string_view text_of(Cause cause);  // a sentence

struct Diagnosis {
  Cause cause = Cause::unknown;
  std::string text;      // what is likely to be wrong, where: axis, blocks, ranks
  std::string evidence;  // the symptoms that say so
};

// The likeliest cause first; one of `unknown` where no rule fits; none where nothing is different.
std::vector<Diagnosis> diagnose(const Observations& seen);

}  // namespace tessera
