// Training steps: reports, agreement between ranks, and steps that run on the GPU without the host.
#pragma once

#include "parallel/comm/communicator.h"
#include "train/config.h"

namespace tessera {

// A rank's request to all others with a step: save a checkpoint after it, or end the run.
enum class StepRequest : uint8_t { none, save, stop };
// Requests are summed over ranks; the sum decodes to the strongest.
inline double encode(StepRequest wish) {
  return wish == StepRequest::stop ? 1 << 20 : wish == StepRequest::save ? 1 : 0;
}
inline StepRequest decode(double votes) {
  return votes >= encode(StepRequest::stop) ? StepRequest::stop : votes > 0 ? StepRequest::save : StepRequest::none;
}

struct StepReport {
  int64_t step = 0;  // completed steps
  double loss = 0, lr = 0, grad_norm = 0, tokens_per_s = 0, step_ms = 0;
  StepRequest wish = StepRequest::none;  // strongest request of any rank, the same on all
};

// Sets time and throughput of a step of `tokens` tokens that took `seconds`.
void set_time(StepReport& report, double seconds, int64_t tokens);

// For display; drops the sign of NaN.
std::string number_text(double number);

// Throws Error (not_finite) naming `step` if its loss or gradient norm is not finite.
void check_finite(const StepReport& report, int64_t step);

// Agreement between ranks on steps that the host only starts and awaits. Before each step the ranks exchange flags once
// on the host to select one mode: a rank whose arena layout no longer matches its graph would queue operations that
// others replay, and NCCL may require all ranks for a capture. Results are reduced on the GPUs. The final wait checks
// the progress of the other ranks and aborts NCCL's kernels if one has failed.

class StepConsensus {
 public:
  enum class StepMode : uint8_t { queue, capture, launch };
  struct Decision {
    StepMode how = StepMode::queue;
    StepRequest wish = StepRequest::none;  // strongest request of any rank
  };

  // `all`: every communicator of this rank's steps, once each; they must outlive this object.
  StepConsensus(Communicator& world, std::vector<Communicator*> all);

  // Replays if every rank has a matching graph, captures if every rank can do either.
  Decision agree(StepRequest wish, bool can_launch, bool can_capture);
  // This rank's preferred mode.
  static StepMode choose(bool can_launch, bool can_capture);
  // Queues an in-place all-reduce.
  void add_up(const Tensor& numbers) { world_.all_reduce(numbers); }
  void wait(Arena& gpu) { world_.wait_for_gpu(gpu, "step"); }

  // Between these two a step is captured, which counts its communication calls; count_again() adds the same counts for
  // a replay.
  void begin_capture();
  void end_capture();
  void count_again();

 private:
  Communicator& world_;
  std::vector<Communicator*> all_;
  std::vector<OpCounts> of_step_;  // counts at the beginning of the capture
};

// A training step without host synchronization: the host passes scalars and tokens to the GPU and queues everything
// from the first embedding to the update without reading results; a single wait returns loss and norm. If either is not
// finite, the GPU leaves the parameters unchanged. Nothing queued depends on the step, so it is captured once as a CUDA
// graph and replayed for later steps (tensor/cuda/gpus.h). Several ranks can do so over NCCL: they synchronize on the
// host only before the step, and reduce loss and norm on their GPUs.

// Whether a run's steps use this path: one rank on a GPU, or several over NCCL without point-to-point messages; no
// experts, whose rows the host counts; and no host-side tracing of actions (`traced`).
bool steps_without_host(const Job& job, bool traced);
// The reason why steps are not captured; empty if they are. `counted`: the number of trained targets varies between
// steps. Throws FieldError if CudaGraph::on requests an impossible capture.
std::string no_graph_because(const Job& job, bool traced, bool counted = false);

class StepGraph : NotCopied {
 public:
  struct Parts {
    std::function<void(int64_t step)> load;   // stages the step's tokens for the GPU
    std::function<void(int64_t step)> ahead;  // prefetches the next step's tokens while the GPU computes
    std::function<DeviceScalar()> gradients;  // queues the passes; returns the sum of the losses
    std::function<void()> finish;             // queues operations after the update
    std::function<Tensor()>
        squares;  // queues the units' sums of squares in the order in which the norm accumulates them
    Optimizer* optimizer = nullptr;
    double clip = 0;                             // maximum norm; 0: unlimited
    bool captured = false;                       // false: queued again in every step
    bool may_give_up = false;                    // after a failed capture, queue all steps instead of ending the run
    StepConsensus* ranks = nullptr;              // null for one rank
    bool says_loss = true, says_squares = true;  // whether this rank contributes to the reductions
  };
  struct Found {
    double loss_sum = 0, grad_norm = 0;  // over all ranks
    StepRequest wish = StepRequest::none;
  };

  virtual ~StepGraph() = default;

  // Runs step number `step` (as counted by dropout) with learning rate `lr`. Updates parameters and the optimizer's
  // step count only if loss and norm are finite and no rank found an index out of bounds, for which that rank throws
  // and ends the run. Returns the request of all ranks.
  virtual Found run(int64_t step, double lr, StepRequest wish) = 0;
  // Device address of the step number while the passes are queued; otherwise null.
  virtual const uint64_t* step_on_gpu() const = 0;
  // Counts of the modes of all steps; a captured step is then launched and also counts as a replay.
  struct Record {
    int64_t captures = 0, replays = 0, queued = 0;
    std::string given_up = {};  // error of a failed capture, after which all steps are queued
  };
  const Record& record() const { return record_; }

 protected:
  Record record_;
};

// Objects referenced by `parts` must outlive the result. Requires CUDA.
std::unique_ptr<StepGraph> make_step_graph(StepGraph::Parts parts, const ArenaPtr& arena);

}  // namespace tessera
