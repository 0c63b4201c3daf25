// The text that `train` shows at the end of a run.
#pragma once
#include <string>

#include "app/train/rank.h"

namespace tessera {

// Generated from the newest checkpoint, because a rank may lack memory for the full model during training. Empty with
// --format json, --quiet and --no-save; truncated by a signal.
std::string sample_text(const TrainCall& call, const ModelConfig& config);

// A sentence ends with . ! or ?, optionally followed by a quotation mark, and the next begins with a capital letter
// after a space. Returns the full text if less than a third would remain.
std::string complete_sentences(const std::string& text);

}  // namespace tessera
