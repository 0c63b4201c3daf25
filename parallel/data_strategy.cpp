// Strategy selection and shared allocation.
#include "parallel/data_strategy.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "nn/units.h"

namespace tessera {

DataStrategy::DataStrategy(Module& model, Communicator& axis, const ArenaPtr& arena, const DataOptions& options,
                           Identity identity)
    : model_((require_object(&model, "[data parallel] model"), model)),
      axis_((require_object(&axis, "[data parallel] axis"), axis)),
      arena_((require_object(arena.get(), "[data parallel] arena"), arena)),
      options_(options),
      layout_{.sharding = identity.sharding, .owners = identity.owners, .every_microbatch = identity.every_microbatch},
      name_(std::move(identity.name)),
      batches_(axis, arena, {.copies = options.copies, .through_root = identity.sharding == ShardingKind::at_root}),
      last_(identity.is_ordered ? Call::gather : Call::none) {
  check_group(options.experts);
  for (const Module::Unit& unit : model.layout()) layout_.sizes.push_back(unit.size);
  const auto state = std::make_shared<ModuleState>(ModuleState{true, identity.is_ordered});
  for (Parameter* p : model.parameters()) {
    if (p->state->has_strategy) reject("data parallel", "a model without a strategy", "one with another strategy");
    p->state = state;
  }
  model_state_ = state;
}

void DataStrategy::check_group(const Communicator* group) const {
  if (group && group->flight() && axis_.flight() && group->flight() != axis_.flight())
    reject("data parallel", "groups of the axis's world", "the " + group->axis() + " axis of another launch()");
}

void DataStrategy::enter(Call call, int64_t microbatch, size_t unit) {
  const std::array names{"none",          "begin_step",       "begin_gradients",
                         "end_gradients", "reduce_gradients", "gather_parameters"};
  const auto name = [&](Call of) { return names.at(static_cast<size_t>(of)); };
  if (call == Call::begin) microbatch_ = microbatch;
  const auto state = model_state_.lock();
  if (!state) reject(name(call), "a model that outlives its strategy", "a destroyed one");
  if (last_ == Call::none) return;
  const auto before = static_cast<Call>(static_cast<size_t>(call) - 1);
  if (call != Call::step && last_ != before && !(call == Call::begin && last_ == Call::end))
    reject(name(call), std::string("a call after ") + name(before), std::string("one after ") + name(last_));
  if (call == Call::step) done_.clear();
  const bool in_pass = call == Call::begin || call == Call::end;
  const int64_t done = in_pass ? done_[unit] : 0, all = options_.microbatches;
  if (in_pass && (microbatch != done || done == all))
    reject(name(call), done < all ? "micro-batch " + std::to_string(done) : "no further micro-batch",
           std::to_string(microbatch));
  if (call == Call::end) ++done_[unit];
  for (const auto& [first, passes] : done_)
    if (call == Call::reduce && passes < all)
      reject(name(call), std::to_string(all) + " micro-batches", std::to_string(passes));
  state->awaits_gradients = call != Call::reduce;
  last_ = call;
}

void DataStrategy::set_masters(std::vector<Tensor> masters) {
  size_t count = 0;
  for (const FlatUnit& shard : shards_)
    if (shard.trainable() && (count == masters.size() || masters[count++].shape() != shard.values.shape()))
      reject("set_masters", "a tensor " + shard.values.shape().str() + " for " + shard.name, "none or another shape");
  if (masters.size() > count) reject("set_masters", std::to_string(count) + " tensors", "more");
  masters_ = std::move(masters);
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

namespace {

void expect_option(bool right, const char* field, const std::string& expected, const std::string& found) {
  if (!right) throw FieldError(field, "expected " + expected + ", got " + found);
}

void check_options(const Communicator&, const DdpOptions& o) { expect_at_least(0, "bucket_bytes", o.bucket_bytes); }

void check_options(const Communicator& axis, const ZeroOptions& o) {
  if (o.shard_ranks == 0) return;
  require_object(&axis, "[data parallel] axis");
  expect_option(o.shard_ranks > 0 && axis.size() % o.shard_ranks == 0, "shard_ranks",
                "a divisor of the axis size, " + std::to_string(axis.size()), std::to_string(o.shard_ranks));
}

void check_options(const Communicator&, const DilocoOptions& o) {
  expect_at_least(1, "sync.every", o.sync.every);
  expect_at_least(1, "sync.fragments", o.sync.fragments);
  expect_option(o.sync.fragments <= o.sync.every, "sync.fragments",
                "at most sync.every, " + std::to_string(o.sync.every), std::to_string(o.sync.fragments));
  for (const int64_t fragment : o.fragments)
    expect_option(fragment >= 0 && fragment < o.sync.fragments, "fragments",
                  "values below sync.fragments, " + std::to_string(o.sync.fragments), std::to_string(fragment));
  expect_option(std::isfinite(o.outer.lr), "outer_lr", "a finite number", std::to_string(o.outer.lr));
  expect_option(std::isfinite(o.outer.momentum), "outer_momentum", "a finite number", std::to_string(o.outer.momentum));
}

void check_options(const Communicator&, const auto&) {}

std::unique_ptr<DataStrategy> make_strategy(Module&, Communicator&, const ArenaPtr&, const DataOptions&,
                                            const AsyncServerOptions&) {
  throw Error("[data parallel] ps-async has no synchronized steps; expected ddp, dataparallel or ps-sync");
}

}  // namespace

std::unique_ptr<DataStrategy> make_data_strategy(Module& model, Communicator& axis, const ArenaPtr& arena,
                                                 const DataOptions& options) {
  expect_at_least(1, "microbatches", options.microbatches);
  for (const auto& [field, dtype] : {std::pair("dtype", options.dtype), std::pair("grad_dtype", options.grad_dtype)})
    expect_option(dtype == DType::float64 || dtype == DType::float32 || dtype == DType::bfloat16, field,
                  "a floating-point dtype", std::string(to_string(dtype)));
  std::visit([&](const auto& strategy) { check_options(axis, strategy); }, options.strategy);
  require_object(&model, "[data parallel] model");
  if (model.parameters().empty()) throw Error("[data parallel] model: it has no parameters");
  return std::visit([&](const auto& strategy) { return make_strategy(model, axis, arena, options, strategy); },
                    options.strategy);
}

}  // namespace tessera
