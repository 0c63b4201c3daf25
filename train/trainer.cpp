// Steps and validation.
#include "train/trainer.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <variant>
#include <vector>

#include "optim/grad_norm.h"
#include "parallel/gradient_norm.h"
#include "tensor/ops/elementwise.h"
#include "train/checkpoint/state.h"
#include "train/device.h"
#include "train/dump.h"
#include "train/evaluate.h"

namespace tessera {

namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Temporarily replaces local weights by the last synchronized ones. Allocates a copy of the local ones.
class ScopedSyncedWeights : NotCopied {
 public:
  explicit ScopedSyncedWeights(const DataStrategy& strategy) : units_(strategy.shards()) {
    if (strategy.agrees()) return;
    const std::vector<FlatUnit> model = model_units(strategy);
    for (size_t u = 0; u < units_.size(); ++u) {
      own_.push_back(units_[u].trainable() ? units_[u].values.clone() : units_[u].values);
      set(units_[u], model[u].values);
    }
  }
  ~ScopedSyncedWeights() {
    for (size_t u = 0; u < own_.size(); ++u) set(units_[u], own_[u]);
  }

 private:
  static void set(const FlatUnit& unit, const Tensor& values) {
    if (!unit.trainable()) return;
    Tensor(unit.values).copy_from(values);
    ++unit.values.storage()->version;
  }
  std::vector<FlatUnit> units_;
  std::vector<Tensor> own_;
};

std::vector<MeshAxis> mesh_axes(const Plan& p) {
  const auto size = [](int64_t n) { return static_cast<int>(n); };
  return {{"pp", size(p.pp)}, {"dp", size(p.dp)}, {"cp", size(p.cp)}, {"tp", size(p.tp)}};
}

}  // namespace

Trainer::Trainer(const TrainConfig& job, Sequences sequences, Communicator& world, Trace* trace)
    : job_(job),
      trace_(trace),
      world_(with_one_job(world, job)),
      mesh_(world, mesh_axes(job.plan)),
      data_axis_(job.plan.cp > 1 ? mesh_.flat({"dp", "cp"}) : mesh_["dp"]),
      arena_(rank_arena(job.plan, world)),
      full_model_(tessera::full_model(job, sequences.vocab)),
      schedule_(lr_schedule(job.optim)) {
  split_data_axis();
  if (trace) {
    trace->watch(arena_);
    for (Communicator* axis : communicators()) axis->set_trace(trace);
  }
  part_ = std::make_unique<ModelPart>(*full_model_, job_.make,
                                      ModelPart::Axes{mesh_["pp"], data_axis_, mesh_["cp"], mesh_["tp"], ep_.get()},
                                      part_options());
  find_units();
  join_tied_weights();
  tokens_ = std::make_unique<StepTokens>(job_, std::move(sequences), part_->positions(), strategy(), arena_);
  if (find_row(job.optim.optimizer).updates_matrices)
    matrices_ = std::make_unique<MatrixOwners>(strategy(), mesh_["tp"]);
  optimizer_ = make_optimizer(job_, strategy().shards(), matrices_ ? matrices_->hook() : nullptr);
  strategy().set_masters(optimizer_->masters());
  make_graph();
}

Trainer::~Trainer() = default;

// Ranks [g e, (g + 1) e) of the axis are an expert-parallel group; ranks of a sharding group that are equal modulo e
// shard the same experts.
void Trainer::split_data_axis() {
  const Plan& p = job_.plan;
  const auto e = static_cast<int>(p.ep);
  if (e == 1) return;
  const int rank = data_axis_.rank(), group = p.shard_ranks > 0 ? static_cast<int>(p.shard_ranks) : data_axis_.size();
  ep_ = data_axis_.split(rank / e, rank % e, "ep");
  edp_ = data_axis_.split(rank / group * e + rank % e, rank / e, "edp");
}

ModelPart::Options Trainer::part_options() {
  const Plan& p = job_.plan;
  DataOptions data = data_options(job_);
  data.experts = edp_.get();
  if (auto* const diloco = std::get_if<DilocoOptions>(&data.strategy)) {
    diloco->context = &mesh_["cp"];
    diloco->replicas = &mesh_["dp"];
  }
  if (p.offload == Offload::parameters)
    std::get<ZeroOptions>(data.strategy).shard_arena = offload_arena(p.device);  // this option requires stage 3
  return {.schedule = make_schedule(p),
          .cp_mode = p.cp_mode,
          .sp = p.sp,
          .tie_copies = p.tie_copies,
          .data = data,
          .sequences = job_.optim.batch / (p.dp * p.microbatches),
          .arena = arena_,
          .trace = trace_};
}

// Index of each local unit in the full model; the copy of a tied weight gets the index after the last.
void Trainer::find_units() {
  const std::vector<Module::Unit> full = full_model_->layout();
  for (const int stage : stages_of_units(*full_model_, part_->layers()))
    ranks_of_units_.push_back(part_->schedule().rank_of_stage[static_cast<size_t>(stage)]);
  for (const Module::Unit& unit : model().layout())
    places_.push_back(static_cast<size_t>(
        std::ranges::find_if(full, [&](const Module::Unit& u) { return u.name == unit.name; }) - full.begin()));
}

// If the first and the last stage are on different ranks, these ranks reduce the tied weight's gradients.
void Trainer::join_tied_weights() {
  const std::vector<int>& ranks = part_->schedule().rank_of_stage;
  const int first = ranks.front(), last = ranks.back(), own = mesh_.coordinate("pp");
  const std::vector<Parameter*> all = full_model_->parameters();
  if (first == last || std::ranges::none_of(all, [](const Parameter* p) { return p->is_tied(); })) return;
  std::vector<int> at = mesh_.coordinates(world_.rank());
  at[0] = own == first || own == last ? 0 : own;  // other ranks form groups of one
  const int offset = own == first || own == last ? 0 : world_.size();
  tied_ = world_.split(mesh_.rank_at(at) + offset, own == first ? 0 : 1, "tied");
}

DeviceScalar Trainer::queue_passes() {
  DeviceScalar loss = part_->step(*tokens_);
  model().set_step({});  // frees documents: a captured step must begin with the memory that it ended with
  return loss;
}

void Trainer::queue_sums() {
  part_->data_step().reduce();
  sum_tied_gradients();
}

void Trainer::dump(int64_t step, const std::filesystem::path& directory) {
  if (step <= steps_done())
    throw FieldError("step", fmt::format("expected a step after the {} completed ones, got {}", steps_done(), step));
  dump_ = std::make_unique<StepDump>(*this, step, directory);
}

StepReport Trainer::compute_gradients(StepRequest request) {
  tokens_->begin(steps_done());
  const bool dumps = dump_ && dump_->is_next();
  if (dumps) dump_->begin(tokens_->sequences());
  const DeviceScalar sum = queue_passes();
  const TraceSpan span(trace_, "finish gradients");
  queue_sums();
  StepReport r;
  r.grad_norm = std::sqrt(sum_of_squares());
  // All tp ranks have the same loss, so one contributes it. With local updates, the sum of the replicas' norms reveals
  // a non-finite one to all ranks.
  std::vector<double> totals{mesh_.coordinate("tp") == 0 ? double{sum} : 0.0, encode(request)};
  if (strategy().layout().local_updates) totals.push_back(r.grad_norm);
  world_.sum(totals);
  r.loss = totals[0] / tokens_->targets();
  r.request = decode(totals[1]);
  if (!std::isfinite(totals.back()) && strategy().layout().local_updates) r.grad_norm = totals.back();
  r.lr = schedule_.at(steps_done());
  if (dumps) dump_->finish(r.loss);
  check_finite(r, steps_done() + 1);
  return r;
}

// Both copies of a tied weight receive the sum of their gradients and so stay equal.
void Trainer::sum_tied_gradients() {
  const FlatUnit *first = nullptr, *last = nullptr;
  for (const FlatUnit& shard : strategy().shards())
    if (shard.trainable() && shard.slots[0].parameter->is_tied())
      (shard.slots[0].parameter->is_copy() ? last : first) = &shard;
  if (first && last) {
    Tensor sum = first->grads, copy = last->grads;
    add_(sum, copy);
    copy.copy_from(sum);
  } else if (tied_ && (first || last)) {
    tied_->all_reduce(first ? first->grads : last->grads);
  }
}

// Units in the order of the full model; excludes copies of tied weights and all but the first tp replica of a tensor.
double Trainer::sum_of_squares() {
  const std::vector<double> own = unit_sums(strategy(), &mesh_["tp"]);
  const bool first = !ep_ || ep_->rank() == 0;  // the first rank contributes values replicated in an expert-parallel
                                                // group
  std::vector<double> all(ranks_of_units_.size(), 0.0);
  for (size_t u = 0; u < own.size(); ++u)
    if (places_[u] < all.size() && (first || strategy().shards()[u].slots[0].parameter->is_expert))
      all[places_[u]] = own[u];
  mesh_["pp"].sum(all);
  if (ep_) ep_->sum(all);
  OrderedSum total;
  for (const double sum : all) total.add(sum);
  return total.total();
}

std::vector<Communicator*> Trainer::communicators() {
  std::vector<Communicator*> out{&world_};
  for (const char* axis : {"pp", "dp", "cp", "tp"}) out.push_back(&mesh_[axis]);
  if (&data_axis_ != &mesh_["dp"]) out.push_back(&data_axis_);
  if (part_ && strategy().replicate_axis())
    out.insert(out.end(), {&strategy().shard_axis(), strategy().replicate_axis()});
  for (Communicator* axis : {ep_.get(), edp_.get()})
    if (axis) out.push_back(axis);
  if (tied_) out.push_back(tied_.get());
  return out;
}

void Trainer::update(const StepReport& r) {
  if (strategy().awaits_gradients()) reject("update", "compute_gradients() first", "no gradients of this step");
  const TraceSpan span(trace_, "optimizer");
  part_->data_step().update(*optimizer_, r.lr, clip_factor(r.grad_norm, job_.optim.clip));
  if (job_.plan.offload == Offload::parameters) wait_for(arena_);  // the host may read them from here on
}

StepReport Trainer::step(StepRequest request) {
  const auto start = std::chrono::steady_clock::now();
  const bool queued = graph_ && !(dump_ && dump_->is_next());
  StepReport r = queued ? queued_step(request) : compute_gradients(request);
  if (!queued) update(r);
  r.step = steps_done();
  set_time(r, seconds_since(start), tokens_->tokens_of_step());
  return r;
}

// Passes have the size of a micro-batch, so validation needs no more memory than a step and the same packed weights.
std::optional<double> Trainer::mean_loss(const Rows& split, const std::function<bool()>& stop) {
  if (const int64_t tokens = full_model_->config.context; split.context() != tokens)
    reject("mean_loss", fmt::format("rows of {} tokens, the `context`", tokens), fmt::format("{}", split.context()));
  const ScopedSyncedWeights model_of_all(strategy());
  const auto forward = [&](const Tensor& ids, const Tensor& targets, const Tensor& starts) {
    model().set_step(tokens_->where(ids, starts));
    const double sum =
        part_->stages().evaluate({tokens_->own(ids), tokens_->own(targets)}, part_->schedule(), mesh_["pp"]);
    return mesh_.coordinate("tp") == 0 ? sum : 0.0;
  };
  return tessera::mean_loss({.forward = forward,
                             .job = &job_,
                             .at_once = job_.optim.batch / (job_.plan.microbatches * job_.plan.dp),
                             .turn = mesh_.coordinate("dp"),
                             .turns = mesh_.size("dp"),
                             .arena = arena_->host(),
                             .stop = stop},
                            world_, split);
}

// Ranks with the same loss or replicated gradients contribute them once.
void Trainer::make_graph() {
  const Plan& p = job_.plan;
  if (!steps_without_host(job_, trace_ != nullptr)) return;
  if constexpr (kWithCuda) {
    if (world_.size() > 1) step_ranks_ = std::make_unique<StepConsensus>(world_, communicators());
    const auto gradients = [this] {
      DeviceScalar sum = queue_passes();
      queue_sums();
      return sum;
    };
    const bool own_sums = p.tp > 1 && strategy().layout().sharding != ShardingKind::everywhere;
    graph_ = make_step_graph(
        {.load = [this](int64_t step) { tokens_->begin(step); },
         .ahead = [this](int64_t step) { tokens_->ahead(step); },
         .gradients = gradients,
         .finish = [this] { strategy().gather_parameters(); },
         .squares = [this] { return queue_squares(); },
         .optimizer = optimizer_.get(),
         .clip = job_.optim.clip,
         .captured = no_graph_because(job_, trace_ != nullptr, tokens_->counts_targets()).empty(),
         .may_fall_back = p.cuda_graph == CudaGraph::automatic && !step_ranks_ && p.zero == ZeroStage::none,
         .ranks = step_ranks_.get(),
         .says_loss = mesh_.coordinate("tp") == 0,
         .says_squares = own_sums ? strategy().copy() == 0 : data_axis_.rank() == 0},
        arena_);
    tokens_->queue_for(*graph_);
  }
}

// Float64, units in the order of the full model.
Tensor Trainer::queue_squares() {
  const Tensor own = unit_squares(strategy(), &mesh_["tp"]);
  std::vector<BlockRun> places(ranks_of_units_.size());
  for (size_t u = 0; u < places_.size(); ++u)
    if (places_[u] < places.size()) places[places_[u]] = {.begin = static_cast<int64_t>(u), .count = 1};
  Tensor all = own.make({std::ssize(places)}, DType::float64, Category::workspace);
  ordered_sums(own, places, all);
  return all;
}

StepReport Trainer::queued_step(StepRequest request) {
  const double lr = schedule_.at(steps_done());
  const StepGraph::Found found = graph_->run(steps_done(), lr, request);
  StepReport r{.lr = lr, .request = found.request};
  r.loss = found.loss_sum / tokens_->targets();
  r.grad_norm = found.grad_norm;
  check_finite(r, steps_done() + 1);
  return r;
}

}  // namespace tessera
