// The rows that each worker of an asynchronous run computes at each of its clocks: those of that step that are its own,
// with the random numbers of those rows. All workers together are one rank's step.

#include "tests/support/one_thread.h"
#include "train/async/trainer.h"

namespace tessera {
namespace {

constexpr int64_t kContext = 8, kVocab = 31;
using Gradient = std::map<std::string, std::vector<double>>;

struct Seen {
  double loss = 0;
  Gradient gradient;
};

Job job_of(int64_t ranks, int64_t microbatches) {
  return {.model = {.layers = 2, .heads = 2, .channels = 16, .context = kContext, .vocab = kVocab, .dropout = 0.3},
          .optim = {.warmup = 0, .steps = 6, .batch = ranks * microbatches * 2, .seed = 77, .dtype = DType::float64},
          .plan = {.dp = ranks,
                   .dp_mode = DataMode::ps_async,
                   .servers = std::min<int64_t>(ranks, 2),
                   .staleness = 2,
                   .microbatches = microbatches,
                   .threads_per_rank = 1}};
}

Sequences sequences_of(const Job& job) {
  return counted_sequences(kVocab, kContext, job.optim.batch, static_cast<uint64_t>(job.optim.seed));
}

Gradient gradient_of(const std::vector<FlatUnit>& units) {
  Gradient out;
  for (const FlatUnit& unit : units)
    for (const Slot& slot : unit.slots)
      out[slot.parameter->name] = unit.grads.narrow(0, slot.begin, slot.size).to(DType::float64).to_vector<double>();
  return out;
}

void expect_near(const Seen& found, const Seen& expected, const std::string& what) {
  EXPECT_NEAR(found.loss, expected.loss, 1e-12) << what;
  ASSERT_EQ(found.gradient.size(), expected.gradient.size()) << what;
  for (const auto& [name, values] : expected.gradient) {
    const std::vector<double>& theirs = found.gradient.at(name);
    ASSERT_EQ(theirs.size(), values.size()) << what;
    double most = 0;
    for (size_t i = 0; i < values.size(); ++i) most = std::max(most, std::abs(theirs[i] - values[i]));
    EXPECT_LE(most, 1e-12) << what << ", " << name;
  }
}

// Each of a worker's rows alone on one rank, by the first weights.
Seen rows_alone(const Job& job, int64_t step, int64_t first, int64_t count) {
  const ArenaPtr arena = make_arena();
  const auto model = whole_model(job, kVocab);
  model->materialize(static_cast<uint64_t>(job.optim.seed), arena, DType::float64, DType::float64);
  const Sequences sequences = sequences_of(job);
  Seen seen;
  const double scale = 1.0 / static_cast<double>(count * kContext);
  for (int64_t row = first; row < first + count; ++row) {
    const Tensor ids = Tensor::empty({1, kContext}, DType::int32, arena), targets = ids.clone();
    sequences.load(step, row, 1, ids.data<int32_t>(), targets.data<int32_t>());
    model->set_step(
        {.seed = static_cast<uint64_t>(job.optim.seed), .step = step, .first_sequence = row, .training = true});
    const Loss loss = model->loss(ids, targets, scale);
    backward(loss.mean);
    seen.loss += double{loss.loss_sum} * scale;
  }
  model->zero_missing_gradients();
  seen.gradient = gradient_of(model->units());
  return seen;
}

// The same step of the trainer, on one rank with the whole batch.
Seen one_rank(Job job, int64_t step) {
  job.plan = {.threads_per_rank = 1};
  Seen seen;
  launch(launch_options(job.plan), [&](Communicator& world) {
    Trainer trainer(job, sequences_of(job), world);
    trainer.set_done(step, step);
    seen.loss = trainer.compute_gradients(Wish::none).loss;
    seen.gradient = gradient_of(trainer.strategy().shards());
  });
  return seen;
}

// By worker and clock.
std::vector<std::vector<Seen>> workers_of(const Job& job) {
  std::vector<std::vector<Seen>> seen(static_cast<size_t>(job.plan.dp));
  launch(launch_options(job.plan), [&](Communicator& world) {
    AsyncTrainer trainer(job, sequences_of(job), world);
    for (int64_t clock = 0; clock < job.optim.steps; ++clock) {
      Seen& mine = seen[static_cast<size_t>(world.rank())].emplace_back();
      mine.loss = trainer.worker_step(world.rank(), clock);
      mine.gradient = gradient_of(trainer.server().units());
    }
  });
  return seen;
}

using AsyncWorkers = test::OneThread;

TEST_F(AsyncWorkers, ComputeTheirOwnRowsOfEachStep) {
  for (const int64_t ranks : {1, 2, 3})
    for (const int64_t microbatches : {1, 2}) {
      const Job job = job_of(ranks, microbatches);
      check(job);
      const std::vector<std::vector<Seen>> found = workers_of(job);
      const int64_t rows = job.optim.batch / ranks;
      for (int64_t step = 0; step < job.optim.steps; ++step) {
        const std::string at = std::to_string(ranks) + " ranks, step " + std::to_string(step);
        Seen mean;
        for (int64_t worker = 0; worker < ranks; ++worker) {
          const Seen& one = found[static_cast<size_t>(worker)][static_cast<size_t>(step)];
          expect_near(one, rows_alone(job, step, worker * rows, rows), at + ", worker " + std::to_string(worker));
          mean.loss += one.loss / static_cast<double>(ranks);
          for (const auto& [name, values] : one.gradient) {
            std::vector<double>& sum = mean.gradient[name];
            sum.resize(values.size());
            for (size_t i = 0; i < values.size(); ++i) sum[i] += values[i] / static_cast<double>(ranks);
          }
        }
        expect_near(mean, one_rank(job, step), at);
      }
    }
}

// A run as it comes, with what it loads written down: each row of each step once, by the worker that it belongs to.
TEST_F(AsyncWorkers, LoadEachRowOfARunOnce) {
  const Job job = job_of(3, 2);
  std::mutex one_at_a_time;
  std::map<std::pair<int64_t, int64_t>, std::vector<int>> loaded;  // ranks, by step and row
  launch(launch_options(job.plan), [&](Communicator& world) {
    Sequences sequences = sequences_of(job);
    sequences.load = [&, load = sequences.load](int64_t step, int64_t first, int64_t count, int32_t* in, int32_t* out) {
      const std::lock_guard lock(one_at_a_time);
      for (int64_t row = first; row < first + count; ++row) loaded[{step, row}].push_back(world.rank());
      load(step, first, count, in, out);
    };
    AsyncTrainer trainer(job, sequences, world);
    trainer.server().run(job.optim.steps,
                         {.step = [&](int worker, int64_t clock) { return trainer.worker_step(worker, clock); }});
  });
  EXPECT_EQ(std::ssize(loaded), job.optim.steps * job.optim.batch);
  for (const auto& [at, ranks] : loaded)
    EXPECT_EQ(ranks, std::vector<int>{static_cast<int>(at.second / 4)}) << "step " << at.first << ", row " << at.second;
}

}  // namespace
}  // namespace tessera
