// What `train` prints about its run.
#pragma once
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "app/options.h"
#include "app/output.h"
#include "train/run/run.h"

namespace tessera {

inline constexpr size_t kWarmupSteps = 5;
// Excludes the first kWarmupSteps, in which memory is allocated and kernels are compiled, if there are more steps.
double median_throughput(std::vector<double> throughputs);

// Read-only and shared by the ranks of a process, except for the run directory, which rank 0 writes.
struct TrainCall {
  const TrainCommand& command;
  const Dataset& dataset;
  const RunDirectory& directory;
  const Sequences& sequences;
};

// Progress and summary for the user, and JSON records (--format json).
class TrainOutput final : public RunObserver {
 public:
  explicit TrainOutput(const TrainCall& call);

  void begin(const RunStart& start) override;
  void step(const StepReport& report, const std::string& record) override;
  void validated(int64_t step, const Validation& found, const std::string& record) override;
  void saved(int64_t step) override;
  void message(const std::string& line) override { progress_.message(with_options(line)); }
  void stopped(const RunResult& result);
  struct Facts {
    int64_t steps = 0, tokens_per_step = 0;
    double flops_per_token = 0;
    double rank_peak_flops = 0;  // measured_peak_flops() of one rank
    std::string strategy = {};
    RunUsage usage = {};
    StepGraph::Record graph = {};
    std::string no_graph = {};               // empty if CUDA graphs are enabled
    std::optional<double> predicted_s = {};  // step time, if this machine was calibrated
    std::string sample = {};
    ExpertLoad experts = {};
  };
  // Appends the summary's record to metrics.jsonl, and prints it.
  void summary(const Facts& facts, const std::function<void(const std::string& record)>& append);

 private:
  std::string summary_text(const Facts& facts, double tokens_per_s, double fraction) const;
  void show(const std::string& json) const;
  void introduce(const RunStart& start);
  const TrainCall call_;
  const TrainConfig& config_;
  const TrainOptions& options_;
  const Plan& plan_;
  std::filesystem::path run_;
  Progress progress_;
  std::vector<double> tokens_per_s_, losses_;
  std::vector<double> times_;
  std::optional<Validation> validation_;  // empty with --no-eval
};

// "gpt-nano: 4 layers, 4 heads, 128 channels, context 64, vocabulary 81 (0.81M parameters)".
std::string describe_model(const TrainConfig& config, LanguageModel& model);

// The best FLOP/s of large matmuls (1024^3 on a CPU, about 1 ms on a GPU); the denominator of MFU.
double measured_peak_flops(DType dtype, const ArenaPtr& arena);

// Number of thread ranks that run concurrently on `cores` cores or GPUs, `each` per rank.
int64_t ranks_at_once(int64_t ranks, int64_t cores, int64_t each);

}  // namespace tessera
