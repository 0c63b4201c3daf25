// A serial run with plain loops for every sum over ranks.
#include "verify/reference.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <numeric>
#include <vector>

#include "optim/exact_norm.h"
#include "optim/grad_norm.h"
#include "tensor/ops/elementwise.h"
#include "train/device.h"

namespace tessera {
namespace {

// Summation order of each algorithm, as documented in its file.

template <class T>
T plus(T a, T b) {
  return static_cast<T>(static_cast<Accumulate<T>>(a) + static_cast<Accumulate<T>>(b));
}

// Rank order, in float32, rounded once.
template <class T>
T in_rank_order(const std::vector<const T*>& x, int64_t i) {
  auto sum = static_cast<Accumulate<T>>(x[0][i]);
  for (size_t r = 1; r < x.size(); ++r) sum += static_cast<Accumulate<T>>(x[r][i]);
  return static_cast<T>(sum);
}

// Around the ring from `first`, rounded at every step.
template <class T>
T around(const std::vector<const T*>& x, size_t first, int64_t i) {
  T sum = x[first % x.size()][i];
  for (size_t r = 1; r < x.size(); ++r) sum = plus(sum, x[(first + r) % x.size()][i]);
  return sum;
}

// Pairwise tree over neighbours, rounded at every step.
template <class T>
T in_pairs(const std::vector<const T*>& x, int64_t i) {
  std::vector<T> sums;
  for (const T* rank : x) sums.push_back(rank[i]);
  for (size_t step = 1; step < sums.size(); step *= 2)
    for (size_t r = 0; r + step < sums.size(); r += 2 * step) sums[r] = plus(sums[r], sums[r + step]);
  return sums[0];
}

template <class T>
void sum_reduction(const std::vector<const T*>& x, T* out, const ReductionSpan& reduced, AdditionOrder order) {
  const auto ranks = static_cast<int>(x.size());
  int owner = 0;  // rank whose chunk contains element i
  for (int64_t i = reduced.range.begin; i < reduced.range.end; ++i) {
    while (i - reduced.range.begin >= chunk_range(reduced.count, ranks, owner).end) ++owner;
    if (order == AdditionOrder::around)
      out[i] = around(x, static_cast<size_t>(owner) + 1, i);
    else
      out[i] = order == AdditionOrder::pairs ? in_pairs(x, i) : in_rank_order(x, i);
  }
}

}  // namespace

void add_to(const Tensor& total, const Tensor& x) {
  with_floating(total.dtype(), "reference", [&](auto t) {
    using T = decltype(t);
    T* const a = total.data<T>();
    const T* const b = x.data<T>();
    for (int64_t i = 0; i < total.numel(); ++i) a[i] = plus(a[i], b[i]);
  });
}

namespace {

// Elements of `reduced`, summed in the algorithm's order.
void sum_in_order(const std::vector<Tensor>& ranks, const Tensor& out, const ReductionSpan& reduced,
                  Algorithm algorithm) {
  with_floating(out.dtype(), "reference", [&](auto t) {
    using T = decltype(t);
    std::vector<const T*> x;
    for (const Tensor& rank : ranks) x.push_back(rank.data<T>());
    sum_reduction(x, out.data<T>(), reduced, find_row(algorithm).order);
  });
}

}  // namespace

Tensor sum_over(const std::vector<Tensor>& ranks, const std::vector<ReductionSpan>& reductions, Algorithm algorithm) {
  Tensor out = ranks[0].clone();
  for (const ReductionSpan& reduced : reductions)
    if (ranks.size() > 1) sum_in_order(ranks, out, reduced, algorithm);
  return out;
}

namespace {

// The total may be on a GPU.
void add_to_any(Tensor total, const Tensor& x) {
  const Tensor here = total.on_host();
  add_to(here, x);
  if (total.device() != Device::cpu) total.copy_from(here);
}

// Searches backward from every token; int32 (B, T) starts, and each token's position in its document.
Documents documents_in(const Tensor& ids, int32_t end) {
  const int64_t tokens = ids.dim(1);
  Documents found{ids.clone(), ids.clone()};
  for (int64_t i = 0; i < ids.numel(); ++i) {
    const int64_t first = i - i % tokens;
    int64_t start = i;
    while (start > first && ids.data<int32_t>()[start - 1] != end) --start;
    found.starts.data<int32_t>()[i] = static_cast<int32_t>(start - first);
    found.positions.data<int32_t>()[i] = static_cast<int32_t>(i - start);
  }
  return found;
}

}  // namespace

Reference::Reference(const TrainConfig& job, Sequences sequences, SumOrder order)
    : job_(job),
      sequences_(std::move(sequences)),
      order_(std::move(order)),
      arena_(rank_arena(job.plan.device, 0, select_kernels(job.plan))),
      aside_(make_arena()),
      model_(full_model(job, sequences_.vocab)),
      schedule_(lr_schedule(job.optim)) {
  const DataOptions d = data_options(job);
  const std::vector<FlatUnit>& units = model_->materialize(d.seed, arena_, d.dtype, d.grad_dtype);
  if (order_.segments.empty())
    for (size_t u = 0; u < units.size(); ++u)
      if (units[u].trainable()) order_.segments.push_back({u});
  optimizer_ = make_optimizer(job_, model_->units());
}

std::vector<FlatUnit> Reference::trained() {
  std::vector<FlatUnit> out = model_->units();
  std::erase_if(out, [](const FlatUnit& unit) { return !unit.trainable(); });
  return out;
}

std::shared_ptr<const Routing> Reference::record_choices() {
  record_passes(*model_);
  choices_ = std::make_shared<Routing>(*model_, job_.optim.batch);
  return choices_;
}

// Null if the plan has no copy.
const FlatUnit* Reference::copied() {
  for (const SumOrder::Segment& segment : order_.segments)
    if (segment.copy) return &model_->units()[segment.unit];
  return nullptr;
}

double Reference::step_targets() const {
  return static_cast<double>(
      targets_of_step(sequences_, optimizer_->steps(), job_.optim.batch * model_->config.context));
}

// `ids` in host memory.
Documents Reference::documents(const Tensor& ids, int64_t first, const std::vector<int64_t>& lengths) const {
  const bool masks = job_.optim.document_mask;
  Documents made;
  if (masks && sequences_.starts) {
    made.starts = Tensor::empty({ids.dim(0), model_->config.context}, DType::int32, arena_->host());
    sequences_.starts(optimizer_->steps(), first, ids.dim(0), made.starts.data<int32_t>());
  }
  made.starts = padded_starts(made.starts, lengths, ids.dim(1), arena_->host());
  if (!masks) return {made.starts.defined() ? made.starts.to(arena_) : Tensor(), {}, true};
  if (made.starts.defined()) {
    made.positions = ids.clone();
    for (int64_t i = 0; i < ids.numel(); ++i)
      made.positions.data<int32_t>()[i] =
          std::max(static_cast<int32_t>(i % ids.dim(1)) - made.starts.data<int32_t>()[i], 0);
  } else {
    made = documents_in(ids, document_end(sequences_));
  }
  return {made.starts.to(arena_), made.positions.to(arena_)};
}

// Forward and backward. With a separate head gradient the graph is split before the head, whose use of the tied weight
// is differentiated separately.
double Reference::passes(const Tensor& ids, const Tensor& targets, Tensor& of_head) {
  const FlatUnit* const tied = copied();
  const double scale = 1.0 / step_targets();
  model_->clear_gradients();
  if (!tied) {
    const Loss loss = model_->head_loss(model_->hidden(ids), targets, scale);
    backward(loss.mean);
    model_->zero_missing_gradients();
    return loss.loss_sum;
  }
  const Var hidden = model_->hidden(ids), cut(hidden.value(), true);
  const Loss loss = model_->head_loss(cut, targets, scale);
  backward(loss.mean);
  of_head = tied->grads.clone();
  for (const Slot& slot : tied->slots) slot.parameter->var.clear_grad();
  backward(hidden, {.seed = cut.grad()});
  model_->zero_missing_gradients();
  return loss.loss_sum;
}

Tensor Reference::gradient(int rank, int64_t microbatch, double& loss_sum) {
  const int64_t size = job_.optim.batch / (order_.ranks * job_.plan.microbatches);
  return gradient_values((rank * job_.plan.microbatches + microbatch) * size, size, loss_sum);
}

// Gradient of `size` sequences in newly cleared buffers, in the plan's order.
Tensor Reference::gradient_values(int64_t first, int64_t size, double& loss_sum) {
  const int64_t context = model_->config.context;
  Tensor of_head;
  {
    const ArenaPtr host = arena_->host();
    const Tensor ids = Tensor::empty({size, context}, DType::int32, host),
                 targets = Tensor::empty({size, context}, DType::int32, host);
    sequences_.load(optimizer_->steps(), first, size, ids.data<int32_t>(), targets.data<int32_t>());
    const std::vector<int64_t> lengths = sequences_.lengths(optimizer_->steps(), first, size);
    const int64_t tokens = padded_tokens(job_, lengths);
    const auto some = [&](const Tensor& all) { return all.narrow(1, 0, tokens).contiguous(); };
    model_->set_step({.seed = static_cast<uint64_t>(job_.optim.seed),
                      .step = optimizer_->steps(),
                      .first_sequence = first,
                      .sequences_total = job_.optim.batch,
                      .training = true,
                      .tokens_total = context,
                      .documents = documents(some(ids), first, lengths),
                      .lengths = lengths});
    loss_sum += passes(some(ids).to(arena_), some(targets).to(arena_), of_head);
  }
  routed_.clear();
  for (MixtureOfExperts* mixture : model_->all<MixtureOfExperts>()) {
    const MixtureOfExperts::Load load = mixture->take_load();
    if (choices_) choices_->place(routed_.size(), load.passes);
    routed_.push_back(load.rows);
    rerouted_tokens_ += load.elsewhere;
    routing_margin_ = std::max(routing_margin_, load.margin);
  }
  int64_t total = 0;
  std::vector<Tensor> slices;
  for (const SumOrder::Segment& segment : order_.segments) {
    slices.push_back(segment.copy ? of_head : model_->units()[segment.unit].grads);
    total += slices.back().numel();
  }
  Tensor all = Tensor::empty({total}, slices.at(0).dtype(), aside_);
  int64_t at = 0;
  for (const Tensor& slice : slices) {
    all.narrow(0, at, slice.numel()).copy_from(slice);
    at += slice.numel();
  }
  return all;
}

void Reference::take(const Tensor& total) {
  int64_t at = 0;
  Tensor of_head;
  for (const SumOrder::Segment& segment : order_.segments) {
    Tensor to = model_->units()[segment.unit].grads;
    const Tensor sum = total.narrow(0, at, to.numel());
    at += sum.numel();
    if (segment.copy)
      of_head = sum;
    else
      to.copy_from(sum);
  }
  if (of_head.defined()) add_to_any(copied()->grads, of_head);
}

// Spans of experts, or of the other units, in the layout.
std::vector<ReductionSpan> Reference::segment_reductions(bool of_experts) const {
  std::vector<ReductionSpan> out;
  int64_t at = 0;
  for (const SumOrder::Segment& segment : order_.segments) {
    const FlatUnit& unit = model_->units()[segment.unit];
    const int64_t size = unit.grads.numel();
    if (unit.slots[0].parameter->is_expert == of_experts) out.push_back({{at, at + size}, size});
    at += size;
  }
  return out;
}

// An expert-parallel group has one sum per expert over all its tokens, stored for the group's first rank.
void Reference::sum_experts(const std::vector<Tensor>& ranks) {
  for (size_t r = 0; order_.ep > 1 && r < ranks.size(); ++r) {
    const size_t first = r - r % static_cast<size_t>(order_.ep);
    for (const ReductionSpan& segment : segment_reductions(true))
      if (r > first)
        add_to(ranks[first].narrow(0, segment.range.begin, segment.range.size()),
               ranks[r].narrow(0, segment.range.begin, segment.range.size()));
  }
}

Tensor Reference::sum_over_ranks(const std::vector<Tensor>& ranks) const {
  if (order_.ep == 1) return sum_over(ranks, order_.reductions, order_.algorithm);
  std::vector<Tensor> firsts;
  for (size_t r = 0; r < ranks.size(); r += static_cast<size_t>(order_.ep)) firsts.push_back(ranks[r]);
  Tensor out = ranks[0].clone();
  for (const ReductionSpan& segment : segment_reductions(false)) sum_in_order(ranks, out, segment, order_.algorithm);
  for (const ReductionSpan& segment : segment_reductions(true)) sum_in_order(firsts, out, segment, order_.algorithm);
  return out;
}

// `rows` of one micro-batch, by rank, layer and expert.
void Reference::note_routing(const std::vector<std::vector<std::vector<int64_t>>>& rows) {
  const size_t e = static_cast<size_t>(order_.ep), layers = rows[0].size();
  for (size_t layer = 0; layer < layers; ++layer)
    for (size_t group = 0; group < rows.size(); group += e)
      for (size_t owner = 0; owner < e; ++owner) {
        int64_t got = 0, even = 0;
        for (size_t source = 0; source < e; ++source) {
          const std::vector<int64_t>& of_source = rows[group + source][layer];
          const size_t here = of_source.size() / e;
          const auto begin = of_source.begin() + static_cast<int64_t>(owner * here);
          const int64_t sent = std::accumulate(begin, begin + static_cast<int64_t>(here), int64_t{0});
          got += sent;
          even += std::accumulate(of_source.begin(), of_source.end(), int64_t{0});
          if (source != owner) routing_.leaving += sent;
        }
        if (even > 0)
          routing_.imbalance = std::max(routing_.imbalance,
                                        static_cast<double>(got) * static_cast<double>(e) / static_cast<double>(even));
      }
}

// Adds the losses of ranks from `first` on to `losses`.
Tensor Reference::sum_of_group(int first, int ranks, std::vector<double>& losses) {
  std::vector<Tensor> of_rank(static_cast<size_t>(ranks));
  Tensor total;
  const auto add = [](Tensor& to, const Tensor& x, int64_t microbatch) {
    if (microbatch == 0)
      to = x;
    else
      add_to(to, x);
  };
  for (int64_t m = 0; m < job_.plan.microbatches; ++m) {
    std::vector<Tensor> fresh;
    std::vector<std::vector<std::vector<int64_t>>> routed;
    for (int rank = first; rank < first + ranks; ++rank) {
      fresh.push_back(gradient(rank, m, losses[static_cast<size_t>(rank)]));
      routed.push_back(routed_);
    }
    note_routing(routed);
    sum_experts(fresh);
    if (order_.every_microbatch) add(total, sum_over_ranks(fresh), m);
    for (size_t r = 0; r < fresh.size() && !order_.every_microbatch; ++r) add(of_rank[r], fresh[r], m);
  }
  return order_.every_microbatch ? total : sum_over_ranks(of_rank);
}

StepReport Reference::compute_gradients() {
  const auto ranks = static_cast<size_t>(order_.ranks);
  std::vector<double> losses(ranks, 0);
  const int group = order_.group > 0 ? order_.group : order_.ranks;
  std::vector<Tensor> of_group;
  if (order_.alone >= 0) {
    of_group = {sum_of_group(order_.alone, 1, losses)};
    scale_(of_group[0], order_.ranks);
  } else {
    for (int first = 0; first < order_.ranks; first += group) of_group.push_back(sum_of_group(first, group, losses));
  }
  take(sum_over(of_group, order_.between, order_.between_algorithm));
  StepReport report;
  double loss = losses[0];
  for (size_t r = 1; r < ranks; ++r) loss += losses[r];
  loss_sum_ = loss;
  report.loss = loss / step_targets();
  report.grad_norm = job_.plan.layout_invariant ? exact_grad_norm(model_->units()) : grad_norm(model_->units());
  report.lr = schedule_.at(optimizer_->steps());
  report.step = optimizer_->steps() + 1;
  return report;
}

void Reference::compute_sequence_gradients(int64_t sequence) {
  double loss = 0;
  take(gradient_values(sequence, 1, loss));
}

void Reference::update(const StepReport& report) {
  optimizer_->step(report.lr, clip_factor(report.grad_norm, job_.optim.clip));
}

void Reference::adopt(const std::vector<NamedTensor>& gradients) {
  size_t at = 0;
  for (const FlatUnit& u : trained())
    for (const Slot& slot : u.slots) slot.full_view(u.grads).copy_from(gradients.at(at++).tensor);
}

}  // namespace tessera
