// What a described program sends.
#include <algorithm>

#include "planner/described.h"
#include "planner/layer.h"
#include "planner/pipeline.h"

namespace tessera::planner {
namespace {

double real(int64_t x) { return static_cast<double>(x); }

}  // namespace

Bytes described_bytes(const Case& c) {
  const Plan& p = c.layout.plan;
  const std::vector<int> rank_of_stage = rank_of_stages(p);
  int64_t boundaries = 0;  // between ranks
  for (size_t s = 1; s < rank_of_stage.size(); ++s) boundaries += rank_of_stage[s - 1] != rank_of_stage[s] ? 1 : 0;
  const Software& s = c.software;
  const double m = real(p.microbatches), t = real(p.tp), n = real(data_axis(c).ranks), pp = real(p.pp);
  const double layers = m * real(c.model.layers) / pp;  // a mean rank's, of all micro-batches
  const double array = 2 * local_tokens(c) * real(c.model.channels), forwards = p.recompute == Recompute::block ? 2 : 1;
  Bytes out;
  if (p.tp > 1) {
    const double once = (t - 1) / t * array, embedded = 2 * m / pp;  // the embedding and the head's input gradient
    if (p.sp) {
      out["tp"]["all_gather"] = once * (layers * (2 * forwards + 4) + embedded);
      out["tp"]["reduce_scatter"] = once * (layers * (2 * forwards + 2) + embedded);
    } else {
      out["tp"]["all_reduce"] = 2 * once * (layers * (2 * forwards + 2) + embedded);
    }
  }
  if (p.cp > 1) {
    const double keys = 2 * array * real(c.model.key()) / real(c.model.channels) / t;
    out["cp"]["send"] = layers * (real(p.cp) - 1) * keys * (forwards + 2);
  }
  if (c.layout.ep > 1) {
    const double ep = real(c.layout.ep), sent = array * real(c.model.experts_per_token) * (ep - 1) / ep;
    out["ep"]["all_to_all"] = layers * sent * (2 * forwards + 2);
  }
  if (p.pp > 1) out["pp"]["send"] = 2 * m * real(boundaries) / pp * array / (p.sp ? t : 1);
  if (n == 1) return out;
  const std::string axis = p.cp > 1 ? "dp+cp" : "dp";
  double held = 0, experts = 0;  // of the mean rank
  const std::vector<int64_t> split = layers_of_stages(c, std::ssize(rank_of_stage));
  for (size_t i = 0; i < split.size(); ++i) {
    const StageParameters stage = parameters_of(c, split[i], i == 0, i + 1 == split.size());
    held += stage.dense / pp;
    experts += stage.experts / pp;
  }
  const double ranks = std::max(1.0, n / real(c.layout.ep)), share = (n - 1) / n * held + (ranks - 1) / ranks * experts;
  if (p.zero == ZeroStage::none) {
    out[axis]["all_reduce"] = 2 * share * s.reduce_bytes;
  } else {
    const bool three = p.zero == ZeroStage::three;
    out[axis]["reduce_scatter"] = share * s.reduce_bytes * (p.zero == ZeroStage::one ? 1 : m);
    out[axis]["all_gather"] = share * s.gather_bytes * (three && s.reshard_after_forward ? 2 * m : 1);
  }
  return out;
}

}  // namespace tessera::planner
