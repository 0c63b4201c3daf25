// Training steps: reports, agreement between ranks, GPU steps without host synchronization.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "parallel/comm/communicator.h"
#include "train/config.h"

namespace tessera {

// A rank's request to all ranks: save a checkpoint after the step, or end the run.
enum class StepRequest : uint8_t { none, save, stop };
// Requests are summed over ranks; the sum decodes to the strongest.
inline double encode(StepRequest request) {
  return request == StepRequest::stop ? 1 << 20 : request == StepRequest::save ? 1 : 0;
}
inline StepRequest decode(double votes) {
  return votes >= encode(StepRequest::stop) ? StepRequest::stop : votes > 0 ? StepRequest::save : StepRequest::none;
}

struct StepReport {
  int64_t step = 0;  // completed steps
  double loss = 0, lr = 0, grad_norm = 0, tokens_per_s = 0, step_ms = 0;
  StepRequest request = StepRequest::none;  // strongest request of any rank
};

void set_time(StepReport& report, double seconds, int64_t tokens);

// For display; drops the sign of NaN.
std::string number_text(double number);

// Throws Error (not_finite) naming `step` if its loss or gradient norm is not finite.
void check_finite(const StepReport& report, int64_t step);

// Before each step without host synchronization, the ranks agree on its mode by one exchange of flags on the host: a
// rank whose arena layout no longer matches its graph would queue operations that others replay, and NCCL may require
// all ranks for a capture. The final wait checks the progress of the other ranks and aborts NCCL's kernels if one has
// failed.

class StepConsensus {
 public:
  enum class StepMode : uint8_t { queue, capture, launch };
  struct Decision {
    StepMode how = StepMode::queue;
    StepRequest request = StepRequest::none;  // of any rank
  };

  // `all`: every communicator of the steps, once each; they must outlive this object.
  StepConsensus(Communicator& world, std::vector<Communicator*> all);

  // Replays if every rank has a matching graph, captures if every rank can do either.
  Decision agree(StepRequest request, bool can_launch, bool can_capture);
  // This rank's preferred mode.
  static StepMode choose(bool can_launch, bool can_capture);
  void add_up(const Tensor& values) { world_.all_reduce(values); }
  void wait(Arena& gpu) { world_.wait_for_gpu(gpu, "step"); }

  // Bracket a captured step and count its communication calls; count_again() adds the same counts for a replay.
  void begin_capture();
  void end_capture();
  void count_again();

 private:
  Communicator& world_;
  std::vector<Communicator*> all_;
  std::vector<OpCounts> of_step_;  // counts at the beginning of the capture
};

// A training step without host synchronization: everything from the first embedding to the update is queued; a single
// wait returns loss and norm. If either is not finite, the GPU leaves the parameters unchanged. Nothing queued depends
// on the step number, so a step is captured once as a CUDA graph and replayed (tensor/cuda/gpus.h). Over NCCL, ranks
// synchronize on the host only before the step, and reduce loss and norm on their GPUs.

// Whether a run's steps use this path: one rank on a GPU, or several over NCCL without point-to-point messages; no
// experts, whose rows the host counts; no host-side tracing of actions (`traced`).
bool steps_without_host(const TrainConfig& job, bool traced);
// Why steps are not captured; empty if they are. `counted`: the number of trained targets varies between steps. Throws
// FieldError if CudaGraph::on is impossible.
std::string no_graph_because(const TrainConfig& job, bool traced, bool counted = false);

class StepGraph : NotCopied {
 public:
  struct Parts {
    std::function<void(int64_t step)> load;   // stages the step's tokens for the GPU
    std::function<void(int64_t step)> ahead;  // prefetches the next step's tokens during the step
    std::function<DeviceScalar()> gradients;  // queues the passes; returns the sum of the losses
    std::function<void()> finish;             // queues operations after the update
    std::function<Tensor()> squares;          // queues the units' sums of squares in the order of their accumulation
    Optimizer* optimizer = nullptr;
    double clip = 0;                             // 0: unlimited
    bool captured = false;                       // false: queued again in every step
    bool may_fall_back = false;                  // after a failed capture, queue all steps instead of ending the run
    StepConsensus* ranks = nullptr;              // null for one rank
    bool says_loss = true, says_squares = true;  // contributes to the reductions
  };
  struct Found {
    double loss_sum = 0, grad_norm = 0;  // over all ranks
    StepRequest request = StepRequest::none;
  };

  virtual ~StepGraph() = default;

  // Updates parameters and the optimizer's step count only if loss and norm are finite and no rank found an index out
  // of bounds; a rank that did throws and ends the run. `step` is the step number used by dropout's RNG.
  virtual Found run(int64_t step, double lr, StepRequest request) = 0;
  // Device address of the step number while the passes are queued; otherwise null.
  virtual const uint64_t* step_on_gpu() const = 0;
  // Steps by mode; a captured step is then launched and also counts as a replay.
  struct Record {
    int64_t captures = 0, replays = 0, queued = 0;
    std::string given_up = {};  // error of a failed capture; all later steps are queued
  };
  const Record& record() const { return record_; }

 protected:
  Record record_;
};

// Objects referenced by `parts` must outlive the result. Requires CUDA.
std::unique_ptr<StepGraph> make_step_graph(StepGraph::Parts parts, const ArenaPtr& arena);

}  // namespace tessera
