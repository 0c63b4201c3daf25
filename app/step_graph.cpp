// Which runs can have their steps captured.
#include "app/step_graph.h"

#include <fmt/format.h>

#include "app/plan.h"
#include "tensor/error.h"

namespace tessera {
namespace {

std::string obstacle(const TrainOptions& o, int ranks) {
  if (o.device != "cuda") return fmt::format("--device is {}", o.device);
  if (ranks > 1 && !uses_nccl(o)) return fmt::format("the {} ranks meet on the host within a step", ranks);
  if (o.dp_mode != "ddp") return fmt::format("--dp-mode {} sums on the host", o.dp_mode);
  const Axes axes = axes_of(o);
  if (axes.pp > 1) return fmt::format("the {} ranks of --pp send each other messages", axes.pp);
  if (axes.cp > 1 && o.cp_mode == "ring") return "the ranks of --cp-mode ring send each other messages";
  if (o.offload != "none") return fmt::format("--offload {} moves state through the host", o.offload);
  if (o.trace) return "--trace looks at each pass of a step";
  return "";
}

}  // namespace

bool steps_without_host(const TrainOptions& o, int ranks) { return obstacle(o, ranks).empty(); }

std::string no_graph_because(const TrainOptions& o, int ranks) {
  if (o.cuda_graph == "off") return "--cuda-graph off";
  std::string why = obstacle(o, ranks);
  if (!why.empty() && o.cuda_graph == "on")
    throw Error(fmt::format("--cuda-graph: a step cannot be captured because {}; expected auto or off, found on", why));
  return why;
}

}  // namespace tessera
