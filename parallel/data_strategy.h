// The interface of the strategies of the data axis, as the training loop sees them.
//
//   for each step:
//     strategy.begin_step();
//     for each micro-batch j:
//       root = loss of the sequences that strategy.batches() gives to this rank
//       strategy.begin_gradients(j);
//       backward(root.value, {.seed = root.seed});
//       strategy.end_gradients(j);
//     strategy.finish_gradients();                   // shards() hold the gradient of the global batch
//     unit_sums(strategy);                           // for the gradient norm: parallel/gradient_norm.h
//     optimizer over strategy.shards() steps
//     strategy.share_parameters();                   // every rank has the parameters for the next step
//
// In a pipeline a rank has some of the units, and the passes of its stages alternate. Then begin_gradients() and
// end_gradients() are called before and after each pass that brings gradients to the units of one stage.
//
// The loss is divided once, by the target tokens of the global batch, so gradients of ranks and micro-batches add up
// without a division here.
#pragma once
#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "nn/module.h"
#include "parallel/data_batches.h"
#include "parallel/data_layout.h"

namespace tessera {

// How data-parallel ranks work together. ps_async has no common steps, so AsyncServer does it and no DataStrategy.
enum class DataMode : uint8_t { ddp, dataparallel, ps_sync, ps_async };
inline constexpr std::array<std::string_view, 4> kDataModeNames = {"ddp", "dataparallel", "ps-sync", "ps-async"};

struct DataOptions {
  DataMode mode = DataMode::ddp;
  int servers = 1;                          // of a parameter server: they live on the first ranks
  int zero = 0;                             // stage of ZeRO; 0 for none
  int64_t microbatches = 1;                 // per step and rank
  int copies = 1;                           // ranks of the axis that have the same sequences, next to each other
  int64_t bucket_bytes = int64_t{4} << 20;  // of DDP's all-reduces
  DType dtype = DType::float32;             // of parameters
  DType grad_dtype = DType::float32;        // of accumulation and on the wire
  uint64_t seed = 0;                        // of the first parameters
};

// Units of Module::layout(), by number.
struct UnitRange {
  size_t begin = 0, end = SIZE_MAX;
};

class DataStrategy {
 public:
  virtual ~DataStrategy() = default;
  DataStrategy(const DataStrategy&) = delete;
  DataStrategy& operator=(const DataStrategy&) = delete;

  // --- actions ---
  virtual void begin_step() { model_.clear_gradients(); }
  virtual void begin_gradients(int64_t /*microbatch*/, UnitRange /*units*/ = {}) {}
  virtual void end_gradients(int64_t /*microbatch*/, UnitRange /*units*/ = {}) {}
  virtual void finish_gradients() = 0;
  virtual void share_parameters() = 0;

  // --- facts that the constructor has set ---
  std::string_view name() const { return name_; }
  const DataLayout& layout() const { return layout_; }
  const DataBatches& batches() const { return batches_; }
  // The values and gradients that this rank's optimizer updates; they stay where they are.
  const std::vector<FlatUnit>& shards() const { return shards_; }
  // The values that this rank holds between steps, whole or in part; a checkpoint is read into them.
  const std::vector<FlatUnit>& residents() const { return residents_; }
  Communicator& axis() const { return axis_; }
  const ArenaPtr& arena() const { return arena_; }

 protected:
  struct Identity {
    std::string name;
    Kept kept = Kept::everywhere;
    int owners = 1;
    bool every_microbatch = false;
  };
  // Notes the sizes of the model's units; shards(), residents() and reductions are for the strategy to fill in.
  DataStrategy(Module& model, Communicator& axis, const ArenaPtr& arena, const DataOptions& options, Identity identity);
  // Memory for whole units, one after another in one stretch for values and one for gradients, which are zero: they are
  // the residents, and the parameters' views lie there. Frozen units have values apart from the stretch.
  struct Stretch {
    Tensor values, grads;
  };
  Stretch make_stretch(Category of_values, Category of_grads);

  Module& model_;
  Communicator& axis_;
  ArenaPtr arena_;
  DataOptions options_;
  DataLayout layout_;
  std::vector<FlatUnit> shards_, residents_;

 private:
  std::string name_;
  DataBatches batches_;
};

// DDP, a stage of ZeRO, DataParallel or a parameter server for the model's parameters, which get their memory and their
// first values here. `model` and `axis` must outlive it. Throws Error (usage) for options that a mode cannot serve.
std::unique_ptr<DataStrategy> make_data_strategy(Module& model, Communicator& axis, const ArenaPtr& arena,
                                                 const DataOptions& options);

}  // namespace tessera
