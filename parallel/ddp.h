// Distributed data parallel: every rank has a replica of the model and a slice of the batch; gradients are all-reduced
// during the backward pass (Li et al. 2020, "PyTorch Distributed: experiences on accelerating data parallel training").
//
//   backward:   [ head ][ block 3 ][ block 2 ][ block 1 ][ block 0 ][ embedding ]
//   bucket 0:           [--- all-reduce ---]
//   bucket 1:                               [--- all-reduce ---]
//   bucket 2:                                                     [--- all-reduce ---]
//
// placements     parameters I, gradients P -> I (all-reduce), optimizer state I
// memory/rank    everything, unsharded: 16 bytes per parameter in bf16 with fp32 state
// volume/rank    2 (n - 1) / n of the gradients, once per step: micro-batches are accumulated locally first
//
// Gradients are one flat buffer in declaration order; a bucket is a contiguous range of parameters, formed from the end
// because the backward pass produces gradients in that order. Experts, which only some ranks have, use separate
// buckets. All ranks send buckets in the same order, each when the step's last backward pass has completed all of its
// gradients (including both uses of a tied weight).
#pragma once
#include <cstdint>
#include <vector>

#include "parallel/data_strategy.h"

namespace tessera {

class Ddp final : public DataStrategy {
 public:
  Ddp(Module& model, Communicator& axis, const ArenaPtr& arena, const DataOptions& options, const DdpOptions& ddp);

  void begin_step() override;
  void reduce_gradients() override;
  void gather_parameters() override { enter(Call::gather); }

  size_t buckets() const { return buckets_.size(); }

 private:
  struct Bucket {
    Range range;                   // elements of the flat gradient buffer
    Communicator* axis = nullptr;  // the ranks that have these parameters
    int parameters = 0, missing = 0;
    Work pending = {};
  };
  void cut_buckets(const std::vector<Module::Unit>& layout);
  void arrived(size_t bucket);
  void send_ready();

  int64_t bucket_bytes_;
  Tensor grads_;  // flat buffer
  std::vector<Bucket> buckets_;
  size_t next_ = 0;  // first unsent bucket
};

}  // namespace tessera
