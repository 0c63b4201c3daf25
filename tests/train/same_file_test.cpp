// Runs that produce the same file: parameters and optimizer state, byte for byte (see the table in README.md), also
// when resumed; and the metadata and contents of rank files.

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "tests/data/support.h"
#include "tests/support/draw.h"
#include "tests/support/gpu.h"
#include "tests/support/tensors.h"
#include "tests/train/support.h"
#include "train/check.h"

namespace tessera {
namespace {

// The file produced by a run up to a step, optionally resumed from another file.
File run(const TrainConfig& job, int64_t to, const File* start = nullptr, int64_t from = 0) {
  File end;
  train(job, 0, [&](Trainer& trainer, Communicator&) {
    if (start) {
      read_values(trainer.state().strategy().resident_units(), make_source(*start));
      read_state(trainer.state(), make_source(*start));
      trainer.state().set_done(from, from);
    }
    for (int64_t i = from; i < to; ++i) trainer.step();
    save(trainer, end);
  });
  return end;
}

// The file after all steps of the job under a plan.
File train_to_file(TrainConfig job, Plan plan) {
  plan.threads_per_rank = 1;
  job.plan = plan;
  check(job);
  return run(job, job.optim.steps);
}

TrainConfig random_job(test::Sampler& sample) {
  TrainConfig job{.model = {.layers = 4, .heads = 2, .channels = 16, .context = 8, .vocab = 37},
                  .optim = {.lr = 0.02, .warmup = 1, .steps = 4, .batch = 12}};
  job.model.dropout = sample.of({0.0, 0.1});
  job.model.tied = sample.of({true, false});
  job.model.family = sample.of({Family::gpt2, Family::llama});
  job.model.kv_heads = sample.of<int64_t>({1, 2});
  job.optim.optimizer = sample.of({OptimizerKind::adamw, OptimizerKind::sgd});
  job.optim.dtype = sample.of({DType::float32, DType::bfloat16});
  return job;
}

// Plans with either several data ranks or several micro-batches produce the file of one rank with as many
// micro-batches: pipelines, ZeRO, DataParallel, a parameter server.
TEST(CheckpointBytes, MatchOneRankUnderEveryPlan) {
  for (uint64_t trial = 0; trial < 16; ++trial) {
    test::Sampler sample("same file", trial);
    const TrainConfig job = random_job(sample);
    const auto parts = sample.of<int64_t>({2, 3, 4});
    Plan plan{.pp = sample.of<int64_t>({1, 2})};
    (sample.of({true, false}) ? plan.dp : plan.microbatches) = parts;
    if (plan.pp > 1)
      plan.schedule = sample.of({ScheduleKind::naive, ScheduleKind::gpipe, ScheduleKind::one_f_one_b,
                                 ScheduleKind::zb_h1, ScheduleKind::zb_v, ScheduleKind::v_half, ScheduleKind::v_min});
    plan.bucket_mb = sample.of({4.0, 0.002});
    if (plan.pp == 1) plan.dp_mode = sample.of({DataMode::ddp, DataMode::dataparallel, DataMode::ps_sync});
    if (plan.dp_mode == DataMode::ps_sync) plan.servers = sample.of<int64_t>({1, plan.dp});
    if (plan.dp_mode == DataMode::ddp)
      plan.zero = sample.of({ZeroStage::none, ZeroStage::one, ZeroStage::two, ZeroStage::three});
    const Plan one{.tie_copies = plan.pp > 1, .microbatches = parts};
    EXPECT_TRUE(train_to_file(job, plan) == train_to_file(job, one)) << trial << ": " << to_text(plan);
  }
}

// With several ranks and several micro-batches per rank, there are two possible files: some plans reduce over ranks
// once, others after each micro-batch.
TEST(CheckpointBytes, DependOnlyOnNumberOfReductionsPerStep) {
  for (uint64_t trial = 0; trial < 4; ++trial) {
    test::Sampler sample("same file", trial);
    const TrainConfig job = random_job(sample);
    Plan plan{.dp = 2, .microbatches = 3};
    const auto with = [&](DataMode mode, ZeroStage zero) {
      plan.dp_mode = mode;
      plan.zero = zero;
      return train_to_file(job, plan);
    };
    const File once = with(DataMode::ddp, ZeroStage::none), each = with(DataMode::ddp, ZeroStage::two);
    EXPECT_TRUE(with(DataMode::ddp, ZeroStage::one) == once) << trial;
    EXPECT_TRUE(with(DataMode::ps_sync, ZeroStage::none) == once) << trial;
    EXPECT_TRUE(with(DataMode::dataparallel, ZeroStage::none) == once) << trial;
    EXPECT_TRUE(with(DataMode::ddp, ZeroStage::three) == each) << trial;
    EXPECT_FALSE(once == each) << trial;
  }
}

// A pipeline and one rank sum the gradients of a tied weight's two uses in different orders unless `tie_copies` is set.
TEST(CheckpointBytes, MatchForTiedWeightsOnlyWithTieCopies) {
  const TrainConfig job{.model = {.layers = 2, .heads = 2, .channels = 16, .context = 8, .vocab = 37},
                        .optim = {.lr = 0.02, .warmup = 1, .steps = 4, .batch = 12}};
  const File pipeline = train_to_file(job, {.pp = 2, .microbatches = 3});
  EXPECT_TRUE(train_to_file(job, {.tie_copies = true, .microbatches = 3}) == pipeline);
  EXPECT_FALSE(train_to_file(job, {.microbatches = 3}) == pipeline);
  TrainConfig untied = job;
  untied.model.tied = false;
  EXPECT_TRUE(train_to_file(untied, {.microbatches = 3}) == train_to_file(untied, {.pp = 2, .microbatches = 3}));
}

// A resumed run continues bitwise identically: between synchronizations of local updates, and for Muon and hybrid
// sharding under another layout.

TrainConfig job_with(const Plan& plan, OptimizerKind optimizer, DType dtype = DType::float32) {
  TrainConfig job{.model = {.layers = 2, .heads = 2, .channels = 16, .context = 8, .vocab = 37, .dropout = 0.1},
                  .optim = {.optimizer = optimizer, .lr = 0.02, .warmup = 1, .steps = 7, .batch = 8},
                  .plan = plan};
  job.optim.dtype = dtype;
  if (plan.ep > 1) job.model.experts = {.count = 4};
  job.plan.threads_per_rank = 1;
  check(job);
  return job;
}

void expect_identical_after_resume(const Plan& before, const Plan& after, OptimizerKind optimizer,
                                   DType dtype = DType::float32) {
  SCOPED_TRACE(to_text(before) + " then " + to_text(after));
  const TrainConfig first = job_with(before, optimizer, dtype);
  const File full_tensors = run(first, 7), half = run(first, 4);
  File rest = run(job_with(after, optimizer, dtype), 7, &half, 4);
  EXPECT_EQ(full_tensors.size(), rest.size());
  for (const auto& [name, bytes] : full_tensors) EXPECT_TRUE(bytes == rest[name]) << name;
}

// Runs are resumed after step 4, between the outer steps of steps 3 and 6; with two fragments, the second one has its
// outer steps at steps 1, 4 and 7.
TEST(ReplicasResume, ResumesBetweenSynchronizations) {
  Plan plan{.dp = 2, .dp_mode = DataMode::diloco, .sync_every = 3}, with_stages = plan;
  expect_identical_after_resume(plan, plan, OptimizerKind::adamw);
  with_stages.pp = 2;
  expect_identical_after_resume(with_stages, with_stages, OptimizerKind::sgd);
  plan.sync_fragments = 2;
  for (const DType dtype : {DType::float32, DType::bfloat16})
    expect_identical_after_resume(plan, plan, OptimizerKind::adamw, dtype);
  plan.cp = 2;
  expect_identical_after_resume(plan, plan, OptimizerKind::adamw, DType::bfloat16);
}

// A unit's fragment is independent of its stage.
TEST(ReplicasResume, ResumesWithDifferentStages) {
  const Plan plan{.dp = 2, .tie_copies = true, .dp_mode = DataMode::diloco, .sync_every = 3, .sync_fragments = 2};
  Plan with_stages = plan;
  with_stages.pp = 2;
  expect_identical_after_resume(plan, with_stages, OptimizerKind::adamw, DType::bfloat16);
  expect_identical_after_resume(with_stages, plan, OptimizerKind::muon);
}

// The validation loss uses the checkpoint's synchronized values, and each rank continues with its own.
void expect_loss_of_synchronized_weights(TrainConfig job) {
  const TokenFile tokens = squares(41);
  File saved;
  double found = 0, expected = 0;
  std::atomic<bool> changed = false;
  train(job, 3, [&](Trainer& trainer, Communicator& world) {
    std::vector<Tensor> before;
    for (const FlatUnit& unit : trainer.state().strategy().shards()) before.push_back(unit.values.clone());
    const double loss = trainer.mean_loss(tokens);
    for (size_t u = 0; u < before.size(); ++u)
      if (!test::bitwise_equal(before[u].on_host(), trainer.state().strategy().shards()[u].values.on_host()))
        changed = true;
    save(trainer, saved);
    if (world.rank() == 0) found = loss;
  });
  EXPECT_FALSE(changed);
  job.plan = {.device = job.plan.device, .threads_per_rank = 1};
  train(job, 0, [&](Trainer& trainer, Communicator&) {
    read_values(trainer.state().strategy().resident_units(), make_source(saved));
    expected = trainer.mean_loss(tokens);
  });
  EXPECT_NEAR(found, expected, 1e-6 * expected);
}

TEST(ReplicasResume, ValidatesSynchronizedWeightsBetweenOuterSteps) {
  for (const DType dtype : {DType::float32, DType::bfloat16})
    expect_loss_of_synchronized_weights(job_with(
        {.dp = 2, .dp_mode = DataMode::diloco, .sync_every = 4, .sync_fragments = 2}, OptimizerKind::adamw, dtype));
}

TEST(ReplicasResume, DifferentLayoutResumesBitwiseIdentically) {
  const Plan ddp{.dp = 4}, zero{.dp = 4, .zero = ZeroStage::one}, staged{.pp = 2, .dp = 4, .tie_copies = true};
  expect_identical_after_resume(ddp, zero, OptimizerKind::muon);
  expect_identical_after_resume(zero, ddp, OptimizerKind::muon);
  expect_identical_after_resume({.dp = 4, .zero = ZeroStage::three}, {.dp = 4, .zero = ZeroStage::two},
                                OptimizerKind::muon);
  const Plan experts{.dp = 4, .ep = 2}, cut{.dp = 4, .ep = 2, .zero = ZeroStage::two};
  expect_identical_after_resume(experts, cut, OptimizerKind::muon);
  expect_identical_after_resume(cut, experts, OptimizerKind::muon);
  Plan copies = ddp;
  copies.tie_copies = true;
  expect_identical_after_resume(copies, staged, OptimizerKind::muon);
  // Two groups of two ranks each: with one micro-batch the summation order is the same for every ZeRO stage.
  expect_identical_after_resume({.dp = 4, .zero = ZeroStage::three, .shard_ranks = 2},
                                {.dp = 4, .zero = ZeroStage::one, .shard_ranks = 2}, OptimizerKind::adamw);
  expect_identical_after_resume({.dp = 4, .ep = 2, .zero = ZeroStage::three, .shard_ranks = 2},
                                {.dp = 4, .ep = 2, .zero = ZeroStage::one, .shard_ranks = 2}, OptimizerKind::muon);
}

// The same on GPUs, where ranks save copies of GPU memory.
using ReplicasResumeGpu = test::OnGpu;
TEST_F(ReplicasResumeGpu, ResumesBetweenSynchronizations) {
  Plan plan{.dp = 2, .dp_mode = DataMode::diloco, .sync_every = 3, .sync_fragments = 2, .device = Device::cuda};
  for (const DType dtype : {DType::float32, DType::bfloat16})
    expect_identical_after_resume(plan, plan, OptimizerKind::adamw, dtype);
  plan.offload = Offload::optimizer;
  expect_identical_after_resume(plan, plan, OptimizerKind::muon, DType::bfloat16);
}

TEST_F(ReplicasResumeGpu, DifferentLayoutResumesBitwiseIdentically) {
  const Plan ddp{.dp = 2, .device = Device::cuda}, zero{.dp = 2, .zero = ZeroStage::three, .device = Device::cuda};
  expect_identical_after_resume(ddp, zero, OptimizerKind::muon);
  expect_identical_after_resume(zero, ddp, OptimizerKind::muon, DType::bfloat16);
}

TEST_F(ReplicasResumeGpu, ValidatesSynchronizedWeightsBetweenOuterSteps) {
  for (const DType dtype : {DType::float32, DType::bfloat16})
    expect_loss_of_synchronized_weights(
        job_with({.dp = 2, .dp_mode = DataMode::diloco, .sync_every = 4, .sync_fragments = 2, .device = Device::cuda},
                 OptimizerKind::adamw, dtype));
}

// Rank files: the slices of a layout match those of its ranks, they reassemble the full tensors, and impossible layouts
// are rejected.

namespace fs = std::filesystem;

std::vector<SavedSlice> saved_parts(const std::vector<TensorSlice>& held) {
  std::vector<SavedSlice> out;
  for (const TensorSlice& h : held) {
    out.push_back({h.name, h.parameter->full_shape, h.parameter->shard, h.begin, h.part.numel()});
    out.back().shard.axis.clear();
  }
  return out;
}

// Ordered by name, since a rank's optimizer lists kinds before units.
std::string to_string(std::vector<SavedSlice> parts) {
  std::ranges::sort(parts, {}, &SavedSlice::name);
  std::string out;
  for (const SavedSlice& p : parts) out += describe_parts({p}) + " " + std::to_string(p.count) + "\n";
  return out;
}

void write_part(const fs::path& file, const std::vector<TensorSlice>& held) {
  std::vector<TensorBytes> tensors;
  for (const TensorSlice& h : held) tensors.push_back(as_bytes(h.name, h.part));
  write_safetensors(file, tensors, {{"parts", describe_parts(saved_parts(held))}});
}

void expect_full_tensors(const SavedTensors& saved, const std::vector<NamedTensor>& tensors, test::Sampler& sample) {
  ASSERT_EQ(saved.all().size(), tensors.size());
  for (const NamedTensor& t : tensors) {
    const int64_t element = element_size(t.tensor.dtype()), begin = sample.between(0, t.tensor.numel() - 1),
                  count = sample.between(1, t.tensor.numel() - begin);
    std::vector<std::byte> read(static_cast<size_t>(count * element));
    saved.tensors()(t.name, t.tensor.dtype(), t.tensor.shape())(begin, read);
    EXPECT_TRUE(std::equal(read.begin(), read.end(), t.tensor.raw() + begin * element)) << t.name;
  }
}

// All state except the model, on rank 0; with local updates, each replica's state and values.
std::vector<NamedTensor> full_states(Trainer& trainer) {
  const bool apart = trainer.state().strategy().layout().local_updates;
  std::vector<NamedTensor> out = full_state(trainer.state());
  for (int copy = 0; apart && copy < trainer.state().strategy().copies(); ++copy) {
    for (NamedTensor& t : full_values(trainer.state(), copy))
      out.push_back({t.name + ".value" + suffix_of_copy(copy), t.tensor});
    for (NamedTensor& t : full_state(trainer.state(), copy))
      if (copy > 0 && !t.name.ends_with(".common") && !t.name.ends_with(".outer"))
        out.push_back({t.name + suffix_of_copy(copy), t.tensor});
  }
  return out;
}

using SavedTensorsTest = DataTest;

TEST_F(SavedTensorsTest, ListedSlicesReassembleFullTensors) {
  for (uint64_t trial = 0; trial < test::plans(12); ++trial) {
    test::Sampler sample("saved parts", trial);
    TrainConfig job{
        .model = {.layers = 4, .heads = 2, .channels = 16, .context = 8, .vocab = 37, .tied = sample.of({true, false})},
        .optim = {.steps = 1, .batch = 8}};
    job.model.family = sample.of({Family::gpt2, Family::llama});
    job.optim.optimizer = sample.of({OptimizerKind::adamw, OptimizerKind::sgd});
    job.optim.dtype = sample.of({DType::float32, DType::bfloat16});
    Plan& plan = job.plan;
    plan = {.pp = sample.of<int64_t>({1, 2}),
            .dp = sample.of<int64_t>({1, 2}),
            .cp = sample.of<int64_t>({1, 2}),
            .tp = sample.of<int64_t>({1, 2})};
    plan.threads_per_rank = 1;
    plan.zero = sample.of({ZeroStage::none, ZeroStage::one, ZeroStage::two, ZeroStage::three});
    if (plan.pp > 1) plan.microbatches = 2;
    plan.schedule =
        plan.pp > 1 ? sample.of({ScheduleKind::one_f_one_b, ScheduleKind::zb_v}) : ScheduleKind::one_f_one_b;
    if (plan.ranks() == plan.dp && plan.zero == ZeroStage::none)
      plan.dp_mode = sample.of({DataMode::ddp, DataMode::dataparallel, DataMode::ps_sync});
    if (plan.dp_mode == DataMode::ddp && plan.zero == ZeroStage::none && sample.of({true, false}))
      plan.dp_mode = DataMode::diloco, plan.dp = plan.ranks() > 4 ? plan.dp : 2;
    if (plan.dp_mode == DataMode::ps_sync) plan.servers = plan.dp;
    if (plan.zero != ZeroStage::none && plan.dp * plan.cp == 4) plan.shard_ranks = sample.of<int64_t>({0, 1, 2});
    if (plan.dp_mode != DataMode::ps_sync && sample.of({true, false})) job.optim.optimizer = OptimizerKind::muon;
    SCOPED_TRACE(to_text(plan));
    check(job);
    for (const auto& e : fs::directory_iterator(path(""))) fs::remove(e.path());
    const auto values = slices_of_ranks(job, false), state = slices_of_ranks(job, true);
    ASSERT_EQ(std::ssize(values), plan.ranks());
    std::vector<std::string> held(values.size()), held_state(values.size());
    std::vector<NamedTensor> full_tensors, full_state_tensors;
    train(job, 1, [&](Trainer& trainer, Communicator& world) {
      const auto rank = static_cast<size_t>(world.rank());
      const std::vector<TensorSlice> mine = own_values(trainer.state()), mine_of_state = own_state(trainer.state());
      held[rank] = to_string(saved_parts(mine)), held_state[rank] = to_string(saved_parts(mine_of_state));
      write_part(path(part_name("model", rank, values.size())), mine);
      write_part(path(part_name("optimizer", rank, values.size())), mine_of_state);
      std::vector<NamedTensor> all = full_values(trainer.state()), all_of_state = full_states(trainer);
      if (rank == 0) full_tensors = std::move(all), full_state_tensors = std::move(all_of_state);
    });
    for (size_t r = 0; r < values.size(); ++r) {
      EXPECT_EQ(to_string(values[r]), held[r]) << "rank " << r;
      EXPECT_EQ(to_string(state[r]), held_state[r]) << "rank " << r;
    }
    expect_full_tensors(SavedTensors(path(""), "model"), full_tensors, sample);
    expect_full_tensors(SavedTensors(path(""), "optimizer"), full_state_tensors, sample);
  }
}

TEST_F(SavedTensorsTest, ReportsMissingElements) {
  const std::vector<float> values{1, 2, 3, 4};
  const auto write = [&](int rank, const std::string& described, int64_t count) {
    const TensorBytes t{
        "w", DType::float32, {count}, std::as_bytes(std::span(values)).first(static_cast<size_t>(count) * 4)};
    write_safetensors(path("model.rank-" + std::to_string(rank) + "-of-2.safetensors"), std::span(&t, 1),
                      {{"parts", described}});
  };
  const auto read = [&] {
    std::vector<float> out(6);
    SavedTensors(path(""), "model").tensors()("w", DType::float32, {3, 2})(0, std::as_writable_bytes(std::span(out)));
    return out;
  };
  const auto refused = [&](const std::string& message) { expect_error(Status::input, {message}, read); };
  const auto described = [](const char* shape, const char* dim, const char* runs, const char* begin) {
    return fmt::format(R"({{"w": {{"shape": {}, "dim": {}, "runs": {}, "begin": {}}}}})", shape, dim, runs, begin);
  };
  refused("neither this file nor its rank files exist");
  write(0, described("[3, 2]", "0", "[[0, 2]]", "0"), 4);
  refused("element 4 of 'w' is in none of the files");
  write(1, described("[3, 2]", "0", "[[1, 2]]", "0"), 4);
  refused("element 2 of 'w' is in two slices");
  write(1, described("[2, 3]", "0", "[[1, 1]]", "0"), 3);
  refused("differs in dtype or shape from the other rank files");
  write(1, described("[3, 2]", "0", "[[2, 1]]", "0"), 3);
  refused("'w' has 3 elements starting at 0, but its slice ends at 2");
  write(1, "{}", 2);
  refused("does not list tensor 'w'");
  for (const auto& [shape, dim, runs, begin] :
       std::vector<std::array<const char*, 4>>{{"[3, 0]", "0", "[[2, 1]]", "0"},
                                               {"[3, 2]", "2", "[[2, 1]]", "0"},
                                               {"[3, 2]", "0", "[[2, 2]]", "0"},
                                               {"[3, 2]", "0", "[[1, 1], [0, 1]]", "0"},
                                               {"[3, 2]", "0", "[[2]]", "0"},
                                               {"[3, 2]", "0", "[[2, 1]]", "-1"},
                                               {"[3, 144115188075855872]", "0", "[]", "0"}}) {
    write(1, described(shape, dim, runs, begin), 2);
    refused("expected shape, dim, runs and begin");
  }
  write(1, described("[3, 2]", "0", "[[2, 1]]", "0"), 2);
  EXPECT_EQ(read(), (std::vector<float>{1, 2, 3, 4, 1, 2}));
}

}  // namespace
}  // namespace tessera
