// The numbers of a run, in its directory: metrics.jsonl (one JSON object per line, the same that `--format json`
// prints) and an event file for TensorBoard.
#pragma once
#include "app/options.h"
#include "app/output.h"
#include "data/event_file.h"
#include "train/trainer.h"
#include "train/usage.h"

namespace tessera {

using Validations = std::vector<std::pair<int64_t, double>>;  // steps and losses

// The records of a metrics file up to a step, and those alone. A last line without its end was cut by a kill and is
// dropped, and so is the summary of an earlier run. `what` names the file in messages. Throws InputError.
struct KeptRecords {
  std::string records;
  Validations validations = {};
};
KeptRecords records_until(std::string_view file, int64_t step, const std::string& what);

inline constexpr size_t kWarmupSteps = 5;
// The median of a run's tokens per second, one rate for each step. The first steps, which touch memory for the first
// time and compile kernels, are left out where there are more.
double median_rate(std::vector<double> rates);

class Metrics {
 public:
  // Opens `run`/metrics.jsonl to append and begins an event file. On resume, records of steps after `resumed_step` are
  // dropped first: they will be made again. Throws OutputError, and InputError for a file that is no list of such
  // records.
  Metrics(const std::filesystem::path& run, int64_t resumed_step);
  ~Metrics();
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  // Written at once, so that a run can be followed. The event comes first: what metrics.jsonl has, both have. Throws
  // OutputError.
  void write(const std::string& json_line, int64_t step, std::span<const Scalar> scalars);
  void write(const std::string& json_line);
  // Whether this step's validation is recorded: a run that was killed at its very end makes it again.
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

// The validation of a run's model on the validation split; for a mixture, on each of its parts.

struct Validation {
  double loss = 0, bits_per_byte = 0;
  struct Part {
    std::string name;
    double loss = 0, bits_per_byte = 0;
  };
  std::vector<Part> parts = {};  // only for a mixture, whose loss is their mean by its shares
};

// The mean loss over the targets of some rows; nothing where it was stopped.
using MeanLoss = std::function<std::optional<double>(const Rows& rows)>;

// Nothing where a part was stopped. `context`: of the rows.
std::optional<Validation> validation_path(const Dataset& dataset, int64_t context, const MeanLoss& mean_loss);

// The output of `train`: to the person (progress, summary), to a program (--format json) and to the files of metrics.

class TrainOutput {
 public:
  TrainOutput(const TrainOptions& options, const Plan& plan, const std::filesystem::path& run, int64_t resumed_step);

  void message(const std::string& line) { progress_.message(line); }
  void step(const StepReport& report);
  bool has_validation(int64_t step) const { return metrics_.has_validation(step); }
  int64_t validations_since_best() const { return metrics_.validations_since_best(); }
  void eval(int64_t step, const Validation& v);
  // The last record, and for a person the result: the sample of text and where the run lies.
  struct Facts {
    int64_t steps = 0, tokens_per_step = 0;
    double flops_per_token = 0;
    double rank_peak_flops = 0;  // measured_peak_flops() of a rank
    std::string strategy = {};
    RunUsage usage = {};
    ArenaPtr arena = {};
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
  std::vector<double> times_;             // seconds of each step
  std::optional<Validation> validation_;  // the last; none with --no-eval
};

// For the head of a run: "gpt-nano: 4 layers, 4 heads, 128 channels, context 64, vocabulary 81 (0.81M parameters)".
std::string describe_model(const TrainOptions& options, LanguageModel& model);

// How much this machine can compute.

// The best rate, in FLOP/s, of a few matrix products (of 1024^3; on a GPU, of a millisecond), on the device of the
// arena: what the model's use of the machine is measured against.
double measured_peak_flops(DType dtype, const ArenaPtr& arena);

// How many of the thread ranks compute at the same time: where they are more than the machine's processors, of which
// each uses `each`, or than its GPUs, they take turns.
int64_t ranks_at_once(int64_t ranks, int64_t processors, int64_t each);

}  // namespace tessera
