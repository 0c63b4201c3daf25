// What a described program holds.
#include <algorithm>

#include "planner/described.h"
#include "planner/layer.h"
#include "planner/pipeline.h"

namespace tessera::planner {
namespace {

double real(int64_t x) { return static_cast<double>(x); }

// Bytes of one micro-batch's arrays on a rank.
struct Arrays {
  double between;  // of h channels and two bytes, as they lie between blocks
  double whole;    // the same as products see it
  double mask;     // of one byte
};
Arrays arrays_of(const Case& c) {
  const Plan& p = c.layout.plan;
  const double whole = 2 * local_tokens(c) * real(c.model.channels), between = whole / (p.sp ? real(p.tp) : 1);
  return {between, whole, c.software.dropout ? between / 2 : 0};
}

// Bytes of what is taken for all tokens of a micro-batch and gone after the pass: logits, and of ZeRO-3 units that are
// whole for a while, two at a time.
double gathered(const Case& c, double layer, double layers) {
  const Software& s = c.software;
  if (c.layout.plan.zero != ZeroStage::three || data_axis(c).ranks == 1) return 0;
  const double units = s.reshard_after_forward ? 2 : layers;
  return layer * (units * s.gather_bytes + s.reduce_bytes);
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

StageParameters parameters_of(const Case& c, int64_t layers, bool first, bool last) {
  const ModelShape& m = c.model;
  const double t = real(c.layout.plan.tp), h = real(m.channels), table = real(m.vocab) * h / t;
  const double matrices = layer_matrices(m), experts = m.experts > 0 ? expert_parameters(m) : 0;
  StageParameters out;
  out.dense = real(layers) * ((matrices - experts) / t + layer_parameters(m) - matrices);
  out.experts = real(layers) * experts / t / real(c.layout.ep);
  if (first) out.dense += table + (m.positions == Positions::learned ? real(m.context) * h : 0);
  if (last) out.dense += (m.gated ? 1 : 2) * h + (m.tied && first ? 0 : table);
  return out;
}

double kept_by_layer(const Case& c) {
  const ModelShape& m = c.model;
  const Plan& p = c.layout.plan;
  const Software& s = c.software;
  const Arrays a = arrays_of(c);
  if (p.recompute == Recompute::block) return a.between;
  const double t = real(p.tp), tokens = local_tokens(c), heads = real(m.heads) / t;
  const double query = a.whole * real(m.query()) / real(m.channels) / t, key = query * real(m.key()) / real(m.query());
  // What norms and products read: two norms and the inputs of the two blocks.
  const bool norms_again = p.recompute == Recompute::activation_norm;
  double kept = 2 * a.between + (norms_again ? 0 : 2 * a.between) + 2 * a.mask;
  // q, k, v, what attention gives; and of pairs the softmax and, with dropout, its mask and what is left of it; or the
  // log-sum-exp alone.
  kept += 2 * query + 2 * key;
  if (s.attention != "unfused")
    kept += 4 * heads * tokens;
  else if (p.recompute != Recompute::attention)
    kept += (s.dropout ? 5 : 2) * heads * tokens * real(m.context);
  // The inside of the feed-forward layer: of GELU what it reads and gives; with experts of all copies of a token.
  const double copies = m.experts > 0 ? real(m.experts_per_token) : 1;
  const double wide = 2 * tokens * copies * real(m.hidden()) / t;
  const bool activation_again = norms_again || p.recompute == Recompute::activation;
  kept += wide * (m.gated ? s.gated_activation_pieces : 2) - (activation_again ? wide : 0);
  if (m.experts > 0) kept += 2 * copies * a.whole;  // as they are sent and come back
  return kept;
}

std::vector<MemoryParts> described_memory(const Case& c, const std::vector<int>& in_flight) {
  const Software& s = c.software;
  const Plan& p = c.layout.plan;
  const Arrays a = arrays_of(c);
  const std::vector<int> rank_of_stage = rank_of_stages(p);
  const size_t stages = rank_of_stage.size();
  const std::vector<int64_t> layers = layers_of_stages(c, std::ssize(rank_of_stage));
  const double chunks = real(std::ssize(rank_of_stage)) / real(p.pp);
  const double n = real(data_axis(c).ranks), t = real(p.tp), kept = kept_by_layer(c);
  const double own = local_tokens(c) * real(c.model.vocab) / t * s.logit_bytes;
  Case none = c;
  none.layout.plan.recompute = Recompute::none;
  const double again = p.recompute == Recompute::block ? kept_by_layer(none) : 0;  // of one layer, during backward
  std::vector<MemoryParts> out;
  for (int rank = 0; rank < p.pp; ++rank) {
    int64_t here = 0;
    bool first = false, last = false;
    for (size_t stage = 0; stage < stages; ++stage) {
      if (rank_of_stage[stage] != rank) continue;
      here += layers[stage];
      first |= stage == 0;
      last |= stage + 1 == stages;
    }
    const StageParameters held = parameters_of(c, here, first, last);
    const auto shared = [&](ZeroStage from) {  // experts lie on n / ep ranks
      return p.zero >= from ? held.dense / n + held.experts / std::max(1.0, n / real(c.layout.ep)) : held.all();
    };
    const double flights = in_flight[static_cast<size_t>(rank)], stage_layers = real(here) / chunks;
    MemoryParts m{.parameters = shared(ZeroStage::three) * s.parameter_bytes,
                  .gradients = shared(ZeroStage::two) * s.gradient_bytes,
                  .optimizer = shared(ZeroStage::one) * s.state_bytes,
                  .activations = flights * stage_layers * kept,
                  .communication = gathered(c, parameters_of(c, 1, false, false).all(), real(here)),
                  .workspace = again};
    if (first) m.activations += flights / chunks * a.mask;  // of the embeddings' dropout
    if (last) m.activations += 2 * a.between + own;         // the last norm's input, the head's, and logits
    out.push_back(m);
  }
  return out;
}

}  // namespace tessera::planner
