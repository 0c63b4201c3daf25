// Strategy selection, and memory allocation shared by several strategies.
#include "parallel/data_strategy.h"

#include "parallel/ddp.h"
#include "parallel/zero.h"
#include "tensor/error.h"

namespace tessera {

DataStrategy::DataStrategy(Module& model, Communicator& axis, const ArenaPtr& arena, const DataOptions& options,
                           Identity identity)
    : model_((require_object(&model, "[data parallel] model"), model)),
      axis_((require_object(&axis, "[data parallel] axis"), axis)),
      arena_((require_object(arena.get(), "[data parallel] arena"), arena)),
      options_(options),
      layout_{.sharding = identity.sharding, .owners = identity.owners, .every_microbatch = identity.every_microbatch},
      name_(std::move(identity.name)),
      batches_(axis, arena, {.copies = options.copies, .through_root = identity.sharding == ShardingKind::at_root}) {
  for (const Module::Unit& unit : model.layout()) layout_.sizes.push_back(unit.size);
}

void DataStrategy::split_axis(int ranks) {
  const int n = axis_.size(), own = axis_.rank();
  if (ranks == n) return;
  if (ranks < 1 || n % ranks != 0)
    throw FieldError("shard_ranks", "groups of " + std::to_string(ranks) + " do not divide the " + std::to_string(n) +
                                        " ranks of the data axis");
  shard_axis_ = axis_.split(own / ranks, own % ranks, "dp.shard");
  replicate_axis_ = axis_.split(own % ranks, own / ranks, "dp.replicate");
}

DataStrategy::FlatBuffer DataStrategy::make_flat_buffer(Category of_values, Category of_grads) {
  const std::vector<Module::Unit> layout = model_.layout();
  int64_t size = 0;
  for (const Module::Unit& unit : layout) size += unit.trainable ? unit.size : 0;
  FlatBuffer all{Tensor::empty({size}, options_.dtype, arena_, of_values),
                 Tensor::empty({size}, options_.grad_dtype, arena_, of_grads)};
  int64_t begin = 0;
  for (const Module::Unit& unit : layout) {
    if (!unit.trainable) {
      residents_.push_back(make_flat(unit, Tensor::empty({unit.size}, unit.dtype(options_.dtype), arena_, of_values),
                                     {}, options_.seed));
      continue;
    }
    residents_.push_back(
        make_flat(unit, all.values.narrow(0, begin, unit.size), all.grads.narrow(0, begin, unit.size), options_.seed));
    begin += unit.size;
  }
  return all;
}

std::unique_ptr<DataStrategy> make_data_strategy(Module& model, Communicator& axis, const ArenaPtr& arena,
                                                 const DataOptions& options) {
  if (options.mode == DataMode::ps_async)
    throw Error("[data parallel] ps-async has no common steps; expected ddp, dataparallel or ps-sync");
  if (options.mode == DataMode::dataparallel) return make_data_parallel(model, axis, arena, options);
  if (options.mode == DataMode::diloco) return make_diloco(model, axis, arena, options);
  if (options.mode == DataMode::ps_sync) return make_parameter_server(model, axis, arena, options);
  if (options.zero == 0) return std::make_unique<Ddp>(model, axis, arena, options);
  return std::make_unique<Zero>(model, axis, arena, options);
}

}  // namespace tessera
