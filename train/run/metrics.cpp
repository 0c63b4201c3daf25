// Metrics files, and the validation loss of a dataset.
#include "train/run/metrics.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <nlohmann/json.hpp>
#include <system_error>

#include "base/bad_input.h"
#include "base/files.h"
#include "base/json.h"
#include "base/write_file.h"
#include "train/run/run_directory.h"

namespace tessera {
namespace {

using Ordered = nlohmann::ordered_json;

Ordered with_scalars(const std::string& event, int64_t step, std::span<const Scalar> scalars) {
  Ordered record{{"event", event}, {"step", step}};
  for (const Scalar& s : scalars) record[std::string(s.tag)] = s.value;
  return record;
}

}  // namespace

MetricRecords records_until(std::string_view file, int64_t step, const std::string& what) {
  MetricRecords out;
  for (size_t at = 0, end; (end = file.find('\n', at)) != std::string_view::npos; at = end + 1) {
    const std::string_view line = file.substr(at, end - at);
    const nlohmann::json j = parse_json(line, what);
    const std::optional<int64_t> found = j.is_object() ? natural(j.value("step", nlohmann::json())) : std::nullopt;
    if (!found) {
      if (j.is_object() && j.value("event", nlohmann::json()) == "summary") continue;
      bad_input("{}: expected a record with a step, got {}", what, line);
    }
    if (*found > step) continue;
    out.records.append(line).append("\n");
    if (j.value("event", nlohmann::json()) != "eval") continue;
    const nlohmann::json loss = j.value("val_loss", nlohmann::json());
    out.validations.emplace_back(*found, loss.is_number() ? loss.get<double>() : std::nan(""));
  }
  return out;
}

Validations Metrics::drop_records_after(const std::filesystem::path& file, int64_t step) {
  std::error_code unknown;
  if (!std::filesystem::is_regular_file(file, unknown)) return {};
  const MetricRecords metrics = records_until(read_file(file), step, file.string());
  write_file(file, metrics.records);
  return metrics.validations;
}

Metrics::Metrics(const std::filesystem::path& run, int64_t resumed_step)
    : path_(run / "metrics.jsonl"),
      validations_(drop_records_after(path_, resumed_step)),
      events_(run, resumed_step + 1),
      file_(std::fopen(path_.c_str(), "ae")) {
  if (!file_) throw OutputError(fmt::format("cannot write {}: {}", path_.string(), std::strerror(errno)));
}

int64_t Metrics::validations_since_best() const {
  const auto best = std::ranges::min_element(validations_, {}, &Validations::value_type::second);
  return best == validations_.end() ? 0 : validations_.end() - best - 1;
}

Metrics::~Metrics() { std::fclose(file_); }

std::string Metrics::step(const StepReport& r) {
  const std::array<Scalar, 4> scalars{
      {{"loss", r.loss}, {"lr", r.lr}, {"grad_norm", r.grad_norm}, {"tokens_per_s", r.tokens_per_s}}};
  Ordered record = with_scalars("step", r.step, scalars);
  record["step_ms"] = r.step_ms;
  write(record.dump(), r.step, scalars);
  return record.dump();
}

std::string Metrics::validation(int64_t step, const Validation& v) {
  std::vector<Scalar> scalars{{"val_loss", v.loss}, {"val_bits_per_byte", v.bits_per_byte}};
  std::deque<std::string> tags;
  for (const Validation::Part& p : v.parts) {
    scalars.push_back({tags.emplace_back("val_loss/" + p.name), p.loss});
    scalars.push_back({tags.emplace_back("val_bits_per_byte/" + p.name), p.bits_per_byte});
  }
  std::string record = with_scalars("eval", step, scalars).dump();
  if (!has_validation(step)) {
    write(record, step, scalars);
    validations_.emplace_back(step, v.loss);
  }
  return record;
}

void Metrics::write(const std::string& json_line, int64_t step, std::span<const Scalar> scalars) {
  events_.write(step, scalars);
  write(json_line);
}

void Metrics::write(const std::string& json_line) {
  if (std::fputs(json_line.c_str(), file_) < 0 || std::fputc('\n', file_) == EOF || std::fflush(file_) != 0)
    throw OutputError(fmt::format("cannot write {}: {}", path_.string(), std::strerror(errno)));
  if (!is_at(path_, ::fileno(file_)))
    throw OutputError(path_.string() + ": the file was removed, moved or replaced while the run was writing to it");
}

std::optional<Validation> compute_validation(const Dataset& d, int64_t context, const MeanLoss& mean_loss) {
  Validation out;
  if (d.parts.empty()) {
    const std::optional<double> loss = mean_loss(*d.validation(context));
    if (!loss) return {};
    return Validation{*loss, d.bits_per_byte(*loss)};
  }
  double ratios = 0;
  for (const MixturePart& p : d.parts) {
    const std::optional<double> loss = mean_loss(*p.dataset->validation(context));
    if (!loss) return {};
    out.parts.push_back({p.name, *loss, p.dataset->bits_per_byte(*loss)});
    out.loss += static_cast<double>(p.ratio) * *loss;
    ratios += static_cast<double>(p.ratio);
  }
  out.loss /= ratios;
  out.bits_per_byte = d.bits_per_byte(out.loss);
  return out;
}

}  // namespace tessera
