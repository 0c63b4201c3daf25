// Executes one rank's action list of any pipeline schedule.
//
//   PipelineRuntime pipe(insert_messages(zb_v(p, m)), axis, stages);
//   for each step: loss = pipe.step();
//
//              F: forward                              B, or I: backward
//   received [input leaf]--> stage --[output] sent      received [output's gradient]--> stage --[input's gradient] sent
//                                                      W: weight gradients deferred by I
//
// Volume: one activation forward and one gradient backward per micro-batch and boundary between ranks. Memory per
// micro-batch in flight: the tensors of the stage's graph; an output is freed once sent. Under every schedule, weights
// accumulate the gradients of micro-batches in ascending order, so results are bitwise identical to one rank that
// processes them sequentially.
#pragma once
#include <functional>
#include <map>

#include "autograd/var.h"
#include "parallel/comm/communicator.h"
#include "parallel/comm/trace.h"
#include "parallel/pipeline/schedule.h"

namespace tessera {

// The last stage sets all fields: the root of the backward pass, its gradient unless that is 1, and the loss sum.
struct StageOutput {
  Var value;
  Tensor seed = {};
  DeviceScalar loss_sum = {};
};

class Stages : NotCopied {
 public:
  virtual ~Stages() = default;

  virtual void enter(int /*stage*/, int /*microbatch*/) {}
  // `input` is a leaf that requires a gradient; undefined for stage 0, which reads the micro-batch directly.
  virtual StageOutput forward(int stage, int microbatch, const Var& input) = 0;
  // Allocates the input that `stage` receives.
  virtual Tensor make_activation(int stage, int microbatch) = 0;
  // Runs a pass that accumulates weight gradients (B or W).
  virtual void accumulate(int stage, int microbatch, const std::function<void()>& pass) = 0;
};

class PipelineRuntime {
 public:
  // Throws Error if the schedule does not match the axis, is invalid (validate.h) or lacks messages. All arguments must
  // outlive the runtime; every rank of the axis passes the same schedule. `trace` may be null.
  PipelineRuntime(Schedule schedule, Communicator& axis, Stages& stages, Trace* trace = nullptr);

  // Returns the sum of the micro-batch losses, added in ascending order, on the rank of the last stage; 0 on other
  // ranks.
  DeviceScalar step();

  const Schedule& schedule() const { return schedule_; }
  int peak_in_flight() const { return peak_; }  // maximum (stage, micro-batch) pairs between F and B or W

 private:
  struct MicrobatchState {
    Tensor input;       // from its receipt until F
    Tensor output;      // from F until it is sent
    Tensor gradient;    // of the output, from its receipt until B or I
    Tensor input_grad;  // until it is sent
    Var leaf;
    Var root;          // the output's node; retains its value only in the last stage
    Tensor seed;       // of the last stage's backward pass
    DType received{};  // of the input and its gradient
    Shape shape;       // of the output and its gradient
    DType dtype{};
    ArenaPtr arena;
    DeferredWeightGrads deferred;
  };
  void perform(const Action& action);
  void forward(int stage, int microbatch);
  void backward(int stage, int microbatch, bool split);
  void accumulate(int stage, int microbatch, const std::function<void()>& pass);
  void message(const Action& action);
  MicrobatchState& at(int stage, int microbatch) { return states_[{stage, microbatch}]; }
  int stage_rank(int stage) const { return schedule_.rank_of_stage[static_cast<size_t>(stage)]; }

  Schedule schedule_;
  Communicator& axis_;
  Stages& stages_;
  Trace* trace_;
  std::map<std::pair<int, int>, MicrobatchState> states_;  // by stage and micro-batch
  int in_flight_ = 0, peak_ = 0;
  DeviceScalar loss_;
};

}  // namespace tessera
