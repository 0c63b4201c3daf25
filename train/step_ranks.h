// What the ranks of a run do together about a step that the host only begins and ends (train/step_graph.h).
//
// Before it they meet on the host, once, and agree on how all of them make it: a rank whose arena has another layout
// than its graph would queue what the others launch, and NCCL may want all of them when it is captured. On the GPU they
// add up what each has found. Who waits for the end looks after the others, and ends NCCL's kernels where one has
// failed.
#pragma once
#include <cstdint>
#include <vector>

#include "parallel/comm/communicator.h"
#include "train/step_report.h"

namespace tessera {

class StepRanks {
 public:
  enum class How : uint8_t { queue, capture, launch };
  struct Agreed {
    How how = How::queue;
    Wish wish = Wish::none;  // of all ranks
  };

  // Every communicator that this rank uses in a step, once; they must outlive it.
  StepRanks(Communicator& world, std::vector<Communicator*> all);

  // Launched where every rank has a graph that fits, captured where every rank could do one or the other.
  Agreed agree(Wish wish, bool can_launch, bool can_capture);
  // What a rank does on its own.
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

}  // namespace tessera
