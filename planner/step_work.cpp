// The calls of GPT-2 and of Llama.
#include "planner/step_work.h"

#include <algorithm>
#include <cmath>

#include "models/layout.h"

namespace tessera::planner {
namespace {

double number(int64_t n) { return static_cast<double>(n); }

ModelConfig config_of(const ModelShape& m) {
  return {.family = m.gated ? Family::llama : Family::gpt2,
          .layers = m.layers,
          .heads = m.heads,
          .channels = m.channels,
          .context = m.context,
          .vocab = m.vocab,
          .tied = m.tied,
          .kv_heads = m.kv_heads,
          .head_dim = m.head_dim,
          .ffn = m.ffn,
          .qkv_bias = m.gated && m.qkv_bias,
          .qk_norm = m.qk_norm};
}

// The sizes that a rank sees.
struct Here {
  Here(const Case& c, DType dtype)
      : m(c.model),
        p(c.layout.plan),
        e(number(size_of(dtype))),
        sequences(number(c.layout.sequences)),
        tokens(number(c.model.context / c.layout.plan.cp)),
        rows(sequences * tokens),
        own_rows(c.layout.plan.sp ? rows / number(c.layout.plan.tp) : rows),
        t(number(c.layout.plan.tp)),
        h(number(c.model.channels)),
        q(number(c.model.query()) / t),
        k(number(c.model.key()) / t),
        f(number(c.model.hidden()) / t),
        v(number(c.model.vocab) / t) {}
  const ModelShape& m;
  const Plan& p;
  double e, sequences, tokens, rows, own_rows, t, h, q, k, f, v;
};

KernelCalls rows_call(Kernel kernel, double rows, double columns, double count = 1) {
  return {kernel, row_sizes(rows, columns), count};
}

void add_product(StageWork& w, double m, double n, double k, double count = 1) {
  w.forward.kernels.push_back({Kernel::product_forward, product_sizes(m, n, k), count});
  w.input.kernels.push_back({Kernel::product_input, product_sizes(m, k, n), count});
  w.weight.kernels.push_back({Kernel::product_weight, product_sizes(n, k, m), count});
}

void add_pair(StageWork& w, Kernel forward, Kernel backward, double rows, double columns) {
  w.forward.kernels.push_back(rows_call(forward, rows, columns));
  w.input.kernels.push_back(rows_call(backward, rows, columns));
}

// Ranks that have a part of a product's sum, and what they do about it.
void add_joining(const Here& s, StageWork& w) {
  if (s.p.tp == 1) return;
  const double bytes = s.e * s.rows * s.h;
  const int64_t t = s.p.tp;
  if (!s.p.sp) {
    w.forward.tp.push_back({Exchange::all_reduce, t, bytes});
    w.input.tp.push_back({Exchange::all_reduce, t, bytes});
    return;
  }
  w.forward.tp.push_back({Exchange::all_gather, t, bytes});
  w.forward.tp.push_back({Exchange::reduce_scatter, t, bytes});
  w.input.tp.push_back({Exchange::all_gather, t, bytes, 2});  // the inputs of column layers are not kept whole
  w.input.tp.push_back({Exchange::reduce_scatter, t, bytes});
}

// Queries see half of the keys. A rank of a ring has a call for each of c hops, of all its queries in the first and of
// all or half of them in others; what those bring is merged into what was there.
void add_attention(const Here& s, StageWork& w) {
  const double c = number(s.p.cp), d = number(s.m.head_size()), heads = s.sequences * s.q / d;
  const bool ring = s.p.cp > 1 && s.p.cp_mode == ContextMode::ring;
  const double calls = ring ? c : 1, later = 0.75;  // of the queries, on average
  const Sizes all = ring || s.p.cp == 1 ? attention_sizes(heads, s.tokens, number(s.m.context) / 2, d)
                                        : attention_sizes(heads / c, s.tokens * c, number(s.m.context) / 2, d);
  Sizes one = all;
  for (size_t i = 1; i < one.size(); ++i) one[i] /= calls;
  if (ring) one[1] = all[1] * (1 + later * (c - 1)) / c;
  w.forward.kernels.push_back({Kernel::attention_forward, one, calls});
  w.input.kernels.push_back({Kernel::attention_backward, one, calls});
  if (s.p.cp == 1) return;
  const double kv_bytes = 2 * s.e * s.rows * s.k, wide = 2 * 4 * s.rows * s.k;
  if (ring) {
    w.forward.kernels.push_back(rows_call(Kernel::accumulate, 1, s.rows * s.q * later, c - 1));
    w.input.kernels.push_back(rows_call(Kernel::accumulate, 1, s.rows * s.q * later, c - 1));
    w.input.kernels.push_back(rows_call(Kernel::accumulate, 1, s.rows * 2 * s.k, c - 1));
    w.forward.cp.push_back({Exchange::send, s.p.cp, kv_bytes, c - 1});
    w.input.cp.push_back({Exchange::send, s.p.cp, kv_bytes, c - 1});
    w.input.cp.push_back({Exchange::send, s.p.cp, wide, c - 1});
    return;
  }
  for (Work* pass : {&w.forward, &w.input}) {
    pass->kernels.push_back(rows_call(Kernel::add, s.rows, s.q + 2 * s.k, 1));  // a copy by rank, and one back
    pass->kernels.push_back(rows_call(Kernel::add, s.rows, s.q, 1));
    pass->cp.push_back({Exchange::all_to_all, s.p.cp, s.e * s.rows * (s.q + 2 * s.k)});
    pass->cp.push_back({Exchange::all_to_all, s.p.cp, s.e * s.rows * s.q});
  }
}

StageWork layer_work(const Here& s) {
  StageWork w;
  add_pair(w, Kernel::norm_forward, Kernel::norm_backward, s.own_rows, s.h);
  add_product(w, s.rows, s.q + 2 * s.k, s.h);
  if (s.m.qk_norm)
    add_pair(w, Kernel::norm_forward, Kernel::norm_backward, s.rows * (s.q + s.k) / number(s.m.head_size()),
             number(s.m.head_size()));
  if (s.m.positions == Positions::rope) add_pair(w, Kernel::rotate, Kernel::rotate, s.rows, s.q + s.k);
  add_attention(s, w);
  add_product(w, s.rows, s.h, s.q);
  add_joining(s, w);
  add_pair(w, Kernel::add_norm_forward, Kernel::add_norm_backward, s.own_rows, s.h);
  add_product(w, s.rows, s.m.gated ? 2 * s.f : s.f, s.h);
  add_pair(w, s.m.gated ? Kernel::swiglu_forward : Kernel::gelu_forward,
           s.m.gated ? Kernel::swiglu_backward : Kernel::gelu_backward, s.rows, s.f);
  add_product(w, s.rows, s.h, s.f);
  add_joining(s, w);
  w.forward.kernels.push_back(rows_call(Kernel::add, s.own_rows, s.h));
  const Recompute again = s.p.recompute;
  if (again == Recompute::block) w.again = w.forward;
  if (again == Recompute::attention)
    for (const KernelCalls& call : w.forward.kernels)
      if (call.kernel == Kernel::attention_forward) w.again.kernels.push_back(call);
  if (again == Recompute::activation || again == Recompute::activation_norm)
    w.again.kernels.push_back(rows_call(s.m.gated ? Kernel::swiglu_forward : Kernel::gelu_forward, s.rows, s.f));
  if (again == Recompute::activation_norm)
    w.again.kernels.push_back(rows_call(Kernel::norm_forward, s.own_rows, s.h, 2));
  return w;
}

StageWork first_work(const Here& s) {
  StageWork w;
  w.forward.kernels.push_back(rows_call(Kernel::lookup_forward, s.rows, s.h));
  w.weight.kernels.push_back({Kernel::lookup_backward, {1, s.v * s.h, s.rows * s.h}});
  if (s.m.positions == Positions::learned) {
    w.forward.kernels.push_back(rows_call(Kernel::lookup_forward, s.tokens, s.h));
    w.forward.kernels.push_back(rows_call(Kernel::add, s.rows, s.h));
    w.input.kernels.push_back(rows_call(Kernel::accumulate, 1, s.rows * s.h));  // the sum over sequences
    w.weight.kernels.push_back({Kernel::lookup_backward, {1, number(s.m.context) * s.h, s.tokens * s.h}});
  }
  if (s.p.tp > 1) {
    const double bytes = s.e * s.rows * s.h;
    w.forward.tp.push_back({s.p.sp ? Exchange::reduce_scatter : Exchange::all_reduce, s.p.tp, bytes});
    if (s.p.sp) w.input.tp.push_back({Exchange::all_gather, s.p.tp, bytes});
  }
  return w;
}

StageWork last_work(const Here& s) {
  StageWork w;
  add_pair(w, Kernel::norm_forward, Kernel::norm_backward, s.own_rows, s.h);
  add_product(w, s.rows, s.v, s.h);
  add_pair(w, Kernel::loss_forward, Kernel::loss_backward, s.rows, s.v);
  if (s.p.tp > 1) {
    const double bytes = s.e * s.rows * s.h;
    w.forward.tp.push_back({Exchange::all_reduce, s.p.tp, 4 * s.rows, 3});
    if (s.p.sp) {
      w.forward.tp.push_back({Exchange::all_gather, s.p.tp, bytes});
      w.input.tp.push_back({Exchange::all_gather, s.p.tp, bytes});
    }
    w.input.tp.push_back({s.p.sp ? Exchange::reduce_scatter : Exchange::all_reduce, s.p.tp, bytes});
  }
  return w;
}

StageWork operator+(const StageWork& a, const StageWork& b) {
  return {a.forward + b.forward, a.input + b.input, a.weight + b.weight, a.again + b.again};
}

std::vector<Range> layers_of_stages(const Case& c, int stages) {
  const auto model = make_model(config_of(c.model));
  return split_layers(*model, stages);
}

// Parameters of a stage on one rank.
double elements_of(const Here& s, const Range& layers, bool first, bool last) {
  const double tables = s.v * s.h, positions = s.m.positions == Positions::learned ? number(s.m.context) * s.h : 0;
  double sum = number(layers.size()) * layer_parameters(s.m) / s.t;
  if (first) sum += tables + positions;
  if (last) sum += s.h * 2 + (s.m.tied && first ? 0 : tables);
  return sum;
}

}  // namespace

Work operator+(Work a, const Work& b) {
  a.kernels.insert(a.kernels.end(), b.kernels.begin(), b.kernels.end());
  a.tp.insert(a.tp.end(), b.tp.begin(), b.tp.end());
  a.cp.insert(a.cp.end(), b.cp.begin(), b.cp.end());
  return a;
}

Work operator*(Work a, double times) {
  for (KernelCalls& call : a.kernels) call.count *= times;
  for (auto* calls : {&a.tp, &a.cp})
    for (ExchangeCalls& call : *calls) call.count *= times;
  return a;
}

std::vector<StageWork> stage_work(const Case& c, DType dtype) {
  const Here s(c, dtype);
  const Schedule schedule = schedule_of(c.layout.plan);
  const std::vector<Range> layers = layers_of_stages(c, schedule.stages);
  const StageWork layer = layer_work(s);
  std::vector<StageWork> out;
  for (size_t i = 0; i < layers.size(); ++i) {
    const double count = number(layers[i].size());
    const bool first = i == 0, last = i + 1 == layers.size();
    StageWork w{layer.forward * count, layer.input * count, layer.weight * count, layer.again * count};
    if (first) w = w + first_work(s);
    if (last) w = w + last_work(s);
    // Micro-batches after the first add their gradients to what is there.
    const double m = number(c.layout.plan.microbatches);
    w.weight.kernels.push_back(rows_call(Kernel::accumulate, 1, elements_of(s, layers[i], first, last), (m - 1) / m));
    if (first && last && c.model.tied) w.weight.kernels.push_back(rows_call(Kernel::accumulate, 1, s.v * s.h));
    out.push_back(std::move(w));
  }
  return out;
}

std::vector<UpdateWork> update_work(const Case& c, DType dtype) {
  const Here s(c, dtype);
  const Plan& p = c.layout.plan;
  const Schedule schedule = schedule_of(p);
  const std::vector<Range> layers = layers_of_stages(c, schedule.stages);
  std::vector<UpdateWork> out(static_cast<size_t>(p.pp));
  const int64_t data = p.dp * p.cp;
  const double n = number(data), value = number(size_of(dtype)), grad = number(size_of(p.grad_dtype)),
               m = number(p.microbatches);
  for (size_t i = 0; i < layers.size(); ++i) {
    const bool first = i == 0, last = i + 1 == layers.size();
    UpdateWork& u = out[static_cast<size_t>(schedule.rank_of_stage[i])];
    const double elements = elements_of(s, layers[i], first, last),
                 units = number(layers[i].size()) + (first ? 2 : 0) + (last ? 1 : 0),
                 mine = p.zero == ZeroStage::none ? elements : elements / n;
    for (const Kernel kernel : {Kernel::squares, Kernel::update})
      u.kernels.kernels.push_back(rows_call(kernel, units, mine / units));
    u.messages = (p.ranks() > 1 ? 1 : 0) + (p.pp > 1 ? 1 : 0) + (p.tp > 1 ? 1 : 0);
    if (first && !last && c.model.tied) u.data.push_back({Exchange::all_reduce, 2, grad * s.v * s.h});
    if (data == 1) continue;
    if (p.zero == ZeroStage::none) {
      const double buckets = std::max(1.0, std::ceil(elements * grad / (p.bucket_mb * 1048576)));
      u.data.push_back({Exchange::all_reduce, data, elements * grad / buckets, buckets});
      continue;
    }
    u.messages += 1;
    const ExchangeCalls sum{Exchange::reduce_scatter, data, elements * grad / units, units},
        gather{Exchange::all_gather, data, elements * value / units, units};
    if (p.zero == ZeroStage::one)
      u.data.push_back(sum);
    else
      u.data_of_stages.push_back(sum);
    if (p.zero != ZeroStage::three) u.data.push_back(gather);
    if (p.zero == ZeroStage::three) u.data_of_stages.insert(u.data_of_stages.end(), {gather, gather});
    if (p.zero != ZeroStage::one)  // a micro-batch's sum is added to those before it
      u.kernels.kernels.push_back(rows_call(Kernel::accumulate, units, mine / units, m - 1));
  }
  return out;
}

double seconds(const Machine& machine, const std::vector<ExchangeCalls>& calls, double busy, int64_t ranks) {
  const auto p = static_cast<double>(machine.identity.processors);
  double sum = 0;
  for (const ExchangeCalls& call : calls) {
    if (call.ranks < 2) continue;
    // A rank that shares its processor waits until it is its turn, as among so many ranks; what it copies takes a part
    // of a processor.
    const double n = static_cast<double>(call.ranks), latency = machine.seconds(call.exchange, ranks, 0),
                 bytes = machine.seconds(call.exchange, call.ranks, call.bytes) -
                         machine.seconds(call.exchange, call.ranks, 0);
    sum += call.count * (latency + bytes * std::max(1.0, busy / p) / std::max(1.0, n / p));
  }
  return sum;
}

double seconds(const Machine& machine, const Work& work, DType dtype, int64_t threads, double busy, int64_t ranks) {
  double sum = 0;
  for (const KernelCalls& call : work.kernels)
    sum += call.count * machine.seconds(call.kernel, call.sizes, dtype, threads, busy);
  return sum + seconds(machine, work.tp, busy, ranks) + seconds(machine, work.cp, busy, ranks);
}

}  // namespace tessera::planner
