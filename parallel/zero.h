// ZeRO: data-parallel ranks shard the state that plain data parallelism replicates (Rajbhandari et al. 2020, "ZeRO:
// memory optimizations toward training trillion parameter models"; PyTorch calls stage 3 FSDP, Zhao et al. 2023).
//
//                 rank 0        rank 1        rank 2          of every unit (an embedding, a block, the last norm)
//   stage 1   p  [#########]   [#########]   [#########]      p parameters, g gradients, s optimizer state
//             g  [#########]   [#########]   [#########]
//             s  [###      ]   [   ###   ]   [      ###]
//   stage 2   g  [###      ]   [   ###   ]   [      ###]      gradients too
//   stage 3   p  [###      ]   [   ###   ]   [      ###]      parameters too
//
// stage   parameters   gradients accumulate as   state   volume per rank and step, in units of (n - 1) / n parameters
//   1         I                  P               S(0)    reduce-scatter 1 + all-gather 1
//   2         I                 S(0)             S(0)    reduce-scatter 1 per micro-batch + all-gather 1
//   3        S(0)               S(0)             S(0)    per micro-batch: all-gather 1 forward and 1 backward,
//                                                        reduce-scatter 1
//
// A unit is sharded evenly, at multiples of a norm block, and padded with zeros, which count toward the volume. In
// stages 2 and 3 a unit's full gradient exists only until its reduce-scatter. In stage 3 a unit is unsharded only
// around its use, and the next unit is prefetched during computation; a tied weight is gathered for each use; an
// embedding lookup needs no weights in its backward pass.
//
// With a shard_arena the parameter shards of stage 3 reside in pinned host memory (Rajbhandari et al. 2021,
// "ZeRO-Infinity: breaking the GPU memory wall for extreme scale deep learning", section 5; FSDP's CPUOffload). Before
// each gather this rank's shard is copied to the GPU, overlapping with the kernels of the previous unit; the update
// writes the shard over the bus. Gradients and state stay on the GPU.
//
// With shard_ranks K the axis is n / K groups of K ranks (FSDP's hybrid sharding, Zhao et al. 2023, section 3.2.2;
// Zhang et al. 2022, "MiCS: near-linear scaling for training gigantic model on public cloud"). Units are sharded within
// a group, and once per step each shard's gradient is all-reduced between groups:
//
//   group 0   rank 0 [###      ]   rank 1 [   ###   ]   rank 2 [      ###]      reduce-scatter, all-gather: within
//   group 1   rank 3 [###      ]   rank 4 [   ###   ]   rank 5 [      ###]      all-reduce of gradients: between
//
// Volume per rank: as in the table with K for n, plus 2 (n/K - 1) / (n/K) of a shard's gradients, once per step.
//
// Lifetime of a gradient in stages 2 and 3. A parameter is a leaf of the graph (Leaf in autograd/graph.h) that
// accumulates gradients and calls the hooks installed by hook(). `holds` is the state of the leaf's buffer; `missing`
// and `reduced` belong to the unit.
//
//   Trainer             engine and leaf                         Zero
//
//   begin_step() ------------------------------------------->   leaves have no gradients
//   begin_gradients() -------------------------------------->   missing = parameters of the unit, reduced = no
//   backward() ----->   expected = uses of the weight
//                       first gradient, no buffer: provide ---> provide_gradients(): memory for the unit's gradients
//                       it is written; holds this_pass
//                       the last use's is added; holds all;
//                       the hooks ---------------------------->  gradient_arrived(): missing - 1. At 0, reduced = yes:
//                                                                start_reducing(), which reclaims the buffer
//                       (other units' gradients)                 reduce-scatter in the background
//   end_gradients() ---------------------------------------->   zeros for parameters without gradients; waits for the
//                                                                reductions; shard += sum from the second micro-batch
//   reduce_gradients() ------------------------------------->   waits for reductions between the groups
//   the optimizer's step, over shards()
//   gather_parameters() ------------------------------------>   all-gather (stage 3: each use gathers)
//
// In stage 1 leaves have permanent buffers, and the reduction waits for the last micro-batch.
#pragma once
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "parallel/data_strategy.h"

namespace tessera {

class Zero final : public DataStrategy {
 public:
  Zero(Module& model, Communicator& axis, const ArenaPtr& arena, const DataOptions& options, const ZeroOptions& zero);

  void begin_step() override;
  void begin_gradients(int64_t microbatch, UnitRange units = {}) override;
  void end_gradients(int64_t microbatch, UnitRange units = {}) override;
  void reduce_gradients() override;
  void gather_parameters() override;

 private:
  struct Unit {
    Module::Unit layout;
    Communicator* axis = nullptr;   // the ranks that have this unit
    int64_t shard_elements = 0;     // elements of each rank's shard
    Tensor values;                  // unsharded; in stage 3 only while in use
    Tensor copied;                  // shard copied from host memory, until the gather
    std::shared_ptr<void> copying;  // the copy into `copied`
    Tensor grads;                   // unsharded; in stages 2 and 3 only until they are reduced
    int users = 0;
    int64_t missing = 0;  // parameters without a gradient in this micro-batch
    Work fetching;        // values
    Work reducing;        // grads, into `arriving`
    Work summing;         // the shard's gradient, between the groups
    Tensor arriving;
    bool reduced = false;  // this micro-batch's reduction has started, or none is needed
  };

  void make_unit(const Module::Unit& layout);
  void make_gradients(Unit& unit, FlatUnit& shard);
  void hook(size_t u);
  void provide_gradients(size_t u);
  void gradient_arrived(size_t u);
  void start_reducing(size_t u);
  void finish_reducing(size_t u);
  void finish_first();  // completes the oldest reduction in flight
  void wrap(size_t u);
  void fetch(size_t u);
  void copy_shard(size_t u);
  Tensor shard_here(size_t u);
  void use(size_t u);
  void release(size_t u);

  int stage_;
  ArenaPtr shard_arena_;
  std::deque<Unit> units_;
  std::deque<size_t> reducing_;
  // Units in order of use, recorded in the first training step for prefetching.
  std::vector<size_t> order_;
  size_t position_ = 0;
  bool learning_ = true;
};

}  // namespace tessera
