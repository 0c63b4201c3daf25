// The strategies of the data axis. A program trains with them through DataStep (parallel/data_step.h), which makes
// these calls in each step:
//
//   begin_step
//   for each micro-batch: begin_gradients, backward(), end_gradients
//   reduce_gradients       shards() then contain the gradient of the global batch
//   the optimizer's step over shards()
//   gather_parameters      every rank has the parameters of the next step
//
// On a pipeline rank begin_gradients() and end_gradients() enclose each pass that accumulates gradients of one stage,
// because the passes of its stages alternate. The loss is divided once, by the target tokens of the global batch, so
// gradients are summed over ranks and micro-batches without another division.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "nn/module.h"
#include "parallel/data_layout.h"
#include "parallel/outer_step.h"

namespace tessera {

// AsyncServer implements ps_async, whose ranks do not step together.
enum class DataMode : uint8_t { ddp, dataparallel, ps_sync, ps_async, diloco };
inline constexpr std::array<std::string_view, 5> kDataModeNames = {"ddp", "dataparallel", "ps-sync", "ps-async",
                                                                   "diloco"};

// When replicas with local updates synchronize: DiLoCo's outer steps, their closed forms and the fault that omits an
// outer step all use this rule; only the oracle (verify/replicas.cpp) has its own. Fragment p of P is synchronized in
// steps p H / P, p H / P + H, ... (fragment 0 in H, 2 H, ...), and all fragments in the last step of the run.
struct SyncSteps {
  int64_t every = 1;      // H: steps between two outer steps of a fragment
  int64_t fragments = 1;  // P, at most H
  int64_t last = 0;       // last step of the run; 0: unknown

  // The first step after step `done` in which the fragment is synchronized.
  int64_t next(int64_t fragment, int64_t done) const {
    const int64_t first = fragment * every / fragments;
    const int64_t step = done < first ? first : done + every - (done - first) % every;
    return done < last ? std::min(step, last) : step;
  }
  bool due(int64_t fragment, int64_t step) const { return next(fragment, step - 1) == step; }
  bool all_due(int64_t step) const;
  // Synchronizations of the fragment in steps 1 to `steps`.
  int64_t count(int64_t fragment, int64_t steps) const;
  int64_t first() const;  // the first step that synchronizes any fragment
};

// The options of each strategy, described in its file.
struct DdpOptions {
  int64_t bucket_bytes = int64_t{4} << 20;  // of the all-reduces
};
struct ZeroOptions {
  int stage = 1;
  int shard_ranks = 0;  // shard group size; 0: all ranks of the axis
  // Storage of stage 3's parameter shards between uses; null: the strategy's arena. On a GPU rank this may be pinned
  // host memory (make_pinned_arena()); before the host reads shards after an update, it must call wait_for() of the
  // strategy's arena.
  ArenaPtr shard_arena = {};
};
struct DataParallelOptions {};
struct ParameterServerOptions {
  int servers = 1;  // on the first ranks
};
struct AsyncServerOptions {  // of AsyncServer, which is not a DataStrategy
  int servers = 1;
};
struct DilocoOptions {
  SyncSteps sync = {};
  std::vector<int64_t> fragments = {};  // of each unit of Module::layout(); empty: one
  OuterOptions outer = {};
  // If DataOptions::copies > 1: ranks with the same sequences, and ranks with the same index in such a group.
  Communicator *context = nullptr, *replicas = nullptr;
};
using StrategyOptions = std::variant<DdpOptions, ZeroOptions, DataParallelOptions, ParameterServerOptions,
                                     AsyncServerOptions, DilocoOptions>;

// Options common to all strategies, and the selected strategy.
struct DataOptions {
  StrategyOptions strategy = DdpOptions{};
  int64_t microbatches = 1;           // per step and rank
  int copies = 1;                     // adjacent ranks of the axis with the same sequences
  DType dtype = DType::float32;       // of parameters
  DType grad_dtype = DType::float32;  // for accumulation and communication
  uint64_t seed = 0;                  // of the initial parameters
  // With expert parallelism: the ranks (of a shard group) that have the same experts.
  Communicator* experts = nullptr;
};

struct UnitRange {
  size_t begin = 0, end = SIZE_MAX;
};

class DataStrategy : NotCopied {
 public:
  virtual ~DataStrategy() = default;

  // Strategies of make_data_strategy() throw Error for actions that are called out of order.
  virtual void begin_step() { enter(Call::step), model_.clear_gradients(); }
  virtual void begin_gradients(int64_t microbatch, UnitRange u = {}) { enter(Call::begin, microbatch, u.begin); }
  virtual void end_gradients(int64_t microbatch, UnitRange u = {}) { enter(Call::end, microbatch, u.begin); }
  virtual void reduce_gradients() = 0;
  virtual void gather_parameters() = 0;
  // Sets the tensors that the optimizer updates instead of the values (fp32 masters of bfloat16), one per trained
  // shard. Call it before the first step.
  void set_masters(std::vector<Tensor> masters);

  std::string_view name() const { return name_; }
  const DataLayout& layout() const { return layout_; }
  const DataBatches& batches() const { return batches_; }
  // Updated by this rank's optimizer; the addresses do not change.
  const std::vector<FlatUnit>& shards() const { return shards_; }
  // Stored between steps, sharded or full; checkpoints are loaded into them.
  const std::vector<FlatUnit>& resident_units() const { return residents_; }
  Communicator& axis() const { return axis_; }
  // With shard_ranks, gradients are reduced over the ranks that shard a unit, then over the ranks with the same shard;
  // otherwise shard_axis() is the axis and replicate_axis() is null.
  Communicator& shard_axis() const { return shard_axis_ ? *shard_axis_ : axis_; }
  Communicator* replicate_axis() const { return replicate_axis_.get(); }
  // False between DiLoCo's outer steps, when ranks have different values.
  virtual bool agrees() const { return true; }
  // Stored between steps in addition to values, named like Optimizer::state().
  const std::vector<NamedTensor>& state() const { return state_; }
  // Name prefixes in state(), the same on all ranks.
  const std::vector<std::string>& state_kinds() const { return state_kinds_; }
  // Whether the gradients that an update needs are not yet reduced.
  bool awaits_gradients() const { return last_ != Call::none && last_ != Call::reduce; }
  void set_steps_done(int64_t steps) { steps_ = steps; }
  // The axis stores copies() replicas of the state; this rank has replica copy() or a shard of it.
  int copies() const { return axis_.size() / ranks_of_copy(); }
  int copy() const { return axis_.rank() / ranks_of_copy(); }
  const OpCount& copied() const { return copied_; }
  Communicator* experts_axis() const { return options_.experts; }
  // The shard axis, or, for an expert, the ranks that have this expert.
  Communicator& gradient_axis(const Parameter& of_unit) const {
    return of_unit.is_expert && options_.experts ? *options_.experts : shard_axis();
  }
  const ArenaPtr& arena() const { return arena_; }

 protected:
  struct Identity {
    std::string name;
    ShardingKind sharding = ShardingKind::everywhere;
    int owners = 1;
    bool every_microbatch = false;
    bool is_ordered = false;  // actions throw Error if they are called out of order
  };
  // Sets the unit sizes of layout(); derived classes fill in shards(), resident_units() and reductions.
  DataStrategy(Module& model, Communicator& axis, const ArenaPtr& arena, const DataOptions& options, Identity identity);
  // Allocates full units as resident_units() and makes the parameters views of them. The trained units share one flat
  // buffer for values and one for gradients (zeros).
  struct FlatBuffer {
    Tensor values, grads;
  };
  FlatBuffer make_flat_buffer(Category of_values, Category of_grads);
  // Called first by each action: throws Error if the model is destroyed, or for an ordered strategy if the calls of
  // a step are out of order. `unit`: the first one of a pipeline stage.
  enum class Call : uint8_t { none, step, begin, end, reduce, gather };
  void enter(Call call, int64_t microbatch = 0, size_t unit = 0);
  // Makes `f` throw Error after the destruction of this strategy, for functions that the model stores.
  template <class F>
  auto while_alive(F f) const {
    return [f = std::move(f), alive = std::weak_ptr(alive_)](const auto&... args) {
      if (alive.expired()) reject("model", "a strategy that outlives the passes of its model", "a destroyed one");
      return f(args...);
    };
  }
  // Throws Error if `group` and the axis belong to different launch() calls.
  void check_group(const Communicator* group) const;
  // Creates shard_axis() and replicate_axis() if `ranks` is less than the axis size. Collective over the axis.
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
  int64_t steps_ = 0, microbatch_ = 0;  // microbatch_: of the current pass
  OpCount copied_;

 private:
  int ranks_of_copy() const {
    return layout_.local_updates                          ? options_.copies
           : layout_.sharding == ShardingKind::everywhere ? 1
                                                          : shard_axis().size();
  }
  std::string name_;
  DataBatches batches_;
  std::unique_ptr<Communicator> shard_axis_, replicate_axis_;
  std::weak_ptr<ModuleState> model_state_;
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
  Call last_ = Call::none;          // none: the order is not checked
  std::map<size_t, int64_t> done_;  // micro-batches of this step, by the first unit of a stage
};

// Allocates and initializes the model's parameters. `model` and `axis` must outlive the result. Throws Error (usage)
// for options that the mode does not support.
std::unique_ptr<DataStrategy> make_data_strategy(Module& model, Communicator& axis, const ArenaPtr& arena,
                                                 const DataOptions& options);

// Defined in the file of each strategy.
std::unique_ptr<DataStrategy> make_strategy(Module& model, Communicator& axis, const ArenaPtr& arena,
                                            const DataOptions& options, const DdpOptions& ddp);
std::unique_ptr<DataStrategy> make_strategy(Module& model, Communicator& axis, const ArenaPtr& arena,
                                            const DataOptions& options, const ZeroOptions& zero);
std::unique_ptr<DataStrategy> make_strategy(Module& model, Communicator& axis, const ArenaPtr& arena,
                                            const DataOptions& options, const DataParallelOptions&);
std::unique_ptr<DataStrategy> make_strategy(Module& model, Communicator& axis, const ArenaPtr& arena,
                                            const DataOptions& options, const ParameterServerOptions& server);
std::unique_ptr<DataStrategy> make_strategy(Module& model, Communicator& axis, const ArenaPtr& arena,
                                            const DataOptions& options, const DilocoOptions& diloco);

}  // namespace tessera
