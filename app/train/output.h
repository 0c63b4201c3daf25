// Metrics of a run: metrics.jsonl (one JSON object per line, as printed by `--format json`) and a TensorBoard event
// file.
#pragma once
#include "app/options.h"
#include "app/output.h"
#include "data/event_file.h"
#include "train/trainer.h"
#include "train/usage.h"

namespace tessera {

using Validations = std::vector<std::pair<int64_t, double>>;

// Records up to a step, without the incomplete last line of a killed run and the summary of an earlier run. `what`
// names the file in messages. Throws InputError.
struct MetricRecords {
  std::string records;
  Validations validations = {};
};
MetricRecords records_until(std::string_view file, int64_t step, const std::string& what);

inline constexpr size_t kWarmupSteps = 5;
// Excludes the first kWarmupSteps, in which memory is allocated and kernels are compiled, if there are more steps.
double median_rate(std::vector<double> rates);

class Metrics {
 public:
  // Appends to `run`/metrics.jsonl and starts an event file. On resume, removes records after `resumed_step`, because
  // these steps are repeated. Throws OutputError, and InputError for a malformed file.
  Metrics(const std::filesystem::path& run, int64_t resumed_step);
  ~Metrics();
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  // Writes the event, then the record, so the event file contains every record of metrics.jsonl. Throws OutputError.
  void write(const std::string& json_line, int64_t step, std::span<const Scalar> scalars);
  void write(const std::string& json_line);
  // A run that was killed after its last step repeats only an unrecorded validation.
  bool has_validation(int64_t step) const { return !validations_.empty() && validations_.back().first == step; }
  void validated(int64_t step, double loss) { validations_.emplace_back(step, loss); }
  int64_t validations_since_best() const;

 private:
  static Validations drop_records_after(const std::filesystem::path& file, int64_t step);
  std::filesystem::path path_;
  Validations validations_;
  EventFile events_;
  std::FILE* file_;
};

struct Validation {
  double loss = 0, bits_per_byte = 0;
  struct Part {
    std::string name;
    double loss = 0, bits_per_byte = 0;
  };
  std::vector<Part> parts = {};  // mixtures only; `loss` is their weighted mean
};

// The mean over the targets of `rows`; nullopt if interrupted.
using MeanLoss = std::function<std::optional<double>(const Rows& rows)>;

// nullopt if interrupted. `context`: tokens per row.
std::optional<Validation> compute_validation(const Dataset& dataset, int64_t context, const MeanLoss& mean_loss);

// Progress and summary for the user, JSON records (--format json), and metrics files.

class TrainOutput {
 public:
  TrainOutput(const TrainOptions& options, const Plan& plan, const std::filesystem::path& run, int64_t resumed_step);

  void message(const std::string& line) { progress_.message(line); }
  void step(const StepReport& report);
  bool has_validation(int64_t step) const { return metrics_.has_validation(step); }
  int64_t validations_since_best() const { return metrics_.validations_since_best(); }
  void eval(int64_t step, const Validation& v);
  struct Facts {
    int64_t steps = 0, tokens_per_step = 0;
    double flops_per_token = 0;
    double rank_peak_flops = 0;  // measured_peak_flops() of one rank
    std::string strategy = {};
    RunUsage usage = {};
    ArenaPtr arena = {};
    StepGraph::Record graph = {};
    std::string no_graph = {};               // empty if CUDA graphs are enabled
    std::optional<double> predicted_s = {};  // step time, if this machine was calibrated
    std::string sample = {};
    ExpertLoad experts = {};
  };
  void summary(const Facts& facts);

 private:
  std::string summary_text(const Facts& facts, double tokens_per_s, double share) const;
  void show(const std::string& json) const;
  const TrainOptions& options_;
  const Plan& plan_;
  std::filesystem::path run_;
  Progress progress_;
  Metrics metrics_;
  std::vector<double> rates_, losses_;
  std::vector<double> times_;
  std::optional<Validation> validation_;  // empty with --no-eval
};

// "gpt-nano: 4 layers, 4 heads, 128 channels, context 64, vocabulary 81 (0.81M parameters)".
std::string describe_model(const TrainOptions& options, LanguageModel& model);

// The best FLOP/s of large matmuls (1024^3 on a CPU, about 1 ms on a GPU); the denominator of MFU.
double measured_peak_flops(DType dtype, const ArenaPtr& arena);

// Thread ranks that run concurrently on `processors` cores, if each rank uses `each`, or on as many GPUs.
int64_t ranks_at_once(int64_t ranks, int64_t processors, int64_t each);

}  // namespace tessera
