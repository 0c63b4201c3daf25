// Kernel calls of GPT-2 and Llama, in Tessera and in other frameworks.
#include "planner/work.h"

#include <algorithm>

#include "train/memory.h"

namespace tessera::planner {
namespace {

// Appends kernel calls with local sizes to Work.
class Lists {
 public:
  Lists(const Case& c, Caller caller) : c_(c), tessera_(caller == Caller::tessera) {}

  Work layer() const {
    const bool fused = s_.fused_elementwise, dropout = s_.dropout, gated = m_.gated;
    const double mask = dropout ? 0.5 : 0, inputs = gated ? 2 : 1, u = between_, f = wide_;
    // Norm: one read and one write; backward two reads, one write, and the addition to the residual's gradient.
    // Residual: the sum of block and residual, with the dropout mask.
    const double norm = (fused ? 2 : 5) * u, norm_back = (fused ? 5 : 11) * u;
    const double residual = (3 + (dropout ? (fused ? mask : 2 + mask) : 0)) * u,
                 residual_back = dropout ? (2 + mask) * u : 0;
    Work w{.hides = true};
    add_pair(w, Kernel::norm_forward, Kernel::norm_backward, own_rows_, h_, norm, norm_back);
    add_product(w, tokens_, h_, q_ + 2 * k_, 1, s_.fp8);
    if (m_.qk_norm) {  // other frameworks fuse these norms into another pass
      const double d = real(m_.head_size());
      add_pair(w, Kernel::norm_forward, Kernel::norm_backward, tokens_ * (q_ + k_) / d, d, 0, 0);
    }
    if (m_.encoding == Positions::rope) {
      const double turned = (fused ? 2 : 6) * (query_ + key_);
      add_pair(w, Kernel::rotate, Kernel::rotate, tokens_, q_ + k_, turned, turned);
    }
    add_attention(w);
    add_product(w, tokens_, q_, h_, 1, s_.fp8);
    add_joining(w);
    add_pair(w, Kernel::add_norm_forward, Kernel::add_norm_backward, own_rows_, h_, norm + residual,
             norm_back + residual_back);
    const double here = m_.experts.count > 0 ? std::max(1.0, real(m_.experts.count) / real(c_.layout.ep)) : 1;
    add_product(w, rows_ / here, h_, (gated ? 2 : 1) * f_, here, s_.fp8);
    // GELU: F -> F, SwiGLU: 2 F -> F; backward also reads the output gradient and writes the input gradient.
    add_pair(w, gated ? Kernel::swiglu_forward : Kernel::gelu_forward,
             gated ? Kernel::swiglu_backward : Kernel::gelu_backward, rows_, f_, (fused || !gated ? inputs + 1 : 5) * f,
             (fused || !gated ? 2 * inputs + 1 : 8) * f);
    add_product(w, rows_ / here, f_, h_, here, s_.fp8);
    w.forward.tasks.push_back({.kernel = Kernel::add, .rows = own_rows_, .columns = h_, .bytes = residual});
    w.input.tasks.push_back({.bytes = residual_back});
    // Biases are fused into matmul epilogues or passes; each bias gradient is a separate pass.
    if (!gated) w.input.tasks.push_back({.bytes = query_ + 2 * key_ + 2 * u + f});
    if (m_.experts.count > 0) {  // dispatch and combine: Lepikhin et al. 2020, GShard
      add_product(w, tokens_, h_, real(m_.experts.count), 1, s_.fp8);
      add_pass(w, 4 * 2 * rows_ * h_, 4 * 2 * rows_ * h_);
      if (c_.layout.ep > 1)
        for (Pass* pass : {&w.forward, &w.input})
          pass->sent.push_back({Exchange::all_to_all, ep_axis(c_.layout), 2 * rows_ * h_, 2});
    }
    w.forward.launches = fused ? 8 : 20;
    w.input.launches = 2 * w.forward.launches;
    w.recompute = recomputation(w, norm);
    return w;
  }

  Work first() const {
    const double array = 2 * tokens_ * h_, rows = tokens_ / real(c_.layout.sequences);
    Work w;
    w.forward.tasks.push_back({.kernel = Kernel::lookup_forward, .rows = tokens_, .columns = h_, .bytes = 2 * array});
    w.weight.tasks.push_back(
        {.kernel = Kernel::lookup_backward, .rows = v_ * h_, .columns = tokens_ / v_, .bytes = 4 * array});
    if (m_.encoding == Positions::learned) {
      const double context = real(m_.context);
      w.forward.tasks.push_back({.kernel = Kernel::lookup_forward, .rows = rows, .columns = h_});
      w.forward.tasks.push_back({.kernel = Kernel::add, .rows = tokens_, .columns = h_, .bytes = 2 * array});
      w.input.tasks.push_back({.kernel = Kernel::accumulate, .rows = 1, .columns = tokens_ * h_});  // over sequences
      w.weight.tasks.push_back(
          {.kernel = Kernel::lookup_backward, .rows = context * h_, .columns = rows / context, .bytes = 4 * array});
    }
    if (s_.dropout) w.forward.tasks.push_back({.bytes = 2 * array});
    if (tp_.ranks == 1) return w;
    const bool scatters = tessera_ && p_.sp;
    w.forward.sent.push_back({scatters ? Exchange::reduce_scatter : Exchange::all_reduce, tp_, full_});
    if (scatters) w.input.sent.push_back({Exchange::all_gather, tp_, full_});
    return w;
  }

  // Logits: written by the head, read by the loss; their gradient is written once and read by two matmuls.
  Work last() const {
    const double logits = tokens_ * v_ * std::max(2.0, s_.logit_bytes);
    Work w;
    add_pair(w, Kernel::norm_forward, Kernel::norm_backward, own_rows_, h_, 2 * between_, 5 * between_);
    add_product(w, tokens_, h_, v_, 1, false);
    add_pair(w, Kernel::loss_forward, Kernel::loss_backward, tokens_, v_, 3 * logits, 2 * logits);
    if (tp_.ranks == 1) return w;
    const bool scatters = tessera_ && p_.sp;
    w.forward.sent.push_back({Exchange::all_reduce, tp_, 4 * tokens_, 3});
    if (scatters)
      for (Pass* pass : {&w.forward, &w.input}) pass->sent.push_back({Exchange::all_gather, tp_, full_});
    w.input.sent.push_back({scatters ? Exchange::reduce_scatter : Exchange::all_reduce, tp_, full_});
    return w;
  }

 private:
  // Matmul with a weight and its two gradients; the weight gradient accumulates over micro-batches.
  void add_product(Work& w, double rows, double in, double out, double count, bool fp8) const {
    const Task all{.count = count, .flops = 2 * rows * in * out * count, .fp8 = fp8};
    Task& forward = w.forward.tasks.emplace_back(all);
    forward.kernel = Kernel::matmul_forward, forward.rows = rows, forward.columns = out, forward.inner = in;
    Task& input = w.input.tasks.emplace_back(all);
    input.kernel = Kernel::matmul_input, input.rows = rows, input.columns = in, input.inner = out;
    Task& weight = w.weight.tasks.emplace_back(all);
    weight.kernel = Kernel::matmul_weight, weight.rows = out, weight.columns = in, weight.inner = rows;
    weight.out_bytes = 2 * s_.gradient_bytes;
  }

  void add_pair(Work& w, Kernel forward, Kernel backward, double rows, double columns, double read,
                double read_back) const {
    w.forward.tasks.push_back({.kernel = forward, .rows = rows, .columns = columns, .bytes = read});
    w.input.tasks.push_back({.kernel = backward, .rows = rows, .columns = columns, .bytes = read_back});
  }

  void add_pass(Work& w, double read, double read_back) const {
    w.forward.tasks.push_back({.bytes = read});
    w.input.tasks.push_back({.bytes = read_back});
  }

  // Shoeybi et al. 2019: an all-reduce after each block, and one of the gradient of the block's input. With sequence
  // parallelism (Korthikanti et al. 2022, section 4.2.2) an all-gather and a reduce-scatter each; backward gathers the
  // inputs of column-parallel layers again, because they are saved sharded.
  void add_joining(Work& w) const {
    if (tp_.ranks == 1) return;
    if (!p_.sp) {
      for (Pass* pass : {&w.forward, &w.input}) pass->sent.push_back({Exchange::all_reduce, tp_, full_, 2});
      return;
    }
    for (Pass* pass : {&w.forward, &w.input}) {
      pass->sent.push_back({Exchange::all_gather, tp_, full_, pass == &w.forward ? 2.0 : 4.0});
      pass->sent.push_back({Exchange::reduce_scatter, tp_, full_, 2});
    }
  }

  // Causal: queries attend to half of the keys. Ring attention (Liu et al. 2023): keys and values, in backward also
  // their gradients, circulate during local attention. A rank makes one call per hop (c hops), with all its queries in
  // the first and all or half of them in the others, and merges the results. Five matmuls in backward, two in forward
  // (Dao et al. 2022, algorithm 4).
  void add_attention(Work& w) const {
    const Axis cp = cp_axis(c_.layout);
    const double c = real(cp.ranks), d = real(m_.head_size()), heads = q_ / d, sequences = real(c_.layout.sequences),
                 queries = tokens_ / sequences, keys = m_.keys() / 2;
    const bool ring = cp.ranks > 1 && (p_.cp_mode == ContextMode::ring || !tessera_);
    constexpr double kLater = 0.75;  // mean fraction of queries in later hops
    Task task{.kernel = Kernel::attention_forward,
              .rows = sequences * heads,
              .columns = queries,
              .inner = keys,
              .head_dim = d,
              .flops = 2 * tokens_ * m_.keys() * q_};
    if (ring) {
      const double seen = 1 + kLater * (c - 1);  // calls per query over all hops
      task.columns = queries * seen / c, task.inner = keys / seen, task.count = c;
    } else {
      task.rows /= c, task.columns *= c;
    }
    w.forward.tasks.push_back(task);
    task.kernel = Kernel::attention_backward;
    task.flops *= 2.5;
    w.input.tasks.push_back(task);
    // Layout changes of attention's q, k, v and result.
    add_pass(w, 2 * query_, 2 * query_);
    if (cp.ranks == 1) return;
    const double keys_bytes = 2 * element_ * tokens_ * k_, gradients = 2 * (tessera_ ? 4 : 2) * tokens_ * k_;
    if (ring) {
      const Task merge{.kernel = Kernel::accumulate, .rows = 1, .columns = tokens_ * q_ * kLater, .count = c - 1};
      w.forward.tasks.push_back(merge);
      w.input.tasks.push_back(merge);
      w.input.tasks.push_back({.kernel = Kernel::accumulate, .rows = 1, .columns = tokens_ * 2 * k_, .count = c - 1});
      for (Pass* pass : {&w.forward, &w.input}) pass->sent.push_back({Exchange::send, cp, keys_bytes, c - 1});
      w.input.sent.push_back({Exchange::send, cp, gradients, c - 1});
      return;
    }
    for (Pass* pass : {&w.forward, &w.input})
      for (const double channels : {q_ + 2 * k_, q_}) {
        pass->tasks.push_back(
            {.kernel = Kernel::add, .rows = tokens_, .columns = channels});  // packs a copy by destination rank
        pass->sent.push_back({Exchange::all_to_all, cp, element_ * tokens_ * channels});
      }
  }

  // Recomputation: Chen et al. 2016; Korthikanti et al. 2022, section 5. `norm`: bytes per norm.
  Pass recomputation(const Work& w, double norm) const {
    const Recompute recompute = p_.recompute;
    if (recompute == Recompute::block) return w.forward;
    if (recompute == Recompute::op) return every_second(w);
    Pass out;
    for (const Task& task : w.forward.tasks) {
      const bool activation = task.kernel == Kernel::gelu_forward || task.kernel == Kernel::swiglu_forward,
                 attention = task.kernel == Kernel::attention_forward;
      const bool wanted = recompute == Recompute::attention ? attention : recompute != Recompute::none && activation;
      if (wanted) out.tasks.push_back(task), out.launches += activation ? 1 : 0;
    }
    if (recompute == Recompute::activation_norm) {
      out.tasks.push_back(
          {.kernel = Kernel::norm_forward, .rows = own_rows_, .columns = h_, .count = 2, .bytes = 2 * norm});
      out.launches += 2;
    }
    return out;
  }

  // torchtitan's selective activation checkpointing recomputes k, o, the second input matmul of a gated feed-forward
  // layer and all elementwise passes, but not attention, other matmuls or reduce-scatters.
  Pass every_second(const Work& w) const {
    Work matmuls;
    add_product(matmuls, tokens_, h_, k_, 1, s_.fp8);
    add_product(matmuls, tokens_, q_, h_, 1, s_.fp8);
    if (m_.gated) add_product(matmuls, rows_, h_, f_, 1, s_.fp8);
    Pass out{.tasks = matmuls.forward.tasks, .launches = w.forward.launches};
    for (const Task& task : w.forward.tasks)
      if (task.flops == 0) out.tasks.push_back(task);
    if (tp_.ranks > 1)
      out.sent.push_back({p_.sp ? Exchange::all_gather : Exchange::all_reduce, tp_, full_, p_.sp ? 2.0 : 1});
    return out;
  }

  const Case& c_;
  bool tessera_;
  const ModelShape& m_ = c_.model;
  const Software& s_ = c_.software;
  const Plan& p_ = c_.layout.plan;
  const Axis tp_ = tp_axis(c_.layout);
  double element_ = tessera_ ? s_.parameter_bytes : 2;
  double t_ = real(p_.tp), tokens_ = local_tokens(c_), own_rows_ = p_.sp ? tokens_ / t_ : tokens_;
  // Model channels; local channels of q, k and the feed-forward layer; local vocabulary.
  double h_ = real(m_.channels), q_ = real(m_.attended()) / t_;
  double k_ = real(m_.key()) / std::min(t_, real(m_.key_heads()));  // with more ranks than heads, heads are replicated
  double f_ = real(m_.hidden()) / t_, v_ = real(m_.vocab) / t_;
  // Local tokens of a feed-forward layer; with experts, routed copies.
  double rows_ = tokens_ * (m_.experts.count > 0 ? real(m_.experts.per_token) : 1);
  // Bytes of arrays: between blocks, q, k, hidden activations.
  double between_ = 2 * tokens_ * h_ / (p_.sp ? t_ : 1), query_ = 2 * tokens_ * q_, key_ = 2 * tokens_ * k_;
  double wide_ = 2 * rows_ * f_, full_ = element_ * tokens_ * h_;
};

}  // namespace

Axis tp_axis(const Layout& l) { return {"tp", l.plan.tp, 1}; }
Axis cp_axis(const Layout& l) { return {"cp", l.plan.cp, l.plan.tp}; }
Axis ep_axis(const Layout& l) { return {"ep", l.ep, l.plan.tp}; }
Axis data_axis(const Layout& l) { return {l.plan.cp > 1 ? "dp+cp" : "dp", l.plan.dp * l.plan.cp, l.plan.tp}; }
Axis pp_axis(const Layout& l) { return {"pp", l.plan.pp, l.plan.tp * l.plan.cp * l.plan.dp}; }

double local_tokens(const Case& c) { return real(c.layout.sequences) * real(c.model.context) / real(c.layout.plan.cp); }

double handed_bytes(const Case& c, double element) {
  return element *
         handed_elements(c.layout.plan, real(c.layout.sequences), real(c.model.context), real(c.model.channels));
}

StepWork step_work(const Case& c, Caller caller) {
  const Lists lists(c, caller);
  return {lists.layer(), lists.first(), lists.last()};
}

bool stays_unsharded(const Case& c) {
  const Reshard reshard = c.software.reshard_after_forward;
  return reshard == Reshard::never || (reshard == Reshard::automatic && c.layout.plan.pp > 1);
}

bool reduces_at_step_end(const Case& c) {
  const Plan& p = c.layout.plan;
  return c.software.sums_after_pipeline && p.pp > 1 && p.zero >= ZeroStage::two && data_axis(c.layout).ranks > 1;
}

// Rajbhandari et al. 2020, section 5: ZeRO-3 gathers a layer's parameters for each pass; ZeRO-2 and 3 reduce-scatter
// gradients per micro-batch.
std::vector<DataSent> data_work(const Case& c) {
  const Software& s = c.software;
  const ZeroStage zero = c.layout.plan.zero;
  if (data_axis(c.layout).ranks == 1) return {};
  if (zero == ZeroStage::none) return {{Exchange::all_reduce, s.reduce_bytes}};
  const bool again = zero == ZeroStage::three && !stays_unsharded(c);
  std::vector<DataSent> out = {
      {Exchange::reduce_scatter, s.reduce_bytes, zero != ZeroStage::one && !reduces_at_step_end(c)},
      {Exchange::all_gather, s.gather_bytes, again, again}};
  if (again) out.push_back({Exchange::all_gather, s.gather_bytes, true});
  return out;
}

}  // namespace tessera::planner
