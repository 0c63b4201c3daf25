// Local errors of a recorded step: every module of a model is computed from its recorded input, and its input gradient
// and parameter gradients from its recorded output gradient, so that errors of other modules are not included.
//
//   recorded:   x0 --layer 0--> x1 --layer 1--> x2 ...        error of layer 1: |x2 - layer1(x1)|
//   gradients:  g0 <--layer 0-- g1 <--layer 1-- g2 ...        error of its backward pass: |g1 - layer1'(x1, g2)|
//
// The same in float64 and in the recording's dtype measures rounding errors. The factor f.e / e.e of recorded and
// expected values is estimated with its standard error over rows.
//
// Memory: one pipeline stage of one layer (the first with the embedding, the last with the head), for some sequences.
// Cost: three times the FLOPs of a step in two dtypes, and one pass over the recording.
#pragma once
#include <cstdint>
#include <map>

#include "train/checkpoint/full_state.h"
#include "verify/audit/recording.h"

namespace tessera::audit {

struct TensorResult;

struct LocalError {
  double distance = 0, tolerance = 0;       // |found - expected| / |expected|, 2-norms
  double factor = 1, factor_tolerance = 0;  // least squares
  bool wrong = false, undecided = false;    // undecided: a factor of 1.02 would not be found
  Batch batch = {};                         // of the largest error
  size_t replica = 0;
};

struct LocalErrors {
  std::map<Key, LocalError> errors;  // of outputs, their gradients and parameter gradients
  double loss = 0;                   // mean of the recorded logits' cross-entropy; 0: unknown
  double loss_tolerance = 0;
};

// Modules without a recorded input or output gradient are omitted. Recordings with dropout, adapters and quantized
// models have no local errors.
// `weights`: before the step.
LocalErrors find_local_errors(const Recording& found, const ModelConfig& config, const FullTensors& weights,
                              const ArenaPtr& arena);

// Adds the local error to the result of a comparison with a reference, whose loss is `loss`.
void add_local_error(const LocalErrors& local, double loss, TensorResult& result);

}  // namespace tessera::audit
