// The agreement of ranks, and conditions for capturing steps.
#include "train/step_graph.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "base/error.h"

namespace tessera {

StepConsensus::StepConsensus(Communicator& world, std::vector<Communicator*> all)
    : world_(world), all_(std::move(all)) {}

StepConsensus::StepMode StepConsensus::choose(bool can_launch, bool can_capture) {
  if (can_launch) return StepMode::launch;
  return can_capture ? StepMode::capture : StepMode::queue;
}

StepConsensus::Decision StepConsensus::agree(StepRequest request, bool can_launch, bool can_capture) {
  const auto vote = [](bool yes) { return yes ? 1.0 : 0.0; };
  std::array<double, 3> votes{encode(request), vote(!can_launch), vote(!can_launch && !can_capture)};
  world_.sum(votes);
  return {choose(votes[1] == 0, votes[2] == 0), decode(votes[0])};
}

void StepConsensus::begin_capture() {
  of_step_.clear();
  for (const Communicator* c : all_) of_step_.push_back(c->counts());
}

void StepConsensus::end_capture() {
  for (size_t c = 0; c < all_.size(); ++c)
    for (size_t op = 0; op < of_step_[c].size(); ++op) {
      const OpCount now = all_[c]->counts()[op];
      OpCount& count = of_step_[c][op];
      count = {.calls = now.calls - count.calls, .sent = now.sent - count.sent};
    }
}

void StepConsensus::count_again() {
  for (size_t c = 0; c < all_.size(); ++c) all_[c]->count_again(of_step_[c]);
}

namespace {

std::string obstacle(const TrainConfig& job, bool traced) {
  const Plan& p = job.plan;
  if (p.device != Device::cuda) return fmt::format("`device` is {}", to_string(p.device));
  if (p.ranks() > 1 && !uses_nccl(p))
    return fmt::format("the {} ranks synchronize on the host within a step", p.ranks());
  if (p.dp_mode == DataMode::diloco) return "only some steps of `dp_mode` diloco end with an outer step";
  if (p.dp_mode != DataMode::ddp) return fmt::format("`dp_mode` {} reduces on the host", value_name(p.dp_mode));
  if (p.pp > 1) return fmt::format("the {} ranks of `pp` exchange point-to-point messages", p.pp);
  if (p.cp > 1 && p.cp_mode == ContextMode::ring) return "the ranks of `cp_mode` ring exchange point-to-point messages";
  if (find_row(job.optim.optimizer).updates_matrices && shard_group_size(p) > 1)
    return fmt::format("the {} owners of muon's matrices receive shards in point-to-point messages",
                       shard_group_size(p));
  if (p.offload != Offload::none)
    return fmt::format("`offload` {} moves {} through the host", value_name(p.offload),
                       p.offload == Offload::optimizer ? "state" : "values");
  if (const int64_t experts = job.model.experts.count; experts > 0)
    return fmt::format("the host needs the number of tokens of each of the {} `experts`", experts);
  if (traced) return "`trace` records each pass of a step";
  return "";
}

}  // namespace

bool steps_without_host(const TrainConfig& job, bool traced) { return obstacle(job, traced).empty(); }

std::string no_graph_because(const TrainConfig& job, bool traced, bool counted) {
  const Plan& p = job.plan;
  if (p.cuda_graph == CudaGraph::off) return "`cuda_graph` off";
  std::string why = obstacle(job, traced);
  if (why.empty() && counted) why = "the loss is divided by the number of targets, which varies between steps";
  if (!why.empty() && p.cuda_graph == CudaGraph::on)
    throw FieldError("cuda_graph",
                     fmt::format("a step cannot be captured because {}; expected auto or off, got on", why));
  return why;
}

}  // namespace tessera
