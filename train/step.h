// Training steps: what they report, what ranks agree on beside them, and steps that a GPU makes by itself.
#pragma once

#include "parallel/comm/communicator.h"
#include "train/job.h"

namespace tessera {

// Requests that a rank makes of all others with a step: to save after it, or to end the run.
enum class StepRequest : uint8_t { none, save, stop };
// Ranks add up their votes, and the sum says what the most demanding of them wants.
inline double encode(StepRequest wish) {
  return wish == StepRequest::stop ? 1 << 20 : wish == StepRequest::save ? 1 : 0;
}
inline StepRequest decode(double votes) {
  return votes >= encode(StepRequest::stop) ? StepRequest::stop : votes > 0 ? StepRequest::save : StepRequest::none;
}

struct StepReport {
  int64_t step = 0;  // steps done
  double loss = 0, lr = 0, grad_norm = 0, tokens_per_s = 0, step_ms = 0;
  StepRequest wish = StepRequest::none;  // the ranks' wish, the same on all
};

// Sets the time of a step of `tokens` tokens that took `seconds`, and their speed.
void set_time(StepReport& report, double seconds, int64_t tokens);

// As it is shown: a NaN has a sign, which nobody wants to read.
std::string number_text(double number);

// Throws Error (not_finite) naming `step` when its loss or its gradient norm is not a number.
void check_finite(const StepReport& report, int64_t step);

// The ranks' work together on a step that the host only begins and ends.
//
// Before it they meet on the host, once, and agree on how all of them make it: a rank whose arena has another layout
// than its graph would queue what the others launch, and NCCL may want all of them when it is captured. On the GPU they
// add up what each has found. Who waits for the end looks after the others, and ends NCCL's kernels where one has
// failed.

class StepConsensus {
 public:
  enum class How : uint8_t { queue, capture, launch };
  struct Agreed {
    How how = How::queue;
    StepRequest wish = StepRequest::none;  // the wish of all ranks
  };

  // Every communicator that this rank uses in a step, once; they must outlive it.
  StepConsensus(Communicator& world, std::vector<Communicator*> all);

  // Launched where every rank has a graph that fits, captured where every rank could do one or the other.
  Agreed agree(StepRequest wish, bool can_launch, bool can_capture);
  // The way that a rank would choose on its own.
  static How choose(bool can_launch, bool can_capture);
  // Queues the sum over ranks, in place.
  void add_up(const Tensor& numbers) { world_.all_reduce(numbers); }
  void wait(Arena& gpu) { world_.wait_for_gpu(gpu, "step"); }

  // Between these two a step is captured, whose communications are counted as they are called; a launch without calls
  // counts them again.
  void begin_capture();
  void end_capture();
  void count_again();

 private:
  Communicator& world_;
  std::vector<Communicator*> all_;
  std::vector<OpCounts> of_step_;  // while it is captured: the counts at its beginning
};

// A training step of which the host hears when it is over: it hands numbers and tokens to the GPU, everything from the
// first embedding to the update is queued without a look at the results, and one wait brings loss and norm back. Where
// either is not finite the GPU has left the parameters as they were.
//
// So nothing that is queued depends on the step, and all of it is captured once as a CUDA graph and launched again for
// every later step (tensor/cuda/gpus.h). Several ranks do so where NCCL moves what they send each other: they meet on
// the host before the step and not within it, and add up loss and norm on their GPUs.

// Whether a run makes its steps so: one rank on a GPU, or several over NCCL that send no messages, without experts,
// whose rows the host counts, and without a look at the parts of a step from the host (`traced`).
bool steps_without_host(const Job& job, bool traced);
// Why a run's steps are not captured; empty when they are. `counted`: each step has as many trained targets as its
// sequences happen to hold. Throws FieldError where CudaGraph::on asks for what cannot be.
std::string no_graph_because(const Job& job, bool traced, bool counted = false);

class StepGraph : NotCopied {
 public:
  struct Parts {
    std::function<void(int64_t step)> load;   // tokens of the step to where the GPU takes them from
    std::function<void(int64_t step)> ahead;  // reads those of the next, while the GPU computes
    std::function<DeviceScalar()> gradients;  // queues the passes; the sum of the losses
    std::function<void()> finish;             // queues what comes after the update
    std::function<Tensor()>
        squares;  // queues the sums of squares of the units, in the order in which the norm adds them
    Optimizer* optimizer = nullptr;
    double clip = 0;                             // the largest norm; 0: any
    bool captured = false;                       // otherwise it is queued anew in every step
    bool may_give_up = false;                    // when a capture fails, all steps are queued; else the run ends
    StepConsensus* ranks = nullptr;              // null: there is one
    bool says_loss = true, says_squares = true;  // whether this rank's count when ranks add theirs up
  };
  struct Found {
    double loss_sum = 0, grad_norm = 0;  // sum and norm over all ranks
    StepRequest wish = StepRequest::none;
  };

  virtual ~StepGraph() = default;

  // One step, number `step` of those that dropout counts, with learning rate `lr`. Parameters were updated, and the
  // optimizer's step was counted, when both numbers are finite (and no rank has met an index outside its bounds, which
  // that rank throws and ends the others with). `wish` is the same on all ranks afterwards.
  virtual Found run(int64_t step, double lr, StepRequest wish) = 0;
  // Where the GPU finds the step's number, while the passes are queued; otherwise null.
  virtual const uint64_t* step_on_gpu() const = 0;
  // How the steps were made. A step that is captured is launched then, and counts as a replay.
  struct Record {
    int64_t captures = 0, replays = 0, queued = 0;
    std::string given_up = {};  // the error of a capture that failed, so that all steps are queued; empty: none
  };
  const Record& record() const { return record_; }

 protected:
  Record record_;
};

// Objects that `parts` holds must outlive the result. In a build with CUDA only.
std::unique_ptr<StepGraph> make_step_graph(StepGraph::Parts parts, const ArenaPtr& arena);

}  // namespace tessera
