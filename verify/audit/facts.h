// Facts of a recording alone, which need no reference.
#pragma once
#include <string>
#include <vector>

#include "verify/audit/recording.h"

namespace tessera::audit {

// The gradient of a norm's bias, or else of its weight, from one micro-batch: a sum over its tokens of recorded outputs
// and output gradients, which are divided by `scale`. Empty if the recording lacks them.
std::vector<double> norm_gradients(const Recording& recording, const std::string& name, Batch batch, double scale);

// Whether ranks or micro-batches with different tokens have the same dropout mask: the same zeros in the output of a
// dropout module, or the same elements that a block leaves unchanged because both of its branches are dropped.
bool equal_masks(const Recording& recording);

// Sums of the logits' gradients over the vocabulary, relative to the sums of their magnitudes: 0 for a softmax.
double sum_logits(const Recording& recording);

}  // namespace tessera::audit
