// Training under the plan beside the oracle.
#include "app/verify/verify.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>

#include "app/plan.h"
#include "app/verify/comparison.h"
#include "app/verify/reference.h"
#include "app/verify/totals.h"
#include "app/whole_state.h"
#include "parallel/comm/launch.h"

namespace tessera {
namespace {

constexpr int64_t kVocab = 64;  // unless the options say otherwise

std::vector<Tensor> of_units(const std::vector<FlatUnit>& units, bool gradients) {
  std::vector<Tensor> out;
  for (const FlatUnit& u : units) out.push_back(gradients ? u.grads : u.values);
  return out;
}

// The counts of both axes of one rank, as one list.
std::vector<int64_t> counts_now(Trainer& t) {
  std::vector<int64_t> out;
  for (const Communicator* axis : {&t.world(), &t.data_axis()})
    for (const OpCount& c : axis->counts()) out.insert(out.end(), {c.calls, c.sent});
  return out;
}

Sequences mutated(Sequences sequences, Mutation mutation, const TrainOptions& o) {
  const int64_t size = o.batch / (ranks_of(o) * o.microbatches), last = o.batch - size;
  if (mutation != Mutation::skip_microbatch && mutation != Mutation::shift_sequences) return sequences;
  auto load = sequences.load;
  sequences.load = [=](int64_t step, int64_t first, int64_t count, int32_t* inputs, int32_t* targets) {
    const bool shifted = mutation == Mutation::shift_sequences && first > 0;
    load(step, shifted ? first - 1 : first, count, inputs, targets);
    if (mutation == Mutation::skip_microbatch && first + count > last) {
      const int64_t tokens = (first + count - std::max(first, last)) * sizes_of(o).context;
      std::fill(targets + count * sizes_of(o).context - tokens, targets + count * sizes_of(o).context, -1);
    }
  };
  return sequences;
}

void damage_gradients(Trainer& t, Mutation mutation) {
  if (mutation != Mutation::divide_twice) return;
  for (const FlatUnit& shard : t.strategy().shards())
    with_floating(shard.grads.dtype(), "mutation", [&](auto type) {
      using T = decltype(type);
      T* const g = shard.grads.data<T>();
      for (int64_t i = 0; i < shard.grads.numel(); ++i) g[i] = T(static_cast<double>(g[i]) / t.data_axis().size());
    });
}

// One rank's side of the run; rank 0 has the oracle.
class VerifiedRank {
 public:
  VerifiedRank(const TrainOptions& o, Communicator& world, const Sequences& sequences, Mutation mutation,
               VerifyResult& result)
      : options_(o), trainer_(o, mutated(sequences, mutation, o), world), mutation_(mutation), result_(result) {
    if (world.rank() != 0) return;
    const DataStrategy& s = trainer_.strategy();
    reference_ = std::make_unique<Reference>(
        o, sequences, SumOrder{world.size(), order_of(o), s.reduces_every_microbatch(), s.reductions()});
    comparison_ = std::make_unique<Comparison>(result);
  }

  void run() {
    for (int64_t step = 0; step < options_.steps; ++step) one_step();
    finish();
  }

 private:
  // ZeRO's reduce-scatter has no tree.
  static Algorithm order_of(const TrainOptions& o) {
    const Algorithm algorithm = algorithm_named(o.all_reduce);
    return algorithm == Algorithm::tree && o.zero > 0 ? Algorithm::direct : algorithm;
  }

  void one_step() {
    trainer_.arena()->reset_peaks();
    std::vector<int64_t> before = counts_now(trainer_);
    StepReport report = trainer_.compute_gradients(false);
    count_since(before);
    damage_gradients(trainer_, mutation_);
    note_peaks();
    const std::vector<NamedTensor> gradients = aside(whole_gradients(trainer_));
    trainer_.arena()->reset_peaks();
    before = counts_now(trainer_);
    update(report);
    count_since(before);
    note_peaks();
    const std::vector<NamedTensor> values = whole_values(trainer_), state = whole_state(trainer_, options_.optimizer);
    if (reference_) compare(report, gradients, values, state);
  }

  void note_peaks() {
    peak_ = std::max(peak_, trainer_.arena()->total().peak);
    moved_ = std::max(moved_, trainer_.arena()->usage(Category::communication).peak);
  }

  // Copies that do not count as held by the rank.
  std::vector<NamedTensor> aside(const std::vector<NamedTensor>& tensors) const {
    std::vector<NamedTensor> out;
    for (const NamedTensor& t : tensors) {
      Tensor copy = Tensor::empty(t.tensor.shape(), t.tensor.dtype(), aside_);
      copy.copy_from(t.tensor);
      out.push_back({t.name, copy});
    }
    return out;
  }

  void update(StepReport report) {
    const bool odd_one = trainer_.world().rank() == trainer_.world().size() - 1;
    if (mutation_ == Mutation::unclipped && odd_one) report.grad_norm = 0;
    std::vector<Tensor> old;
    if (mutation_ == Mutation::stale_shard && odd_one)
      for (const FlatUnit& unit : trainer_.strategy().residents()) old.push_back(unit.values.clone());
    trainer_.update(report);
    size_t at = 0;
    for (const Tensor& values : old) {  // the first quarter of each unit stays as it was
      const Tensor now = trainer_.strategy().residents()[at++].values;
      std::memcpy(now.raw(), values.raw(), static_cast<size_t>(values.nbytes() / 4));
    }
  }

  void count_since(const std::vector<int64_t>& before) {
    const std::vector<int64_t> now = counts_now(trainer_);
    counts_.resize(now.size());
    for (size_t i = 0; i < now.size(); ++i) counts_[i] += now[i] - before[i];
  }

  void compare(const StepReport& report, const std::vector<NamedTensor>& gradients,
               const std::vector<NamedTensor>& values, const std::vector<NamedTensor>& state) {
    const StepReport expected = reference_->step();
    comparison_->loss(expected.step, report.loss, expected.loss);
    const std::vector<FlatUnit>& units = reference_->units();
    comparison_->tensors(expected.step, "gradient", gradients, units, of_units(units, true), result_.grad_max_rel);
    comparison_->tensors(expected.step, "parameter", values, units, of_units(units, false), result_.param_max_rel);
    std::map<std::string, std::vector<NamedTensor>> by_kind;
    for (const NamedTensor& t : state) by_kind[t.name.substr(t.name.rfind('.') + 1)].push_back(t);
    size_t kinds = 0;
    for (const auto& [kind, tensors] : by_kind) {
      std::vector<Tensor> whole;
      for (const FlatUnit& unit : units)
        for (const NamedTensor& t : reference_->optimizer().state())
          if (t.name == unit.name + "." + kind) whole.push_back(t.tensor);
      comparison_->tensors(expected.step, "state", tensors, units, whole, result_.param_max_rel);
      kinds += whole.size();
    }
    if (kinds != reference_->optimizer().state().size())
      result_.failures.emplace_back("the optimizer keeps other tensors than the oracle's");
  }

  // What each rank counted and holds goes to rank 0.
  void finish() {
    Communicator& world = trainer_.world();
    const ArenaPtr& arena = trainer_.arena();
    const auto held = [&](Category c) { return arena->usage(c).live; };
    const std::vector<int64_t> mine = {held(Category::parameters), held(Category::gradients), held(Category::optimizer),
                                       peak_, moved_};
    const auto width = static_cast<int64_t>(mine.size());
    const Tensor counts = Tensor::of<int64_t>(counts_, {static_cast<int64_t>(counts_.size())}, arena);
    const Tensor own = Tensor::of<int64_t>(mine, {width}, arena);
    const Tensor all = Tensor::empty({width * world.size()}, DType::int64, arena);
    const Tensor most = counts.clone();
    world.all_reduce(counts);
    world.all_reduce(most, Reduction::max);
    world.all_gather(own, all);
    if (!reference_) return;
    const int64_t* c = counts.data<int64_t>();
    const int64_t* busiest = most.data<int64_t>();
    for (const Communicator* axis : {&world, &trainer_.data_axis()})
      for (int op = 0; op < kOps; ++op, c += 2, busiest += 2)
        if (c[0] > 0)
          result_.sent.push_back({axis->axis(), std::string(name_of(static_cast<Op>(op))), c[0], c[1], busiest[1]});
    for (int r = 0; r < world.size(); ++r) {
      const int64_t* m = all.data<int64_t>() + r * width;
      result_.held.push_back({m[0], m[1], m[2]});
      result_.peak.push_back(m[3]);
      const HeldBytes& e = result_.expected_held.at(static_cast<size_t>(r));
      result_.expected_peak.push_back(e.parameters + e.gradients + e.optimizer + m[4] +
                                      reference_->peak_of_microbatch() + second_microbatch());
    }
  }

  // A later micro-batch's gradient of a parameter is made beside the sum of the earlier ones, twice for a tied weight.
  int64_t second_microbatch() const {
    if (options_.microbatches == 1 || trainer_.strategy().reduces_every_microbatch()) return 0;
    int64_t largest = 0;
    for (const FlatUnit& unit : reference_->units())
      for (const Slot& slot : unit.slots)
        largest = std::max(largest, (slot.name == "tokens.weight" ? 2 : 1) * slot.shape.numel());
    return largest * size_of(reference_->units()[0].grads.dtype());
  }

  const TrainOptions& options_;
  Trainer trainer_;
  Mutation mutation_;
  VerifyResult& result_;
  std::unique_ptr<Reference> reference_;
  std::unique_ptr<Comparison> comparison_;
  std::vector<int64_t> counts_;
  ArenaPtr aside_ = make_arena();
  int64_t peak_ = 0, moved_ = 0;  // moved: of what only the strategy needs
};

}  // namespace

VerifyResult verify(const TrainOptions& given, Mutation mutation) {
  TrainOptions o = given;
  if (!o.vocab) o.vocab = kVocab;
  check_plan(o);
  if (o.dp_mode == "ps-async")
    throw Error(
        "--dp-mode: an asynchronous run is not the run of one rank; train --record and --replay repeat it to the bit");
  if (o.all_reduce == "native")
    throw Error("--all-reduce: the order of a library's own sums is not known; expected direct, ring, tree or root");
  const Sequences sequences = counted_sequences(*o.vocab, sizes_of(o).context, o.batch, static_cast<uint64_t>(o.seed));
  const GptConfig config = gpt_config(o, *o.vocab);
  VerifyResult result;
  result.steps = o.steps;
  result.expected_sent = expected_bytes(o, config, o.steps);
  result.expected_held = expected_memory(o, config);
  LaunchOptions l = launch_options(o);
  if (mutation == Mutation::other_order) l.algorithm = Algorithm::ring;
  if (mutation == Mutation::drop_reduction)
    for (int r = 0; r < l.ranks; ++r) l.faults[r] = {{.kind = Fault::Kind::drop, .call = 0, .seconds = 0}};
  launch(l, [&](Communicator& world) {
    VerifiedRank(o, world, sequences, mutation, result).run();
    if (backend_of(o) == Backend::mpi) result.known = world.rank() == 0;
  });
  if (result.known) check_totals(result, o);
  return result;
}

}  // namespace tessera
