// Memory and communication volume, from Software or from closed forms and dry runs of an equivalent job.
#include "planner/memory.h"

#include <algorithm>
#include <cstdint>
#include <string>

#include "models/stages.h"
#include "planner/work.h"
#include "train/check.h"
#include "train/expected_bytes.h"
#include "train/memory.h"

namespace tessera::planner {
namespace {

constexpr int64_t kMaxLayers = 512;  // keeps the FLOP-balanced split and the dry run fast

// Bytes of a rank's (tokens, channels) arrays, per micro-batch.
struct Arrays {
  double between;  // 16-bit, between blocks (sharded with sp)
  double full;     // 16-bit, all local tokens, as read by matmuls
  double mask;     // one byte per element
};
Arrays expected_arrays(const Case& c) {
  const Plan& p = c.layout.plan;
  const double full = 2 * local_tokens(c) * real(c.model.channels), between = full / (p.sp ? real(p.tp) : 1);
  return {between, full, c.software.dropout ? between / 2 : 0};
}

// Simultaneously gathered ZeRO-3 units: two, of which one may be the head (other frameworks gather it once for both
// passes), and one gradient; without resharding, all parameters of the rank.
double gathered(const Case& c, double layer, double head, double held) {
  const Software& s = c.software;
  if (c.layout.plan.zero != ZeroStage::three || data_axis(c.layout).ranks == 1) return 0;
  const double full = stays_unsharded(c) ? held : layer + (s.name == "tessera" ? layer : std::max(layer, head));
  return full * s.gather_bytes + layer * s.reduce_bytes;
}

}  // namespace

std::vector<int64_t> layers_of_stages(const Case& c, int64_t stages) {
  const bool fewer = c.software.fewer_layers_at_ends && stages > 1;
  const int64_t layers = c.model.layers + (fewer ? 2 : 0);
  std::vector<int64_t> out;
  for (int64_t s = 0; s < stages; ++s) out.push_back((s + 1) * layers / stages - s * layers / stages);
  if (fewer) {
    --out.front();
    --out.back();
  }
  return out;
}

StageParameters stage_parameters(const Case& c, int64_t layers, bool first, bool last) {
  const ModelShape& m = c.model;
  const double t = real(c.layout.plan.tp), h = real(m.channels), table = real(m.vocab) * h / t;
  const double matrices = layer_matrices(m), experts = m.experts.count > 0 ? expert_parameters(m) : 0;
  StageParameters out;
  out.dense = real(layers) * ((matrices - experts) / t + layer_parameters(m) - matrices);
  out.experts = real(layers) * experts / t / real(c.layout.ep);
  if (first) out.dense += table + real(m.learned()) * h;
  if (last) out.dense += (m.gated ? 1 : 2) * h + (m.tied && first ? 0 : table);
  return out;
}

double saved_by_layer(const Case& c) {
  const ModelShape& m = c.model;
  const Plan& p = c.layout.plan;
  const Software& s = c.software;
  const Arrays a = expected_arrays(c);
  if (p.recompute == Recompute::block) return a.between;
  const double t = real(p.tp), tokens = local_tokens(c), heads = real(m.heads) / t;
  const double query = a.full * real(m.attended()) / real(m.channels) / t,
               key = query * real(m.key()) / real(m.attended());
  if (p.recompute == Recompute::op) {
    // torchtitan's policy saves every second matmul: the input; attention and its log-sum-exp; q, v, the first matmul
    // of the feed-forward layer and, if gated, its output projection (the seventh); and the outputs of reduce-scatters.
    const double last = m.gated ? a.full : 0, scattered = p.sp && p.tp > 1 ? 2 * a.between : 0;
    return a.between + 2 * query + key + 4 * heads * tokens + 2 * tokens * real(m.hidden()) / t + last + scattered;
  }
  // Inputs of both norms and both blocks.
  const bool norms_again = p.recompute == Recompute::activation_norm;
  double saved = 2 * a.between + (norms_again ? 0 : 2 * a.between) + 2 * a.mask;
  // q, k, v and the attention output; per query-key pair the softmax and, with dropout, mask and result; fused kernels
  // save only the log-sum-exp.
  saved += 2 * query + 2 * key;
  if (s.attention != "unfused")
    saved += 4 * heads * tokens;
  else if (p.recompute != Recompute::attention)
    saved += (s.dropout ? 5 : 2) * heads * tokens * real(m.context);
  // Feed-forward layer: input and output of GELU; with experts, for all copies of a token.
  const double copies = m.experts.count > 0 ? real(m.experts.per_token) : 1;
  const double wide = 2 * tokens * copies * real(m.hidden()) / t;
  const bool activation_again = norms_again || p.recompute == Recompute::activation;
  saved += wide * (m.gated ? s.gated_activation_pieces : 2) - (activation_again ? wide : 0);
  if (m.experts.count > 0) saved += 2 * copies * a.full;  // dispatched and combined
  return saved;
}

double saved_for_weight_pass(const Case& c) {
  const ModelShape& m = c.model;
  const Arrays a = expected_arrays(c);
  const double t = real(c.layout.plan.tp), copies = m.experts.count > 0 ? real(m.experts.per_token) : 1,
               query = a.full * real(m.attended()) / real(m.channels) / t,
               key = query * real(m.key()) / real(m.attended()),
               wide = 2 * local_tokens(c) * copies * real(m.hidden()) / t;
  // With sequence parallelism Tessera saves the gathered input; others gather it again.
  const double outside = c.software.name == "tessera" ? a.full : a.between;
  return 4 * outside + 2 * (query + key) + wide * (m.gated ? 3 : 2);
}

std::vector<MemoryParts> described_memory(const Case& c, const std::vector<int64_t>& layers,
                                          const PipelineTime& pipeline) {
  const Software& s = c.software;
  const Plan& p = c.layout.plan;
  const Arrays a = expected_arrays(c);
  const std::vector<int> rank_of_stage = rank_of_stages(p);
  const size_t stages = rank_of_stage.size();
  const double chunks = real(std::ssize(rank_of_stage)) / real(p.pp);
  const double n = real(data_axis(c.layout).ranks), t = real(p.tp), saved = saved_by_layer(c);
  const double own = local_tokens(c) * real(c.model.vocab) / t * s.logit_bytes;
  Case none = c;
  none.layout.plan.recompute = Recompute::none;
  // Workspace of backward: recomputed activations of one layer. Other frameworks also hold the gradients of the
  // feed-forward layer's matmul outputs and, with sp, its gathered input and the gradient of that input.
  double workspace = p.recompute == Recompute::block ? saved_by_layer(none)
                     : p.recompute == Recompute::op  ? std::max(0.0, saved_by_layer(none) - saved)
                                                     : 0;
  if (s.name != "tessera")
    workspace += (c.model.gated ? 3 : 2) * 2 * local_tokens(c) * real(c.model.hidden()) / t +
                 (p.sp && p.tp > 1 ? 2 * a.full : 0);
  double unsharded_table = 0;  // Tessera's ZeRO-2/3 temporarily unshards a table and its gradient
  if (s.name == "tessera" && n > 1 && p.zero >= ZeroStage::two)
    unsharded_table = stage_parameters(c, 0, false, true).dense *
                      (s.reduce_bytes + (p.zero == ZeroStage::three ? s.gather_bytes : 0));
  // After I, Tessera frees the activations that W does not read.
  const double until_w = s.name == "tessera" ? saved_for_weight_pass(c) : std::max(saved, saved_for_weight_pass(c));
  std::vector<MemoryParts> out;
  std::vector<StageParameters> held_by(static_cast<size_t>(p.pp));  // counts a tied table on both end stages
  std::vector<int64_t> layers_on(held_by.size(), 0), side_lengths(held_by.size(), 0);
  for (size_t stage = 0; stage < stages; ++stage) {
    const auto rank = static_cast<size_t>(rank_of_stage[stage]);
    const StageParameters more = stage_parameters(c, layers[stage], stage == 0, stage + 1 == stages);
    held_by[rank] = {held_by[rank].dense + more.dense, held_by[rank].experts + more.experts};
    layers_on[rank] += layers[stage];
    side_lengths[rank] += (stage > 0 ? 1 : 0) + (stage + 1 < stages ? 1 : 0);
  }
  for (int rank = 0; rank < p.pp; ++rank) {
    const StageParameters held = held_by[static_cast<size_t>(rank)];
    const int64_t here = layers_on[static_cast<size_t>(rank)];
    const bool first = rank == rank_of_stage.front(), last = rank == rank_of_stage.back();
    const int64_t sides = side_lengths[static_cast<size_t>(rank)];  // with incoming messages
    // Experts are replicated on n / ep ranks.
    const double full = held.all(), shard = held.dense / n + held.experts / std::max(1.0, n / real(c.layout.ep));
    const StateSize<double> local = state_with_zero<double>(p.zero, {full, full, full}, {shard, shard, shard});
    const double flights = pipeline.in_flight[static_cast<size_t>(rank)], stage_layers = real(here) / chunks,
                 waiting = pipeline.waiting[static_cast<size_t>(rank)];
    MemoryParts m{.parameters = local.parameters * s.parameter_bytes,
                  .gradients = reduces_at_step_end(c) ? full * s.reduce_bytes : local.gradients * s.gradient_bytes,
                  .optimizer = local.optimizer * s.state_bytes,
                  .activations = stage_layers * ((flights - waiting) * saved + waiting * until_w),
                  .communication = gathered(c, stage_parameters(c, 1, false, false).all(),
                                            last ? stage_parameters(c, 0, false, true).all() : 0, full),
                  .workspace = workspace};
    if (s.message_buffers)  // also saves outputs; a received input counts as the first layer's
      m.communication +=
          (real(p.microbatches * sides) + flights / chunks * (real(first) - real(last))) * handed_bytes(c, 2);
    if (first) m.activations += flights / chunks * a.mask;  // dropout mask of the embeddings
    if (last) {
      m.activations +=
          pipeline.in_flight_last_stage * (2 * a.between + own);  // inputs of the last norm and head, logits
      m.workspace = std::max(0.0, workspace - own);               // reuses the memory of the logits
    }
    if (first || last) m.communication += unsharded_table;
    out.push_back(m);
  }
  return out;
}

Software own_software(DType dtype, DType grad_dtype, OptimizerKind optimizer) {
  Software s = software_named("tessera");
  s.parameter_bytes = s.gather_bytes = static_cast<double>(element_size(dtype));
  s.gradient_bytes = s.reduce_bytes = static_cast<double>(element_size(dtype == DType::float64 ? dtype : grad_dtype));
  s.state_bytes = static_cast<double>(state_bytes({.optimizer = optimizer, .dtype = dtype}));
  return s;
}

std::optional<TrainConfig> own_job(const Case& c) {
  const Software& s = c.software;
  if (s.name != "tessera" || c.model.layers > kMaxLayers || c.model.gated != (c.model.encoding == Positions::rope))
    return {};
  for (const DType dtype : {DType::bfloat16, DType::float32, DType::float64})
    for (const DType grad : {DType::float32, DType::bfloat16})
      for (size_t row = 0; row < kOptimizers.size(); ++row) {  // the first optimizer with state of this size
        const auto optimizer = static_cast<OptimizerKind>(row);
        const Software own = own_software(dtype, grad, optimizer);
        if (own.parameter_bytes != s.parameter_bytes || own.gradient_bytes != s.gradient_bytes ||
            own.state_bytes != s.state_bytes)
          continue;
        TrainConfig job{.model = c.model.config(),
                        .optim = {.optimizer = optimizer, .batch = c.layout.batch(), .dtype = dtype},
                        .plan = c.layout.plan};
        job.model.dropout = s.dropout ? 0.1 : 0;
        job.plan.grad_dtype = grad;
        job.plan.ep = c.layout.ep;
        // Ranks that do not share CPU cores have one GPU each.
        job.plan.device = c.hardware.cores == 0 ? Device::cuda : Device::cpu;
        check_sizes(job);
        return job;
      }
  return {};
}

std::vector<int64_t> layer_range(const Case& c, const std::optional<TrainConfig>& own) {
  if (!own) return layers_of_stages(c, std::ssize(rank_of_stages(c.layout.plan)));
  std::vector<int64_t> out;
  for (const Range& r : split_layers(*full_model(*own, own->model.vocab), shortest_schedule(own->plan).stages))
    out.push_back(r.size());
  return out;
}

// Layers send according to their Work. Both ends add one array over tp each: the embedding output and the gradient of
// the head's input. With sequence parallelism, an all-gather and a reduce-scatter replace an all-reduce.
Bytes described_bytes(const Case& c) {
  const Plan& p = c.layout.plan;
  const std::vector<int> rank_of_stage = rank_of_stages(p);
  const double m = real(p.microbatches), pp = real(p.pp), layers = m * real(c.model.layers) / pp;  // mean over ranks
  Bytes arrays, counts, out;  // bytes per transfer; mean transfers per rank
  const auto add = [&](const Sent& s, double count) {
    const double n = real(s.axis.ranks), fraction = s.exchange == Exchange::send ? 1 : (n - 1) / n;
    const std::string axis(s.axis.name), operation(kExchangeNames[static_cast<size_t>(s.exchange)]);
    arrays[axis][operation] = (s.exchange == Exchange::all_reduce ? 2 : 1) * fraction * s.bytes;
    out[axis][operation] = arrays[axis][operation] * (counts[axis][operation] += count);
  };
  const Work layer = step_work(c, Caller::described).layer;
  for (const Pass* pass : {&layer.forward, &layer.recompute, &layer.input})
    for (const Sent& sent : pass->sent) {
      add(sent, layers * sent.count);
      if (sent.axis.name == "tp" && pass == &layer.forward) add(sent, 2 * m / pp);
    }
  if (p.pp > 1) {
    double boundaries = 0;  // between ranks
    for (size_t s = 1; s < rank_of_stage.size(); ++s) boundaries += rank_of_stage[s - 1] != rank_of_stage[s] ? 1 : 0;
    out["pp"]["send"] = 2 * m * boundaries / pp * handed_bytes(c, 2);
  }
  StageParameters held;  // mean over ranks
  const std::vector<int64_t> split = layers_of_stages(c, std::ssize(rank_of_stage));
  for (size_t i = 0; i < split.size(); ++i) {
    const StageParameters stage = stage_parameters(c, split[i], i == 0, i + 1 == split.size());
    held.dense += stage.dense / pp;
    held.experts += stage.experts / pp;
  }
  const Axis data = data_axis(c.layout);
  const double n = real(data.ranks), ranks = std::max(1.0, n / real(c.layout.ep)),
               remote = (n - 1) / n * held.dense + (ranks - 1) / ranks * held.experts;
  for (const DataSent& s : data_work(c))
    out[std::string(data.name)][std::string(kExchangeNames[static_cast<size_t>(s.exchange)])] +=
        (s.exchange == Exchange::all_reduce ? 2 : 1) * remote * s.bytes * (s.each ? m : 1);
  return out;
}

std::optional<std::vector<MemoryParts>> own_memory(const TrainConfig& job) {
  std::vector<RankMemory> ranks;
  try {
    ranks = memory_of_ranks(job, true);
  } catch (const OutOfMemory&) {  // exceeds the address space of an arena
    return {};
  }
  const size_t alike = ranks.size() / static_cast<size_t>(job.plan.pp);
  std::vector<MemoryParts> out(static_cast<size_t>(job.plan.pp));
  for (size_t r = 0; r < ranks.size(); ++r) {
    const MemoryByCategory& held = ranks[r].held;
    const MemoryParts found{.parameters = static_cast<double>(held.parameters),
                            .gradients = static_cast<double>(held.gradients),
                            .optimizer = static_cast<double>(held.optimizer),
                            .activations = static_cast<double>(ranks[r].activations),
                            .communication = static_cast<double>(ranks[r].communication)};
    MemoryParts& peak = out[r / alike];
    if (found.peak() > peak.peak()) peak = found;
  }
  return out;
}

Bytes own_bytes(const TrainConfig& job) {
  Bytes out;
  for (const SentBytes& sent : expected_bytes(job, 1))
    if (sent.bytes > 0)
      out[sent.axis][sent.operation] = static_cast<double>(sent.bytes) / static_cast<double>(job.plan.ranks());
  return out;
}

}  // namespace tessera::planner
