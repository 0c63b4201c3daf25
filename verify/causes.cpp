// Every cause by its name, and in a sentence.
#include <algorithm>
#include <array>

#include "verify/diagnosis.h"

namespace tessera {
namespace {

struct Named {
  Cause cause;
  std::string_view name, text;
};
constexpr auto kCauses = std::to_array<Named>({
    {Cause::lost_call, "lost-call", "a rank took no part in a collective, or a message was lost"},
    {Cause::failed_rank, "failed-rank", "a rank ended with an error of its own"},
    {Cause::group_not_summed, "group-not-summed", "shards are summed within groups of ranks, and not over the groups"},
    {Cause::wrong_group, "wrong-group", "shards are summed over other ranks than those that have the same shard"},
    {Cause::outer_step, "outer-step", "ranks that train alone leave out a step that they should make together"},
    {Cause::silent_owner, "silent-owner", "the owner of a matrix does not send its update to the other ranks"},
    {Cause::missing_gradient_sum, "missing-gradient-sum", "gradients are not summed over the data axis"},
    {Cause::summed_twice, "summed-twice", "gradients are summed over the data axis twice"},
    {Cause::wrong_scale, "wrong-scale", "gradients are multiplied or divided once too often"},
    {Cause::narrow_sums, "narrow-sums", "gradients are summed and sent in a narrower dtype"},
    {Cause::order_of_sums, "order-of-sums", "gradients are summed in another order"},
    {Cause::microbatch_skipped, "microbatch-skipped", "a micro-batch is left out"},
    {Cause::microbatch_repeated, "microbatch-repeated", "a micro-batch is computed twice, in place of another"},
    {Cause::wrong_sequences, "wrong-sequences", "ranks compute other sequences than the plan gives them"},
    {Cause::wrong_targets, "wrong-targets", "the last stage compares with the targets of other sequences"},
    {Cause::wrong_message, "wrong-message", "a pipeline stage computes with another micro-batch's activations"},
    {Cause::tied_copies, "tied-copies", "the two copies of the tied weight do not sum their gradients"},
    {Cause::missing_forward_sum, "missing-forward-sum", "a row layer's outputs are not summed over the tensor axis"},
    {Cause::missing_backward_sum, "missing-backward-sum",
     "the gradient of a column layer's input is not summed over the tensor axis"},
    {Cause::weight_not_summed, "weight-not-summed",
     "the gradient of one replicated weight is not summed over the tensor axis: R and I are swapped"},
    {Cause::context_positions, "context-positions",
     "attention over context ranks takes tokens for others: the positions or the mask are wrong"},
    {Cause::document_mask, "document-mask", "attention sees another document, or not all of its own"},
    {Cause::dropout_masks, "dropout-masks", "ranks or micro-batches draw other dropout masks than they should"},
    {Cause::wrong_expert, "wrong-expert", "tokens meet other experts than the router chose for them"},
    {Cause::wrong_expert_sum, "wrong-expert-sum",
     "gradients of experts are summed over other ranks than those that have these experts"},
    {Cause::missing_gather, "missing-gather", "updated shards are not gathered: ranks go on with stale ones"},
    {Cause::misplaced_gather, "misplaced-gather", "gathered shards are put in each other's places"},
    {Cause::stale_part, "stale-part", "a part of the parameters keeps its old values"},
    {Cause::update_skipped, "update-skipped", "the update is not applied"},
    {Cause::clipping, "clipping", "gradients are not clipped, or by another norm than they should be"},
    {Cause::norm, "norm", "the gradient norm lacks the part of some ranks"},
    {Cause::needless_communication, "needless-communication", "something is sent that nobody needs"},
    {Cause::schedule, "schedule", "the pipeline executes another schedule than the plan's"},
    {Cause::kept_memory, "kept-memory", "something is kept that should be cut or freed"},
    {Cause::unknown, "unknown", "no rule fits"},
});

const Named& named(Cause cause) {
  return *std::ranges::find_if(kCauses, [&](const Named& n) { return n.cause == cause; });
}

}  // namespace

std::string_view name_of(Cause cause) { return named(cause).name; }
std::string_view text_of(Cause cause) { return named(cause).text; }

}  // namespace tessera
