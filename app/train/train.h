// The rank's side of the command `train`, for runs in steps and for asynchronous ones.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "app/options.h"
#include "app/run/directory.h"
#include "app/train/output.h"
#include "data/dataset.h"
#include "parallel/comm/communicator.h"
#include "train/batches.h"
#include "train/job.h"

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

// Rank 0's output, with words at the head of a run.
struct Beginning {
  LanguageModel& model;
  std::string steps;  // words such as "100 steps of 512 tokens"
  int64_t done = 0;   // steps
  const std::vector<std::string>& passed_over;
};
std::unique_ptr<TrainOutput> begin_output(const Run& run, const Beginning& beginning);
// After a step, or in the validation that follows.
void say_stopped(const Run& run, int64_t step, bool validating, TrainOutput& output);
// That a checkpoint was asked for by SIGUSR1.
void say_saved(const Run& run, int64_t step, TrainOutput& output);
// Throws Error (usage) when a resumed run has made more steps than it shall.
void check_steps_done(const Run& run, int64_t done);
// Text by the model as it was saved last: no rank needs to hold the whole of it while it is trained. Empty for a
// program that reads the output, and with --no-save; cut short by a signal.
std::string sample_of_saved(const Run& run, const ModelConfig& config);

// A sample of text, cut where a reader would begin and end.

// The whole sentences of a text: from the first that begins in it to the end of the last. A sentence ends with . ! or ?
// and maybe a quotation mark, and the next begins with a capital behind a space. All of the text where that leaves less
// than a third: not every text has sentences.
std::string whole_sentences(const std::string& text);

}  // namespace tessera
