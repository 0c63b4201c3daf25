// Asynchronous training: worker steps, and collectives over all ranks.
#include "train/async/trainer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "train/device.h"
#include "train/evaluate.h"

namespace tessera {

namespace {

std::string of_worker(int worker) { return fmt::format("worker.{}.", worker); }

void add_slots(const std::vector<Slot>& slots, const Tensor& full, const std::string& prefix, const std::string& suffix,
               std::vector<NamedTensor>& out) {
  const Tensor here = full.on_host();
  for (const Slot& slot : slots) {
    std::string name = prefix;
    name.append(slot.parameter->name).append(suffix);
    out.push_back({std::move(name), here.narrow(0, slot.begin, slot.size).reshape(slot.parameter->full_shape)});
  }
}

}  // namespace

AsyncTrainer::AsyncTrainer(const TrainConfig& job, Sequences sequences, Communicator& world)
    : job_(job),
      sequences_(std::move(sequences)),
      axis_(with_one_job(world, job).split(0, world.rank(), "dp")),
      arena_(rank_arena(job.plan, world)),
      model_(full_model(job, sequences_.vocab)),
      schedule_(lr_schedule(job.optim)),
      server_(*model_, *axis_, arena_, data_options(job), async_options()) {
  check_sequences(job_, sequences_);
}

// `ids` in host memory.
Documents AsyncTrainer::documents(const Tensor& ids) const {
  if (!job_.optim.document_mask) return {};
  const Documents made = find_documents(ids, *sequences_.document_end);
  return {made.starts.to(arena_), made.positions.to(arena_)};
}

AsyncOptions AsyncTrainer::async_options() {
  const int ranks = axis_->size();
  return {.steps = job_.optim.steps,
          .staleness = job_.plan.staleness,
          .clip = job_.optim.clip,
          .optimizer = [this](const std::vector<FlatUnit>& units) { return make_optimizer(job_, units); },
          .lr = [this, ranks](int64_t applied) { return schedule_.at(applied / ranks); },
          .record = job_.plan.record,
          .replay = job_.plan.replay};
}

double AsyncTrainer::worker_step(int worker, int64_t step) {
  const int64_t microbatches = job_.plan.microbatches, context = model_->config.context,
                size = job_.optim.batch / (axis_->size() * microbatches), tokens = size * microbatches * context;
  model_->clear_gradients();
  double sum = 0;
  for (int64_t m = 0; m < microbatches; ++m) {
    const int64_t first = (worker * microbatches + m) * size;
    const ArenaPtr host = arena_->host();
    const Tensor ids = Tensor::empty({size, context}, DType::int32, host),
                 targets = Tensor::empty({size, context}, DType::int32, host);
    sequences_.load(step, first, size, ids.data<int32_t>(), targets.data<int32_t>());
    model_->set_step({.seed = static_cast<uint64_t>(job_.optim.seed),
                      .step = step,
                      .first_sequence = first,
                      .sequences_total = size * microbatches,
                      .training = true,
                      .documents = documents(ids)});
    const Loss loss = model_->loss(ids.to(arena_), targets.to(arena_), 1.0 / static_cast<double>(tokens));
    backward(loss.mean);
    sum += loss.loss_sum;
  }
  model_->zero_missing_gradients();
  return sum / static_cast<double>(tokens);
}

std::optional<double> AsyncTrainer::mean_loss(const Rows& split, const std::function<bool()>& stop) {
  const auto forward = [&](const Tensor& ids, const Tensor& targets, const Tensor&) {
    model_->set_step({.documents = documents(ids)});
    return model_->loss(ids.to(arena_), targets.to(arena_), 1).loss_sum;
  };
  return tessera::mean_loss({.forward = forward,
                             .job = &job_,
                             .vocab = model_->config.vocab,
                             .at_once = job_.optim.batch / (job_.plan.microbatches * axis_->size()),
                             .turn = axis_->rank(),
                             .turns = axis_->size(),
                             .arena = arena_->host(),
                             .stop = stop},
                            *axis_, split);
}

// Assembles full tensors on rank 0 from the servers' shards.
void AsyncTrainer::gather(const std::string& suffix, const std::function<Tensor(size_t unit)>& shard,
                          std::vector<NamedTensor>& out) {
  const std::vector<Module::Unit> layout = model_->layout();
  for (size_t u = 0; u < layout.size(); ++u) {
    const Tensor full = server_.gather(u, server_.optimizer() ? shard(u) : Tensor());
    if (axis_->rank() == 0) add_slots(layout[u].slots, full, "", suffix, out);
  }
}

AsyncTensors AsyncTrainer::gather() {
  AsyncTensors out;
  gather(
      "", [&](size_t u) { return server_.shards()[u].values; }, out.values);
  for (const std::string& kind : state_kinds(job_.optim))
    gather(
        "." + kind,
        [&](size_t u) {
          for (const NamedTensor& t : server_.optimizer()->state())
            if (t.name == server_.shards()[u].name + "." + kind) return t.tensor;
          return Tensor();
        },
        out.state);
  const std::vector<FlatUnit>& units = server_.units();
  for (int w = 0; w < axis_->size(); ++w)
    for (size_t u = 0; server_.holds(w) && u < units.size(); ++u) {
      const Tensor full = server_.gather_worker(u, w);
      if (axis_->rank() == 0) add_slots(units[u].slots, full, of_worker(w), "", out.pulled);
    }
  return out;
}

void AsyncTrainer::read(const FullTensors& values, const FullTensors& state, int64_t updates) {
  Optimizer* const optimizer = server_.optimizer();
  if (!optimizer) return;
  read_values(server_.shards(), values);
  read_state(*optimizer, state);
  optimizer->set_steps(updates);
}

void AsyncTrainer::begin_with(const FullTensors& values) {
  if (server_.optimizer()) tessera::begin_with(server_.shards(), *server_.optimizer(), values);
}

void AsyncTrainer::read_pulled(const FullTensors& pulled) {
  read_values(server_.units(), [&](const std::string& name, DType dtype, const Shape& shape) {
    return pulled(of_worker(axis_->rank()) + name, dtype, shape);
  });
}

}  // namespace tessera
