// The end of a run with --trace.
#include "app/trace_file.h"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <ctime>
#include <nlohmann/json.hpp>
#include <utility>

#include "app/trace/timeline.h"
#include "data/files.h"
#include "tensor/cpu/vectorize.h"

namespace tessera {
namespace {

using Json = nlohmann::ordered_json;

std::string name_of_rank(const Mesh& mesh, int rank) {
  return tessera::name_of_rank(mesh.axes(), mesh.coordinates(rank), rank);
}

std::string kept_steps(const std::vector<TraceStep>& steps, int64_t done) {
  if (steps.empty()) return "no step";
  return fmt::format("steps {} to {} of {}", steps.front().step, steps.back().step, done);
}

Json model_json(const TrainOptions& o, LanguageModel& model) {
  const ModelConfig& c = model.config;
  return {{"name", o.model},      {"layers", c.layers}, {"heads", c.heads}, {"channels", c.channels},
          {"context", c.context}, {"vocab", c.vocab},   {"dtype", o.dtype}, {"parameters", model.parameter_count()}};
}

Json plan_json(const TrainOptions& o, Trainer& trainer) {
  const Schedule& s = trainer.schedule();
  Json axes = Json::object();
  for (const MeshAxis& a : trainer.mesh().axes()) axes[a.name] = a.size;
  return {
      {"ranks", trainer.world().size()},
      {"axes", axes},
      {"strategy", trainer.strategy().name()},
      {"shard_ranks", trainer.job().plan.shard_ranks},
      {"backend", trainer.world().kind()},
      {"all_reduce", o.all_reduce},
      {"recompute", o.recompute},
      {"batch", o.batch},
      {"tokens_per_step", trainer.tokens_per_step()},
      {"threads_per_rank", cpu::threads()},
      {"schedule", {{"name", s.name}, {"stages", s.stages}, {"microbatches", s.microbatches}, {"text", to_text(s)}}}};
}

Json ranks_json(const std::vector<RankLog>& logs, const Mesh& mesh, const RunUsage& usage) {
  Json ranks = Json::array();
  for (size_t r = 0; r < logs.size(); ++r) {
    Json peaks = Json::object(), places = Json::object();
    for (size_t c = 0; c < logs[r].peaks.size(); ++c)
      peaks[std::string(name_of(static_cast<Category>(c)))] = logs[r].peaks[c];
    const std::vector<int> at = mesh.coordinates(static_cast<int>(r));
    for (size_t a = 0; a < at.size(); ++a) places[mesh.axes()[a].name] = at[a];
    ranks.push_back({{"name", name_of_rank(mesh, static_cast<int>(r))},
                     {"at", places},
                     {"peak_bytes", usage.peak_bytes[r]},
                     {"peaks", peaks}});
  }
  return ranks;
}

Json report_json(const Run& run, Trainer& trainer, const RunUsage& usage, const std::vector<RankLog>& logs) {
  const Processors processors = processors_of(logs);
  Json sent = Json::array();
  for (const SentBytes& s : usage.sent)
    sent.push_back({{"axis", s.axis}, {"operation", s.operation}, {"calls", s.calls}, {"bytes", s.bytes}});
  return {
      {"format", 1},
      {"written", fmt::format("{:%Y-%m-%d %H:%M}", fmt::localtime(std::time(nullptr)))},
      {"steps", trainer.steps_done()},
      {"model", model_json(run.options, trainer.whole_model())},
      {"plan", plan_json(run.options, trainer)},
      {"processors", {{"cores", processors.cores}, {"threads", processors.threads}, {"shared", processors.shared()}}},
      {"clock", align(logs).words},
      {"kept", kept_steps(logs[0].steps, trainer.steps_done())},
      {"ranks", ranks_json(logs, trainer.mesh(), usage)},
      {"sent", sent}};
}

}  // namespace

std::string name_of_rank(const std::vector<MeshAxis>& axes, const std::vector<int>& at, int64_t rank) {
  std::string places;
  for (size_t a = 0; a < at.size(); ++a)
    if (axes[a].size > 1) places += fmt::format("{}{} {}", places.empty() ? "" : ", ", axes[a].name, at[a]);
  return places.empty() ? fmt::format("rank {}", rank) : fmt::format("rank {} ({})", rank, places);
}

RunTrace::RunTrace(const TrainOptions& o, Communicator& world) : world_(world) {
  if (o.trace) trace_.emplace(static_cast<size_t>(o.trace_steps));
}

RunTrace::~RunTrace() {
  if (trace_) world_.set_trace(nullptr);  // which goes on without us
}

void RunTrace::stop(Trainer& trainer) {
  if (!trace_) return;
  for (Communicator* axis : trainer.communicators()) axis->set_trace(nullptr);
  log_ = describe_rank(*trainer.arena());
  log_.origin = trace_->origin();
  log_.events = trace_->events();
  for (TraceEvent& wait : trace_->waits()) log_.events.push_back(std::move(wait));
  log_.steps = trace_->steps();
  log_.memory = trace_->memory();
}

bool RunTrace::write(const Run& run, Trainer& trainer, const RunUsage& usage) {
  if (!trace_) return false;
  const std::vector<RankLog> logs = gather_logs(world_, std::move(log_));
  if (world_.rank() != 0) return true;
  std::vector<std::string> names;
  for (int r = 0; r < world_.size(); ++r) names.push_back(name_of_rank(trainer.mesh(), r));
  const std::filesystem::path& folder = run.directory.path();
  write_file(folder / "trace.json", timeline_json(logs, names, kept_steps(logs[0].steps, trainer.steps_done())));
  write_file(folder / "report.json", report_json(run, trainer, usage, logs).dump(1) + "\n");
  return true;
}

}  // namespace tessera
