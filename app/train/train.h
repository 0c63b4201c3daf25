// The ranks of the command `train`.
#pragma once
#include "app/run/directory.h"
#include "app/train/output.h"

namespace tessera {

// Read-only and shared by the ranks of a process, except for the run directory, which rank 0 writes.
struct Run {
  const TrainOptions& options;
  const Job& job;
  const Dataset& dataset;
  const Sequences& sequences;
  const RunDirectory& directory;
};

// Run on every rank; return the exit status.
int train_in_steps(const Run& run, Communicator& world);
int train_asynchronously(const Run& run, Communicator& world);

// Creates rank 0's output and prints the introduction. `steps` describes the run ("100 steps of 512 tokens"); `done` of
// them are completed.
std::unique_ptr<TrainOutput> begin_output(const Run& run, LanguageModel& model, const std::string& steps, int64_t done,
                                          const std::vector<std::string>& passed_over);
// A sentence ends with . ! or ?, optionally followed by a quotation mark, and the next begins with a capital letter
// after a space. Returns the full text if less than a third would remain.
std::string complete_sentences(const std::string& text);

}  // namespace tessera
