// Steps without host synchronization: queueing, capture and launch.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>

#include "optim/cuda/step_state.h"
#include "optim/grad_norm.h"
#include "tensor/cuda/context.h"
#include "tensor/cuda/gpus.h"
#include "train/step.h"

namespace tessera {
namespace {

class Within {
 public:
  explicit Within(bool& flag) : flag_(flag) { flag_ = true; }
  ~Within() { flag_ = false; }
  Within(const Within&) = delete;
  Within& operator=(const Within&) = delete;

 private:
  bool& flag_;
};

class QueuedStep final : public StepGraph {
 public:
  QueuedStep(Parts parts, const ArenaPtr& arena) : parts_(std::move(parts)), arena_(arena), state_(arena) {
    clip_factor(0, parts_.clip);  // rejects invalid norms
  }

  Found run(int64_t step, double lr, StepRequest request) override {
    parts_.load(step);
    state_.set(static_cast<uint64_t>(step), parts_.optimizer->next(lr));
    StepConsensus::Decision agreed = agree(request);
    if (agreed.how == StepConsensus::StepMode::capture && !captures()) agreed.how = StepConsensus::StepMode::queue;
    std::optional<Arena::AllowReuse> lent;  // for the launched graph, until it completes
    if (agreed.how != StepConsensus::StepMode::queue) lent.emplace(*arena_);
    launch_or_queue(agreed.how);
    parts_.ahead(step + 1);
    if (parts_.ranks) parts_.ranks->wait(*arena_);
    arena_->local<cuda::Context>().synchronize();  // the only synchronization of a step
    const Found found{state_.found().loss_sum, state_.found().grad_norm, agreed.request};
    if (!state_.found().update.skip)
      parts_.optimizer->count_step();
    else if (parts_.ranks && std::isfinite(found.loss_sum) && std::isfinite(found.grad_norm))
      parts_.ranks->agree(request, false, false);  // another rank found an index out of bounds and throws here
    return found;
  }

  const uint64_t* step_on_gpu() const override { return queueing_ ? state_.step() : nullptr; }

 private:
  // The first steps select algorithms and grow the arena. If a step begins with the layout of the previous one, the
  // arena is stable and the next step will allocate the same blocks.
  StepConsensus::Decision agree(StepRequest request) {
    const Arena::Layout now = arena_->layout();
    if (graph_ && !graph_->fits()) graph_.reset();  // e.g. after validation has grown the arena
    const bool launches = graph_.has_value(), captures = parts_.captured && (launches || now == before_);
    before_ = now;
    if (parts_.ranks) return parts_.ranks->agree(request, launches, captures);
    return {StepConsensus::choose(launches, captures), request};
  }

  void launch_or_queue(StepConsensus::StepMode how) {
    if (how == StepConsensus::StepMode::queue) {
      ++record_.queued;
      return queue();
    }
    if (how == StepConsensus::StepMode::launch && parts_.ranks) parts_.ranks->count_again();
    graph_->launch();
    ++record_.replays;
  }

  void capture() {
    if (parts_.ranks) parts_.ranks->begin_capture();
    graph_.reset();
    graph_.emplace(arena_, [this] { queue(); });
    if (parts_.ranks) parts_.ranks->end_capture();
    ++record_.captures;
  }

  // A failed capture has executed nothing; gradients() restarts the step.
  bool captures() {
    try {
      capture();
      return true;
    } catch (const Error& e) {
      if (!parts_.may_fall_back) throw;
      graph_.reset();
      parts_.captured = false;
      record_.given_up = e.what();
      return false;
    }
  }

  void queue() {
    const Within here(queueing_);
    state_.fetch();
    const DeviceScalar loss = parts_.gradients();
    const Tensor found = state_.contributions(loss.on_gpu(), parts_.squares(),
                                              {.loss = parts_.says_loss, .squares = parts_.says_squares});
    if (parts_.ranks) parts_.ranks->add_up(found);
    state_.close(found, parts_.clip);
    parts_.optimizer->queue_step(state_.update());
    parts_.finish();
    state_.copy_back();
  }

  Parts parts_;
  ArenaPtr arena_;
  cuda::StepState state_;
  std::optional<cuda::Graph> graph_;
  std::optional<Arena::Layout> before_;  // at the beginning of the last step
  bool queueing_ = false;
};

}  // namespace

std::unique_ptr<StepGraph> make_step_graph(StepGraph::Parts parts, const ArenaPtr& arena) {
  return std::make_unique<QueuedStep>(std::move(parts), arena);
}

}  // namespace tessera
