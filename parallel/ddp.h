// Distributed data parallel: every rank has the whole model and a part of the batch; gradients are summed over ranks
// while the backward pass still runs (Li et al. 2020, "PyTorch Distributed: experiences on accelerating data parallel
// training").
//
//   backward:   [ head ][ block 3 ][ block 2 ][ block 1 ][ block 0 ][ embedding ]
//   bucket 0:           [--- all-reduce ---]
//   bucket 1:                               [--- all-reduce ---]
//   bucket 2:                                                     [--- all-reduce ---]
//
// placements     parameters I, gradients P -> I (all-reduce), optimizer state I
// memory/rank    the whole of everything: 16 bytes per parameter in bf16 with fp32 state
// volume/rank    2 (n - 1) / n of the gradients, once per step: accumulated micro-batches are summed here first
//
// Gradients lie in one stretch of memory, in order of declaration; a bucket is a run of whole parameters of it, cut
// from the end, because the backward pass reaches them in that order. Experts that few ranks have are in buckets of
// their own. A bucket is sent when each of its parameters has got all that the last backward of the step brings it (a
// tied weight waits for both uses), and after the buckets before it, so that every rank sends in the same order.
#pragma once
#include "parallel/data_strategy.h"

namespace tessera {

class Ddp final : public DataStrategy {
 public:
  Ddp(Module& model, Communicator& axis, const ArenaPtr& arena, const DataOptions& options);

  void begin_step() override;
  void begin_gradients(int64_t index, UnitRange = {}) override { last_ = index + 1 == options_.microbatches; }
  void reduce_gradients() override;
  void gather_parameters() override {}

  size_t buckets() const { return buckets_.size(); }

 private:
  struct Bucket {
    Range range;                   // the bucket's part of all gradients
    Communicator* axis = nullptr;  // the ranks that have these parameters
    int parameters = 0, missing = 0;
    Work pending = {};
  };
  void cut_buckets(const std::vector<Module::Unit>& layout);
  void arrived(size_t bucket);
  void send_ready();

  Tensor grads_;  // all of them
  std::vector<Bucket> buckets_;
  size_t next_ = 0;  // the first bucket that was not sent
  bool last_ = false;
};

}  // namespace tessera
