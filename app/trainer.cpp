// Steps and validation.
#include "app/trainer.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>

#include "app/device.h"
#include "app/evaluate.h"
#include "app/plan.h"
#include "models/gpt_parallel.h"
#include "optim/grad_norm.h"
#include "parallel/pipeline/passes.h"
#include "tensor/error.h"
#include "tensor/ops/elementwise.h"

namespace tessera {
namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

Recompute recompute_of(const std::string& name) {
  if (name == "gelu") return Recompute::gelu;
  if (name == "gelu+norm") return Recompute::gelu_norm;
  return name == "block" ? Recompute::block : Recompute::none;
}

std::vector<MeshAxis> mesh_axes(const Axes& a) {
  const auto size = [](int64_t n) { return static_cast<int>(n); };
  return {{"pp", size(a.pp)}, {"dp", size(a.dp)}, {"cp", size(a.cp)}, {"tp", size(a.tp)}};
}

// Each stage that uses a tied weight has a copy of it, on one rank too: so the sums of its gradients have one order.
GptConfig part_config(GptConfig config, const Schedule& plan) {
  config.tied = plan.stages == 1;
  return config;
}

}  // namespace

GptConfig gpt_config(const TrainOptions& o, int64_t tokenizer_vocab) {
  const ModelSizes s = sizes_of(o);
  if (o.vocab && *o.vocab < tokenizer_vocab)
    throw Error(fmt::format("--vocab: expected at least the tokenizer's {}, found {}", tokenizer_vocab, *o.vocab));
  return {s.layers,
          s.heads,
          s.channels,
          s.context,
          o.vocab.value_or(tokenizer_vocab),
          o.dropout,
          recompute_of(o.recompute)};
}

Trainer::Trainer(const TrainOptions& o, Sequences sequences, Communicator& world, Trace* trace)
    : options_(o),
      trace_(trace),
      axes_(axes_of(o)),
      world_(world),
      mesh_(world, mesh_axes(axes_)),
      data_axis_(axes_.cp > 1 ? mesh_.flat({"dp", "cp"}) : mesh_["dp"]),
      arena_(rank_arena(o.device, world)),
      whole_(gpt_config(o, sequences.vocab)),
      plan_(schedule_of(o)),
      model_(part_config(whole_.config, plan_)),
      layers_(split_layers(whole_.config, plan_.stages)),
      schedule_{.lr = o.lr, .min_lr = o.min_lr.value_or(o.lr / 10), .warmup = o.warmup, .steps = o.steps} {
  if (trace) {
    trace->watch(arena_);
    for (Communicator* axis : communicators()) axis->set_trace(trace);
  }
  cut_model();
  find_units();
  strategy_ = make_data_strategy(model_, data_axis_, arena_, data_options(o));
  join_tied_weights();
  tokens_ =
      std::make_unique<StepTokens>(o, std::move(sequences), whole_.config.context, positions_, *strategy_, arena_);
  stages_ = std::make_unique<GptStages>(model_, *strategy_, stage_options());
  runtime_ = std::make_unique<PipelineRuntime>(insert_messages(plan_), mesh_["pp"], *stages_, trace);
  optimizer_ = make_optimizer(o.optimizer, strategy_->shards(), optimizer_options(o));
  make_graph();
}

Trainer::~Trainer() = default;

// What this rank has of the model, before there is memory for it.
void Trainer::cut_model() {
  const int64_t context = whole_.config.context;
  Communicator& cp = mesh_["cp"];
  const bool ring = options_.cp_mode == "ring";
  if (cp.size() > 1)
    positions_ = context_positions(context, cp.size(), cp.rank(), ring ? Balance::zigzag : Balance::contiguous);
  tensor_parallel(model_, mesh_["tp"], options_.sp ? S(1, context / cp.size()) : I);
  context_parallel(model_, cp, ring ? ContextMode::ring : ContextMode::ulysses);
  keep_stages(model_, layers_,
              [&](int stage) { return plan_.rank_of_stage[static_cast<size_t>(stage)] == mesh_.coordinate("pp"); });
}

// Where each unit of this rank stands in the whole model; past its end for the copy of a tied weight.
void Trainer::find_units() {
  const std::vector<Module::Unit> whole = whole_.layout();
  whole_units_ = whole.size();
  for (const Module::Unit& unit : model_.layout())
    places_.push_back(static_cast<size_t>(
        std::find_if(whole.begin(), whole.end(), [&](const Module::Unit& u) { return u.name == unit.name; }) -
        whole.begin()));
}

// Where the first and the last stage are not on one rank, their ranks sum the gradients of the tied weight.
void Trainer::join_tied_weights() {
  const int first = plan_.rank_of_stage.front(), last = plan_.rank_of_stage.back(), own = mesh_.coordinate("pp");
  if (first == last) return;
  std::vector<int> at = mesh_.coordinates(world_.rank());
  at[0] = own == first || own == last ? 0 : own;  // the others are alone
  const int beside = own == first || own == last ? 0 : world_.size();
  tied_ = world_.split(mesh_.rank_at(at) + beside, own == first ? 0 : 1, "tied");
}

GptStages::Options Trainer::stage_options() {
  const GptConfig& c = whole_.config;
  const int64_t sequences = options_.batch / (axes_.dp * options_.microbatches);
  const int64_t tokens = c.context / axes_.cp / (options_.sp ? axes_.tp : 1);
  return {
      .layers = layers_,
      .loss = [this](const Var& hidden, const Tensor& targets,
                     double scale) { return parallel_loss(model_, hidden, targets, scale, mesh_["tp"]); },
      .scale = 1.0 / static_cast<double>(tokens_per_step()),
      .load = [this](int64_t microbatch, bool ids, bool targets) { return tokens_->load(microbatch, ids, targets); },
      .where = [this](int64_t microbatch) { return where(microbatch, true); },
      .activation = {sequences, tokens, c.channels},
      .dtype = dtype_named(options_.dtype),
      .arena = arena_};
}

StepInfo Trainer::where(int64_t microbatch, bool training) const {
  StepInfo at{.seed = static_cast<uint64_t>(options_.seed), .step = steps_done(), .training = training};
  if (training) at.first_sequence = strategy_->computes(options_.batch, options_.microbatches, microbatch).first;
  if (graph_) at.step_on_gpu = graph_->step_on_gpu();
  at.positions = positions_;
  at.tokens_total = whole_.config.context;
  return at;
}

LateNumber Trainer::queue_passes() {
  strategy_->begin_step();
  return runtime_->step();
}

void Trainer::queue_sums() {
  strategy_->finish_gradients();
  sum_tied_gradients();
}

StepReport Trainer::compute_gradients(bool stop) {
  tokens_->begin(steps_done());
  const LateNumber sum = queue_passes();
  const TraceSpan span(trace_, "finish gradients");
  queue_sums();
  // All ranks of a tensor axis know the same loss: one says it.
  std::array<double, 2> totals{mesh_.coordinate("tp") == 0 ? double{sum} : 0.0, stop ? 1.0 : 0.0};
  world_.sum(totals);
  StepReport r;
  r.loss = totals[0] / static_cast<double>(tokens_per_step());
  r.stop = totals[1] > 0;
  r.grad_norm = std::sqrt(sum_of_squares());
  r.lr = schedule_.at(steps_done());
  check_finite(r, steps_done() + 1);
  return r;
}

// Both copies of a tied weight get the sum of what their uses brought, so that they stay equal.
void Trainer::sum_tied_gradients() {
  if (model_.config.tied) return;
  const FlatUnit *first = nullptr, *last = nullptr;
  for (const FlatUnit& shard : strategy_->shards()) {
    if (shard.name == "tokens") first = &shard;
    if (shard.name == "head") last = &shard;
  }
  if (first && last) {
    Tensor sum = first->grads, copy = last->grads;
    add_(sum, copy);
    copy.copy_from(sum);
  } else if (first || last) {
    tied_->all_reduce(first ? first->grads : last->grads);
  }
}

// Units in the order of the whole model, whoever has them; a copy of a tied weight does not count, nor do the second
// and later copies of what every rank of a tensor axis has.
double Trainer::sum_of_squares() {
  std::vector<double> own;
  if (axes_.tp > 1) {
    const bool speaks = mesh_.coordinate("tp") == 0;
    own = strategy_->unit_sums([&](const Slot& slot) { return speaks || !slot.cut.is_whole(); });
    mesh_["tp"].sum(own);
  } else {
    own = strategy_->unit_sums();
  }
  std::vector<double> all(whole_units_, 0.0);
  for (size_t u = 0; u < own.size(); ++u)
    if (places_[u] < all.size()) all[places_[u]] = own[u];
  mesh_["pp"].sum(all);
  OrderedSum total;
  for (const double sum : all) total.add(sum);
  return total.total();
}

std::vector<Communicator*> Trainer::communicators() {
  std::vector<Communicator*> out{&world_};
  for (const char* axis : {"pp", "dp", "cp", "tp"}) out.push_back(&mesh_[axis]);
  if (&data_axis_ != &mesh_["dp"]) out.push_back(&data_axis_);
  if (tied_) out.push_back(tied_.get());
  return out;
}

DType Trainer::gradient_dtype() const { return data_options(options_).grad_dtype; }

int Trainer::pipeline_rank_of(const std::string& unit) const {
  return plan_.rank_of_stage[static_cast<size_t>(stage_of_unit(unit, layers_))];
}

void Trainer::update(const StepReport& r) {
  const TraceSpan span(trace_, "optimizer");
  optimizer_->step(r.lr, clip_factor(r.grad_norm, options_.clip));
  strategy_->share_parameters();
}

StepReport Trainer::step(bool stop) {
  const auto start = std::chrono::steady_clock::now();
  StepReport r = graph_ ? queued_step(stop) : compute_gradients(stop);
  if (!graph_) update(r);
  r.step = steps_done();
  const double seconds = seconds_since(start);
  r.step_ms = seconds * 1e3;
  r.tokens_per_s = static_cast<double>(tokens_per_step()) / seconds;
  return r;
}

// As many sequences at once as a micro-batch has: no more memory than a step, and the same packed weights.
double Trainer::mean_loss(const TokenFile& split) {
  model_.set_step(where(0, false));
  const auto forward = [&](const Tensor& ids, const Tensor& targets) {
    const double sum = stages_->evaluate({tokens_->own(ids), tokens_->own(targets)}, plan_, mesh_["pp"]);
    return mesh_.coordinate("tp") == 0 ? sum : 0.0;
  };
  return tessera::mean_loss({.forward = forward,
                             .context = whole_.config.context,
                             .at_once = options_.batch / (options_.microbatches * axes_.dp),
                             .turn = mesh_.coordinate("dp"),
                             .turns = static_cast<int>(axes_.dp),
                             .arena = arena_->host()},
                            world_, split);
}

}  // namespace tessera
