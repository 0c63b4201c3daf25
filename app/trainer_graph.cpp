// The trainer's steps that the host only begins and ends (app/step_graph.h).
#include "app/trainer.h"
#include "optim/cuda/grad_norm.h"

namespace tessera {

// Ranks of a tensor axis know the same loss, and what is whole on all of them: one says it. So do ranks that have the
// same gradients after they were summed.
void Trainer::make_graph() {
  if (!steps_without_host(options_, world_.size())) return;
  if constexpr (kWithCuda) {
    if (world_.size() > 1) step_ranks_ = std::make_unique<StepRanks>(world_, communicators());
    const auto gradients = [this] {
      LateNumber sum = queue_passes();
      queue_sums();
      return sum;
    };
    const bool own_sums = axes_.tp > 1 && strategy_->shares_out_gradients();
    graph_ = make_step_graph({.load = [this](int64_t step) { tokens_->begin(step); },
                              .ahead = [this](int64_t step) { tokens_->ahead(step); },
                              .gradients = gradients,
                              .finish = [this] { strategy_->share_parameters(); },
                              .squares = [this] { return queue_squares(); },
                              .optimizer = optimizer_.get(),
                              .clip = options_.clip,
                              .captured = no_graph_because(options_, world_.size()).empty(),
                              .may_give_up = options_.cuda_graph == "auto" && !step_ranks_ && options_.zero == 0,
                              .ranks = step_ranks_.get(),
                              .says_loss = mesh_.coordinate("tp") == 0,
                              .says_squares = own_sums || data_axis_.rank() == 0},
                             arena_);
  }
}

// As sum_of_squares(), of what this rank has to say: float64, units in the order of the whole model.
Tensor Trainer::queue_squares() {
  const bool speaks = mesh_.coordinate("tp") == 0;
  const Tensor own = axes_.tp > 1
                         ? strategy_->own_sums_on_gpu([&](const Slot& slot) { return speaks || !slot.cut.is_whole(); })
                         : strategy_->unit_sums_on_gpu();
  std::vector<BlockRun> places(whole_units_);
  for (size_t u = 0; u < places_.size(); ++u)
    if (places_[u] < places.size()) places[places_[u]] = {.begin = static_cast<int64_t>(u), .count = 1};
  Tensor all = own.make({static_cast<int64_t>(places.size())}, DType::float64, Category::workspace);
  if constexpr (kWithCuda) cuda::ordered_sums(own, places, all);
  return all;
}

// Loss and norm are known when the update has been made, or left out.
StepReport Trainer::queued_step(bool stop) {
  const double lr = schedule_.at(steps_done());
  const StepGraph::Found found = graph_->run(steps_done(), lr, stop);
  StepReport r{.lr = lr, .stop = found.stop};
  r.loss = found.loss_sum / static_cast<double>(tokens_per_step());
  r.grad_norm = found.grad_norm;
  check_finite(r, steps_done() + 1);
  return r;
}

}  // namespace tessera
