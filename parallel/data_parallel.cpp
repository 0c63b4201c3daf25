// What goes to rank 0 and comes back.
#include "parallel/data_parallel.h"

#include <utility>

#include "optim/grad_norm.h"
#include "tensor/ops/cross_entropy.h"

namespace tessera {

DataParallel::DataParallel(Module& model, Communicator& axis, const ArenaPtr& arena, const DataOptions& options)
    : DataStrategy(axis, options), model_(model), axis_(axis), arena_(arena) {
  if (options.zero != 0)
    throw Error("--zero: dataparallel keeps everything on rank 0, so there is no stage " +
                std::to_string(options.zero) + " of it; expected 0, or ddp instead of dataparallel");
  if (axis.kind() != "threads")
    throw Error("[data parallel] dataparallel is for threads of one process, found " + std::string(axis.kind()) +
                "; use ddp");
  const std::vector<Module::Unit> layout = model.layout();
  int64_t size = 0;
  for (const Module::Unit& unit : layout) size += unit.size;
  const auto category = [&](Category of_root) { return root() ? of_root : Category::communication; };
  values_ = Tensor::empty({size}, options.dtype, arena, category(Category::parameters));
  grads_ = Tensor::empty({size}, options.grad_dtype, arena, category(Category::gradients));
  grads_.fill(0);
  int64_t begin = 0;
  for (const Module::Unit& unit : layout) {
    FlatUnit flat{unit.name, values_.narrow(0, begin, unit.size), grads_.narrow(0, begin, unit.size), unit.slots};
    initialise(unit, flat.values, 0, options.seed);
    bind_values(unit, flat.values);
    bind_gradients(unit, flat.grads);
    units_.push_back(std::move(flat));
    begin += unit.size;
  }
}

std::vector<Share> DataParallel::loads(int64_t batch, int64_t microbatches, int64_t index) const {
  std::vector<Share> all;
  for (int r = 0; root() && r < axis_.size(); ++r) all.push_back(share_of(r, batch, microbatches, index));
  return all;
}

// Each rank its rows: int32 (B, T) on rank 0 -> (B / n, T).
Tensor DataParallel::deal(const Tensor& ids) {
  if (axis_.size() == 1) return ids;
  const int64_t rows = root() ? ids.dim(0) / axis_.size() : ids.dim(0);
  Tensor own = Tensor::empty({rows, ids.dim(1)}, DType::int32, arena_, Category::communication);
  axis_.scatter(root() ? ids.contiguous() : Tensor(), own, 0);
  return own;
}

// On rank 0: the gradient of all rows, and the loss sum of each rank's rows.
struct DataParallel::RootLoss {
  Tensor gradient, sums;  // undefined on other ranks
};

// Each rank's rows apart, as it would add them up itself; then the gradients of all in the place of the logits.
DataParallel::RootLoss DataParallel::losses(Tensor logits, const Tensor& targets, double scale) {
  const int n = axis_.size();
  const int64_t rows = logits.dim(0) / n;
  const Tensor sums = Tensor::empty({n}, DType::float64, arena_->host(), Category::communication);
  Tensor lse;
  for (int r = 0; r < n; ++r) {
    const CrossEntropy own = cross_entropy(logits.narrow(0, r * rows, rows), targets.narrow(0, r * rows, rows));
    sums.data<double>()[r] = own.loss_sum;
    if (!lse.defined()) lse = own.lse.make({n * rows}, own.lse.dtype(), Category::communication);
    lse.narrow(0, r * rows, rows).copy_from(own.lse);
  }
  return {cross_entropy_backward(std::move(logits), targets, lse, scale), sums};
}

Root DataParallel::loss(const Var& hidden, const Tensor& targets, double scale, const Head& head) {
  if (axis_.size() == 1) return DataStrategy::loss(hidden, targets, scale, head);  // without copies
  Var logits = head.logits(hidden);
  const Var edge = logits.edge();
  Tensor own = std::move(logits).take();
  const int64_t rows = own.dim(0) * axis_.size(), vocab = own.dim(1);
  const Tensor sum = Tensor::empty({1}, DType::float64, arena_->host(), Category::communication);
  RootLoss at_root;
  Tensor all;
  if (root()) all = Tensor::empty({rows, vocab}, own.dtype(), arena_, Category::communication);
  axis_.gather(own, all, 0);
  if (root()) at_root = losses(std::move(all), targets.contiguous().reshape({-1}), scale);
  if (!own.unique()) own = own.make(own.shape());  // the model keeps its logits: leave them as they are
  axis_.scatter(at_root.sums, sum, 0);
  axis_.scatter(at_root.gradient, own, 0);
  return {edge, std::move(own), sum.item<double>()};
}

// Parameters that no gradient reached have zeros.
void DataParallel::finish_gradients() {
  model_.settle_gradients();
  axis_.reduce(grads_, 0);
}

std::vector<double> DataParallel::unit_sums() {
  std::vector<double> sums = root() ? tessera::unit_sums(units_) : std::vector<double>(units_.size(), 0.0);
  axis_.sum(sums);
  return sums;
}

void DataParallel::share_parameters() {
  axis_.broadcast(values_, 0);
  if (!root()) ++values_.storage()->version;  // packed copies of the old values are stale
}

Tensor DataParallel::gather(size_t, const Tensor& shard) { return root() ? shard : Tensor(); }

Range DataParallel::kept(size_t unit) const { return {0, root() ? units_[unit].values.numel() : 0}; }

}  // namespace tessera
