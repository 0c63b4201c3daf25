// One rank of `train`: the run, its timeline and its summary.
#include <algorithm>
#include <array>
#include <cctype>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "app/plan/plan.h"
#include "app/run/pretrained.h"
#include "app/trace/timeline.h"
#include "app/train/train.h"
#include "models/sample.h"
#include "tensor/cpu/vectorize.h"
#include "train/device.h"
#include "train/run/signals.h"

namespace tessera {

namespace {

// Text samples, trimmed to complete sentences.

constexpr std::string_view kSpaces = " \n\r\t";

// The full stop of a title does not end a sentence.
bool is_title(std::string_view before_point) {
  size_t begin = before_point.size();
  while (begin > 0 && std::isalpha(static_cast<unsigned char>(before_point[begin - 1]))) --begin;
  constexpr std::array<std::string_view, 6> titles = {"Mr", "Mrs", "Ms", "Dr", "St", "Esq"};
  return std::ranges::find(titles, before_point.substr(begin)) != titles.end();
}

// The position after the sentence that ends at `at`, or 0.
size_t end_at(std::string_view text, size_t at) {
  if (std::string_view(".!?").find(text[at]) == text.npos || (text[at] == '.' && is_title(text.substr(0, at))))
    return 0;
  const size_t end = std::min(text.find_first_not_of("\"')_", at + 1), text.size());
  return end == text.size() || kSpaces.find(text[end]) != kSpaces.npos ? end : 0;
}

// npos if no sentence begins after `end`.
size_t next_sentence(std::string_view text, size_t end) {
  const size_t begin = std::min(text.find_first_not_of(kSpaces, end), text.size());
  const size_t word = begin < text.size() && (text[begin] == '"' || text[begin] == '\'') ? begin + 1 : begin;
  return word < text.size() && text[word] >= 'A' && text[word] <= 'Z' ? begin : text.npos;
}

std::optional<double> predict_step_time(const TrainCall& call, const ModelConfig& model) {
  const auto machine = cached_machine_here();
  const bool regular = !call.dataset.has_examples() && call.command.config.plan.dp_mode != DataMode::ps_async;
  if (!machine || !regular) return {};  // irregular steps differ in length
  TrainConfig job = call.command.config;
  job.model = model;
  job.plan.threads_per_rank = cpu::threads();
  return predicted_step(*machine, job);
}

constexpr int64_t kSampleTokens = 300;

// Generated from the newest checkpoint, because a rank may lack memory for the full model during training. Empty with
// --format json, --quiet and --no-save; truncated by a signal.
std::string sample_text(const TrainCall& call, const ModelConfig& config) {
  if (call.command.options.json() || call.command.config.run.no_save || call.command.options.quiet) return "";
  std::vector<std::string> passed_over;
  const std::unique_ptr<LanguageModel> model = build_model(call.command.config.make, config);
  const Plan& plan = call.command.config.plan;  // except its kernels: decoding token by token uses Tessera's own
  model->freeze();                              // avoids memory for gradients
  model->materialize(0, rank_arena(plan.device, 0), call.command.config.optim.dtype, DType::float32);
  load_model(*model, find_checkpoint(call.directory.path(), passed_over));
  StreamDecoder text(*call.dataset.tokenizer, StreamDecoder::Broken::escaped);
  std::string written;
  const std::vector<int32_t> prompt = call.dataset.prompt();
  const SampleOptions options{.temperature = 0.7,
                              .top_p = 0.9,
                              .seed = static_cast<uint64_t>(call.command.config.optim.seed),
                              .vocab = call.dataset.tokenizer->vocab_size()};
  sample(*model, prompt, kSampleTokens, options, [&](int32_t token) {
    written += text.add(token);
    return SignalRequests::stop() == 0;
  });
  written += text.end();
  return call.dataset.val_examples ? written : complete_sentences(written);
}

// Adds the remaining facts.
void add_to_summary(const TrainCall& call, LanguageModel& model, TrainOutput::Facts& facts) {
  const ModelConfig& c = model.config;
  const int64_t row =
      facts.tokens_per_step / call.command.config.optim.batch;  // rows of examples are shorter than the context
  facts.flops_per_token = model.training_flops() - 12 * static_cast<double>(c.layers) * c.keys() *
                                                       static_cast<double>(c.attended() - std::min(c.attended(), row));
  facts.rank_peak_flops = measured_peak_flops(call.command.config.optim.dtype, facts.usage.arena);
  facts.no_graph =
      with_options(no_graph_because(call.command.config, call.command.options.trace, call.dataset.has_examples()));
  facts.sample = sample_text(call, model.config);
}

}  // namespace

std::string complete_sentences(const std::string& text) {
  size_t first = std::string::npos, last = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const size_t end = end_at(text, i);
    if (end == 0) continue;
    if (first == std::string::npos)
      first = next_sentence(text, end);
    else
      last = end;
  }
  return first != std::string::npos && last > first && 3 * (last - first) >= text.size()
             ? text.substr(first, last - first)
             : text;
}

int train_rank(const TrainCall& call, Communicator& world) {
  const TrainConfig& config = call.command.config;
  RunTrace trace(call.command.options, world);
  TrainOutput output(call);
  RunSetup setup{.config = config,
                 .directory = call.directory,
                 .sequences = call.sequences,
                 .dataset = &call.dataset,
                 .trace = trace.get(),
                 .set = &call.command.set};
  if (config.run.init)
    setup.weights = [&](const ModelConfig& model) {
      return first_weights(open_pretrained(*config.run.init, config.run.base), model);
    };
  Run run(setup, world, &output);
  const RunResult result = run.train();
  const bool first = world.rank() == 0;
  if (first && result.stopped) output.stopped(result);
  Trainer* const trainer = run.trainer().synchronous();
  if (trainer) trace.stop(trainer->state());
  const RunUsage usage = run.usage();
  const ExpertLoad experts = trainer ? expert_load(trainer->state()) : ExpertLoad();
  if (trainer && trace.write(call, trainer->state(), usage) && first)
    output.message(fmt::format("timeline written; show it with tessera report {}", call.directory.path().string()));
  if (result.stopped) return SignalRequests::exit_status();
  if (!first) return 0;
  if (!result.note.empty()) output.message(result.note);
  LanguageModel& model = run.trainer().full_model();
  TrainOutput::Facts facts{.steps = result.steps,
                           .tokens_per_step = tokens_per_step(config, call.sequences),
                           .strategy = trainer ? std::string(trainer->state().strategy().name())
                                               : std::string(value_name(DataMode::ps_async)),
                           .usage = usage,
                           .graph = trainer ? trainer->step_record() : StepGraph::Record(),
                           .predicted_s = predict_step_time(call, model.config),
                           .experts = experts};
  add_to_summary(call, model, facts);
  output.summary(facts, [&](const std::string& record) { run.append(record); });
  return SignalRequests::stop() != 0 ? SignalRequests::exit_status() : 0;
}

}  // namespace tessera
