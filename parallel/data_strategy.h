// The interface of the strategies of the data axis, as the training loop sees them.
//
//   for each step:
//     strategy.begin_step();
//     for each micro-batch j:
//       root = loss of the sequences that strategy.batches() gives to this rank
//       strategy.begin_gradients(j);
//       backward(root.value, {.seed = root.seed});
//       strategy.end_gradients(j);
//     strategy.reduce_gradients();                   // shards() hold the gradient of the global batch
//     unit_sums(strategy);                           // for the gradient norm: parallel/gradient_norm.h
//     optimizer over strategy.shards() steps
//     strategy.gather_parameters();                   // every rank has the parameters for the next step
//
// In a pipeline a rank has some of the units, and the passes of its stages alternate. Then begin_gradients() and
// end_gradients() are called before and after each pass that brings gradients to the units of one stage.
//
// The loss is divided once, by the target tokens of the global batch, so gradients of ranks and micro-batches add up
// without a division here.
#pragma once

#include "nn/module.h"
#include "parallel/data_layout.h"

namespace tessera {

// How data-parallel ranks work together. ps_async has no common steps, so AsyncServer does it and no DataStrategy.
enum class DataMode : uint8_t { ddp, dataparallel, ps_sync, ps_async, diloco };
inline constexpr std::array<std::string_view, 5> kDataModeNames = {"ddp", "dataparallel", "ps-sync", "ps-async",
                                                                   "diloco"};

// When ranks that train alone make outer steps: fragment p of P in steps p H / P, p H / P + H, ... (the first one in
// H, 2 H, ...), and all fragments in the last step of the run.
struct SyncSteps {
  int64_t every = 1;      // H: steps from one outer step of a fragment to the next
  int64_t fragments = 1;  // P, at most H
  int64_t last = 0;       // last step of the run; 0: not known
  bool due(int64_t fragment, int64_t step) const {
    return step == last || step % every == fragment * every / fragments;
  }
  bool all_due(int64_t step) const { return step == last || (fragments == 1 && due(0, step)); }
};

struct DataOptions {
  DataMode mode = DataMode::ddp;
  int servers = 1;                              // number of parameter servers: they live on the first ranks
  int zero = 0;                                 // stage of ZeRO; 0 for none
  int shard_ranks = 0;                          // ranks of a group that ZeRO shares out over; 0: all ranks of the axis
  SyncSteps sync = {};                          // outer steps of diloco
  std::vector<int64_t> fragments = {};          // diloco's fragment of each unit of Module::layout(); empty: one
  double outer_lr = 0.7, outer_momentum = 0.9;  // factors of diloco's outer step
  int64_t microbatches = 1;                     // per step and rank
  int copies = 1;                               // ranks of the axis that have the same sequences, next to each other
  int64_t bucket_bytes = int64_t{4} << 20;      // bytes of a bucket, for DDP's all-reduces
  DType dtype = DType::float32;                 // dtype of parameters
  DType grad_dtype = DType::float32;            // dtype of gradients: of accumulation and on the wire
  uint64_t seed = 0;                            // seed of the first parameters
  // Where ranks of the axis share out experts: those, of the group with shard_ranks, that have the same ones as this.
  Communicator* experts = nullptr;
  // Groups of diloco where `copies` is above 1: the ranks with the same sequences, and those with this place among such
  // ranks.
  Communicator *context = nullptr, *replicas = nullptr;
  // Where shards of parameters lie between their uses, with zero 3; null: in the strategy's arena. For a rank on a GPU:
  // pinned memory of the host, make_pinned_arena(). Each use of a unit copies this rank's shard to the GPU first. Who
  // reads them on the host after an update waits for it: wait_for() of the strategy's arena.
  ArenaPtr shard_arena = {};
};

// Units of Module::layout(), by number.
struct UnitRange {
  size_t begin = 0, end = SIZE_MAX;
};

class DataStrategy : NotCopied {
 public:
  virtual ~DataStrategy() = default;

  // --- actions ---
  virtual void begin_step() { model_.clear_gradients(); }
  virtual void begin_gradients(int64_t /*microbatch*/, UnitRange /*units*/ = {}) {}
  virtual void end_gradients(int64_t /*microbatch*/, UnitRange /*units*/ = {}) {}
  virtual void reduce_gradients() = 0;
  virtual void gather_parameters() = 0;
  // Sets the tensors that the optimizer updates, one for each of shards() that is trained: fp32 masters of bfloat16, or
  // the values. To be called before the first step; without it, they are the values.
  void set_masters(std::vector<Tensor> masters) { masters_ = std::move(masters); }

  // --- facts that the constructor has set ---
  std::string_view name() const { return name_; }
  const DataLayout& layout() const { return layout_; }
  const DataBatches& batches() const { return batches_; }
  // The values and gradients that this rank's optimizer updates; they stay where they are.
  const std::vector<FlatUnit>& shards() const { return shards_; }
  // The values that this rank holds between steps, whole or in part; a checkpoint is read into them.
  const std::vector<FlatUnit>& resident_units() const { return residents_; }
  Communicator& axis() const { return axis_; }
  // The ranks that a unit is cut over, and those that have the same part of it, whose sums are added up afterwards:
  // with shard_ranks two groups, each along another direction of the axis; otherwise the axis, and nobody.
  Communicator& shard_axis() const { return shard_axis_ ? *shard_axis_ : axis_; }
  Communicator* replicate_axis() const { return replicate_axis_.get(); }
  // Whether the ranks' values are equal now, if they ever are not.
  bool agrees() const { return !layout_.apart || steps_ == 0 || options_.sync.all_due(steps_); }
  // The tensors that the strategy keeps between steps beside values, named as Optimizer::state() is.
  const std::vector<NamedTensor>& state() const { return state_; }
  // The kinds of these names, whatever parameters are here: "common".
  const std::vector<std::string>& state_kinds() const { return state_kinds_; }
  void set_steps_done(int64_t steps) { steps_ = steps; }
  // The axis has copies() copies of all that is kept; this rank has number copy(), or a part of it.
  int copies() const { return axis_.size() / ranks_of_copy(); }
  int copy() const { return axis_.rank() / ranks_of_copy(); }
  // Shards of parameters that were copied from the host's memory to a GPU, up to now.
  const OpCount& copied() const { return copied_; }
  Communicator* experts_axis() const { return options_.experts; }
  // The ranks that share out a unit, or its gradient's sum: the shard axis, or those that have this expert.
  Communicator& gradient_axis(const Parameter& of_unit) const {
    return of_unit.is_expert && options_.experts ? *options_.experts : shard_axis();
  }
  const ArenaPtr& arena() const { return arena_; }

 protected:
  struct Identity {
    std::string name;
    ShardingKind kept = ShardingKind::everywhere;
    int owners = 1;
    bool every_microbatch = false;
  };
  // Notes the sizes of the model's units; shards(), resident_units() and reductions are for the strategy to fill in.
  DataStrategy(Module& model, Communicator& axis, const ArenaPtr& arena, const DataOptions& options, Identity identity);
  // Memory for whole units, one after another in one stretch for values and one for gradients, which are zero: they are
  // the resident_units, and the parameters' views lie there. Frozen units have values apart from the stretch.
  struct FlatBuffer {
    Tensor values, grads;
  };
  FlatBuffer make_flat_buffer(Category of_values, Category of_grads);
  // Makes the two groups where `ranks` are not all of the axis. Every rank of the axis calls it.
  void split_axis(int ranks);

  Module& model_;
  Communicator& axis_;
  ArenaPtr arena_;
  DataOptions options_;
  DataLayout layout_;
  std::vector<FlatUnit> shards_, residents_;
  std::vector<NamedTensor> state_;
  std::vector<std::string> state_kinds_;
  std::vector<Tensor> masters_;
  int64_t steps_ = 0;  // done; counted where the strategy needs it
  OpCount copied_;

 private:
  int ranks_of_copy() const {
    return layout_.apart ? options_.copies : layout_.kept == ShardingKind::everywhere ? 1 : shard_axis().size();
  }
  std::string name_;
  DataBatches batches_;
  std::unique_ptr<Communicator> shard_axis_, replicate_axis_;
};

// Strategies that nobody else names; the file of each opens with its idea, a picture and its volume.
std::unique_ptr<DataStrategy> make_data_parallel(Module& model, Communicator& axis, const ArenaPtr& arena,
                                                 const DataOptions& options);
std::unique_ptr<DataStrategy> make_diloco(Module& model, Communicator& axis, const ArenaPtr& arena,
                                          const DataOptions& options);
std::unique_ptr<DataStrategy> make_parameter_server(Module& model, Communicator& axis, const ArenaPtr& arena,
                                                    const DataOptions& options);

// DDP, a stage of ZeRO, DataParallel, a parameter server or DiLoCo for the model's parameters, which get their memory
// and their first values here. `model` and `axis` must outlive it. Throws Error (usage) for options that a mode cannot
// serve.
std::unique_ptr<DataStrategy> make_data_strategy(Module& model, Communicator& axis, const ArenaPtr& arena,
                                                 const DataOptions& options);

}  // namespace tessera
