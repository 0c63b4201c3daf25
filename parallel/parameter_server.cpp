// The synchronous parameter server: workers push gradients to servers, which reduce and update, and pull the new
// parameters (Li et al. 2014, OSDI, "Scaling distributed machine learning with the parameter server"). Every rank is a
// worker, and ranks 0 .. K-1 are also servers; a server stores 1/K of each unit's optimizer state. Training is bitwise
// identical to DDP.
//
//        worker 0   worker 1   worker 2   worker 3         every worker: all parameters, all gradients
//            |          |          |          |
//            +----+-----+----+-----+----+-----+            push: gradients, sharded over the servers
//                 v          v
//             server 0   server 1                          g = g_0 + g_1 + g_2 + g_3, one optimizer step of the half
//                 |          |
//            +----+-----+----+-----+----+-----+            pull: each server's half to all workers
//            v          v          v          v
//
// placements     parameters I, gradients P -> summed at their server, optimizer state S(0) over the first K ranks
// memory/rank    unsharded parameters and gradients; optimizer state 1/K on a server, none on the other ranks
// volume         (n - 1) S of gradients and (n - 1) S of parameters in total, for S bytes each and any K. A server
//                receives and sends (n - 1) S / K, which is the bottleneck; a worker sends and receives S (on a server
//                (K - 1)/K of it)
//
// A server adds in rank order and rounds once, whatever the all-reduce algorithm. Workers push once per step, after the
// last backward pass; unlike DDP, communication does not overlap with it.
#include <cstdint>
#include <memory>

#include "nn/units.h"
#include "parallel/data_strategy.h"

namespace tessera {

class ParameterServer final : public DataStrategy {
 public:
  ParameterServer(Module& model, Communicator& axis, const ArenaPtr& arena, const DataOptions& options,
                  const ParameterServerOptions& server);

  void reduce_gradients() override;   // push
  void gather_parameters() override;  // pull

 private:
  // Calls f(server, u, range of its shard) for each nonempty shard, in the same order on all ranks.
  template <class F>
  void for_shards(const F& f) const;
};

namespace {

// Selects `direct` within its scope: sums in rank order, and each server sends to each worker.
class Direct : NotCopied {
 public:
  explicit Direct(Communicator& axis) : axis_(axis), before_(axis.algorithm()) {
    axis_.set_algorithm(Algorithm::direct);
  }
  ~Direct() { axis_.set_algorithm(before_); }

 private:
  Communicator& axis_;
  Algorithm before_;
};

Tensor slice(const Tensor& t, Range range) { return t.narrow(0, range.begin, range.size()); }

}  // namespace

// Ranks without a server have empty shards, so their optimizers have no state.
ParameterServer::ParameterServer(Module& model, Communicator& axis, const ArenaPtr& arena, const DataOptions& options,
                                 const ParameterServerOptions& server)
    : DataStrategy(
          model, axis, arena, options,
          {.name = "ps-sync", .sharding = ShardingKind::by_owners, .owners = server.servers, .is_ordered = true}) {
  check_servers(server.servers, axis.size());
  int64_t begin = 0;
  for (const Module::Unit& layout : model.layout()) {
    residents_.push_back(make_unit(layout, arena, options.dtype, options.grad_dtype, options.seed));
    const FlatUnit& unit = residents_.back();
    const Range mine = shard_range(layout.size, server.servers, axis.rank());
    shards_.push_back({layout.name, slice(unit.values, mine), {}, layout.slots});
    for (Slot& slot : shards_.back().slots) slot.begin -= mine.begin;
    if (!layout.trainable) continue;
    shards_.back().grads = slice(unit.grads, mine);
    for (int k = 0; k < server.servers; ++k)
      if (const Range range = shard_range(layout.size, server.servers, k); range.size() > 0)
        layout_.reductions.push_back({{begin + range.begin, begin + range.end}, range.size()});
    begin += layout.size;
  }
}

template <class F>
void ParameterServer::for_shards(const F& f) const {
  for (size_t u = 0; u < residents_.size(); ++u)
    for (int k = 0; residents_[u].trainable() && k < layout_.owners; ++k)
      if (const Range range = shard_range(layout_.sizes[u], layout_.owners, k); range.size() > 0) f(k, u, range);
}

void ParameterServer::reduce_gradients() {
  enter(Call::reduce);
  model_.zero_missing_gradients();
  const Direct direct(axis_);
  for_shards([&](int server, size_t u, Range range) { axis_.reduce(slice(residents_[u].grads, range), server); });
}

void ParameterServer::gather_parameters() {
  enter(Call::gather);
  const Direct direct(axis_);
  for_shards([&](int server, size_t u, Range range) { axis_.broadcast(slice(residents_[u].values, range), server); });
  for (const FlatUnit& unit : residents_) ++unit.values.storage()->version;  // invalidates packed copies
}

std::unique_ptr<DataStrategy> make_strategy(Module& model, Communicator& axis, const ArenaPtr& arena,
                                            const DataOptions& options, const ParameterServerOptions& server) {
  return std::make_unique<ParameterServer>(model, axis, arena, options, server);
}

}  // namespace tessera
