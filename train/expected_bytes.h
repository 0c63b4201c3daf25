// Closed forms of a plan, worked out from the model's sizes and the plan alone: what a rank has of the model, and the
// traffic of all ranks, calls and bytes by axis and operation. (Bytes that each rank holds: train/memory.h.)
//
// S is the bytes of an array, n the data-parallel ranks; figures
// are sums over ranks. An all-reduce sends 2 (n - 1) S, by every algorithm; a reduce-scatter or an all-gather (n - 1)
// S, through a root (n - 1) S (1 + 1/n). Rajbhandari et al. 2020, sections 5 and 7.
#pragma once

#include "models/language_model.h"
#include "parallel/pipeline/schedule.h"
#include "train/job.h"
#include "train/usage.h"

namespace tessera {

inline int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// A unit's parameters, by their sizes, and how often a micro-batch of ZeRO-3 needs it whole.
struct UnitSizes {
  static constexpr int64_t kSlot = 16, kBlock = 256;  // elements: where parameters begin, and where shards may be cut
  std::vector<int64_t> parameters;
  int64_t value = 4;  // bytes of an element; 1 of what is held in four bits, whose elements are bytes
  int64_t uses = 0;
  bool table = false;  // whether it holds the tied weight's table
  int64_t layer = 0;   // that it belongs to: LanguageModel::layers_of_units()
  bool trainable = true;
  int64_t state = 0;                 // bytes that the optimizer keeps of an element
  std::vector<Shape> matrices = {};  // whole shapes of the parameters that are updated as wholes
  int64_t ep = 1;  // ranks of the data axis that share out experts, for an expert: 1 / ep of the axis has it
  bool operator==(const UnitSizes&) const = default;
  int64_t size() const;
  // Over so many ranks of the data axis.
  int64_t piece(int64_t ranks) const { return round_up((size() * ep + ranks - 1) / ranks, kBlock); }
  int64_t padded(int64_t ranks) const { return piece(ranks) * (ranks / ep); }
};

// Parts of the model that the ranks with these coordinates have.
struct PartSizes {
  std::vector<UnitSizes> units;
  int64_t layers = 0;
  bool first = false, last = false;  // has the embeddings; has what comes after the layers
  // Parameters: matrices of layers, cut by outputs and by inputs; and what every rank of tp has of norms, of norms of
  // heads, of tables before the layers, and besides.
  int64_t columns = 0, rows = 0, norms = 0, head_norms = 0, tables = 0, biases = 0;
  int64_t routers = 0;                            // each, with its experts, counts as a pair of such matrices
  int64_t column_adapters = 0, row_adapters = 0;  // numbers of adapters on such matrices
  bool operator==(const PartSizes&) const = default;
  // Elements of all units, or of those alone that are trained: of one rank of so many its pieces.
  int64_t whole(bool trained = false) const {
    return sum(trained, [](const UnitSizes& u) { return u.size(); });
  }
  int64_t padded(int64_t ranks, bool trained = false) const {
    return sum(trained, [=](const UnitSizes& u) { return u.padded(ranks); });
  }
  int64_t pieces(int64_t ranks, bool trained = false) const {
    return sum(trained, [=](const UnitSizes& u) { return u.piece(ranks); });
  }
  int64_t whole_of_fragment(int64_t fragment, int64_t fragments, int64_t all_layers) const;  // a diloco fragment's size
  // Bytes of their values: whole, padded for so many ranks, or the piece of one of them.
  int64_t value_bytes(int64_t ranks = 0) const {
    return sum(false, [=](const UnitSizes& u) { return (ranks > 0 ? u.padded(ranks) : u.size()) * u.value; });
  }
  int64_t piece_bytes(int64_t ranks) const {
    return sum(false, [=](const UnitSizes& u) { return u.piece(ranks) * u.value; });
  }
  // Bytes that the optimizer keeps of all that is trained: whole, or of the piece of one of so many ranks.
  int64_t state_bytes(int64_t ranks = 0) const {
    return sum(false, [=](const UnitSizes& u) { return (ranks > 0 ? u.piece(ranks) : u.size()) * u.state; });
  }

 private:
  template <class F>
  int64_t sum(bool trained, const F& of) const {
    int64_t total = 0;
    for (const UnitSizes& u : units) total += u.trainable || !trained ? of(u) : 0;
    return total;
  }
};

// The plan's schedule with as few micro-batches as it may have: where its stages are, and which passes they make.
Schedule shortest_schedule(const Plan& plan);

struct PlanSizes {
  explicit PlanSizes(const Job& job);  // the vocabulary of `job` is known

  Plan plan;
  ModelConfig config;
  Schedule schedule;                          // the shortest
  int64_t data = 1;                           // ranks of the data axis
  int64_t cut = 1;                            // data ranks that share out what ZeRO shares out
  int64_t m = 1;                              // micro-batches
  int64_t value = 4, grad = 4, wide = 4;      // bytes of an element; wide: of sums in float
  int64_t bucket_bytes = 0;                   // bytes of a bucket of DDP
  int64_t sequences = 1, tokens = 1;          // sequences of a micro-batch, and the tokens of each on a rank of cp
  bool documents = false;                     // are masked
  bool tied_over_ranks = false;               // two pipeline ranks have a copy of the tied weight each
  int64_t units = 0;                          // units of the whole model
  std::vector<std::vector<PartSizes>> parts;  // [pp][tp]
  int largest_tp_rank() const;                // the tp rank that has most of the model
  int64_t micro_elements() const { return sequences * tokens * config.channels; }
  // Elements of a micro-batch's q, and of its k or v, on a rank of tp.
  int64_t query_elements() const { return sequences * tokens * config.attended() / plan.tp; }
  int64_t key_elements() const { return query_elements() * config.all_heads().key / config.heads; }
};

// --- traffic ---

// Traffic of `steps` steps of training, in the order of axes and operations; operations that the plan does not use are
// absent. `rows`: how often, in all of them, a token was sent to an expert on another rank; without it all experts are
// taken to be chosen alike.
std::vector<SentBytes> expected_bytes(const Job& job, int64_t steps, std::optional<int64_t> rows = {});
// Copies that each rank makes from the host's memory to its GPU in `steps` steps, with Offload::parameters: its
// shard of a unit for each use of it.
std::optional<SentBytes> expected_copies(const Job& job, int64_t steps);

}  // namespace tessera
