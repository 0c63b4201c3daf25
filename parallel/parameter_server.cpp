// Pushes are reductions to a server, pulls are broadcasts from it.
#include "parallel/parameter_server.h"

namespace tessera {
namespace {

// While it lives the axis exchanges directly: sums in rank order, and each server sends what it has to each worker.
class Direct {
 public:
  explicit Direct(Communicator& axis) : axis_(axis), before_(axis.algorithm()) {
    axis_.set_algorithm(Algorithm::direct);
  }
  ~Direct() { axis_.set_algorithm(before_); }
  Direct(const Direct&) = delete;
  Direct& operator=(const Direct&) = delete;

 private:
  Communicator& axis_;
  Algorithm before_;
};

Tensor part(const Tensor& t, Range range) { return t.narrow(0, range.begin, range.size()); }

}  // namespace

// Shards have no elements on a rank that is no server, and so its optimizer has no state. Servers add in rank order,
// whatever the algorithm of the axis is.
ParameterServer::ParameterServer(Module& model, Communicator& axis, const ArenaPtr& arena, const DataOptions& options)
    : DataStrategy(model, axis, arena, options,
                   {.name = "ps-sync", .kept = Kept::by_owners, .owners = options.servers}) {
  check_servers(options.servers, axis.size());
  int64_t begin = 0;
  for (const Module::Unit& layout : model.layout()) {
    residents_.push_back(make_unit(layout, arena, options.dtype, options.grad_dtype, options.seed));
    const FlatUnit& unit = residents_.back();
    const Range mine = shard_range(layout.size, options.servers, axis.rank());
    shards_.push_back({layout.name, part(unit.values, mine), {}, layout.slots});
    for (Slot& slot : shards_.back().slots) slot.begin -= mine.begin;
    if (!layout.trainable) continue;
    shards_.back().grads = part(unit.grads, mine);
    for (int k = 0; k < options.servers; ++k)
      if (const Range range = shard_range(layout.size, options.servers, k); range.size() > 0)
        layout_.reductions.push_back({{begin + range.begin, begin + range.end}, range.size()});
    begin += layout.size;
  }
}

template <class F>
void ParameterServer::for_each_part(const F& f) const {
  for (size_t u = 0; u < residents_.size(); ++u)
    for (int k = 0; residents_[u].trainable() && k < layout_.owners; ++k)
      if (const Range range = shard_range(layout_.sizes[u], layout_.owners, k); range.size() > 0) f(k, u, range);
}

void ParameterServer::finish_gradients() {
  model_.zero_missing_gradients();
  const Direct direct(axis_);
  for_each_part([&](int server, size_t u, Range range) { axis_.reduce(part(residents_[u].grads, range), server); });
}

void ParameterServer::share_parameters() {
  const Direct direct(axis_);
  for_each_part([&](int server, size_t u, Range range) { axis_.broadcast(part(residents_[u].values, range), server); });
  for (const FlatUnit& unit : residents_) ++unit.values.storage()->version;  // packed copies are stale
}

}  // namespace tessera
