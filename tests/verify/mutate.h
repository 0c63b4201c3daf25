// Defects that are planted in a plan, one at a time.
#pragma once
#include "verify/verify.h"

namespace tessera::test {

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
  unsummed_heads,    // the gradient of what normalises heads is not summed over the ranks that have them
  wrong_positions,   // rotary positions of the tokens of another chunk
  wrong_documents,   // one layer's attention takes documents to begin where those of another sequence do
  untied,            // the two copies of the tied weight are not summed
};

VerifyHooks hooks_of(Mutation mutation);

}  // namespace tessera::test
