// Closed forms that depend only on model sizes and plan: the parameters of each rank, and the traffic of all ranks, as
// calls and bytes by axis and operation.
#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "models/language_model.h"
#include "parallel/pipeline/schedule.h"
#include "train/config.h"
#include "train/usage.h"

namespace tessera {

inline int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// `uses`: ZeRO-3 gathers per micro-batch.
struct UnitSizes {
  static constexpr int64_t kSlot = 16, kBlock = 256;  // elements: alignment of parameters, and granularity of shards
  std::vector<int64_t> parameters;
  int64_t value = 4;  // bytes per element; 1 for 4-bit weights
  int64_t uses = 0;
  bool table = false;  // holds the tied embedding table
  int64_t layer = 0;   // LanguageModel::layers_of_units()
  bool trainable = true;
  int64_t state = 0;                 // optimizer bytes per element
  std::vector<Shape> matrices = {};  // full shapes of parameters that are updated as full matrices
  int64_t ep = 1;                    // an expert's group size: 1 / ep of the data ranks hold a copy; 1: not an expert
  bool operator==(const UnitSizes&) const = default;
  int64_t size() const;
  // Elements of one shard over `ranks` data ranks.
  int64_t shard(int64_t ranks) const { return round_up((size() * ep + ranks - 1) / ranks, kBlock); }
  int64_t padded(int64_t ranks) const { return shard(ranks) * (ranks / ep); }
};

// Sizes of the model shard at given pp and tp coordinates.
struct ShardSizes {
  std::vector<UnitSizes> units;
  int64_t layers = 0;
  bool first = false, last = false;  // holds the embeddings; holds the final norm and the head
  // Layers' matrices sharded by outputs (columns) and by inputs (rows); replicated over tp: norms, head norms, tables
  // before the layers, and biases.
  int64_t columns = 0, rows = 0, norms = 0, head_norms = 0, tables = 0, biases = 0;
  int64_t routers = 0;                            // each, with its experts, counts as one column and one row matrix
  int64_t column_adapters = 0, row_adapters = 0;  // adapter elements on such matrices
  bool operator==(const ShardSizes&) const = default;
  // Elements of all or only of trainable units: unsharded, padded, or one rank's shard.
  int64_t full(bool trained = false) const {
    return sum(trained, [](const UnitSizes& u) { return u.size(); });
  }
  int64_t padded(int64_t ranks, bool trained = false) const {
    return sum(trained, [=](const UnitSizes& u) { return u.padded(ranks); });
  }
  int64_t shard(int64_t ranks, bool trained = false) const {
    return sum(trained, [=](const UnitSizes& u) { return u.shard(ranks); });
  }
  // Elements of a diloco fragment.
  int64_t fragment_size(int64_t fragment, int64_t fragments, int64_t all_layers) const;
  // Bytes of the values: unsharded, padded for `ranks` ranks, or one rank's shard.
  int64_t value_bytes(int64_t ranks = 0) const {
    return sum(false, [=](const UnitSizes& u) { return (ranks > 0 ? u.padded(ranks) : u.size()) * u.value; });
  }
  int64_t shard_bytes(int64_t ranks) const {
    return sum(false, [=](const UnitSizes& u) { return u.shard(ranks) * u.value; });
  }
  // Optimizer bytes: unsharded, or of one rank's shard.
  int64_t state_bytes(int64_t ranks = 0) const {
    return sum(false, [=](const UnitSizes& u) { return (ranks > 0 ? u.shard(ranks) : u.size()) * u.state; });
  }

 private:
  template <class F>
  int64_t sum(bool trained, const F& of) const {
    int64_t total = 0;
    for (const UnitSizes& u : units) total += u.trainable || !trained ? of(u) : 0;
    return total;
  }
};

// With the minimum number of micro-batches: defines stage placement and kinds of passes.
Schedule shortest_schedule(const Plan& plan);

struct PlanSizes {
  explicit PlanSizes(const TrainConfig& job);  // requires a known vocabulary

  Plan plan;
  ModelConfig config;
  Schedule schedule;                      // shortest_schedule()
  int64_t data = 1;                       // data-parallel ranks
  int64_t cut = 1;                        // data ranks of a ZeRO group
  int64_t m = 1;                          // micro-batches
  int64_t value = 4, grad = 4, wide = 4;  // bytes per element; wide: of float accumulators
  int64_t bucket_bytes = 0;
  int64_t sequences = 1, tokens = 1;  // tokens of each sequence on a cp rank
  bool documents = false;
  bool tied_over_ranks = false;                 // the tied weight has copies on two pipeline ranks
  int64_t units = 0;                            // of the full model
  std::vector<std::vector<ShardSizes>> shards;  // [pp][tp]
  int largest_tp_rank() const;                  // with the largest model shard
  int64_t micro_elements() const { return sequences * tokens * config.channels; }
  // Elements of a micro-batch's q, and of its k or v, on a tp rank.
  int64_t query_elements() const { return sequences * tokens * config.attended() / plan.tp; }
  int64_t key_elements() const { return query_elements() * config.all_heads().key / config.heads; }
};

// Traffic of `steps` training steps by axis and operation, without unused operations. `rows`: total number of tokens
// sent to experts on other ranks; unset: balanced routing.
std::vector<SentBytes> expected_bytes(const TrainConfig& job, int64_t steps, std::optional<int64_t> rows = {});
// Host-to-GPU copies of each rank with Offload::parameters: its shard of a unit for each use.
std::optional<SentBytes> expected_copies(const TrainConfig& job, int64_t steps);

}  // namespace tessera
