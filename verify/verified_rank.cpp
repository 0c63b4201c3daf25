// Step by step under the plan, beside the oracle.
#include "verify/verified_rank.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "tensor/ops/linear_cross_entropy.h"
#include "tensor/ops/matmul/cuda/product.h"
#include "train/attention_choice.h"
#include "train/plan.h"
#include "train/whole_state.h"
#include "verify/plan_order.h"
#include "verify/plan_sizes.h"
#include "verify/stage_memory.h"

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

void VerifiedRank::note_peaks() {
  peak_ = std::max(peak_, trainer_.arena()->total().peak);
  moved_ = std::max(moved_, trainer_.arena()->usage(Category::communication).peak);
}

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
  const std::vector<FlatUnit>& units = reference_->units();
  comparison_->number(expected.step, "loss", report.loss, expected.loss);
  comparison_->number(expected.step, "gradient norm", report.grad_norm, expected.grad_norm);
  comparison_->tensors(expected.step, "gradient", gradients, units, of_units(units, true), result_.grad_max_rel);
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
    for (const FlatUnit& unit : units)
      for (const NamedTensor& t : reference_->optimizer().state())
        if (t.name == unit.name + "." + kind) whole.push_back(t.tensor.on_host());
    comparison_->tensors(expected.step, "state", tensors, units, whole, result_.param_max_rel);
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
  const std::vector<int64_t> mine = {
      held(Category::parameters), held(Category::gradients), held(Category::optimizer), peak_, moved_,
      trainer_.peak_in_flight()};
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
  const bool data_only = job_.plan.ranks() == job_.plan.dp && !trainer_.schedule().has(Do::I);
  if (!data_only) {
    of_passes_ = peaks_of_ranks(trainer_.schedule(), measure_stages(job_), handed_bytes(job_));
  }
  for (int r = 0; r < world.size(); ++r) note_rank(r, all.data<int64_t>() + r * width);
}

void VerifiedRank::note_rank(int rank, const int64_t* m) {
  result_.held.push_back({m[0], m[1], m[2]});
  result_.peak.push_back(m[3]);
  const Plan& p = job_.plan;
  const int64_t alike = p.ranks() / p.pp;  // ranks with the same stages
  const HeldBytes& e = result_.expected_held.at(static_cast<size_t>(rank));
  const int64_t held = e.parameters + e.gradients + e.optimizer;
  if (of_passes_.empty())
    result_.expected_peak.push_back(held + m[4] + reference_->peak_of_microbatch() + second_microbatch() +
                                    whole_logits());
  else  // what passes send is among what they hold; what the strategy of the data axis needs besides comes on top
    result_.expected_peak.push_back(held + (p.dp * p.cp > 1 || p.zero != ZeroStage::none ? m[4] : 0) +
                                    of_passes_.at(static_cast<size_t>(rank / alike)));
  result_.expected_peak.back() += library_workspace();
  if (rank % alike == 0) result_.in_flight.push_back(m[5]);
}

// DataParallel has the logits of its rows whole, of which the oracle has a block.
int64_t VerifiedRank::whole_logits() {
  if (job_.plan.dp_mode != DataMode::dataparallel) return 0;
  const PlanSizes sizes(job_);
  const ModelConfig& config = sizes.config;
  const int64_t rows = sizes.sequences * sizes.tokens;
  const DType dtype = job_.optim.dtype;
  const RowBlocks blocks =
      row_blocks(Tensor::meta({rows, config.channels}, dtype), Tensor::meta({config.vocab, config.channels}, dtype));
  return (rows - std::min(rows, blocks.block)) * config.vocab * sizes.value;
}

// What NVIDIA's libraries may take on a GPU while they compute: one product, or cuDNN's backward pass of attention,
// which in a fixed order keeps a number of 16 bits for each score.
int64_t VerifiedRank::library_workspace() {
  if (job_.plan.device != Device::cuda) return 0;
  const PlanSizes sizes(job_);
  const int64_t scores = sizes.sequences * trainer_.whole_model().config.heads * sizes.tokens * sizes.tokens;
  return std::max(cuda::kMostWorkspace, asks_cudnn(job_.plan) ? 2 * scores : 0);
}

// A later micro-batch's gradient of a parameter is made beside the sum of the earlier ones, twice for a tied weight.
int64_t VerifiedRank::second_microbatch() const {
  if (job_.plan.microbatches == 1 || trainer_.strategy().layout().every_microbatch) return 0;
  int64_t largest = 0;
  for (const FlatUnit& unit : reference_->units())
    for (const Slot& slot : unit.slots) largest = std::max(largest, (slot.parameter->is_tied() ? 2 : 1) * slot.size);
  return largest * size_of(reference_->units()[0].grads.dtype());
}

}  // namespace tessera
