// The one-rank reference of a recorded step: Tessera trains the step on the recorded tokens, from the weights of the
// model before the step, and dumps it. Further runs measure rounding errors.
#pragma once
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "train/checkpoint/full_state.h"
#include "verify/audit/local.h"
#include "verify/audit/recording.h"

namespace tessera::audit {

struct ReferenceModel {
  ModelConfig config;
  FullTensors weights;
};

struct ReferenceRuns {
  std::filesystem::path reference;  // a dump
  std::vector<std::filesystem::path> repeats;
  std::vector<std::string> names;  // of all runs
  LocalErrors local;
  double seconds = 0;
};

// Runs the step from the weights of the model, after step 1 from those of the recording, in the dtype of the
// recording's activations, with other micro-batches, in fp64, and with token embeddings moved by one ulp. Throws
// InputError if the recording has no tokens or tokens outside the vocabulary.
ReferenceRuns run_references(const Recording& found, const ReferenceModel& model,
                             const std::filesystem::path& directory);

}  // namespace tessera::audit
