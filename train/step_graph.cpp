// Which runs can have their steps captured.
#include "train/step_graph.h"

#include <fmt/format.h>

#include "tensor/error.h"
#include "train/names.h"

namespace tessera {
namespace {

std::string obstacle(const Job& job, bool traced) {
  const Plan& p = job.plan;
  if (p.device != Device::cuda) return fmt::format("`device` is {}", name_of(p.device));
  if (p.ranks() > 1 && !uses_nccl(p)) return fmt::format("the {} ranks meet on the host within a step", p.ranks());
  if (p.dp_mode == DataMode::diloco) return "some steps of `dp_mode` diloco end with an outer step, and others do not";
  if (p.dp_mode != DataMode::ddp) return fmt::format("`dp_mode` {} sums on the host", text_of(p.dp_mode));
  if (p.pp > 1) return fmt::format("the {} ranks of `pp` send each other messages", p.pp);
  if (p.cp > 1 && p.cp_mode == ContextMode::ring) return "the ranks of `cp_mode` ring send each other messages";
  if (job.optim.optimizer == OptimizerKind::muon && shared_over(p) > 1)
    return fmt::format("the {} owners of matrices of muon get parts of them by messages", shared_over(p));
  if (p.offload != Offload::none)
    return fmt::format("`offload` {} moves {} through the host", text_of(p.offload),
                       p.offload == Offload::optimizer ? "state" : "values");
  if (const int64_t experts = job.model.experts.count; experts > 0)
    return fmt::format("the host must know how many tokens each of the {} `experts` gets", experts);
  if (traced) return "`trace` looks at each pass of a step";
  return "";
}

}  // namespace

bool steps_without_host(const Job& job, bool traced) { return obstacle(job, traced).empty(); }

std::string no_graph_because(const Job& job, bool traced, bool counted) {
  const Plan& p = job.plan;
  if (p.cuda_graph == CudaGraph::off) return "`cuda_graph` off";
  std::string why = obstacle(job, traced);
  if (why.empty() && counted) why = "the loss is divided by the number of targets, which differs from step to step";
  if (!why.empty() && p.cuda_graph == CudaGraph::on)
    throw FieldError("cuda_graph",
                     fmt::format("a step cannot be captured because {}; expected auto or off, found on", why));
  return why;
}

}  // namespace tessera
