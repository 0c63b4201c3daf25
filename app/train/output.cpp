// The output of `train`.
#include "app/train/output.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "app/plan_json.h"
#include "app/resolve.h"
#include "bench/op_bench.h"
#include "tensor/cpu/vectorize.h"
#include "train/device.h"

namespace tessera {

double median_throughput(std::vector<double> throughputs) {
  if (throughputs.size() > kWarmupSteps) throughputs.erase(throughputs.begin(), throughputs.begin() + kWarmupSteps);
  return median(std::move(throughputs));
}

namespace {

using Ordered = nlohmann::ordered_json;
constexpr size_t kCurve = 48;

Ordered attention_json(const KernelLog::Attention& a) {
  return {{"cudnn", a.cudnn}, {"tensor cores", a.tensor_cores}, {"plain", a.plain}};
}

Ordered pass_json(const KernelLog::Pass& p) { return {{"fused", p.fused}, {"apart", p.apart}}; }

// Attention kernels, CUDA graph captures and replays or why there were none, and fused epilogues of rank 0's GPU.
Ordered gpu_json(const TrainOutput::Facts& f) {
  const auto& log = f.usage.arena->local<KernelLog>();
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

// cuBLASLt and Tessera's kernels cannot vectorize accesses to logits whose rows are not multiples of 16 bytes. Empty if
// no padding is needed.
std::string vocab_hint(const TrainConfig& s, int64_t vocab) {
  constexpr int64_t kVector = 16, kRound = 64;
  const int64_t shards = s.plan.tp, row = shards * kVector / element_size(s.optim.dtype), round = shards * kRound;
  if (vocab % row == 0) return "";
  return fmt::format(
      "a vocabulary size of {} is not a multiple of {}, which slows down the output layer and the loss on a GPU; "
      "pad it with --vocab {}",
      vocab, row, (vocab + round - 1) / round * round);
}

}  // namespace

std::string describe_model(const TrainConfig& o, LanguageModel& model) {
  const ModelConfig& c = model.config;
  const int64_t shared = c.all_heads().key;
  return fmt::format("{}: {} layers, {} heads{}, {} channels, context {}, vocabulary {} ({} parameters, {})",
                     o.run.init ? one_line("from " + std::filesystem::proximate(*o.run.init).string()) : o.preset,
                     c.layers, c.heads, shared == c.heads ? "" : fmt::format(" ({} key-value heads)", shared),
                     c.channels, c.context, c.vocab, format_si(static_cast<double>(model.parameter_count())),
                     value_name(o.optim.dtype));
}

TrainOutput::TrainOutput(const TrainCall& call)
    : call_(call),
      config_(call.command.config),
      options_(call.command.options),
      plan_(config_.plan),
      run_(call.directory.path()),
      progress_(Progress::for_stderr(config_.optim.steps, options_.quiet)) {}

void TrainOutput::begin(const RunStart& start) {
  for (const std::filesystem::path& path : call_.directory.removed())
    message("removed incomplete files of a killed run: " + path.string());
  if (const std::string note = call_.directory.note(); !note.empty()) message(note);
  for (const std::string& why : start.passed_over) message("skipped a checkpoint: " + why);
  introduce(start);
  if (config_.run.resume)
    message(start.done > 0 ? fmt::format("resuming after step {}", start.done)
                           : "no checkpoint yet: starting at step 1");
}

void TrainOutput::introduce(const RunStart& start) {
  const TrainConfig& o = config_;
  const Dataset& d = call_.dataset;
  const std::string steps = fmt::format("{} {}steps of {} tokens", o.optim.steps,
                                        start.has_common_steps ? "" : "asynchronous ", start.tokens_per_step);
  const bool gpu = o.plan.device == Device::cuda, bf16 = o.optim.dtype == DType::bfloat16;
  message(describe_model(o, start.model));
  if (is_default_job(o)) message("default job: tessera train " + default_job_args(o));
  if (const std::string useless = useless_options(o); !useless.empty()) message(useless);
  for (const std::string& line : describe_data(d)) message(line);
  for (const std::string& note : d.notes) message(note);
  message(fmt::format("{} on {}, {} per rank ({}); run directory {}", steps, describe(plan_),
                      cpu::threads() == 1 ? "one thread" : fmt::format("{} threads", cpu::threads()),
                      gpu                      ? describe_device()
                      : bf16 && cpu::has_amx() ? "Tessera's AMX matmul"
                                               : cpu::matmul_library(),
                      run_.string()));
  if (gpu) {
    message(describe_attention(o));
    const std::string why = no_graph_because(o, options_.trace, d.has_examples());
    message(why.empty() ? "CUDA graph: on (steps are captured once and replayed)"
                        : fmt::format("CUDA graph: off ({})", why));
    if (const std::string nccl = describe_nccl(plan_); !nccl.empty()) message(nccl);
    if (const std::string hint = vocab_hint(o, start.model.config.vocab); !hint.empty() && !o.run.resume) message(hint);
  }
  if (!gpu && bf16 && !cpu::has_bfloat16_matmul())
    message("bf16 is emulated: this CPU has no AVX-512, so matmuls run in fp32 on rounded inputs");
}

void TrainOutput::stopped(const RunResult& r) {
  const std::string where =
      fmt::format("stopped {}after step {}", r.in_validation ? "during the validation " : "", r.steps);
  if (config_.run.no_save) return message(where + "; nothing was saved (--no-save)");
  message(fmt::format("{}{}; tessera train --resume --out {} resumes", where,
                      r.in_validation ? ", which was saved" : "", run_.string()));
}

void TrainOutput::saved(int64_t step) {
  message(fmt::format("SIGUSR1: {} after step {}{}", config_.run.no_save ? "nothing saved" : "saved", step,
                      config_.run.no_save ? " (--no-save)" : ""));
}

void TrainOutput::show(const std::string& json) const {
  if (options_.json()) print(json + "\n");
}

void TrainOutput::step(const StepReport& r, const std::string& record) {
  tokens_per_s_.push_back(r.tokens_per_s);
  times_.push_back(r.step_ms / 1e3);
  losses_.push_back(r.loss);
  show(record);
  progress_.step(r);
}

void TrainOutput::validated(int64_t step, const Validation& v, const std::string& record) {
  validation_ = v;
  std::string parts;
  for (const Validation::Part& p : v.parts)
    parts += fmt::format("{}{} {:.4f}", parts.empty() ? ": " : ", ", one_line(p.name), p.loss);
  show(record);
  progress_.message(
      fmt::format("step {}: validation loss {:.4f} ({:.4f} bits per byte){}", step, v.loss, v.bits_per_byte, parts));
}

void TrainOutput::summary(const Facts& f, const std::function<void(const std::string& record)>& append) {
  const double rate = median_throughput(tokens_per_s_);
  const bool stepped = !tokens_per_s_.empty();  // false if a resumed run was already complete
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
                 {"straggler", late ? Ordered{{"rank", late->rank}, {"share", late->fraction}} : Ordered()},
                 {"plan", plan},
                 {"out", run_.string()}};
  if (f.predicted_s && stepped)
    fields["predicted"] = {{"step_s", *f.predicted_s}, {"measured_step_s", median_throughput(times_)}};
  if (plan_.device == Device::cuda) fields["gpu"] = gpu_json(f);
  if (!f.experts.empty())
    fields["experts"] = {{"load", f.experts.rows}, {"dropped", f.experts.dropped}, {"ranks", plan_.ep}};
  const std::string record = fields.dump();
  append(record);
  show(record);
  if (!options_.json()) print(summary_text(f, rate, mfu));
}

// `fraction`: of the machine's peak matmul throughput.
std::string TrainOutput::summary_text(const Facts& f, double rate, double fraction) const {
  const std::string run = one_line(run_.string());
  const bool stepped = !tokens_per_s_.empty();
  const int64_t steps = f.steps;
  std::string text =
      fmt::format("\nAfter {} steps ({} tokens) ", steps, format_si(static_cast<double>(steps * f.tokens_per_step)));
  text += validation_ ? fmt::format("the validation loss is {:.4f} ({:.4f} bits per byte).\n", validation_->loss,
                                    validation_->bits_per_byte)
                      : "the run is complete; it was not validated (--no-eval).\n";
  if (stepped)
    text += fmt::format("loss {:.2f} {} {:.2f}\n{} tokens/s, {:.0f}% of this machine's matmul peak; ", losses_.front(),
                        sparkline(losses_, kCurve), losses_.back(), format_si(rate), 100 * fraction);
  const double peak_mb = static_cast<double>(*std::ranges::max_element(f.usage.peak_bytes)) / 1e6;
  text += fmt::format("{} {:.{}f} MB of memory{}.\n", stepped ? "at most" : "No steps remained; at most", peak_mb,
                      peak_mb < 10 ? 1 : 0, f.usage.peak_bytes.size() > 1 ? " per rank" : "");
  if (f.predicted_s && stepped)
    text += fmt::format("Step time: predicted {:.2f} ms for this machine, measured {:.2f} ms.\n", *f.predicted_s * 1e3,
                        median_throughput(times_) * 1e3);
  if (const auto& late = f.usage.straggler)
    text += fmt::format("Straggler: the other ranks waited for rank {} {:.0f}% of the time.\n", late->rank,
                        100 * late->fraction);
  if (const ExpertLoad::Busiest busiest = f.experts.busiest(); busiest.times > 0)
    text += fmt::format("Busiest expert: number {} of layer {}, with {:.2f} times the mean load; {} tokens dropped.\n",
                        busiest.expert, busiest.layer, busiest.times, f.experts.dropped);
  if (config_.run.no_save) return text + fmt::format("\nThe run is in {}, without a checkpoint (--no-save).\n", run);
  if (!f.sample.empty()) text += fmt::format("\nSample:\n{}\n", f.sample);
  return text + fmt::format("\nThe run is in {}; generate more text with\n  ./tessera generate {}\n", run, run);
}

double measured_peak_flops(DType dtype, const ArenaPtr& arena) {
  constexpr int rounds = 6;
  constexpr int64_t max_n = 8192;
  int64_t n = arena->device() == Device::cuda ? 128 : 1024;
  double rate = bench::measure_matmuls(n, rounds, dtype, arena);
  while (arena->device() == Device::cuda && n < max_n &&
         rate > bench::matmul_throughput(n, 1e-3))  // too short to be timed accurately
    rate = bench::measure_matmuls(n *= 2, rounds, dtype, arena);
  return rate;
}

int64_t ranks_at_once(int64_t ranks, int64_t cores, int64_t each) {
  return std::clamp<int64_t>(cores / each, 1, ranks);
}

}  // namespace tessera
