// A training step of which the host hears when it is over: it hands numbers and tokens to the GPU, everything from the
// first embedding to the update is queued without a look at the results, and one wait brings loss and norm back. Where
// either is not finite the GPU has left the parameters as they were.
//
// So nothing that is queued depends on the step, and all of it is captured once as a CUDA graph and launched again for
// every later step (tensor/cuda/gpus.h). Several ranks do so where NCCL moves what they send each other: they meet on
// the host before the step (train/step_tokens.h) and not within it, and add up loss and norm on their GPUs.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "optim/optimizer.h"
#include "tensor/tensor.h"
#include "train/job.h"
#include "train/step_tokens.h"

namespace tessera {

// Whether a run makes its steps so: one rank on a GPU, or several over NCCL that send no messages, without experts,
// whose rows the host counts, and without a look at the parts of a step from the host (`traced`).
bool steps_without_host(const Job& job, bool traced);
// Why a run's steps are not captured; empty when they are. `counted`: each step has as many trained targets as its
// sequences happen to hold. Throws FieldError where CudaGraph::on asks for what cannot be.
std::string no_graph_because(const Job& job, bool traced, bool counted = false);

class StepGraph {
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
    StepRanks* ranks = nullptr;                  // null: there is one
    bool says_loss = true, says_squares = true;  // whether this rank's count when ranks add theirs up
  };
  struct Found {
    double loss_sum = 0, grad_norm = 0;  // sum and norm over all ranks
    Wish wish = Wish::none;
  };

  StepGraph() = default;
  virtual ~StepGraph() = default;
  StepGraph(const StepGraph&) = delete;
  StepGraph& operator=(const StepGraph&) = delete;

  // One step, number `step` of those that dropout counts, with learning rate `lr`. Parameters were updated, and the
  // optimizer's step was counted, when both numbers are finite (and no rank has met an index outside its bounds, which
  // that rank throws and ends the others with). `wish` is the same on all ranks afterwards.
  virtual Found run(int64_t step, double lr, Wish wish) = 0;
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
