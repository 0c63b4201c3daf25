// Metrics of a run: metrics.jsonl (one JSON object per line) and a TensorBoard event file.
#pragma once

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "data/dataset.h"
#include "data/event_file.h"
#include "train/step_report.h"

namespace tessera {

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

using Validations = std::vector<std::pair<int64_t, double>>;

// Records up to a step, excluding the incomplete last line of a killed run and an earlier run's summary. `what` names
// the file in messages. Throws InputError.
struct MetricRecords {
  std::string records;
  Validations validations = {};
};
MetricRecords records_until(std::string_view file, int64_t step, const std::string& what);

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
  // Write a record, unless the validation of that step is already recorded, and return it.
  std::string step(const StepReport& report);
  std::string validation(int64_t step, const Validation& found);
  // A run that was killed after its last step repeats only an unrecorded validation.
  bool has_validation(int64_t step) const { return !validations_.empty() && validations_.back().first == step; }
  int64_t validations_since_best() const;

 private:
  static Validations drop_records_after(const std::filesystem::path& file, int64_t step);
  std::filesystem::path path_;
  Validations validations_;
  EventFile events_;
  std::FILE* file_;
};

}  // namespace tessera
