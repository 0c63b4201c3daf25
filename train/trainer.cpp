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
#include "train/checkpoint/full_state.h"
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

}  // namespace

Trainer::Trainer(const TrainConfig& job, Sequences sequences, Communicator& world, Trace* trace)
    : state_(job, sequences.vocab, world, trace),
      trace_(trace),
      tokens_(state_.job, std::move(sequences), state_.part().positions(), strategy(), state_.arena),
      schedule_(lr_schedule(job.optim)) {
  find_units();
  make_graph();
}

Trainer::~Trainer() = default;

void Trainer::find_units() {
  const std::vector<Module::Unit> full = state_.full_model().layout();
  all_units_ = full.size();
  for (const Module::Unit& unit : state_.model().layout())
    places_.push_back(static_cast<size_t>(
        std::ranges::find_if(full, [&](const Module::Unit& u) { return u.name == unit.name; }) - full.begin()));
}

DeviceScalar Trainer::queue_passes() {
  DeviceScalar loss = state_.part().step(tokens_);
  state_.model().set_step({});  // frees documents: a captured step must begin with the memory that it ended with
  return loss;
}

void Trainer::queue_sums() {
  state_.part().data_step().reduce();
  sum_tied_gradients();
}

void Trainer::dump(int64_t step, const std::filesystem::path& directory) {
  if (step <= state_.steps_done())
    throw FieldError("step",
                     fmt::format("expected a step after the {} completed ones, got {}", state_.steps_done(), step));
  dump_ = std::make_unique<StepDump>(state_, step, directory);
}

StepReport Trainer::compute_gradients(StepRequest request) {
  tokens_.begin(state_.steps_done());
  const bool dumps = dump_ && dump_->is_next();
  if (dumps) dump_->begin(tokens_.sequences());
  const DeviceScalar sum = queue_passes();
  const TraceSpan span(trace_, "finish gradients");
  queue_sums();
  StepReport r;
  const bool exact = state_.job.plan.layout_invariant;
  if (!exact) r.grad_norm = std::sqrt(sum_of_squares());
  // All tp ranks have the same loss, so one contributes it. With local updates, the sum of the replicas' norms reveals
  // a non-finite one to all ranks.
  std::vector<double> totals{mesh().coordinate("tp") == 0 ? double{sum} : 0.0, encode(request)};
  if (strategy().layout().local_updates) totals.push_back(r.grad_norm);
  if (exact) {
    const auto counted = [this](size_t unit) { return places_[unit] < all_units_; };  // no copy of a tied weight
    const ExactSum own = exact_squares(strategy(), mesh()["tp"], counted);
    totals.insert(totals.end(), own.begin(), own.end());
  }
  state_.groups.world.sum(totals);
  if (exact) {
    ExactSum squares{};
    std::copy(totals.end() - kExactBins, totals.end(), squares.begin());
    r.grad_norm = std::sqrt(total(squares));
    totals.resize(totals.size() - kExactBins);
  }
  r.loss = totals[0] / tokens_.targets();
  r.request = decode(totals[1]);
  if (!std::isfinite(totals.back()) && strategy().layout().local_updates) r.grad_norm = totals.back();
  r.lr = schedule_.at(state_.steps_done());
  if (dumps) {
    dump_->write_gradients(r);
    if (!std::isfinite(r.loss) || !std::isfinite(r.grad_norm)) dump_->finish();
  }
  check_finite(r, state_.steps_done() + 1);
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
  } else if (state_.groups.tied && (first || last)) {
    state_.groups.tied->all_reduce(first ? first->grads : last->grads);
  }
}

// Units in the order of the full model; excludes copies of tied weights and all but the first tp replica of a tensor.
double Trainer::sum_of_squares() {
  const std::vector<double> own = unit_sums(strategy(), &mesh()["tp"]);
  const bool first =
      !state_.groups.experts || state_.groups.experts->rank() == 0;  // contributes values replicated in the ep group
  std::vector<double> all(all_units_, 0.0);
  for (size_t u = 0; u < own.size(); ++u)
    if (places_[u] < all.size() && (first || strategy().shards()[u].slots[0].parameter->is_expert))
      all[places_[u]] = own[u];
  mesh()["pp"].sum(all);
  if (state_.groups.experts) state_.groups.experts->sum(all);
  OrderedSum total;
  for (const double sum : all) total.add(sum);
  return total.total();
}

void Trainer::update(const StepReport& r) {
  if (strategy().awaits_gradients()) reject("update", "compute_gradients() first", "no gradients of this step");
  const TraceSpan span(trace_, "optimizer");
  state_.part().data_step().update(state_.optimizer(), r.lr, clip_factor(r.grad_norm, state_.job.optim.clip));
  if (state_.job.plan.offload == Offload::parameters) wait_for(state_.arena);  // the host may read them from here on
  if (dump_ && dump_->awaits_update()) dump_->finish();
}

StepReport Trainer::step(StepRequest request) {
  const auto start = std::chrono::steady_clock::now();
  const bool queued = graph_ && !(dump_ && dump_->is_next());
  StepReport r = queued ? queued_step(request) : compute_gradients(request);
  if (!queued) update(r);
  r.step = state_.steps_done();
  set_time(r, seconds_since(start), tokens_.tokens_of_step());
  return r;
}

// Passes have the size of a micro-batch, so validation needs no more memory than a step and the same packed weights.
std::optional<double> Trainer::mean_loss(const Rows& split, const std::function<bool()>& stop) {
  if (const int64_t tokens = state_.full_model().config.context; split.context() != tokens)
    reject("mean_loss", fmt::format("rows of {} tokens, the `context`", tokens), fmt::format("{}", split.context()));
  const ScopedSyncedWeights model_of_all(strategy());
  const auto forward = [&](const Tensor& ids, const Tensor& targets, const Tensor& starts) {
    state_.model().set_step(tokens_.where(ids, starts));
    const double sum = state_.part().stages().evaluate({tokens_.own(ids), tokens_.own(targets)},
                                                       state_.part().schedule(), mesh()["pp"]);
    return mesh().coordinate("tp") == 0 ? sum : 0.0;
  };
  return tessera::mean_loss({.forward = forward,
                             .job = &state_.job,
                             .vocab = state_.full_model().config.vocab,
                             .at_once = state_.job.optim.batch / (state_.job.plan.microbatches * state_.job.plan.dp),
                             .turn = mesh().coordinate("dp"),
                             .turns = mesh().size("dp"),
                             .arena = state_.arena->host(),
                             .stop = stop},
                            state_.groups.world, split);
}

// A loss or gradient that several ranks have is contributed by one of them.
void Trainer::make_graph() {
  const Plan& p = state_.job.plan;
  if (!steps_without_host(state_.job, trace_ != nullptr)) return;
  if constexpr (kWithCuda) {
    if (state_.groups.world.size() > 1)
      step_ranks_ = std::make_unique<StepConsensus>(state_.groups.world, state_.communicators());
    const auto gradients = [this] {
      DeviceScalar sum = queue_passes();
      queue_sums();
      return sum;
    };
    const bool own_sums = p.tp > 1 && strategy().layout().sharding != ShardingKind::everywhere;
    graph_ = make_step_graph(
        {.load = [this](int64_t step) { tokens_.begin(step); },
         .ahead = [this](int64_t step) { tokens_.ahead(step); },
         .gradients = gradients,
         .finish = [this] { strategy().gather_parameters(); },
         .squares = [this] { return queue_squares(); },
         .optimizer = &state_.optimizer(),
         .clip = state_.job.optim.clip,
         .captured = no_graph_because(state_.job, trace_ != nullptr, tokens_.counts_targets()).empty(),
         .may_fall_back = p.cuda_graph == CudaGraph::automatic && !step_ranks_ && p.zero == ZeroStage::none,
         .ranks = step_ranks_.get(),
         .says_loss = mesh().coordinate("tp") == 0,
         .says_squares = own_sums ? strategy().copy() == 0 : state_.groups.data.rank() == 0},
        state_.arena);
    tokens_.queue_for(*graph_);
  }
}

// Float64, units in the order of the full model.
Tensor Trainer::queue_squares() {
  const Tensor own = unit_squares(strategy(), &mesh()["tp"]);
  std::vector<BlockRun> places(all_units_);
  for (size_t u = 0; u < places_.size(); ++u)
    if (places_[u] < places.size()) places[places_[u]] = {.begin = static_cast<int64_t>(u), .count = 1};
  Tensor all = own.make({std::ssize(places)}, DType::float64, Category::workspace);
  ordered_sums(own, places, all);
  return all;
}

StepReport Trainer::queued_step(StepRequest request) {
  const double lr = schedule_.at(state_.steps_done());
  const StepGraph::Found found = graph_->run(state_.steps_done(), lr, request);
  StepReport r{.lr = lr, .request = found.request};
  r.loss = found.loss_sum / tokens_.targets();
  r.grad_norm = found.grad_norm;
  check_finite(r, state_.steps_done() + 1);
  return r;
}

}  // namespace tessera
