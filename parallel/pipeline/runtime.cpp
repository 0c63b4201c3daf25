// Execution of a schedule's actions.
#include "parallel/pipeline/runtime.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/error.h"
#include "parallel/pipeline/validate.h"

namespace tessera {

PipelineRuntime::PipelineRuntime(Schedule schedule, Communicator& axis, Stages& stages, Trace* trace)
    : schedule_(std::move(schedule)), axis_(axis), stages_(stages), trace_(trace) {
  if (schedule_.ranks != axis.size())
    throw Error("[pipeline] " + schedule_.name + " is for " + std::to_string(schedule_.ranks) + " ranks; the " +
                axis.axis() + " axis has " + std::to_string(axis.size()));
  validate(schedule_);
  if (schedule_.wire_boundaries() > 0 && !has_messages(schedule_))
    throw Error("[pipeline] " + schedule_.name + " has no messages; insert_messages() adds them");
}

DeviceScalar PipelineRuntime::step() {
  loss_ = 0;
  in_flight_ = 0;
  states_.clear();  // tensors of a step that threw
  for (const Action& action : schedule_.actions[static_cast<size_t>(axis_.rank())]) {
    const double begin = trace_ ? trace_->now() : 0, before = trace_ ? Trace::cpu_now() : 0;
    perform(action);
    if (!trace_) continue;
    const double cpu_s = Trace::cpu_now() - before;
    trace_->add({action.str(), axis_.axis(), 0, begin, begin, trace_->now(), 0, TraceKind::action, cpu_s});
  }
  states_.clear();
  return std::exchange(loss_, 0);
}

void PipelineRuntime::perform(const Action& action) {
  const PassKind what = action.what;
  const int stage = action.stage, microbatch = action.microbatch;
  if (what <= PassKind::W) stages_.enter(stage, microbatch);
  switch (what) {
    case PassKind::F:
      return forward(stage, microbatch);
    case PassKind::B:
      return accumulate(stage, microbatch, [&] { backward(stage, microbatch, false); });
    case PassKind::I:
      return backward(stage, microbatch, true);
    case PassKind::W:
      return accumulate(stage, microbatch, [&] { at(stage, microbatch).deferred.run(); });
    default:
      return message(action);
  }
}

void PipelineRuntime::forward(int stage, int microbatch) {
  peak_ = std::max(peak_, ++in_flight_);
  MicrobatchState& here = at(stage, microbatch);
  Var input;
  if (stage > 0) {
    here.received = here.input.dtype();
    input = Var::input(std::exchange(here.input, Tensor()));
  }
  StageOutput out = stages_.forward(stage, microbatch, input);
  here.leaf = input.edge();
  if (stage + 1 == schedule_.stages) {
    loss_ += out.loss_sum;
    here.root = out.seed.defined() ? out.value.edge() : std::move(out.value);
    here.seed = std::move(out.seed);
    return;
  }
  here.root = out.value.edge();
  here.shape = out.value.shape();
  here.dtype = out.value.dtype();
  here.arena = out.value.value().arena();
  Tensor value = std::move(out.value).take();
  (schedule_.crosses(stage) ? here.output : at(stage + 1, microbatch).input) = std::move(value);
}

void PipelineRuntime::backward(int stage, int microbatch, bool split) {
  MicrobatchState& here = at(stage, microbatch);
  const bool last = stage + 1 == schedule_.stages;
  {
    const Var root = std::exchange(here.root, Var());
    tessera::backward(root, {.seed = std::exchange(last ? here.seed : here.gradient, Tensor()),
                             .defer = split ? &here.deferred : nullptr});
  }
  if (stage > 0) {
    Tensor gradient = std::exchange(here.leaf, Var()).grad();
    if (!gradient.defined() || gradient.dtype() != here.received)
      throw Error("[pipeline] " + Action{split ? PassKind::I : PassKind::B, stage, microbatch}.str() +
                  ": the input, of " + std::string(to_string(here.received)) + ", has " +
                  (gradient.defined() ? "the gradient " + gradient.describe() : "no gradient") +
                  "; expected a gradient of this dtype");
    (schedule_.crosses(stage - 1) ? here.input_grad : at(stage - 1, microbatch).gradient) = std::move(gradient);
  }
}

void PipelineRuntime::accumulate(int stage, int microbatch, const std::function<void()>& pass) {
  stages_.accumulate(stage, microbatch, pass);
  --in_flight_;
}

// The tag encodes the destination stage, micro-batch and direction.
void PipelineRuntime::message(const Action& action) {
  const PassKind what = action.what;
  const int stage = action.stage, microbatch = action.microbatch;
  MicrobatchState& here = at(stage, microbatch);
  const auto tag = [&](int to, int backward) { return (to * schedule_.microbatches + microbatch) * 2 + backward; };
  if (what == PassKind::send_forward) {
    const Tensor out = std::exchange(here.output, Tensor()).contiguous();
    axis_.send(out, stage_rank(stage + 1), tag(stage + 1, 0));
  } else if (what == PassKind::recv_forward) {
    here.input = stages_.make_activation(stage, microbatch);
    axis_.recv(here.input, stage_rank(stage - 1), tag(stage, 0));
  } else if (what == PassKind::send_backward) {
    const Tensor out = std::exchange(here.input_grad, Tensor()).contiguous();
    axis_.send(out, stage_rank(stage - 1), tag(stage - 1, 1));
  } else {
    here.gradient = Tensor::empty(here.shape, here.dtype, here.arena, Category::communication);
    axis_.recv(here.gradient, stage_rank(stage + 1), tag(stage, 1));
  }
}

}  // namespace tessera
