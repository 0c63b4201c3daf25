// Metrics files and the output of `train`.
#include "app/train/output.h"

#include <cerrno>
#include <cstring>

#include "app/plan_json.h"
#include "app/run/directory.h"
#include "base/json.h"
#include "bench/op_bench.h"
#include "tensor/cpu/vectorize.h"
#include "train/device.h"

namespace tessera {

double median_rate(std::vector<double> rates) {
  if (rates.size() > kWarmupSteps) rates.erase(rates.begin(), rates.begin() + kWarmupSteps);
  return median(std::move(rates));
}

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
  double shares = 0;
  for (const MixturePart& p : d.parts) {
    const std::optional<double> loss = mean_loss(*p.dataset->validation(context));
    if (!loss) return {};
    out.parts.push_back({p.name, *loss, p.dataset->bits_per_byte(*loss)});
    out.loss += static_cast<double>(p.share) * *loss;
    shares += static_cast<double>(p.share);
  }
  out.loss /= shares;
  out.bits_per_byte = d.bits_per_byte(out.loss);
  return out;
}

namespace {

using Ordered = nlohmann::ordered_json;
constexpr size_t kCurve = 48;

Ordered with_scalars(const std::string& event, int64_t step, std::span<const Scalar> scalars) {
  Ordered record{{"event", event}, {"step", step}};
  for (const Scalar& s : scalars) record[std::string(s.tag)] = s.value;
  return record;
}

Ordered attention_json(const KernelLog::Attention& a) {
  return {{"cudnn", a.cudnn}, {"tensor cores", a.tensor_cores}, {"plain", a.plain}};
}

Ordered pass_json(const KernelLog::Pass& p) { return {{"fused", p.fused}, {"apart", p.apart}}; }

// Attention kernels, CUDA graph captures and replays or why there were none, and fused epilogues of rank 0's GPU.
Ordered gpu_json(const TrainOutput::Facts& f) {
  const auto& log = f.arena->local<KernelLog>();
  const bool each_looked_at = f.graph.replays + f.graph.queued == 0;
  return {{"name", describe_device()},
          {"attention",
           {{"forward", attention_json(log.forward)},
            {"backward", attention_json(log.backward)},
            {"refused", log.refused}}},
          {"graph",
           {{"captures", f.graph.captures},
            {"replays", f.graph.replays},
            {"queued", each_looked_at ? f.steps : f.graph.queued},
            {"why_not", f.graph.given_up.empty() ? f.no_graph : f.graph.given_up}}},
          {"epilogues",
           {{"gelu", pass_json(log.gelu)},
            {"gelu_gradient", pass_json(log.gelu_gradient)},
            {"bias_sums", pass_json(log.bias_sums)}}},
          {"padded_products", log.padded_products}};
}

}  // namespace

std::string describe_model(const TrainOptions& o, LanguageModel& model) {
  const ModelConfig& c = model.config;
  const int64_t shared = c.all_heads().key;
  return fmt::format("{}: {} layers, {} heads{}, {} channels, context {}, vocabulary {} ({} parameters, {})",
                     o.init ? one_line("from " + std::filesystem::proximate(*o.init).string()) : o.model, c.layers,
                     c.heads, shared == c.heads ? "" : fmt::format(" ({} key-value heads)", shared), c.channels,
                     c.context, c.vocab, format_si(static_cast<double>(model.parameter_count())),
                     value_name(o.optim.dtype));
}

TrainOutput::TrainOutput(const TrainOptions& o, const Plan& plan, const std::filesystem::path& run,
                         int64_t resumed_step)
    : options_(o),
      plan_(plan),
      run_(run),
      progress_(Progress::for_stderr(o.optim.steps, o.quiet)),
      metrics_(run, resumed_step) {}

void TrainOutput::show(const std::string& json) const {
  if (options_.format == "json") print(json + "\n");
}

void TrainOutput::step(const StepReport& r) {
  rates_.push_back(r.tokens_per_s);
  times_.push_back(r.step_ms / 1e3);
  losses_.push_back(r.loss);
  const std::array<Scalar, 4> scalars{
      {{"loss", r.loss}, {"lr", r.lr}, {"grad_norm", r.grad_norm}, {"tokens_per_s", r.tokens_per_s}}};
  Ordered record = with_scalars("step", r.step, scalars);
  record["step_ms"] = r.step_ms;
  metrics_.write(record.dump(), r.step, scalars);
  show(record.dump());
  progress_.step(r);
}

void TrainOutput::eval(int64_t step, const Validation& v) {
  validation_ = v;
  std::vector<Scalar> scalars{{"val_loss", v.loss}, {"val_bits_per_byte", v.bits_per_byte}};
  std::string parts;
  std::deque<std::string> tags;
  for (const Validation::Part& p : v.parts) {
    scalars.push_back({tags.emplace_back("val_loss/" + p.name), p.loss});
    scalars.push_back({tags.emplace_back("val_bits_per_byte/" + p.name), p.bits_per_byte});
    parts += fmt::format("{}{} {:.4f}", parts.empty() ? ": " : ", ", one_line(p.name), p.loss);
  }
  const std::string record = with_scalars("eval", step, scalars).dump();
  if (!metrics_.has_validation(step)) {
    metrics_.write(record, step, scalars);
    metrics_.validated(step, v.loss);
  }
  show(record);
  progress_.message(
      fmt::format("step {}: validation loss {:.4f} ({:.4f} bits per byte){}", step, v.loss, v.bits_per_byte, parts));
}

void TrainOutput::summary(const Facts& f) {
  const double rate = median_rate(rates_);
  const bool stepped = !rates_.empty();  // false if a resumed run was already complete
  const auto ranks = std::ssize(f.usage.peak_bytes);
  const int64_t units = plan_.device == Device::cuda ? gpu_count() : std::thread::hardware_concurrency(),
                at_once = has_processes(plan_)
                              ? ranks
                              : ranks_at_once(ranks, units, plan_.device == Device::cuda ? 1 : cpu::threads());
  const double peak = f.rank_peak_flops * static_cast<double>(at_once), mfu = rate * f.flops_per_token / peak;
  Ordered sent = Ordered::object();
  for (const SentBytes& s : f.usage.sent) sent[s.axis][s.operation] = s.bytes;
  const std::optional<Straggler>& late = f.usage.straggler;
  Ordered plan = plan_json(plan_);
  plan["strategy"] = f.strategy;
  plan["backend"] = value_name(plan_.backend);
  plan["threads_per_rank"] = cpu::threads();
  Ordered fields{{"event", "summary"},
                 {"steps", f.steps},
                 {"tokens", f.steps * f.tokens_per_step},
                 {"loss", stepped ? Ordered(losses_.back()) : Ordered()},
                 {"val_loss", validation_ ? Ordered(validation_->loss) : Ordered()},
                 {"val_bits_per_byte", validation_ ? Ordered(validation_->bits_per_byte) : Ordered()},
                 {"tokens_per_s", stepped ? Ordered(rate) : Ordered()},
                 {"mfu", stepped ? Ordered(mfu) : Ordered()},
                 {"flops_per_token", f.flops_per_token},
                 {"peak_flops", peak},
                 {"peak_bytes", f.usage.peak_bytes},
                 {"sent_bytes", sent},
                 {"straggler", late ? Ordered{{"rank", late->rank}, {"share", late->share}} : Ordered()},
                 {"plan", plan},
                 {"out", run_.string()}};
  if (f.predicted_s && stepped)
    fields["predicted"] = {{"step_s", *f.predicted_s}, {"measured_step_s", median_rate(times_)}};
  if (plan_.device == Device::cuda) fields["gpu"] = gpu_json(f);
  if (!f.experts.empty())
    fields["experts"] = {{"load", f.experts.rows}, {"dropped", f.experts.dropped}, {"ranks", plan_.ep}};
  const std::string record = fields.dump();
  metrics_.write(record);
  show(record);
  if (options_.format != "json") print(summary_text(f, rate, mfu));
}

// `share`: fraction of the machine's peak matmul throughput.
std::string TrainOutput::summary_text(const Facts& f, double rate, double share) const {
  const std::string run = one_line(run_.string());
  const bool stepped = !rates_.empty();
  const int64_t steps = f.steps;
  std::string text =
      fmt::format("\nAfter {} steps ({} tokens) ", steps, format_si(static_cast<double>(steps * f.tokens_per_step)));
  text += validation_ ? fmt::format("the validation loss is {:.4f} ({:.4f} bits per byte).\n", validation_->loss,
                                    validation_->bits_per_byte)
                      : "the run is complete; it was not validated (--no-eval).\n";
  if (stepped)
    text += fmt::format("loss {:.2f} {} {:.2f}\n{} tokens/s, {:.0f}% of this machine's matmul peak; ", losses_.front(),
                        sparkline(losses_, kCurve), losses_.back(), format_si(rate), 100 * share);
  const double peak_mb = static_cast<double>(*std::ranges::max_element(f.usage.peak_bytes)) / 1e6;
  text += fmt::format("{} {:.{}f} MB of memory{}.\n", stepped ? "at most" : "No steps remained; at most", peak_mb,
                      peak_mb < 10 ? 1 : 0, f.usage.peak_bytes.size() > 1 ? " per rank" : "");
  if (f.predicted_s && stepped)
    text += fmt::format("Step time: predicted {:.2f} ms for this machine, measured {:.2f} ms.\n", *f.predicted_s * 1e3,
                        median_rate(times_) * 1e3);
  if (const auto& late = f.usage.straggler)
    text += fmt::format("Straggler: the other ranks waited for rank {} {:.0f}% of the time.\n", late->rank,
                        100 * late->share);
  if (const ExpertLoad::Busiest busiest = f.experts.busiest(); busiest.times > 0)
    text += fmt::format("Busiest expert: number {} of layer {}, with {:.2f} times the mean load; {} tokens dropped.\n",
                        busiest.expert, busiest.layer, busiest.times, f.experts.dropped);
  if (options_.no_save) return text + fmt::format("\nThe run is in {}, without a checkpoint (--no-save).\n", run);
  if (!f.sample.empty()) text += fmt::format("\nSample:\n{}\n", f.sample);
  return text + fmt::format("\nThe run is in {}; generate more text with\n  ./tessera generate {}\n", run, run);
}

double measured_peak_flops(DType dtype, const ArenaPtr& arena) {
  constexpr int rounds = 6;
  constexpr int64_t max_n = 8192;
  int64_t n = arena->device() == Device::cuda ? 128 : 1024;
  double rate = bench::measure_matmuls(n, rounds, dtype, arena);
  while (arena->device() == Device::cuda && n < max_n &&
         rate > bench::matmul_rate(n, 1e-3))  // too short to be timed accurately
    rate = bench::measure_matmuls(n *= 2, rounds, dtype, arena);
  return rate;
}

int64_t ranks_at_once(int64_t ranks, int64_t processors, int64_t each) {
  return std::clamp<int64_t>(processors / each, 1, ranks);
}

}  // namespace tessera
