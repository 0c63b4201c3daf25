// Step by step under the plan, beside the oracle.
#include "verify/verified_rank.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "tensor/ops/matmul/cuda/product.h"
#include "train/attention_choice.h"
#include "train/plan.h"
#include "train/plan_sizes.h"
#include "train/rank_memory.h"
#include "train/whole_state.h"
#include "verify/plan_order.h"

namespace tessera {
namespace {

std::vector<Tensor> of_units(const std::vector<FlatUnit>& units, bool gradients) {
  std::vector<Tensor> out;
  for (const FlatUnit& u : units) out.push_back((gradients ? u.grads : u.values).on_host());
  return out;
}

}  // namespace

VerifiedRank::VerifiedRank(const Job& job, Communicator& world, const Sequences& sequences, const VerifyHooks& hooks,
                           VerifyResult& result)
    : job_(job), trainer_(job, hooks.loading(sequences, job, world.rank()), world), hooks_(hooks), result_(result) {
  const SumOrder order = order_of_sums(trainer_);
  hooks_.made(trainer_);
  if (world.rank() != 0) return;
  reference_ = std::make_unique<Reference>(job, sequences, order);
  comparison_ = std::make_unique<Comparison>(result);
}

void VerifiedRank::run() {
  for (int64_t step = 0; step < job_.optim.steps; ++step) one_step();
  finish();
}

void VerifiedRank::one_step() {
  trainer_.arena()->reset_peaks();
  std::vector<int64_t> before = counts_now();
  const StepReport report = trainer_.compute_gradients();
  count_since(before);
  hooks_.summed(trainer_);
  note_peaks();
  const std::vector<NamedTensor> gradients = aside(whole_gradients(trainer_));
  trainer_.arena()->reset_peaks();
  before = counts_now();
  hooks_.update(trainer_, report);
  count_since(before);
  note_peaks();
  const std::vector<NamedTensor> values = whole_values(trainer_), state = whole_state(trainer_);
  if (reference_) compare(report, gradients, values, state);
}

// The counts of all axes of one rank, as one list.
std::vector<int64_t> VerifiedRank::counts_now() {
  std::vector<int64_t> out;
  for (const Communicator* axis : trainer_.communicators())
    for (const OpCount& c : axis->counts()) out.insert(out.end(), {c.calls, c.sent});
  return out;
}

void VerifiedRank::count_since(const std::vector<int64_t>& before) {
  const std::vector<int64_t> now = counts_now();
  counts_.resize(now.size());
  for (size_t i = 0; i < now.size(); ++i) counts_[i] += now[i] - before[i];
}

void VerifiedRank::note_peaks() { peak_ = std::max(peak_, trainer_.arena()->total().peak); }

// Copies that do not count as held by the rank.
std::vector<NamedTensor> VerifiedRank::aside(const std::vector<NamedTensor>& tensors) const {
  std::vector<NamedTensor> out;
  for (const NamedTensor& t : tensors) {
    Tensor copy = Tensor::empty(t.tensor.shape(), t.tensor.dtype(), aside_);
    copy.copy_from(t.tensor);
    out.push_back({t.name, copy});
  }
  return out;
}

void VerifiedRank::compare(const StepReport& report, const std::vector<NamedTensor>& gradients,
                           const std::vector<NamedTensor>& values, const std::vector<NamedTensor>& state) {
  StepReport expected = reference_->compute_gradients();
  const std::vector<FlatUnit>&units = reference_->units(), trained = reference_->trained();
  comparison_->number(expected.step, "loss", report.loss, expected.loss);
  comparison_->number(expected.step, "gradient norm", report.grad_norm, expected.grad_norm);
  comparison_->tensors(expected.step, "gradient", gradients, trained, of_units(trained, true), result_.grad_max_rel);
  if (!result_.exact) {
    reference_->adopt(gradients);
    expected.grad_norm = report.grad_norm;
  }
  reference_->update(expected);
  comparison_->exactly();
  comparison_->tensors(expected.step, "parameter", values, units, of_units(units, false), result_.param_max_rel);
  std::map<std::string, std::vector<NamedTensor>> by_kind;
  for (const NamedTensor& t : state) by_kind[t.name.substr(t.name.rfind('.') + 1)].push_back(t);
  size_t kinds = 0;
  for (const auto& [kind, tensors] : by_kind) {
    std::vector<Tensor> whole;
    for (const FlatUnit& unit : trained)
      for (const NamedTensor& t : reference_->optimizer().state())
        if (t.name == unit.name + "." + kind) whole.push_back(t.tensor.on_host());
    comparison_->tensors(expected.step, "state", tensors, trained, whole, result_.param_max_rel);
    kinds += whole.size();
  }
  comparison_->within_bound();
  if (kinds != reference_->optimizer().state().size())
    result_.failures.emplace_back("the optimizer keeps other tensors than the oracle's");
}

// What each rank counted and holds goes to rank 0.
void VerifiedRank::finish() {
  Communicator& world = trainer_.world();
  const ArenaPtr& arena = trainer_.arena();
  const auto held = [&](Category c) { return arena->usage(c).live; };
  const std::vector<int64_t> mine = {held(Category::parameters), held(Category::gradients), held(Category::optimizer),
                                     peak_, trainer_.peak_in_flight()};
  const auto width = std::ssize(mine);
  const ArenaPtr host = arena->host();
  const Tensor counts = Tensor::of<int64_t>(counts_, {std::ssize(counts_)}, host);
  const Tensor own = Tensor::of<int64_t>(mine, {width}, host);
  const Tensor all = Tensor::empty({width * world.size()}, DType::int64, host);
  const Tensor most = counts.clone();
  world.all_reduce(counts);
  world.all_reduce(most, Reduction::max);
  world.all_gather(own, all);
  if (!reference_) return;
  const int64_t* c = counts.data<int64_t>();
  const int64_t* busiest = most.data<int64_t>();
  for (const Communicator* axis : trainer_.communicators())
    for (int op = 0; op < kOps; ++op, c += 2, busiest += 2)
      if (c[0] > 0)
        result_.sent.push_back({axis->axis(), std::string(name_of(static_cast<Op>(op))), c[0], c[1], busiest[1]});
  expected_ = memory_of_ranks(job_);
  for (int r = 0; r < world.size(); ++r) note_rank(r, all.data<int64_t>() + r * width);
}

void VerifiedRank::note_rank(int rank, const int64_t* m) {
  result_.held.push_back({m[0], m[1], m[2]});
  result_.peak.push_back(m[3]);
  const int64_t alike = job_.plan.ranks() / job_.plan.pp;  // ranks with the same stages
  result_.expected_peak.push_back(expected_.at(static_cast<size_t>(rank)).total() + library_workspace());
  if (rank % alike == 0) result_.in_flight.push_back(m[4]);
}

// What NVIDIA's libraries may take on a GPU while they compute: one product, or cuDNN's backward pass of attention,
// which in a fixed order keeps a number of 16 bits for each score.
int64_t VerifiedRank::library_workspace() {
  if (job_.plan.device != Device::cuda) return 0;
  const PlanSizes sizes(job_);
  const int64_t scores = sizes.sequences * trainer_.whole_model().config.heads * sizes.tokens * sizes.tokens;
  return std::max(cuda::kMostWorkspace, asks_cudnn(job_.plan) ? 2 * scores : 0);
}

}  // namespace tessera
