// Routing, and execution of the experts on their rows.
#include "nn/experts/experts.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"

namespace tessera {

namespace {

MixtureOfExperts::Options checked(MixtureOfExperts::Options o) {
  o.mlp.bias = false;
  const ExpertConfig& e = o.experts;
  if (e.count < 1) throw FieldError("experts", "expected at least 1, got " + std::to_string(e.count));
  if (e.per_token < 1 || e.per_token > e.count)
    throw FieldError("experts_per_token",
                     "expected 1 to " + std::to_string(e.count) + " (`experts`), got " + std::to_string(e.per_token));
  if (e.shared < 0) throw FieldError("shared_experts", "expected at least 0, got " + std::to_string(e.shared));
  if (!(e.capacity >= 0)) throw FieldError("expert_capacity", "expected 0 or a positive number");
  return o;
}

int64_t count_elements(Module& module) {
  int64_t n = 0;
  for (const Linear* l : module.all<Linear>()) n += l->weight.value().numel();
  return n;
}

}  // namespace

MixtureOfExperts::MixtureOfExperts(int64_t channels, const Options& o)
    : options_(checked(o)),
      router_(child<Linear>("router", channels, o.experts.count, Linear::Options{.bias = false})),
      shared_(nullptr),
      here_(o.experts.count),
      load_{std::vector<int64_t>(static_cast<size_t>(o.experts.count))} {
  const auto make = [&](const std::string& name, int64_t hidden) -> Module& {
    if (o.mlp.activation.gated) return child<GatedMlp>(name, channels, hidden, options_.mlp);
    return child<Mlp>(name, channels, hidden, options_.mlp);
  };
  if (o.experts.shared > 0) shared_ = &make("shared", o.experts.shared * o.hidden);
  for (int64_t e = 0; e < o.experts.count; ++e) {
    Module& one = make("experts." + std::to_string(e), o.hidden);
    one.make_unit();
    in_.push_back(one.all<Linear>()[0]);
    out_.push_back(one.all<Linear>()[1]);
    for (Parameter* p : one.parameters()) p->is_expert = true;
    experts_.push_back(&one);
  }
}

int64_t MixtureOfExperts::idle_elements() const {
  return count_elements(*experts_[0]) * (options_.experts.count - options_.experts.per_token);
}

void MixtureOfExperts::set_local_experts(int64_t first, int64_t count, Exchange exchange) {
  first_ = first;
  here_ = count;
  exchange_ = std::move(exchange);
  for (int64_t e = 0; e < options_.experts.count; ++e)
    experts_[static_cast<size_t>(e)]->set_local(e >= first && e < first + count);
}

MixtureOfExperts::Load MixtureOfExperts::take_load() {
  return std::exchange(load_, {std::vector<int64_t>(experts_.size())});
}

// Applies experts [first, first + count) to consecutive blocks of counts[i] rows, repeating the experts for further
// counts.
Var MixtureOfExperts::through(Var rows, size_t first, size_t count, const std::vector<int64_t>& counts) {
  std::vector<Var> in, out;
  for (size_t e = first; e < first + count; ++e)
    for (const auto& [layer, weights] : {std::pair{in_[e], &in}, {out_[e], &out}}) {
      if (!layer->may_fuse() || layer->hooks.input || layer->hooks.output)
        throw Error("[experts] '" + layer->full_name() +
                    "' has a custom matmul, a wrapper or an adapter, which grouped GEMMs do not support");
      weights->push_back(layer->weights().w);
    }
  rows = grouped_linear(rows, in, counts);
  rows = activate(std::move(rows), options_.mlp.activation);
  return grouped_linear(rows, out, counts);
}

// Runs the experts as one grouped GEMM, or one by one.
Var MixtureOfExperts::run(const Var& rows, const std::vector<std::vector<int64_t>>& counts) {
  const size_t sources = counts.size(), first = static_cast<size_t>(first_), here = static_cast<size_t>(here_);
  std::vector<int64_t> sizes;
  for (const std::vector<int64_t>& of_source : counts) sizes.insert(sizes.end(), of_source.begin(), of_source.end());
  if (experts_[first]->may_fuse()) return through(rows, first, here, sizes);
  std::vector<Var> slices = split_rows(rows, sizes);
  for (size_t e = 0; e < here; ++e) {
    std::vector<Var> own;
    std::vector<int64_t> by_source;
    for (size_t s = 0; s < sources; ++s) {
      own.push_back(std::exchange(slices[s * here + e], Var()));
      by_source.push_back(sizes[s * here + e]);
    }
    const auto expert = [&](const Var& x) { return through(x, first + e, 1, by_source); };
    std::vector<Var> made = split_rows(experts_[first + e]->call(expert, join_rows(own)), by_source);
    for (size_t s = 0; s < sources; ++s) slices[s * here + e] = std::move(made[s]);
  }
  return join_rows(slices);
}

RouteOptions MixtureOfExperts::options_at(const StepInfo& at, int64_t sequences, int64_t tokens) const {
  const ExpertConfig& c = options_.experts;
  RouteOptions o{.per_token = c.per_token, .softmax_first = c.softmax == RouterSoftmax::all, .sequences = sequences};
  if (!at.training) return o;
  const auto total = static_cast<double>(at.sequences_total > 0 ? at.sequences_total : sequences);
  o.balance = c.balance_loss / total;
  o.z = c.z_loss / total;
  o.tokens = at.tokens_total;
  if (comm_.earlier) o.earlier = [this, sequences](const Tensor& chosen) { return comm_.earlier(chosen, sequences); };
  const auto capacity = [&](int64_t length) {
    return static_cast<int64_t>(
        std::ceil(c.capacity * static_cast<double>(c.per_token * length) / static_cast<double>(c.count)));
  };
  o.capacity = capacity(o.earlier ? o.tokens : tokens);
  for (const int64_t length : at.lengths) {
    const int64_t here = at.positions.empty()
                             ? std::min(length, tokens)
                             : std::ranges::count_if(at.positions, [=](int64_t position) { return position < length; });
    o.lengths.push_back({length, here, capacity(length)});
  }
  if (replay_) o.replayed = replay_(at.first_sequence, sequences);
  return o;
}

void MixtureOfExperts::note(const Routed& routed, const StepInfo& at) {
  for (size_t e = 0; e < experts_.size(); ++e) load_.rows[e] += routed.counts[e];
  load_.dropped += routed.dropped;
  load_.elsewhere += routed.elsewhere;
  load_.margin = std::max(load_.margin, routed.margin);
  if (records_passes_) load_.passes.push_back({at.first_sequence, routed.chosen.to_vector<int32_t>(), routed.counts});
}

Var MixtureOfExperts::forward(const Var& x) {
  const StepInfo at = step();
  Var logits = router_(x);
  if (comm_.logits) logits = comm_.logits(std::move(logits));
  const int64_t channels = x.dim(-1), sequences = x.dim(0), experts = options_.experts.count,
                tokens = logits.value().numel() / experts;
  const RouteOptions o = options_at(at, sequences, tokens / sequences);
  const RoutedVar routed = route(reshape(logits, {tokens, experts}), o, o.balance != 0 ? comm_.count : nullptr);
  logits = Var();
  if (at.training && grad_enabled()) note(routed.routed, at);
  const Var inner = comm_.enter ? comm_.enter(x) : x;
  Var rows = dispatch_rows(reshape(inner, {tokens, channels}), routed.routed);
  Exchanged there{.counts = {routed.routed.counts}};
  if (exchange_) there = exchange_(std::exchange(rows, Var()), routed.routed.counts);
  const Var of_all = shared_ ? (*shared_)(inner) : Var();  // overlaps with the row exchange in both passes
  if (exchange_) rows = there.rows();
  rows = run(rows, there.counts);
  if (exchange_) rows = there.back(rows);
  const Var weights = comm_.weights ? comm_.weights(routed.weights) : routed.weights;
  Var y = reshape(combine_rows(rows, weights, routed.routed), inner.shape());
  if (shared_) y = add(y, of_all);
  return comm_.leave ? comm_.leave(std::move(y)) : y;
}

}  // namespace tessera
