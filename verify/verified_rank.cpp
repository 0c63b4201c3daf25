// A rank of the plan, compared with the oracle step by step.
#include "verify/verified_rank.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tensor/ops/matmul/cuda/gemm.h"
#include "train/checkpoint/full_state.h"
#include "train/device.h"
#include "train/expected_bytes.h"
#include "train/memory.h"
#include "train/plan.h"
#include "verify/comparison.h"
#include "verify/diagnosis/differences.h"
#include "verify/replicas.h"

namespace tessera {
namespace {

// ZeRO uses reduce-scatters, which some algorithms do not define.
Algorithm find_algorithm(const Plan& p) {
  return p.zero != ZeroStage::none && find_row(p.all_reduce).lacks(Op::reduce_scatter) ? Algorithm::direct
                                                                                       : p.all_reduce;
}

std::vector<int64_t> shard_boundaries(const DataStrategy& strategy) {
  std::vector<int64_t> out;
  const DataLayout& l = strategy.layout();
  for (const ReductionSpan& r : l.reductions) out.insert(out.end(), {r.range.begin, r.range.end, r.count, 0});
  for (const ReductionSpan& r : l.between) out.insert(out.end(), {r.range.begin, r.range.end, r.count, 1});
  return out;
}

// The pipeline rank that stores the copy of a tied weight; -1: none.
int copied_to(TrainState& t, const Module::Unit& unit) {
  return !t.model().config.tie_copies || !unit.slots[0].parameter->is_tied()
             ? -1
             : t.part().runtime().schedule().rank_of_stage.back();
}

// The plan's summation order over all ranks, on rank 0; collective. Units determine stages, and unit sizes the length
// of each rank's flat array. If sums are split inside matmuls, the order of ranks is irrelevant.
SumOrder order_of_sums(TrainState& t) {
  const Plan& p = t.job.plan;
  Communicator& pp = t.groups.mesh["pp"];
  const std::vector<Module::Unit> full = t.full_model().layout();
  if (splits_sums(p)) {
    SumOrder order{.ranks = t.groups.mesh.size("dp"), .algorithm = find_algorithm(p)};
    int64_t size = 0;
    for (size_t u = 0; u < full.size(); ++u) {
      if (!full[u].trainable) continue;
      order.segments.push_back({u});
      size += full[u].size;
    }
    order.reductions = {{{0, size}, size}};
    return order;
  }
  SumOrder order{.ranks = t.groups.mesh.size("dp"),
                 .ep = static_cast<int>(p.ep),
                 .algorithm = find_algorithm(p),
                 .every_microbatch = t.strategy().layout().every_microbatch,
                 .group = t.strategy().shard_axis().size(),
                 .between_algorithm = p.all_reduce};
  const std::vector<int> stages = stages_of_units(t.full_model(), t.part().layers());
  const std::vector<int64_t> own = shard_boundaries(t.strategy());
  const Tensor count = Tensor::of<int64_t>(std::vector<int64_t>{std::ssize(own)}, {1}, t.arena);
  if (pp.rank() != 0) {
    pp.send(count, 0);
    pp.send(Tensor::of<int64_t>(own, {std::ssize(own)}, t.arena), 0);
    return order;
  }
  int64_t begin = 0;
  const std::vector<int>& rank_of_stage = t.part().schedule().rank_of_stage;
  for (int rank = 0; rank < pp.size(); ++rank) {
    std::vector<int64_t> cuts = own;
    if (rank > 0) {
      pp.recv(count, rank);
      const Tensor theirs = Tensor::empty({count.item<int64_t>()}, DType::int64, t.arena);
      pp.recv(theirs, rank);
      cuts = theirs.to_vector<int64_t>();
    }
    for (size_t i = 0; i < cuts.size(); i += 4)
      (cuts[i + 3] == 0 ? order.reductions : order.between)
          .push_back({{begin + cuts[i], begin + cuts[i + 1]}, cuts[i + 2]});
    const auto add = [&](size_t unit, bool copy) {
      order.segments.push_back({unit, copy});
      begin += full[unit].size;
    };
    for (size_t u = 0; u < full.size(); ++u)
      if (full[u].trainable && rank_of_stage[static_cast<size_t>(stages[u])] == rank) add(u, false);
    for (size_t u = 0; u < full.size(); ++u)
      if (full[u].trainable && copied_to(t, full[u]) == rank) add(u, true);
  }
  // Ranks have different experts and chunk boundaries, but no algorithm supported with `ep` sums by chunks.
  if (p.ep > 1) order.between = {{{0, begin}, begin}};
  // Nor does any supported with `tp`, whose ranks have shards of the units.
  if (p.tp > 1) order.reductions = order.between = {{{0, begin}, begin}};
  return order;
}

std::vector<Tensor> of_units(const std::vector<FlatUnit>& units, bool gradients) {
  std::vector<Tensor> out;
  for (const FlatUnit& u : units) out.push_back((gradients ? u.grads : u.values).on_host());
  return out;
}

struct Given {
  int64_t step = 0, sequence = 0, sequences = 0;
};

// Records where the sequences loaded by a rank differ from the oracle's.
Sequences watched(Sequences loading, const Sequences& right, int64_t context, const std::shared_ptr<Given>& given) {
  loading.load = [=, load = loading.load, right = right.load](int64_t step, int64_t first, int64_t count,
                                                              int32_t* inputs, int32_t* targets) {
    load(step, first, count, inputs, targets);
    const auto all = static_cast<size_t>(count * context);
    std::vector<int32_t> ids(all), next(all);
    right(step, first, count, ids.data(), next.data());
    for (int64_t i = 0; i < count; ++i) {
      const auto same = [&](const int32_t* mine, const std::vector<int32_t>& theirs) {
        return std::equal(mine + i * context, mine + (i + 1) * context, theirs.begin() + i * context);
      };
      if (same(inputs, ids) && same(targets, next)) continue;
      if (given->sequences++ == 0) {
        given->step = step + 1;
        given->sequence = first + i;
      }
    }
  };
  return loading;
}

class VerifiedRank {
 public:
  VerifiedRank(const TrainConfig& job, Communicator& world, const Sequences& sequences, const VerifyHooks& hooks,
               VerifyResult& result)
      : job_(job),
        trainer_(hooks.running(job),
                 watched(hooks.loading(sequences, job, world.rank()), sequences, job.model.context, given_), world),
        hooks_(hooks),
        result_(result) {
    const SumOrder order = order_of_sums(state_);
    hooks_.made(trainer_);
    if (replays_routing(job_)) record_passes(state_.model());
    owners_of_gradients_ = aside(full_matrix_state(state_, true));
    owners_of_values_ = aside(full_matrix_state(state_, false));
    if (world.rank() != 0) return;
    oracle_ = std::make_unique<Replicas>(job, sequences, order);
    comparison_ = std::make_unique<Comparison>(result);
    for (const FlatUnit& unit : oracle_->of(0).trained()) result.seen.trained += std::ssize(unit.slots);
  }

  void run() {
    for (int64_t step = 0; step < job_.optim.steps; ++step) {
      if (oracle_) hooks_.working("comparing the plan with one rank", step);
      one_step();
    }
    finish();
  }

 private:
  using OfCopies = std::vector<std::vector<NamedTensor>>;

  void one_step() {
    state_.arena->reset_peaks();
    std::vector<int64_t> before = counts_now();
    const StepReport report = trainer_.compute_gradients();
    count_since(before);
    hooks_.summed(trainer_);
    note_peaks();
    take_routing();
    OfCopies gradients, values, state;
    for (int copy = 0; copy < trained_copies(); ++copy) gradients.push_back(aside(full_gradients(state_, copy)));
    state_.arena->reset_peaks();
    before = counts_now();
    hooks_.update(trainer_, report);
    count_since(before);
    note_peaks();
    for (int copy = 0; copy < trained_copies(); ++copy) {
      values.push_back(full_values(state_, copy));
      state.push_back(full_state(state_, copy));
    }
    const std::vector<double> of_copies = norms(report);
    if (oracle_) compare(report, of_copies, gradients, values, state);
    look_at_copies();
  }

  // Called before the oracle computes the same step.
  void take_routing() {
    if (!replays_routing(job_)) return;
    const auto routing = std::make_shared<const Routing>(read_routing(state_));
    replayed_.leaving += routing->leaving;
    replayed_.imbalance = std::max(replayed_.imbalance, routing->imbalance);
    for (size_t copy = 0; oracle_ && copy < oracle_->count(); ++copy)
      oracle_->of(static_cast<int>(copy)).replay(routing);
  }

  int trained_copies() const { return state_.strategy().layout().local_updates ? state_.strategy().copies() : 1; }

  // Gradient norm of each replica, as reported by its first rank.
  std::vector<double> norms(const StepReport& report) {
    const std::vector<double> all =
        all_gather_values<double>(state_.groups.world, {report.grad_norm}, state_.arena->host());
    std::vector<double> out;
    for (int64_t copy = 0; copy < trained_copies(); ++copy)
      out.push_back(all[static_cast<size_t>(copy * job_.plan.cp * job_.plan.tp)]);
    return out;
  }

  std::vector<int64_t> counts_now() {
    std::vector<int64_t> out;
    for (const Communicator* axis : state_.communicators())
      for (const OpCount& c : axis->counts()) out.insert(out.end(), {c.calls, c.sent});
    const OpCount& copied = state_.strategy().copied();
    out.insert(out.end(), {copied.calls, copied.sent});
    return out;
  }

  void count_since(const std::vector<int64_t>& before) {
    const std::vector<int64_t> now = counts_now();
    counts_.resize(now.size());
    for (size_t i = 0; i < now.size(); ++i) counts_[i] += now[i] - before[i];
  }

  void note_peaks() { peak_ = std::max(peak_, state_.arena->total().peak); }

  // Copies tensors to memory that does not count as the rank's.
  std::vector<NamedTensor> aside(const std::vector<NamedTensor>& tensors) const {
    std::vector<NamedTensor> out;
    for (const NamedTensor& t : tensors) {
      Tensor copy = Tensor::empty(t.tensor.shape(), t.tensor.dtype(), aside_);
      copy.copy_from(t.tensor);
      out.push_back({t.name, copy});
    }
    return out;
  }

  // If replicated state differs, each data rank reports its own values.
  void look_at_copies() {
    std::string cause;
    try {
      check_replicas(state_);
    } catch (const Error& e) {
      if (e.status() != Status::communication || dynamic_cast<const CommError*>(&e)) throw;
      cause = e.what();
    }
    if (state_.groups.world.max(cause.empty() ? 0 : 1) == 0) return;
    note_copies(cause);
    for (int copy = 1; trained_copies() == 1 && copy < state_.strategy().copies(); ++copy) {
      const std::vector<NamedTensor> values = full_values(state_, copy), state = full_state(state_, copy);
      if (oracle_) compare_replica(state_.steps_done(), values, state, copy);
    }
  }

  void note_copies(const std::string& mine) {
    constexpr size_t kLength = 256;
    std::vector<int32_t> letters(mine.begin(), mine.end());
    letters.resize(kLength);
    const std::vector<int32_t> all = all_gather_values(state_.groups.world, letters, state_.arena->host());
    if (!oracle_) return;
    if (result_.seen.copies_step == 0) result_.seen.copies_step = state_.steps_done();
    for (auto from = all.begin(); from != all.end(); from += kLength) {
      std::string text(from, std::find(from, from + kLength, 0));
      std::vector<std::string>& known = result_.seen.copies;
      if (!text.empty() && std::ranges::find(known, text) == known.end()) known.push_back(std::move(text));
    }
  }

  void compare(const StepReport& report, const std::vector<double>& norms, const OfCopies& gradients,
               const OfCopies& values, const OfCopies& state) {
    using Kind = TensorDifference::Kind;
    const StepReport expected = oracle_->compute_gradients();
    comparison_->number(expected.step, "loss", report.loss, expected.loss);
    before_.clear();
    for (int copy = 0; copy < std::ssize(gradients); ++copy) {
      const auto c = static_cast<size_t>(copy);
      Reference& reference = oracle_->of(copy);
      const std::vector<FlatUnit> trained = reference.trained();
      comparison_->number(expected.step, "gradient norm", norms[c], oracle_->gradient_norm(copy));
      const bool first = result_.wrong_steps.empty() || result_.wrong_steps[0] == expected.step;
      const bool right = comparison_->tensors({.step = expected.step,
                                               .kind = Kind::gradient,
                                               .found = gradients[c],
                                               .units = trained,
                                               .full = of_units(trained, true),
                                               .owners = owners_of_gradients_},
                                              result_.grad_max_rel);
      if (!right && first && gradients.size() == 1) {
        result_.seen.mixture = find_mixture(reference, job_.optim.batch, gradients[c]);
        if (result_.seen.mixture) result_.seen.mixture->step = expected.step;
      }
      if (!result_.exact) {
        reference.adopt(gradients[c]);
        oracle_->gradient_norm(copy) = norms[c];
      }
      std::vector<Tensor>& before = before_.emplace_back();
      for (const Tensor& values_before : of_units(reference.units(), false)) before.push_back(values_before.clone());
    }
    oracle_->update();
    for (int copy = 0; copy < std::ssize(gradients); ++copy)
      compare_replica(expected.step, values[static_cast<size_t>(copy)], state[static_cast<size_t>(copy)], copy);
  }

  void compare_replica(int64_t step, const std::vector<NamedTensor>& values, const std::vector<NamedTensor>& state,
                       int copy) {
    Reference& reference = oracle_->of(copy);
    const int rank_of_copy =
        copy * state_.groups.data.size() / state_.strategy().copies() * static_cast<int>(job_.plan.tp);
    comparison_->exactly();
    comparison_->tensors({.step = step,
                          .kind = TensorDifference::Kind::parameter,
                          .found = values,
                          .units = reference.units(),
                          .full = of_units(reference.units(), false),
                          .before = before_[std::min(static_cast<size_t>(copy), before_.size() - 1)],
                          .owners = owners_of_values_,
                          .rank_of_copy = rank_of_copy},
                         result_.param_max_rel);
    compare_state(step, state, copy, rank_of_copy);
    comparison_->within_bound();
  }

  // Some units may lack a kind of state.
  void compare_state(int64_t step, const std::vector<NamedTensor>& state, int copy, int rank_of_copy) {
    const std::vector<FlatUnit> trained = oracle_->of(copy).trained();
    std::vector<NamedTensor> expected = oracle_->of(copy).optimizer().state();
    expected.insert(expected.end(), oracle_->state().begin(), oracle_->state().end());
    std::map<std::string, std::vector<NamedTensor>> by_kind;
    for (const NamedTensor& t : state) by_kind[t.name.substr(t.name.rfind('.') + 1)].push_back(t);
    size_t kinds = 0;
    for (const auto& [kind, tensors] : by_kind) {
      std::vector<FlatUnit> units;
      std::vector<Tensor> full;
      std::vector<NamedTensor> owners;
      size_t at = 0;  // index of the trainable slot
      for (const FlatUnit& unit : trained) {
        const auto found = std::ranges::find_if(
            expected, [&, &k = kind](const NamedTensor& t) { return t.name == unit.name + "." + k; });
        for (size_t i = 0; i < unit.slots.size(); ++i, ++at)
          if (found != expected.end()) owners.push_back(owners_of_gradients_.at(at));
        if (found == expected.end()) continue;
        units.push_back(unit);
        full.push_back(found->tensor.on_host());
      }
      kinds += full.size();
      comparison_->tensors({.step = step,
                            .kind = TensorDifference::Kind::state,
                            .found = tensors,
                            .units = units,
                            .full = full,
                            .owners = owners,
                            .rank_of_copy = rank_of_copy},
                           result_.param_max_rel);
    }
    if (kinds != expected.size())
      result_.failures.push_back(
          fmt::format("the run has {} of the oracle's {} optimizer state tensors", kinds, expected.size()));
  }

  void finish() {
    Communicator& world = state_.groups.world;
    const auto held = [&](Category c) { return state_.arena->usage(c).live; };
    const std::vector<int64_t> mine = {held(Category::parameters),
                                       held(Category::gradients),
                                       held(Category::optimizer),
                                       peak_,
                                       state_.part().runtime().peak_in_flight(),
                                       given_->step,
                                       given_->sequence,
                                       given_->sequences};
    const Tensor counts = Tensor::of<int64_t>(counts_, {std::ssize(counts_)}, state_.arena->host());
    const Tensor maximum = counts.clone();
    world.all_reduce(counts);
    world.all_reduce(maximum, Reduction::max);
    const std::vector<int64_t> all = all_gather_values(world, mine, state_.arena->host());
    if (!oracle_) return;
    const Routing& routing = replays_routing(job_) ? replayed_ : oracle_->of(0).routing();
    result_.expected_sent = expected_bytes(job_, job_.optim.steps, routing.leaving);
    result_.imbalance = std::max(1.0, routing.imbalance);
    for (size_t copy = 0; copy < oracle_->count(); ++copy) {
      const Reference& reference = oracle_->of(static_cast<int>(copy));
      result_.rerouted_tokens += reference.rerouted_tokens();
      result_.routing_margin = std::max(result_.routing_margin, reference.routing_margin());
    }
    const int64_t* c = counts.data<int64_t>();
    const int64_t* busiest = maximum.data<int64_t>();
    for (const Communicator* axis : state_.communicators())
      for (int op = 0; op < kOps; ++op, c += 2, busiest += 2)
        if (c[0] > 0)
          result_.sent.push_back({axis->axis(), std::string(to_string(static_cast<Op>(op))), c[0], c[1], busiest[1]});
    if (const auto copies = expected_copies(job_, job_.optim.steps)) result_.expected_sent.push_back(*copies);
    if (c[0] > 0) result_.sent.push_back({"host", "copy_to_gpu", c[0], c[1], busiest[1]});
    expected_ = memory_of_ranks(job_);
    for (int r = 0; r < world.size(); ++r) note_rank(r, all.data() + r * std::ssize(mine));
  }

  void note_rank(int rank, const int64_t* m) {
    result_.held.push_back({m[0], m[1], m[2]});
    result_.peak.push_back(m[3]);
    const int64_t alike = job_.plan.ranks() / job_.plan.pp;  // ranks with the same stages
    // The passes' memory grows with the rows of the local experts.
    const RankMemory& expected = expected_.at(static_cast<size_t>(rank));
    const auto more = static_cast<int64_t>((result_.imbalance - 1) *
                                           static_cast<double>(expected.activations + expected.communication));
    result_.expected_peak.push_back(expected.total() + more + library_workspace());
    if (rank % alike == 0) result_.in_flight.push_back(m[4]);
    if (m[7] > 0) result_.seen.given.push_back({rank, static_cast<int>(rank / alike), m[5], m[6], m[7]});
  }

  // NVIDIA's libraries allocate workspace on a GPU: for one GEMM, or cuDNN's backward attention, whose deterministic
  // mode stores 16 bits per score.
  int64_t library_workspace() {
    if (job_.plan.device != Device::cuda) return 0;
    const PlanSizes sizes(job_);
    const int64_t scores = sizes.sequences * state_.full_model().config.heads * sizes.tokens * sizes.tokens;
    return std::max(cuda::kMaxWorkspace, asks_cudnn(job_.plan) ? 2 * scores : 0);
  }

  const TrainConfig& job_;
  std::shared_ptr<Given> given_ = std::make_shared<Given>();
  Trainer trainer_;
  TrainState& state_ = trainer_.state();
  const VerifyHooks& hooks_;
  VerifyResult& result_;
  std::unique_ptr<Replicas> oracle_;
  std::unique_ptr<Comparison> comparison_;
  std::vector<int64_t> counts_;
  ArenaPtr aside_ = make_arena();
  int64_t peak_ = 0;
  std::vector<RankMemory> expected_;         // by rank
  std::vector<std::vector<Tensor>> before_;  // the oracle's values before its update
  Routing replayed_;                         // statistics of all steps so far
  std::vector<NamedTensor> owners_of_gradients_, owners_of_values_;
};

}  // namespace

void run_with_oracle(const TrainConfig& job, Communicator& world, const Sequences& sequences, const VerifyHooks& hooks,
                     VerifyResult& result) {
  VerifiedRank(job, world, sequences, hooks, result).run();
}

}  // namespace tessera
