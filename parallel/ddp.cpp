// DDP's buckets and gradient hooks.
#include "parallel/ddp.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace tessera {

Ddp::Ddp(Module& model, Communicator& axis, const ArenaPtr& arena, const DataOptions& options, const DdpOptions& ddp)
    : DataStrategy(model, axis, arena, options, {.name = "ddp", .is_ordered = true}), bucket_bytes_(ddp.bucket_bytes) {
  grads_ = make_flat_buffer(Category::parameters, Category::gradients).grads;
  shards_ = residents_;
  cut_buckets(model.layout());
  for (const Bucket& b : buckets_) layout_.reductions.push_back({b.range, b.range.size()});
}

void Ddp::cut_buckets(const std::vector<Module::Unit>& layout) {
  int64_t end = grads_.numel(), begin = end;
  buckets_.push_back({.range = {end, end}});
  for (size_t u = layout.size(); u-- > 0;) {
    if (!layout[u].trainable) continue;
    begin -= layout[u].size;
    for (size_t p = layout[u].slots.size(); p-- > 0;) {
      Communicator& axis = gradient_axis(*layout[u].slots[p].parameter);
      const Bucket& last = buckets_.back();
      const bool full = last.range.size() * element_size(options_.grad_dtype) >= bucket_bytes_;
      if (full || (last.parameters > 0 && last.axis != &axis)) {
        end = last.range.begin;
        buckets_.push_back({.range = {end, end}});
      }
      Bucket& bucket = buckets_.back();
      bucket.axis = &axis;
      bucket.range.begin = begin + layout[u].slots[p].begin;
      ++bucket.parameters;
      layout[u].slots[p].parameter->var.on_grad(while_alive([this, b = buckets_.size() - 1] { arrived(b); }));
    }
  }
}

void Ddp::begin_step() {
  DataStrategy::begin_step();
  for (Bucket& b : buckets_) b.missing = b.parameters;
  next_ = 0;
}

void Ddp::arrived(size_t bucket) {
  if (microbatch_ + 1 != options_.microbatches) return;
  --buckets_[bucket].missing;
  send_ready();
}

void Ddp::send_ready() {
  for (; next_ < buckets_.size() && buckets_[next_].missing <= 0; ++next_) {
    Bucket& b = buckets_[next_];
    b.pending = (b.axis ? *b.axis : axis_).start_all_reduce(grads_.narrow(0, b.range.begin, b.range.size()));
  }
}

// Parameters without gradients get zeros, so that the remaining buckets can be sent.
void Ddp::reduce_gradients() {
  enter(Call::reduce);
  if (next_ < buckets_.size()) {
    model_.zero_missing_gradients();
    for (Bucket& b : buckets_) b.missing = 0;
    send_ready();
  }
  for (Bucket& b : buckets_) b.pending.wait();
}

std::unique_ptr<DataStrategy> make_strategy(Module& model, Communicator& axis, const ArenaPtr& arena,
                                            const DataOptions& options, const DdpOptions& ddp) {
  return std::make_unique<Ddp>(model, axis, arena, options, ddp);
}

}  // namespace tessera
