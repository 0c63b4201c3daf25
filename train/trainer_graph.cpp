// The trainer's steps that the host only begins and ends (train/step_graph.h).
#include "optim/grad_norm.h"
#include "parallel/gradient_norm.h"
#include "train/trainer.h"

namespace tessera {

// Ranks of a tensor axis know the same loss, and what is whole on all of them: one says it. So do ranks that have the
// same gradients after they were summed.
void Trainer::make_graph() {
  const Plan& p = job_.plan;
  if (!steps_without_host(job_, trace_ != nullptr)) return;
  if constexpr (kWithCuda) {
    if (world_.size() > 1) step_ranks_ = std::make_unique<StepRanks>(world_, communicators());
    const auto gradients = [this] {
      DeviceScalar sum = queue_passes();
      queue_sums();
      return sum;
    };
    const bool own_sums = p.tp > 1 && strategy().layout().kept != Kept::everywhere;
    graph_ = make_step_graph(
        {.load = [this](int64_t step) { tokens_->begin(step); },
         .ahead = [this](int64_t step) { tokens_->ahead(step); },
         .gradients = gradients,
         .finish = [this] { strategy().share_parameters(); },
         .squares = [this] { return queue_squares(); },
         .optimizer = optimizer_.get(),
         .clip = job_.optim.clip,
         .captured = no_graph_because(job_, trace_ != nullptr, tokens_->counts_targets()).empty(),
         .may_give_up = p.cuda_graph == CudaGraph::automatic && !step_ranks_ && p.zero == ZeroStage::none,
         .ranks = step_ranks_.get(),
         .says_loss = mesh_.coordinate("tp") == 0,
         .says_squares = own_sums ? strategy().copy() == 0 : data_axis_.rank() == 0},
        arena_);
  }
}

// As sum_of_squares(), of what this rank has to say: float64, units in the order of the whole model.
Tensor Trainer::queue_squares() {
  const Tensor own = unit_squares(strategy(), &mesh_["tp"]);
  std::vector<BlockRun> places(ranks_of_units_.size());
  for (size_t u = 0; u < places_.size(); ++u)
    if (places_[u] < places.size()) places[places_[u]] = {.begin = static_cast<int64_t>(u), .count = 1};
  Tensor all = own.make({std::ssize(places)}, DType::float64, Category::workspace);
  ordered_sums(own, places, all);
  return all;
}

// Loss and norm are known when the update has been made, or left out.
StepReport Trainer::queued_step(Wish wish) {
  const double lr = schedule_.at(steps_done());
  const StepGraph::Found found = graph_->run(steps_done(), lr, wish);
  StepReport r{.lr = lr, .wish = found.wish};
  r.loss = found.loss_sum / tokens_->targets();
  r.grad_norm = found.grad_norm;
  check_finite(r, steps_done() + 1);
  return r;
}

}  // namespace tessera
