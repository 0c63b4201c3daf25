// Pushes are reductions to a server, pulls are broadcasts from it.
#include "parallel/parameter_server.h"

#include <utility>

#include "optim/grad_norm.h"
#include "parallel/server_cut.h"

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

ParameterServer::ParameterServer(Module& model, Communicator& axis, const ArenaPtr& arena, const DataOptions& options)
    : DataStrategy(axis, options), model_(model), axis_(axis), arena_(arena), servers_(options.servers) {
  check_servers(servers_, axis.size());
  for (const Module::Unit& layout : model.layout()) {
    FlatUnit unit{layout.name, Tensor::empty({layout.size}, options.dtype, arena, Category::parameters),
                  Tensor::empty({layout.size}, options.grad_dtype, arena, Category::gradients), layout.slots};
    initialise(layout, unit.values, 0, options.seed);
    unit.grads.fill(0);
    bind_values(layout, unit.values);
    bind_gradients(layout, unit.grads);
    const Range mine = served_range(layout.size, servers_, axis.rank());
    FlatUnit shard{layout.name, part(unit.values, mine), part(unit.grads, mine), layout.slots};
    for (Slot& slot : shard.slots) slot.begin -= mine.begin;
    units_.push_back(std::move(unit));
    shards_.push_back(std::move(shard));
  }
}

Range ParameterServer::served(size_t u, int rank) const {
  return served_range(units_[u].values.numel(), servers_, rank);
}

template <class F>
void ParameterServer::for_each_part(const F& f) const {
  for (size_t u = 0; u < units_.size(); ++u)
    for (int k = 0; k < servers_; ++k)
      if (const Range range = served(u, k); range.size() > 0) f(k, u, range);
}

void ParameterServer::finish_gradients() {
  model_.settle_gradients();
  const Direct direct(axis_);
  for_each_part([&](int server, size_t u, Range range) { axis_.reduce(part(units_[u].grads, range), server); });
}

void ParameterServer::share_parameters() {
  const Direct direct(axis_);
  for_each_part([&](int server, size_t u, Range range) { axis_.broadcast(part(units_[u].values, range), server); });
  for (const FlatUnit& unit : units_) ++unit.values.storage()->version;  // packed copies are stale
}

// Block sums travel, so that they are added in the order of the whole units, on every rank.
std::vector<double> ParameterServer::unit_sums() {
  std::vector<int64_t> begins;  // of each server's sums, those of all units one after another
  int64_t blocks = 0;
  for (int k = 0; k < servers_; ++k) {
    begins.push_back(blocks);
    for (size_t u = 0; u < units_.size(); ++u) blocks += norm_blocks(served(u, k).size());
  }
  begins.push_back(blocks);
  const Tensor sums = Tensor::empty({blocks}, DType::float64, arena_, Category::workspace);
  std::vector<int64_t> next = begins;
  if (axis_.rank() < servers_)
    for (int64_t at = begins[static_cast<size_t>(axis_.rank())]; const FlatUnit& shard : shards_) {
      const int64_t own = norm_blocks(shard.grads.numel());
      block_sums(shard.grads, sums.narrow(0, at, own));
      at += own;
    }
  for (int k = 0; k < servers_; ++k) {
    const Range range{begins[static_cast<size_t>(k)], begins[static_cast<size_t>(k) + 1]};
    if (range.size() > 0) axis_.broadcast(part(sums, range), k);
  }
  const Tensor here = sums.on_host();
  const double* const all = here.data<double>();
  std::vector<double> out;
  for (size_t u = 0; u < units_.size(); ++u) {
    OrderedSum sum;
    for (int k = 0; k < servers_; ++k) {
      int64_t& at = next[static_cast<size_t>(k)];
      for (const int64_t end = at + norm_blocks(served(u, k).size()); at < end; ++at) sum.add(all[at]);
    }
    out.push_back(sum.total());
  }
  return out;
}

Tensor ParameterServer::gather(size_t u, const Tensor& shard) {
  return gather_served(axis_, servers_, units_[u].values.numel(), shard);
}

std::vector<Reduced> ParameterServer::reductions() const {
  std::vector<Reduced> out;
  int64_t begin = 0;
  for (size_t u = 0; u < units_.size(); begin += units_[u++].values.numel())
    for (int k = 0; k < servers_; ++k)
      if (const Range range = served(u, k); range.size() > 0)
        out.push_back({{begin + range.begin, begin + range.end}, range.size()});
  return out;
}

}  // namespace tessera
