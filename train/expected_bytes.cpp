// Sizes of model shards, and traffic of collectives.
#include "train/expected_bytes.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "models/layout.h"
#include "models/stages.h"
#include "nn/adapters/lora.h"
#include "optim/exact_norm.h"
#include "parallel/comm/call.h"
#include "parallel/comm/fake_transport.h"
#include "parallel/matrix_owners.h"

namespace tessera {
namespace {

void count_adapters(ShardSizes& sizes, Module& unit) {
  for (const Lora* l : unit.all<Lora>())
    ++(l->b.parameter(l->b.weight).shard.is_replicated() ? sizes.row_adapters : sizes.column_adapters);
}

bool has(const Module::Unit& unit, const Var& weight) {
  return std::ranges::any_of(unit.slots, [&](const Slot& slot) { return &slot.parameter->var == &weight; });
}

// Sizes by pipeline rank for one tp rank, computed with fake ranks.
std::vector<ShardSizes> parameter_sizes(const TrainConfig& job, const PlanSizes& s, const std::vector<Range>& layers,
                                        int tp) {
  Communicator axis(std::make_unique<FakeTransport>(tp, static_cast<int>(s.plan.tp)), "tp");
  Communicator ep(std::make_unique<FakeTransport>(0, static_cast<int>(s.plan.ep)), "ep");
  ModelConfig config = s.config;
  config.tie_copies = s.plan.tie_copies || s.schedule.stages > 1;
  const std::unique_ptr<LanguageModel> model = build_model(job.make, config);
  model->place({.tp = &axis, .between = s.plan.sp ? S(1, s.tokens) : I, .ep = &ep});
  std::vector<ShardSizes> by_rank(static_cast<size_t>(s.plan.pp));
  const auto part_with = [&](int stage) -> ShardSizes& {
    return by_rank[static_cast<size_t>(s.schedule.rank_of_stage[static_cast<size_t>(stage)])];
  };
  part_with(0).first = true;
  part_with(s.schedule.stages - 1).last = true;
  for (int stage = 0; stage < s.schedule.stages; ++stage)
    part_with(stage).layers += layers[static_cast<size_t>(stage)].size();
  const std::vector<Module::Unit> units = model->layout();
  const std::vector<int64_t> at = model->layers_of_units();
  const std::vector<int> stages = stages_of_units(*model, layers);
  for (size_t u = 0; u < units.size(); ++u) {
    ShardSizes& sizes = part_with(stages[u]);
    UnitSizes unit;
    unit.table = units[u].slots[0].parameter->is_tied();
    unit.layer = at[u];
    unit.trainable = units[u].trainable;
    unit.value = units[u].packed ? 1 : s.value;
    unit.state = unit.trainable ? state_bytes(job.optim, units[u].matrices) : 0;
    if (units[u].is_expert()) unit.ep = s.plan.ep;
    const bool adapters = unit.trainable && config.lora.rank > 0;
    int64_t replicated = 0, norms = 0, head_norms = 0;
    for (const Slot& slot : units[u].slots) {
      unit.parameters.push_back(slot.size);
      if (units[u].matrices) unit.matrices.push_back(slot.parameter->full_shape);
      const ShardSpec& shard = slot.parameter->shard;
      if (shard.is_replicated()) ++replicated;
      const bool matrix = !shard.is_replicated() && slot.parameter->full_shape.ndim() == 2 && !units[u].is_expert();
      if (matrix && !adapters && at[u] >= 0 && at[u] < config.layers) ++(shard.dim == 0 ? sizes.columns : sizes.rows);
    }
    if (adapters) count_adapters(sizes, *units[u].module);
    int64_t routers = 0;
    for (MixtureOfExperts* mixture : units[u].module->all<MixtureOfExperts>()) {
      if (!has(units[u], mixture->router().weight)) continue;
      ++routers;
      const bool pair = mixture->options().experts.shared > 0 && s.plan.tp > 1;  // one pair with routed experts
      sizes.columns -= pair ? 1 : 0;
      sizes.rows -= pair ? 1 : 0;
    }
    sizes.routers += routers;
    for (Norm* norm : units[u].module->all<Norm>()) norms += static_cast<int64_t>(norm->parameters().size());
    for (const Attention* attention : units[u].module->all<Attention>()) head_norms += attention->norm_q ? 2 : 0;
    if (config.lora.rank == 0 && !units[u].matrices) {  // otherwise only adapters' shards are trainable
      sizes.norms += norms;
      sizes.head_norms += head_norms;
      (at[u] < 0 ? sizes.tables : sizes.biases) += replicated - norms - head_norms - routers;
    }
    // A lookup table is gathered once, other units in forward and in backward, a tied table three times. Recomputation
    // gathers an expert again, since it is a unit inside its layer.
    const bool again = units[u].is_expert() && config.recompute == Recompute::block;
    unit.uses = at[u] >= 0 ? (again ? 3 : 2) : unit.table && !config.tie_copies ? 3 : 1;
    sizes.units.push_back(std::move(unit));
  }
  return by_rank;
}

}  // namespace

int64_t UnitSizes::size() const {
  int64_t sum = 0;
  for (const int64_t p : parameters) sum += round_up(p, kSlot);
  return sum;
}

// Fragments as in unit_fragments() of train/model_part.cpp.
int64_t ShardSizes::fragment_size(int64_t fragment, int64_t fragments, int64_t all_layers) const {
  int64_t sum = 0;
  for (const UnitSizes& u : units) {
    const int64_t layer = u.table || u.layer < 0 ? 0 : std::min(u.layer, all_layers - 1);
    if (u.trainable && layer % fragments == fragment) sum += u.size();
  }
  return sum;
}

Schedule shortest_schedule(const Plan& plan) {
  Plan few = plan;
  if (plan.schedule_file.empty()) few.microbatches = plan.schedule == ScheduleKind::interleaved ? plan.pp : 1;
  return make_schedule(few);
}

PlanSizes::PlanSizes(const TrainConfig& job)
    : plan(job.plan),
      config(model_config(job, job.model.vocab)),
      schedule(shortest_schedule(plan)),
      data(plan.dp * plan.cp),
      cut(shard_group_size(plan)),
      m(plan.microbatches) {
  const DataOptions d = data_options(job);
  const Optimisation& o = job.optim;
  value = element_size(d.dtype);
  grad = element_size(d.grad_dtype);
  wide = d.dtype == DType::float64 ? 8 : 4;
  if (const auto* const ddp = std::get_if<DdpOptions>(&d.strategy)) bucket_bytes = ddp->bucket_bytes;
  documents = o.document_mask;
  sequences = o.batch / (plan.dp * m);
  tokens = config.context / plan.cp;
  tied_over_ranks = schedule.rank_of_stage.front() != schedule.rank_of_stage.back();
  const std::unique_ptr<LanguageModel> full = build_model(job.make, config);
  units = static_cast<int64_t>(full->layout().size());
  const std::vector<Range> layers = split_layers(*full, schedule.stages);
  shards.resize(static_cast<size_t>(plan.pp));
  // If the first and last tp ranks have equal sizes, all have.
  const auto of_rank = [&](int64_t t) { return parameter_sizes(job, *this, layers, static_cast<int>(t)); };
  const std::vector<ShardSizes> first = of_rank(0), last = plan.tp > 1 ? of_rank(plan.tp - 1) : first;
  for (int64_t t = 0; t < plan.tp; ++t) {
    const bool middle = t > 0 && t + 1 < plan.tp && first != last;
    const std::vector<ShardSizes> here = middle ? of_rank(t) : t + 1 < plan.tp ? first : last;
    for (size_t p = 0; p < shards.size(); ++p) shards[p].push_back(here[p]);
  }
}

int PlanSizes::largest_tp_rank() const {
  std::vector<std::pair<int64_t, int64_t>> sums(shards[0].size());
  for (const std::vector<ShardSizes>& of_stage : shards)
    for (size_t t = 0; t < sums.size(); ++t) {
      sums[t].first += of_stage[t].value_bytes(cut);
      sums[t].second += of_stage[t].value_bytes();
    }
  return static_cast<int>(std::ranges::max_element(sums) - sums.begin());
}

// Accumulates traffic by axis and operation, and the bytes of the busiest rank: everything added between two calls of
// next_ranks() is executed by the same ranks.
class Sent {
 public:
  explicit Sent(Algorithm algorithm) : algorithm_(algorithm), through_root_(algorithm == Algorithm::root) {}

  // `calls` collectives on each of `ranks` ranks; all send `bytes` in total, the busiest one `peak`.
  void add(const std::string& axis, Op op, int64_t ranks, int64_t calls, int64_t bytes, std::optional<int64_t> peak) {
    if (ranks < 2 || calls == 0) return;
    Entry& entry = sent_[{axis, op}];
    entry.calls += ranks * calls * steps_ * groups_;
    entry.bytes += bytes * steps_ * groups_;
    own(axis, op, algorithm_ == Algorithm::native ? std::nullopt : peak);
  }
  void own(const std::string& axis, Op op, std::optional<int64_t> peak) {
    Entry& entry = sent_[{axis, op}];
    entry.known = entry.known && peak;
    entry.own += peak.value_or(0) * steps_;
  }
  void all_reduce(const std::string& axis, int64_t n, int64_t calls, int64_t bytes, int64_t element) {
    std::optional<int64_t> max_bytes = busiest_of_sum(n, bytes, element);
    if (max_bytes) max_bytes = *max_bytes * calls;
    add(axis, Op::all_reduce, n, calls, 2 * (n - 1) * bytes * calls, max_bytes);
  }
  // Float64 reductions (e.g. a norm), always by the direct algorithm. If the algorithm of tp or cp reductions
  // has a different busiest rank, the busiest rank of the axis is unknown.
  void reduce_directly(const std::string& axis, int64_t n, int64_t bytes, int64_t calls = 1) {
    const int64_t max_bytes = in_chunks(n, bytes, 8);
    const bool other = (axis == "tp" || axis == "cp") && busiest_of_sum(n, bytes, 8) != max_bytes && bytes / 8 % n > 0;
    add(axis, Op::all_reduce, n, calls, 2 * (n - 1) * bytes * calls,
        other ? std::nullopt : std::optional(max_bytes * calls));
  }
  // Collectives with equal chunks. Through a root, rank 0 forwards gathered chunks and the others send full arrays.
  void reduce_scatter(const std::string& axis, int64_t n, int64_t calls, int64_t bytes) {
    add(axis, Op::reduce_scatter, n, calls, half(n, bytes) * calls,
        (through_root_ ? bytes : bytes - bytes / n) * calls);
  }
  void all_gather(const std::string& axis, int64_t n, int64_t calls, int64_t bytes) {
    const int64_t max_bytes = through_root_ ? (n - 1) * bytes : bytes - bytes / n;
    add(axis, Op::all_gather, n, calls, half(n, bytes) * calls, max_bytes * calls);
  }
  // `max_bytes`: bytes of the busiest rank.
  void messages(const std::string& axis, int64_t count, int64_t bytes, int64_t max_bytes) {
    if (count == 0) return;
    for (const Op op : {Op::send, Op::recv}) {
      Entry& entry = sent_[{axis, op}];
      entry.calls += count * steps_ * groups_;
      entry.bytes += op == Op::send ? count * bytes * steps_ * groups_ : 0;
    }
    own(axis, Op::send, max_bytes);
  }
  // Bytes sent by the busiest of n ranks in an all-reduce. With chunks, that is the last rank, whose chunk is largest;
  // on a ring, known only for equal chunks.
  std::optional<int64_t> busiest_of_sum(int64_t n, int64_t bytes, int64_t element) const {
    if (algorithm_ == Algorithm::root) return (n - 1) * bytes;
    if (algorithm_ == Algorithm::tree) return std::bit_width(static_cast<uint64_t>(n - 1)) * bytes;
    if (algorithm_ == Algorithm::ring && n > 2 && bytes / element % n > 0) return {};
    return in_chunks(n, bytes, element);
  }
  static int64_t in_chunks(int64_t n, int64_t bytes, int64_t element) {
    return bytes + (n - 2) * ((bytes / element + n - 1) / n * element);
  }
  bool by_tree() const { return algorithm_ == Algorithm::tree; }

  // Multiplies subsequent additions by `steps`, and by the number of groups that execute them.
  void in_steps(int64_t steps) { steps_ = steps; }
  void in_groups(int64_t groups) { groups_ = groups; }
  void next_ranks() {
    for (auto& [key, entry] : sent_) entry.max_bytes = std::max(entry.max_bytes, std::exchange(entry.own, 0));
  }

  std::vector<SentBytes> result() const {
    std::vector<SentBytes> out;
    for (const std::string axis :
         {"world", "pp", "dp", "cp", "tp", "dp+cp", "dp.shard", "dp.replicate", "ep", "edp", "tied"})
      for (const auto& [key, entry] : sent_)
        if (key.first == axis)
          out.push_back({axis, std::string(to_string(key.second)), entry.calls, entry.bytes,
                         entry.known && axis != "ep" && axis != "edp" ? entry.max_bytes : 0});  // depends on routing
    return out;
  }

 private:
  struct Entry {
    int64_t calls = 0, bytes = 0, own = 0, max_bytes = 0;
    bool known = true;
  };
  int64_t half(int64_t n, int64_t bytes) const { return (n - 1) * bytes + (through_root_ ? (n - 1) * bytes / n : 0); }
  Algorithm algorithm_;
  bool through_root_;
  int64_t steps_ = 1, groups_ = 1;
  std::map<std::pair<std::string, Op>, Entry> sent_;
};

namespace {

// Number of DDP's all-reduces. A bucket collects complete parameters in reverse order until it is full or the reducing
// ranks change, i.e. between experts and other parameters.
struct Buckets {
  int64_t common = 0, experts = 0;
};
Buckets buckets(const std::vector<UnitSizes>& units, int64_t element, int64_t bucket_bytes) {
  Buckets out;
  int64_t filled = 0, ep = 0;
  for (auto u = units.rbegin(); u != units.rend(); ++u)
    for (auto p = u->parameters.rbegin(); u->trainable && p != u->parameters.rend(); ++p) {
      if (ep != u->ep || filled * element >= bucket_bytes) {
        ++(u->ep > 1 ? out.experts : out.common);
        filled = 0;
        ep = u->ep;
      }
      filled += round_up(*p, UnitSizes::kSlot);
    }
  if (out.common + out.experts == 0) out.common = 1;
  return out;
}

// Rank 0 scatters ids, losses and the logits' gradient, gathers logits, reduces gradients, broadcasts parameters.
void add_dataparallel(Sent& out, const PlanSizes& s, const ShardSizes& sizes) {
  const int64_t n = s.data, others = n - 1, tokens = s.m * s.sequences * s.tokens;  // tokens of a rank per step
  const int64_t logits = tokens * s.config.vocab * s.value;
  const int64_t values = sizes.full(true) * s.value, dealt = others * (4 * tokens + 8 * s.m + logits);
  out.reduce_directly("dp", n, 8 * std::ssize(sizes.units));  // the norm
  out.add("dp", Op::broadcast, n, 1, others * values, others * values);
  out.add("dp", Op::reduce, n, 1, others * sizes.full(true) * s.grad, sizes.full(true) * s.grad);
  out.add("dp", Op::gather, n, s.m, others * logits, logits);
  out.add("dp", Op::scatter, n, 3 * s.m, dealt, dealt);
}

// Each server reduces its shard of every unit and broadcasts it.
void add_server(Sent& out, const PlanSizes& s, int64_t servers, const ShardSizes& sizes) {
  const int64_t n = s.data, others = n - 1;
  int64_t shards = 0, blocks = 0, with_blocks = 0, max_bytes = 0, min_elements = servers < n ? 0 : sizes.full(true);
  std::vector<int64_t> served(static_cast<size_t>(servers), 0), own = served;  // norm blocks; elements
  for (const UnitSizes& u : sizes.units)
    for (int64_t k = 0; u.trainable && k < servers; ++k) {
      const int64_t size = std::clamp(u.size() - k * u.shard(servers), int64_t{0}, u.shard(servers));
      shards += size > 0 ? 1 : 0;
      served[static_cast<size_t>(k)] += (size + UnitSizes::kBlock - 1) / UnitSizes::kBlock;
      own[static_cast<size_t>(k)] += size;
    }
  for (size_t k = 0; k < served.size(); ++k) {
    blocks += served[k];
    with_blocks += served[k] > 0 ? 1 : 0;
    max_bytes = std::max(max_bytes, own[k] * s.value + 8 * served[k]);
    min_elements = std::min(min_elements, own[k]);
  }
  out.add("dp", Op::broadcast, n, shards + with_blocks, others * (sizes.full(true) * s.value + 8 * blocks),
          others * max_bytes);
  out.add("dp", Op::reduce, n, shards, others * sizes.full(true) * s.grad, (sizes.full(true) - min_elements) * s.grad);
}

// One ZeRO group. Each expert is sharded over the ranks that hold it.
void add_shards(Sent& out, const PlanSizes& s, const Plan& p, const ShardSizes& sizes, const std::string& axis) {
  const int64_t n = s.cut;
  int64_t of_experts = 0;
  for (const UnitSizes& u : sizes.units)
    for (int64_t group = 0; group < u.ep; ++group) {
      const std::string over = u.ep > 1 ? "edp" : axis;
      const int64_t ranks = n / u.ep, once = u.trainable ? 1 : 0;  // once: after each update
      if (u.trainable) out.reduce_scatter(over, ranks, p.zero == ZeroStage::one ? 1 : s.m, u.padded(n) * s.grad);
      out.all_gather(over, ranks, p.zero == ZeroStage::three ? u.uses * s.m : once, u.padded(n) * u.value);
      if (u.ep > 1 && group == 0 && u.trainable) of_experts += u.padded(n);
    }
  if (p.layout_invariant) return;  // the norm is part of a reduction over the world
  if (s.plan.tp > 1) {
    out.reduce_directly(axis, n, 8 * std::ssize(sizes.units));  // the norm
    for (int64_t group = 0; p.ep > 1 && group < p.ep; ++group)
      out.reduce_directly("edp", n / p.ep, 8 * std::ssize(sizes.units));
    return;
  }
  out.all_gather(axis, n, 1, (sizes.padded(n, true) - of_experts) / UnitSizes::kBlock * 8);
  for (int64_t group = 0; of_experts > 0 && group < p.ep; ++group)
    out.all_gather("edp", n / p.ep, 1, of_experts / UnitSizes::kBlock * 8);
}

// Context ranks reduce gradients; fragments are synchronized over the data axis.
void add_alone(Sent& out, const PlanSizes& s, const ShardSizes& sizes, int64_t steps, const SyncSteps& sync) {
  const Plan& p = s.plan;
  out.in_groups(p.dp);
  out.all_reduce("cp", p.cp, 1, sizes.full(true) * s.grad, s.grad);
  out.in_groups(p.cp);
  for (int64_t fragment = 0; fragment < p.sync_fragments; ++fragment) {
    const int64_t size = sizes.fragment_size(fragment, p.sync_fragments, s.config.layers);
    out.in_steps(sync.count(fragment, steps));
    if (size > 0) out.all_reduce("dp", p.dp, 1, size * s.grad, s.grad);
  }
  out.in_steps(steps);
  out.in_groups(1);
}

void add_data(Sent& out, const PlanSizes& s, const Plan& p, const ShardSizes& sizes) {
  const std::string axis = s.plan.cp > 1 ? "dp+cp" : "dp";
  const int64_t n = s.data;
  if (p.zero == ZeroStage::none) {
    const Buckets calls = buckets(sizes.units, s.grad, s.bucket_bytes);
    int64_t of_experts = 0;
    for (const UnitSizes& u : sizes.units) of_experts += u.ep > 1 && u.trainable ? u.size() : 0;
    const int64_t few = n / p.ep, common = (sizes.full(true) - of_experts) * s.grad;
    // Whether the chunks of the buckets add up to those of one array.
    const bool alike = calls.common == 1 || UnitSizes::kSlot % n == 0;
    out.add(axis, Op::all_reduce, n, calls.common, 2 * (n - 1) * common,
            alike ? out.busiest_of_sum(n, common, s.grad) : std::nullopt);
    out.add("edp", Op::all_reduce, few, calls.experts * p.ep, 2 * (few - 1) * of_experts * s.grad * p.ep, {});
    return;
  }
  out.in_groups(n / s.cut);
  add_shards(out, s, p, sizes, s.cut < n ? "dp.shard" : axis);
  out.in_groups(s.cut);
  for (const UnitSizes& u : sizes.units)
    if (u.trainable && s.cut < n) out.all_reduce("dp.replicate", n / s.cut, 1, u.shard(s.cut) * s.grad, s.grad);
  out.in_groups(1);
}

// Matrices sent to their owners and back, for one pipeline and tensor rank: matrices of experts or, with ep 1, of
// everything else.
void add_owners(Sent& out, const PlanSizes& s, const std::vector<ShardSizes>& tp, const ShardSizes& sizes, int64_t ep) {
  const bool alone = s.plan.dp_mode != DataMode::ddp, cut = s.plan.zero != ZeroStage::none;
  const int64_t all = alone ? 1 : cut ? s.cut : s.data, n = all / ep;
  const int64_t groups = s.plan.dp_mode == DataMode::dataparallel ? 1 : s.data / n;
  const std::string axis = ep > 1 ? "edp" : s.cut > 1 && s.cut < s.data ? "dp.shard" : s.plan.cp > 1 ? "dp+cp" : "dp";
  std::vector<int64_t> elements;
  for (const UnitSizes& u : sizes.units)
    for (const Shape& matrix : u.matrices)
      if (u.ep == ep) elements.push_back(matrix.numel());
  const std::vector<int> owners = balanced_owners(elements, static_cast<int>(n));
  std::vector<int64_t> busy(static_cast<size_t>(n), 0);  // bytes sent by each rank
  size_t next = 0;
  for (size_t unit = 0; unit < sizes.units.size(); ++unit) {
    const UnitSizes& u = sizes.units[unit];
    int64_t begin = 0;
    for (size_t i = 0; u.ep == ep && i < u.matrices.size();
         begin += round_up(u.parameters[i++], UnitSizes::kSlot), ++next) {
      int64_t size = u.parameters[i], largest = 0;
      for (const ShardSizes& other : tp) largest = std::max(largest, other.units[unit].parameters[i]);
      int64_t& owner = busy[static_cast<size_t>(owners[next])];
      if (!cut) out.add(axis, Op::broadcast, n, groups, groups * (n - 1) * size * s.wide, 0);
      if (!cut) owner += (n - 1) * size * s.wide;
      for (int64_t r = 0; cut && r < n; ++r) {
        const int64_t from = std::max(begin, r * u.shard(all)), to = std::min(begin + size, (r + 1) * u.shard(all));
        if (r == owners[next] || from >= to) continue;
        out.messages(axis, 2 * groups, (to - from) * s.wide, 0);
        owner += (to - from) * s.wide, busy[static_cast<size_t>(r)] += (to - from) * s.wide;
      }
      if (&sizes == &tp.front() && largest < u.matrices[i].numel())  // sharded over tp
        out.all_gather("tp", s.plan.tp, groups, s.plan.tp * largest * s.wide), out.own("tp", Op::all_gather, {});
    }
  }
  if (const int64_t max_bytes = *std::ranges::max_element(busy); max_bytes > 0)
    out.own(axis, cut ? Op::send : Op::broadcast, cut || !out.by_tree() ? max_bytes : std::optional<int64_t>());
}

// Traffic between the two matrices of an adapter, and with sequence parallelism gradients of matrices that process only
// local tokens.
void add_adapters(Sent& out, const PlanSizes& s, const Plan& p, const ShardSizes& sizes) {
  const int64_t n = s.plan.tp, rank = s.config.lora.rank, low = s.sequences * s.tokens * rank * s.value;
  const int64_t forwards = p.recompute == Recompute::block ? 2 : 1;
  const int64_t columns = sizes.column_adapters * s.m, rows = sizes.row_adapters * s.m;
  if (!p.sp) {
    out.all_reduce("tp", n, columns + rows * forwards, low, s.value);
    return;
  }
  out.all_gather("tp", n, columns * forwards + rows, low);
  out.reduce_scatter("tp", n, columns + rows * forwards, low);
  out.all_reduce("tp", n, columns + rows, rank * s.config.channels * s.wide, s.wide);
}

// `sizes`: shard of a rank of the tensor-parallel group.
void add_tensor(Sent& out, const PlanSizes& s, const Plan& p, const ShardSizes& sizes) {
  const int64_t n = s.plan.tp, full = s.micro_elements() * s.value, rows = s.sequences * s.tokens;
  const int64_t element = p.layout_invariant ? s.wide : s.value, partial = s.micro_elements() * element;
  const int64_t forwards = p.recompute == Recompute::block ? 2 : 1;
  const int64_t m = s.m, first = sizes.first ? m : 0, last = sizes.last ? m : 0;
  const int64_t routers = sizes.routers * m, columns = sizes.columns * m + routers, inputs = sizes.rows * m + routers;
  if (!p.sp) {
    out.all_reduce("tp", n, inputs * forwards + columns + last, partial, element);
    out.all_reduce("tp", n, first, full, s.value);
  } else {
    // Column layers, the head and tables gather their inputs again for the weight gradients.
    const int64_t again = s.config.lora.rank > 0 ? 0 : columns - routers + first + last;
    out.all_gather("tp", n, columns * forwards + again + inputs + last, full);
    out.reduce_scatter("tp", n, inputs * forwards + columns + last, partial);
    out.reduce_scatter("tp", n, first, full);
    // Gradients of tables: (T, C), or (B, T, C) if documents restart positions.
    out.all_gather("tp", n, sizes.tables * m, (s.documents ? s.sequences : 1) * s.tokens * s.config.channels * s.value);
    out.all_reduce("tp", n, sizes.norms * m, s.config.channels * s.wide, s.wide);
    out.all_reduce("tp", n, sizes.biases * m, s.config.channels * s.grad, s.grad);
    out.all_gather("tp", n, routers * forwards, rows * s.config.experts.count * s.value);  // logits
    if (s.config.lora.rank == 0)
      out.all_reduce("tp", n, routers, s.config.experts.count * s.config.channels * s.grad, s.grad);
  }
  // Gradients of the routing weights.
  out.all_reduce("tp", n, routers, rows * s.config.experts.per_token * s.wide, s.wide);
  add_adapters(out, s, p, sizes);
  out.all_reduce("tp", n, sizes.head_norms * m, s.config.head_size() * s.wide, s.wide);
  out.all_reduce("tp", n, 3 * last, rows * s.wide, s.wide);                            // the loss
  if (!p.layout_invariant) out.reduce_directly("tp", n, 8 * std::ssize(sizes.units));  // the norm, once per step
}

void add_context(Sent& out, const PlanSizes& s, const Plan& p, const ShardSizes& sizes) {
  const int64_t n = s.plan.cp, keys = s.key_elements();
  const int64_t forwards = p.recompute == Recompute::block || p.recompute == Recompute::attention ? 2 : 1,
                layers = sizes.layers * s.m;
  if (n == 1) return;
  const ExpertConfig& experts = s.config.experts;
  const int64_t routings = experts.count == 0 ? 0 : sizes.layers * s.m * (p.recompute == Recompute::block ? 2 : 1);
  if (experts.balance_loss != 0) out.reduce_directly("cp", n, 8 * s.sequences * experts.count, routings);
  if (experts.capacity > 0)  // expert choices of all tokens
    out.all_gather("cp", n, routings, 4 * n * s.sequences * s.tokens * experts.per_token);
  if (p.cp_mode == ContextMode::ulysses) {
    const int64_t bytes = layers * (forwards + 1) * (n - 1) * 2 * (s.query_elements() + keys) * s.value;
    out.add("cp", Op::all_to_all, n, layers * 2 * (forwards + 1), bytes, bytes / n);
    return;
  }
  const int64_t passes = layers * (forwards + 1) * (n - 1), pair = 2 * keys;
  out.messages("cp", passes * n, pair * s.value, passes * pair * s.value);                    // keys and values
  out.messages("cp", layers * n * (n - 1), pair * s.wide, layers * (n - 1) * pair * s.wide);  // their gradients
}

// Expert-parallel groups of one pipeline rank: row counts per expert, and the norm. The rows themselves depend on
// routing.
void add_experts(Sent& out, const PlanSizes& s, const Plan& p, const ShardSizes& sizes) {
  const int64_t e = p.ep, forwards = p.recompute == Recompute::block ? 2 : 1, passes = sizes.layers * s.m;
  for (int64_t g = 0; g < s.data / e; ++g) {
    out.reduce_directly("ep", e, 8 * s.units);
    out.add("ep", Op::all_to_all, e, passes * (3 * forwards + 2),
            passes * forwards * (e - 1) * s.config.experts.count * 8, {});
  }
}

// Rows routed to other ranks in a step under balanced routing; every tp rank sends them.
int64_t balanced_rows(const TrainConfig& job) {
  const ModelConfig& c = job.model;
  return job.optim.batch * c.context * c.layers * c.experts.per_token / job.plan.ep * (job.plan.ep - 1) * job.plan.tp;
}

// Pipeline groups, and the replicas of the tied weight at their ends.
void add_pipeline(Sent& out, const PlanSizes& s, const Plan& p) {
  const int64_t activation = s.micro_elements() / (p.sp ? s.plan.tp : 1) * s.value;
  const std::vector<int>& at = s.schedule.rank_of_stage;
  std::vector<int64_t> sends(static_cast<size_t>(s.plan.pp), 0);  // per micro-batch
  for (size_t stage = 1; stage < at.size(); ++stage)
    for (const size_t end : {stage - 1, stage})
      if (at[stage - 1] != at[stage]) ++sends[static_cast<size_t>(at[end])];
  out.in_groups(s.plan.ranks() / s.plan.pp);
  out.messages("pp", 2 * s.m * s.schedule.wire_boundaries(), activation,
               s.m * *std::ranges::max_element(sends) * activation);
  if (!p.layout_invariant) out.reduce_directly("pp", s.plan.pp, 8 * s.units);  // the norm
  out.in_groups(s.data);
  for (const ShardSizes& sizes : s.shards.front()) {
    for (const UnitSizes& u : sizes.units)
      if (s.tied_over_ranks && u.table && u.trainable)
        out.all_reduce("tied", 2, 1, (p.zero == ZeroStage::none ? u.size() : u.shard(s.cut)) * s.grad, s.grad);
    out.next_ranks();
  }
  out.in_groups(1);
}

}  // namespace

std::vector<SentBytes> expected_bytes(const TrainConfig& job, int64_t steps, std::optional<int64_t> rows) {
  const PlanSizes s(job);
  const Plan& p = s.plan;
  const int64_t ranks = s.plan.ranks();
  Sent out(p.all_reduce);
  out.in_steps(steps);
  // Loss, a rank's request and norm.
  out.reduce_directly("world", ranks,
                      p.layout_invariant              ? 16 + 8 * kExactBins
                      : p.dp_mode == DataMode::diloco ? 24
                                                      : 16);
  for (const std::vector<ShardSizes>& stage : s.shards) {
    for (const ShardSizes& sizes : stage) {
      if (p.dp_mode == DataMode::dataparallel)
        add_dataparallel(out, s, sizes);
      else if (p.dp_mode == DataMode::ps_sync)
        add_server(out, s, p.servers, sizes);
      else if (p.dp_mode == DataMode::diloco)
        add_alone(out, s, sizes, steps, diloco_options(job.plan, job.optim.steps).sync);
      else
        add_data(out, s, p, sizes);
      for (const int64_t ep : std::set<int64_t>{1, p.ep}) add_owners(out, s, stage, sizes, ep);
      out.in_groups(s.plan.dp);
      add_context(out, s, p, sizes);
      out.in_groups(s.data);
      if (&sizes == &stage.front()) add_tensor(out, s, p, sizes);
      out.in_groups(1);
      add_experts(out, s, p, sizes);
      out.next_ranks();
    }
  }
  add_pipeline(out, s, p);
  std::vector<SentBytes> all = out.result();
  const int64_t transfers = p.recompute == Recompute::block ? 6 : 4;
  for (SentBytes& sent : all)
    if (sent.axis == "ep" && sent.operation == to_string(Op::all_to_all))
      sent.bytes += rows.value_or(balanced_rows(job) * steps) * transfers * s.config.channels * s.value;
  return all;
}

std::optional<SentBytes> expected_copies(const TrainConfig& job, int64_t steps) {
  if (job.plan.offload != Offload::parameters) return {};
  const PlanSizes s(job);
  SentBytes out{"host", "copy_to_gpu"};
  for (const std::vector<ShardSizes>& stage : s.shards)
    for (const ShardSizes& sizes : stage)
      for (const UnitSizes& u : sizes.units) {
        const int64_t calls = s.data * u.uses * s.m * steps;
        out.calls += calls;
        out.bytes += calls * u.shard(s.cut) * u.value;
      }
  return out;
}

}  // namespace tessera
