// What `train` says: to the person (progress, summary), to a program (--format json) and to the files of metrics.
#pragma once
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "app/metrics.h"
#include "app/options.h"
#include "app/progress.h"
#include "app/validation.h"
#include "train/expert_load.h"
#include "train/step_graph.h"
#include "train/trainer.h"
#include "train/usage.h"

namespace tessera {

class TrainOutput {
 public:
  TrainOutput(const TrainOptions& options, const Plan& plan, const std::filesystem::path& run, int64_t resumed_step);

  void message(const std::string& line) { progress_.message(line); }
  void step(const StepReport& report);
  bool has_validation_of(int64_t step) const { return metrics_.has_validation_of(step); }
  void eval(int64_t step, const Validation& v);
  // The last record, and for a person the result: the sample of text and where the run lies.
  struct Facts {
    int64_t steps = 0, tokens_per_step = 0;
    double flops_per_token = 0;
    double rank_peak_flops = 0;  // measured_peak_flops() of a rank
    std::string strategy, backend;
    RunUsage usage;
    ArenaPtr arena;
    StepGraph::Record graph = {};            // how steps were made on a GPU
    std::string no_graph = {};               // why none was to be captured; empty: they were to be
    std::optional<double> predicted_s = {};  // a step, where this machine was measured
    std::string sample = {};                 // empty: none
    ExpertLoad experts = {};
  };
  void summary(const Facts& facts);

 private:
  std::string in_words(const Facts& facts, double tokens_per_s, double share) const;
  void show(const std::string& json) const;  // to a program
  const TrainOptions& options_;
  const Plan& plan_;
  std::filesystem::path run_;
  Progress progress_;
  Metrics metrics_;
  std::vector<double> rates_, losses_;    // tokens per second and loss of each step
  std::optional<Validation> validation_;  // the last; none with --no-eval
};

// For the head of a run: "gpt-nano: 4 layers, 4 heads, 128 channels, context 64, vocabulary 81 (0.81M parameters)".
std::string describe_model(const TrainOptions& options, LanguageModel& model);

}  // namespace tessera
