// Step by step under the plan, beside the oracle.
#include "verify/verified_rank.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "tensor/ops/matmul/cuda/product.h"
#include "train/check_data.h"
#include "train/checkpoint/state.h"
#include "train/device.h"
#include "train/memory.h"
#include "train/plan.h"
#include "train/plan_sizes.h"
#include "verify/mixture.h"
#include "verify/plan_order.h"

namespace tessera {

// Notes where a rank loads other tokens than the oracle.
Sequences VerifiedRank::watched(Sequences loading, const Sequences& right, int64_t context,
                                const std::shared_ptr<Given>& given) {
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

VerifiedRank::VerifiedRank(const Job& job, Communicator& world, const Sequences& sequences, const VerifyHooks& hooks,
                           VerifyResult& result)
    : job_(job),
      trainer_(hooks.running(job),
               watched(hooks.loading(sequences, job, world.rank()), sequences, job.model.context, given_), world),
      hooks_(hooks),
      result_(result) {
  const SumOrder order = order_of_sums(trainer_);
  hooks_.made(trainer_);
  if (replays_routing(job_)) keep_passes(trainer_.model());
  owners_of_gradients_ = aside(whole_owners(trainer_, true));
  owners_of_values_ = aside(whole_owners(trainer_, false));
  if (world.rank() != 0) return;
  oracle_ = std::make_unique<Replicas>(job, sequences, order);
  comparison_ = std::make_unique<Comparison>(result);
  for (const FlatUnit& unit : oracle_->of(0).trained()) result.seen.trained += std::ssize(unit.slots);
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
  take_routing();
  OfCopies gradients, values, state;
  for (int copy = 0; copy < trained_copies(); ++copy) gradients.push_back(aside(whole_gradients(trainer_, copy)));
  trainer_.arena()->reset_peaks();
  before = counts_now();
  hooks_.update(trainer_, report);
  count_since(before);
  note_peaks();
  for (int copy = 0; copy < trained_copies(); ++copy) {
    values.push_back(whole_values(trainer_, copy));
    state.push_back(whole_state(trainer_, copy));
  }
  const std::vector<double> of_copies = norms(report);
  if (oracle_) compare(report, of_copies, gradients, values, state);
  look_at_copies();
}

// Before the oracle computes the same step.
void VerifiedRank::take_routing() {
  if (!replays_routing(job_)) return;
  const auto routing = std::make_shared<const Routing>(routing_of(trainer_));
  replayed_.leaving += routing->leaving;
  replayed_.most = std::max(replayed_.most, routing->most);
  for (size_t copy = 0; oracle_ && copy < oracle_->count(); ++copy) oracle_->of(static_cast<int>(copy)).replay(routing);
}

int VerifiedRank::trained_copies() const {
  return trainer_.strategy().layout().apart ? trainer_.strategy().copies() : 1;
}

// Of the gradients of each copy, as its first rank reports it.
std::vector<double> VerifiedRank::norms(const StepReport& report) {
  Communicator& world = trainer_.world();
  const ArenaPtr host = trainer_.arena()->host();
  const Tensor all = Tensor::empty({world.size()}, DType::float64, host);
  world.all_gather(Tensor::of<double>(std::vector<double>{report.grad_norm}, {1}, host), all);
  std::vector<double> out;
  for (int copy = 0; copy < trained_copies(); ++copy)
    out.push_back(all.data<double>()[copy * static_cast<int>(job_.plan.cp * job_.plan.tp)]);
  return out;
}

// The counts of all axes of one rank, and of its copies to the GPU, as one list.
std::vector<int64_t> VerifiedRank::counts_now() {
  std::vector<int64_t> out;
  for (const Communicator* axis : trainer_.communicators())
    for (const OpCount& c : axis->counts()) out.insert(out.end(), {c.calls, c.sent});
  const OpCount& copied = trainer_.strategy().copied();
  out.insert(out.end(), {copied.calls, copied.sent});
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

// Where copies that several ranks hold are not equal, each rank of the data axis shows its own.
void VerifiedRank::look_at_copies() {
  std::string cause;
  try {
    check_replicas(trainer_);
  } catch (const Error& e) {
    if (e.status() != Status::communication || dynamic_cast<const CommError*>(&e)) throw;
    cause = e.what();
  }
  if (trainer_.world().max(cause.empty() ? 0 : 1) == 0) return;
  note_copies(cause);
  for (int copy = 1; trained_copies() == 1 && copy < trainer_.strategy().copies(); ++copy) {
    const std::vector<NamedTensor> values = whole_values(trainer_, copy), state = whole_state(trainer_, copy);
    if (oracle_) compare_kept(trainer_.steps_done(), values, state, copy);
  }
}

// Rank 0 hears what each rank has found.
void VerifiedRank::note_copies(const std::string& mine) {
  Communicator& world = trainer_.world();
  const ArenaPtr host = trainer_.arena()->host();
  constexpr int64_t kLength = 256;
  std::vector<int32_t> letters(mine.begin(), mine.end());
  letters.resize(kLength);
  const Tensor all = Tensor::empty({kLength * world.size()}, DType::int32, host);
  world.all_gather(Tensor::of<int32_t>(letters, {kLength}, host), all);
  if (!oracle_) return;
  if (result_.seen.copies_step == 0) result_.seen.copies_step = trainer_.steps_done();
  for (int64_t r = 0; r < world.size(); ++r) {
    const int32_t* const from = all.data<int32_t>() + r * kLength;
    std::string text(from, std::find(from, from + kLength, 0));
    std::vector<std::string>& known = result_.seen.copies;
    if (!text.empty() && std::ranges::find(known, text) == known.end()) known.push_back(std::move(text));
  }
}

// What each rank counted and holds goes to rank 0.
void VerifiedRank::finish() {
  Communicator& world = trainer_.world();
  const ArenaPtr& arena = trainer_.arena();
  const auto held = [&](Category c) { return arena->usage(c).live; };
  const std::vector<int64_t> mine = {held(Category::parameters), held(Category::gradients),
                                     held(Category::optimizer),  peak_,
                                     trainer_.peak_in_flight(),  given_->step,
                                     given_->sequence,           given_->sequences};
  const auto width = std::ssize(mine);
  const ArenaPtr host = arena->host();
  const Tensor counts = Tensor::of<int64_t>(counts_, {std::ssize(counts_)}, host);
  const Tensor own = Tensor::of<int64_t>(mine, {width}, host);
  const Tensor all = Tensor::empty({width * world.size()}, DType::int64, host);
  const Tensor most = counts.clone();
  world.all_reduce(counts);
  world.all_reduce(most, Reduction::max);
  world.all_gather(own, all);
  if (!oracle_) return;
  const Routing& routing = replays_routing(job_) ? replayed_ : oracle_->of(0).routing();
  result_.expected_sent = expected_bytes(job_, job_.optim.steps, routing.leaving);
  result_.imbalance = std::max(1.0, routing.most);
  for (size_t copy = 0; copy < oracle_->count(); ++copy) {
    const Reference& reference = oracle_->of(static_cast<int>(copy));
    result_.strayed += reference.strayed();
    result_.stray_margin = std::max(result_.stray_margin, reference.stray_margin());
  }
  const int64_t* c = counts.data<int64_t>();
  const int64_t* busiest = most.data<int64_t>();
  for (const Communicator* axis : trainer_.communicators())
    for (int op = 0; op < kOps; ++op, c += 2, busiest += 2)
      if (c[0] > 0)
        result_.sent.push_back({axis->axis(), std::string(name_of(static_cast<Op>(op))), c[0], c[1], busiest[1]});
  if (const auto copies = expected_copies(job_, job_.optim.steps)) result_.expected_sent.push_back(*copies);
  if (c[0] > 0) result_.sent.push_back({"host", "copy_to_gpu", c[0], c[1], busiest[1]});
  expected_ = memory_of_ranks(job_);
  for (int r = 0; r < world.size(); ++r) note_rank(r, all.data<int64_t>() + r * width);
}

void VerifiedRank::note_rank(int rank, const int64_t* m) {
  result_.held.push_back({m[0], m[1], m[2]});
  result_.peak.push_back(m[3]);
  const int64_t alike = job_.plan.ranks() / job_.plan.pp;  // ranks with the same stages
  // What passes hold grows with the rows that its experts get, at most as these do.
  const RankMemory& expected = expected_.at(static_cast<size_t>(rank));
  const auto more = static_cast<int64_t>((result_.imbalance - 1) *
                                         static_cast<double>(expected.activations + expected.communication));
  result_.expected_peak.push_back(expected.total() + more + library_workspace());
  if (rank % alike == 0) result_.in_flight.push_back(m[4]);
  if (m[7] > 0) result_.seen.given.push_back({rank, static_cast<int>(rank / alike), m[5], m[6], m[7]});
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
