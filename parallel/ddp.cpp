// Buckets and the hooks that fill them.
#include "parallel/ddp.h"

#include "optim/cuda/grad_norm.h"
#include "optim/grad_norm.h"

namespace tessera {

Ddp::Ddp(Module& model, Communicator& axis, const ArenaPtr& arena, const DataOptions& options)
    : DataStrategy(axis, options), model_(model), axis_(axis), options_(options) {
  const std::vector<Module::Unit> layout = model.layout();
  int64_t size = 0;
  for (const Module::Unit& unit : layout) {
    begins_.push_back(size);
    size += unit.size;
  }
  const Tensor values = Tensor::empty({size}, options.dtype, arena, Category::parameters);
  grads_ = Tensor::empty({size}, options.grad_dtype, arena, Category::gradients);
  grads_.fill(0);
  for (size_t u = 0; u < layout.size(); ++u) {
    const Module::Unit& unit = layout[u];
    FlatUnit flat{unit.name, values.narrow(0, begins_[u], unit.size), grads_.narrow(0, begins_[u], unit.size),
                  unit.slots};
    initialise(unit, flat.values, 0, options.seed);
    bind_values(unit, flat.values);
    bind_gradients(unit, flat.grads);
    units_.push_back(std::move(flat));
  }
  cut_buckets(layout);
}

// From the last parameter to the first; the first bucket ends at the end of the memory.
void Ddp::cut_buckets(const std::vector<Module::Unit>& layout) {
  int64_t end = grads_.numel();
  buckets_.push_back({.range = {end, end}});
  for (size_t u = layout.size(); u-- > 0;)
    for (size_t p = layout[u].parameters.size(); p-- > 0;) {
      if (buckets_.back().range.size() * size_of(options_.grad_dtype) >= options_.bucket_bytes) {
        end = buckets_.back().range.begin;
        buckets_.push_back({.range = {end, end}});
      }
      Bucket& bucket = buckets_.back();
      bucket.range.begin = begins_[u] + layout[u].slots[p].begin;
      ++bucket.parameters;
      layout[u].parameters[p]->var.on_grad([this, b = buckets_.size() - 1] { arrived(b); });
    }
}

void Ddp::begin_step() {
  model_.clear_gradients();
  for (Bucket& b : buckets_) b.missing = b.parameters;
  next_ = 0;
}

void Ddp::arrived(size_t bucket) {
  if (!last_) return;
  --buckets_[bucket].missing;
  send_ready();
}

void Ddp::send_ready() {
  for (; next_ < buckets_.size() && buckets_[next_].missing <= 0; ++next_) {
    Bucket& b = buckets_[next_];
    b.pending = axis_.start_all_reduce(grads_.narrow(0, b.range.begin, b.range.size()));
  }
}

// Parameters that no gradient reached have zeros; their buckets are still to be sent.
void Ddp::finish_gradients() {
  if (next_ < buckets_.size()) {
    model_.settle_gradients();
    for (Bucket& b : buckets_) b.missing = 0;
    send_ready();
  }
  for (Bucket& b : buckets_) b.pending.wait();
}

std::vector<double> Ddp::unit_sums() { return tessera::unit_sums(units_); }

Tensor Ddp::unit_sums_on_gpu() {
  std::vector<Tensor> grads;
  for (const FlatUnit& unit : units_) grads.push_back(unit.grads);
  if constexpr (kWithCuda)
    return cuda::sums_of_squares(grads);
  else
    return DataStrategy::unit_sums_on_gpu();
}

Tensor Ddp::gather(size_t, const Tensor& shard) { return axis_.rank() == 0 ? shard : Tensor(); }

std::vector<Reduced> Ddp::reductions() const {
  std::vector<Reduced> out;
  for (const Bucket& b : buckets_) out.push_back({b.range, b.range.size()});
  return out;
}

}  // namespace tessera
