// The ranks of the command `train`.
#pragma once
#include <string>

#include "app/train/output.h"

namespace tessera {

// One rank of a run, with its output; returns the exit status.
int train_rank(const TrainCall& call, Communicator& world);

// A sentence ends with . ! or ?, optionally followed by a quotation mark, and the next begins with a capital letter
// after a space. Returns the full text if less than a third would remain.
std::string complete_sentences(const std::string& text);

}  // namespace tessera
