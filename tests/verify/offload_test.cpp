// Parameters of ZeRO-3 that lie in the host's memory: they train and are saved as those that lie on the GPU.

#include "tests/support/errors.h"
#include "tests/verify/draw.h"
#include "train/checkpoint/state.h"

namespace tessera {
namespace {

using test::Draw;
using test::small_plan;
using OffloadGpu = test::OnGpu;

// Every axis, groups of shards, adapters, schedules, types and optimizers: what goes with ZeRO-3 on a GPU.
TrainOptions draw_plan(uint64_t trial) {
  Draw d("parameters of the host", trial);
  TrainOptions o = small_plan();
  say(o, "device=cuda zero=3 offload=parameters steps=2");
  o["heads"] = 2 * d.between(1, 2);
  o["channels"] = o.sizes.heads * 4 * d.between(1, 3);
  o["context"] = 2 * d.between(2, 6);
  o["vocab"] = d.between(8, 40);
  o["dp"] = d.of<int64_t>({1, 2, 2, 3});
  if (d.between(0, 2) == 0) o["pp"] = 2;
  if (d.between(0, 2) == 0) o["tp"] = 2;
  o["layers"] = 2;
  o["microbatches"] = d.between(1, 3);
  o["batch"] = o.plan.dp * o.plan.microbatches * d.between(1, 2);
  o["dtype"] = d.of<const char*>({"fp32", "bf16", "fp64"});
  o["optimizer"] = d.of<const char*>({"sgd", "adam", "adamw"});
  o["momentum"] = d.of({0.0, 0.9});
  o["lr"] = text_of(o.optim.optimizer) == "sgd" ? 0.3 : 0.01;
  o["recompute"] = d.of<const char*>({"none", "none", "attention", "block"});
  if (d.between(0, 2) == 0) o["shard_ranks"] = d.of<int64_t>({1, o.plan.dp});
  o["family"] = d.of<const char*>({"gpt2", "llama"});
  o["untied"] = d.between(0, 1) == 1;
  test::draw_adapters(d, o);
  return o;
}

TEST_F(OffloadGpu, ParametersTrainLikeOneRank) {
  for (uint64_t trial = 0; trial < 5; ++trial) {
    const TrainOptions o = draw_plan(trial);
    if (text_of(o.optim.dtype) == "fp64" && !test::has_kernels(DType::float64, Device::cuda)) continue;
    SCOPED_TRACE(test::command_of(o));
    const VerifyResult r = verify(job_of(o));
    EXPECT_TRUE(r.passed()) << (r.failures.empty() ? "" : r.failures.front());
    EXPECT_TRUE(r.bitwise || !r.exact);
    for (const HeldBytes& held : r.held) EXPECT_EQ(held.parameters, 0);
    ASSERT_FALSE(r.sent.empty());
    EXPECT_EQ(r.sent.back().operation, "copy_to_gpu");
    EXPECT_GT(r.sent.back().bytes, 0);
  }
}

// A checkpoint's tensors after two steps, and the loss of the second one. A rank's GPU has no parameters after them,
// and rank 0's host has `host_bytes`.
struct Trained {
  std::string saved;
  double loss = 0;
  int64_t host_bytes = 0;
};

Trained trained(const TrainOptions& o) {
  const Job job = job_of(o);
  const Sequences sequences = counted_sequences(o.sizes.vocab, o.sizes.context, o.optim.batch, 1);
  Trained out;
  launch(launch_options(job.plan), [&](Communicator& world) {
    Trainer trainer(job, sequences, world);
    const auto on_gpu = [&] { return trainer.arena()->usage(Category::parameters).live; };
    for (int step = 0; step < 2; ++step) {
      const double loss = trainer.step().loss;
      if (world.rank() == 0) out.loss = loss;
    }
    std::string all;
    for (const auto& tensors : {whole_values(trainer), whole_state(trainer)})
      for (const NamedTensor& t : tensors) {
        const Tensor here = t.tensor.contiguous();
        all += t.name + std::string(reinterpret_cast<const char*>(here.raw()), static_cast<size_t>(here.nbytes()));
      }
    const ArenaPtr& host = trainer.strategy().shards()[0].values.arena();
    const bool moved = job.plan.offload == Offload::parameters;
    EXPECT_EQ(on_gpu() == 0, moved);
    EXPECT_EQ(host->device() == Device::cpu, moved);
    if (world.rank() != 0) return;
    out.saved = all;
    out.host_bytes = host->usage(Category::parameters).live;
  });
  return out;
}

TEST_F(OffloadGpu, ParametersAreSavedAsThoseOfTheGpu) {
  for (const char* dtype : {"fp32", "bf16"}) {
    TrainOptions o = small_plan();
    say(o, "device=cuda zero=3 ranks=3 batch=6");
    o["dtype"] = dtype;
    const Trained there = trained(o);
    o["offload"] = "parameters";
    const Trained here = trained(o);
    EXPECT_FALSE(here.saved.empty());
    EXPECT_TRUE(here.saved == there.saved) << dtype;
    EXPECT_EQ(here.loss, there.loss) << dtype;
    EXPECT_EQ(here.host_bytes, there.host_bytes) << dtype;  // the shards, as large as they were
  }
}

TEST(Offload, ParametersAreRefusedWhereNothingIsGained) {
  const auto refused = [](const TrainOptions& o, const std::string& words) {
    const std::string what = error_of([&] { check(job_of(o)); });
    EXPECT_NE(what.find(words), std::string::npos) << what;
  };
  TrainOptions o = small_plan();
  say(o, "ranks=2 offload=parameters");
  for (const int64_t zero : {0, 1, 2}) {
    o["zero"] = zero;
    refused(o, fmt::format("`offload`: parameters moves the shards of `zero` 3; expected `zero` 3 beside it, found {}",
                           zero));
  }
  o["zero"] = 3;
  refused(o, "`offload`: parameters moves them to the host's memory. With `device` cpu they lie there already");
  refused(o, "expected `device` cuda beside it, found cpu");
}

}  // namespace
}  // namespace tessera
