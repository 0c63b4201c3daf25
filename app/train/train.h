// The rank's side of the command `train`, for runs in steps and for asynchronous ones.
#pragma once
#include "app/run/directory.h"
#include "app/train/output.h"

namespace tessera {

// State that the ranks of one process share, all of it read only but for the run's folder, which rank 0 writes.
struct Run {
  const TrainOptions& options;
  const Job& job;  // the meaning of the options
  const Dataset& dataset;
  const Sequences& sequences;
  const RunDirectory& directory;
};

// Every rank calls one of these; they return the exit status.
int train_in_steps(const Run& run, Communicator& world);
int train_asynchronously(const Run& run, Communicator& world);

// Rank 0's output, with words at the head of a run of `steps`, "100 steps of 512 tokens", of which some are done.
std::unique_ptr<TrainOutput> begin_output(const Run& run, LanguageModel& model, const std::string& steps, int64_t done,
                                          const std::vector<std::string>& passed_over);
// The whole sentences of a text: from the first that begins in it to the end of the last. A sentence ends with . ! or ?
// and maybe a quotation mark, and the next begins with a capital behind a space. All of the text where that leaves less
// than a third: not every text has sentences.
std::string whole_sentences(const std::string& text);

}  // namespace tessera
