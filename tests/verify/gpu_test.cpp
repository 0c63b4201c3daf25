// Runs on GPUs: ranks that share a GPU train like one rank on it, also with experts and with offloaded parameters, and
// their initial and saved state equals that of CPU ranks.

#include <algorithm>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "tensor/ops/matmul/cuda/gemm.h"
#include "tests/support/errors.h"
#include "tests/support/gpus.h"
#include "tests/verify/draw.h"
#include "train/check.h"
#include "train/checkpoint/full_state.h"
#include "train/device.h"
#include "verify/defects/defects.h"

namespace tessera {
namespace {

using namespace test;

using TrainingGpu = test::OnGpu;

using Saved = std::map<std::string, std::vector<std::byte>>;  // by tensor name

Saved as_bytes(const std::vector<NamedTensor>& tensors) {
  Saved out;
  for (const NamedTensor& t : tensors) {
    const Tensor here = t.tensor.contiguous();
    out[t.name] = {here.raw(), here.raw() + here.nbytes()};
  }
  return out;
}

// Initial parameters and optimizer state as in a checkpoint, on rank 0.
Saved complete_run(
    const TypedOptions& o, const std::function<void(Trainer&)>& before = [](Trainer&) {},
    const std::function<void(Trainer&)>& after = [](Trainer&) {}) {
  Saved saved;
  on_ranks(resolve(o), [&](Trainer& trainer) {
    before(trainer);
    Saved all = as_bytes(full_values(trainer.state()));
    all.merge(as_bytes(full_state(trainer.state())));
    if (trainer.state().groups.world.rank() == 0) saved = std::move(all);
    after(trainer);
  });
  return saved;
}

TypedOptions plan(const std::string& options) { return small_plan("steps=4 " + options); }

std::vector<TypedOptions> layouts() {
  return {plan("ranks=1"),
          plan("ranks=4 tp=2"),
          plan("ranks=4 tp=2 sp=true zero=3 dtype=bf16"),
          plan("ranks=4 pp=2 zero=1 microbatches=2"),
          plan("ranks=3 zero=2 optimizer=sgd"),
          plan("ranks=2 dp_mode=ps-sync servers=2")};
}

TEST_F(TrainingGpu, InitialValuesAndStateMatchCpu) {
  for (TypedOptions o : layouts()) {
    const Saved expected = complete_run(o);
    o["device"] = "cuda";
    EXPECT_TRUE(complete_run(o) == expected) << make_command(o);
  }
}

// Loads and saves tensors whose values depend only on their names.
TEST_F(TrainingGpu, LoadsAndSavesSameState) {
  Saved files;
  std::mutex mutex;
  const FullTensors source = [&](const std::string& name, DType dtype, const Shape& shape) {
    const std::lock_guard lock(mutex);
    std::vector<std::byte>& bytes = files[name];
    if (bytes.empty()) {
      bytes.resize(static_cast<size_t>(shape.numel() * element_size(dtype)));
      const Philox random = Philox::named(3, name);
      for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(random.below(120, i));
    }
    return make_reader(bytes, dtype);
  };
  for (TypedOptions o : layouts()) {
    o["device"] = "cuda";
    const Saved found = complete_run(o, [&](Trainer& trainer) {
      read_values(trainer.state().strategy().resident_units(), source);
      read_state(trainer.state().optimizer(), source);
    });
    for (const auto& [name, bytes] : found) EXPECT_TRUE(bytes == files.at(name)) << make_command(o) << " " << name;
    files.clear();
  }
}

TEST_F(TrainingGpu, LayoutsTrainLikeOneRank) {
  for (TypedOptions o : layouts()) {
    o["device"] = "cuda";
    expect_passes(o);
  }
}

// The capability is that of a T4.
TEST_F(TrainingGpu, RejectsBf16WithoutHardwareSupport) {
  if (!describe_device().starts_with("emulated")) GTEST_SKIP() << "the GPU here is what it is";
  setenv("TESSERA_EMULATED_CAPABILITY", "75", 1);
  EXPECT_EQ(error_message([] { check(resolve(plan("device=cuda dtype=bf16"))); }),
            "`dtype`: emulated GPU has compute capability 7.5, but bf16 matmuls require 8.0; expected fp32, got bf16");
  expect_passes(plan("device=cuda"));
  setenv("TESSERA_EMULATED_GPUS", "2", 1);
  EXPECT_EQ(error_message([] { check(resolve(plan("device=cuda ranks=2"))); }),
            "`backend`: GPUs 0 and 1 have no peer access, which thread ranks require; expected "
            "nccl with `all_reduce` native");
  EXPECT_EQ(describe_nccl(resolve(plan("device=cuda ranks=2 backend=nccl all_reduce=native")).plan),
            "GPUs 0 and 1 have no peer access: NCCL sends through host memory, which is slower");
  unsetenv("TESSERA_EMULATED_CAPABILITY");
  EXPECT_EQ(gpus_apart(resolve(plan("device=cuda ranks=2")).plan), "");
  unsetenv("TESSERA_EMULATED_GPUS");
}

TEST_F(TrainingGpu, EveryAxisAndScheduleTrainsLikeOneRank) {
  expect_passes(
      plan("device=cuda"),
      {"ranks=4 dp=2 tp=2", "ranks=2 pp=2 microbatches=4", "ranks=2 pp=2 microbatches=3 schedule=zb-h1", "ranks=2 cp=2",
       "ranks=2 cp=2 cp_mode=ulysses", "ranks=2 cp=2 document_mask=true vocab=12",
       "ranks=2 pp=2 document_mask=true vocab=12 family=llama", "ranks=3 all_reduce=ring",
       "ranks=3 all_reduce=tree bucket_mb=0.001", "ranks=2 dp_mode=dataparallel", "ranks=2 recompute=block dtype=bf16",
       "ranks=2 zero=2 offload=optimizer dtype=bf16", "ranks=2 dtype=fp64"});
}

// Shards of matrices are sent to owners and back, bitwise identical to one rank.
TEST_F(TrainingGpu, MuonTrainsLikeOneRank) {
  expect_passes(
      plan("device=cuda optimizer=muon"),
      {"ranks=1 microbatches=2", "ranks=3 dtype=bf16", "ranks=2 zero=1 microbatches=2 family=llama ffn=37",
       "ranks=3 zero=2 dtype=bf16 grad_dtype=bf16", "ranks=4 zero=3 shard_ranks=2", "ranks=2 zero=3 offload=parameters",
       "ranks=2 zero=2 offload=optimizer dtype=bf16", "ranks=4 tp=2 family=llama ffn=37",
       "ranks=4 tp=2 zero=3 dtype=fp64", "ranks=4 pp=2 zero=1 microbatches=2", "ranks=2 dp_mode=dataparallel"});
}

// The model's matrices are larger than its activations, and no library allocates workspaces. A step's reductions (loss,
// norm) are not part of the prediction.
TEST_F(TrainingGpu, MuonStaysWithinExpectedMemory) {
  constexpr int64_t kSums = 16;
  for (const int64_t zero : {0, 1}) {
    TypedOptions o = plan("ranks=3 channels=64 context=8 device=cuda batch=3 steps=2");
    o["zero"] = zero;
    const auto peaks = [&](const char* optimizer) {
      o["optimizer"] = optimizer;
      const VerifyResult r = verify(resolve(o));
      EXPECT_TRUE(r.passed()) << make_command(o);
      for (size_t rank = 0; emulated() && rank < r.peak.size(); ++rank)
        EXPECT_LE(r.peak[rank], r.expected_peak[rank] - cuda::kMaxWorkspace + kSums)
            << make_command(o) << " " << optimizer << " " << rank;
      return *std::ranges::max_element(r.peak);
    };
    EXPECT_GT(peaks("muon"), peaks("adamw")) << zero;
  }
}

// Each replica trains like a serial run on a GPU with outer steps.
TEST_F(TrainingGpu, LocalUpdatesMatchReplay) {
  expect_passes(
      plan("steps=5 device=cuda dp_mode=diloco sync_every=2"),
      {"ranks=3", "ranks=2 outer_momentum=0 optimizer=sgd dtype=fp64", "ranks=2 sync_fragments=2 dtype=bf16 clip=0.1",
       "ranks=2 sync_fragments=2 channels=24 dtype=bf16 grad_dtype=bf16",
       "ranks=3 offload=optimizer dtype=bf16 all_reduce=ring", "ranks=2 optimizer=muon untied=true microbatches=2",
       "ranks=2 lora_rank=2", "ranks=4 pp=2 sync_fragments=2 microbatches=2", "ranks=4 tp=2 all_reduce=tree",
       "ranks=4 cp=2 cp_mode=ulysses dtype=bf16"});
}

// verify() itself, not only the command, chooses kernels without timing, and attention kernels that guarantee bitwise
// reproducibility.
TEST(Verifiable, SelectsBitwiseReproducibleKernels) {
  EXPECT_TRUE(verifiable({}).plan.deterministic);
  EXPECT_EQ(verifiable({}).plan.attention, AttentionKernels::own);
  EXPECT_EQ(verifiable({.plan = {.attention = AttentionKernels::cudnn}}).plan.attention, AttentionKernels::cudnn);
}

// Faults are detected on GPUs too.
void expect_detected(const TypedOptions& o, std::initializer_list<const char*> faults) {
  for (const char* name : faults)
    EXPECT_FALSE(verify(resolve(o), with_fault(find_fault(name), resolve(o))).passed()) << name;
}

TEST_F(TrainingGpu, DetectsInjectedFaults) {
  expect_detected(plan("ranks=2 device=cuda clip=0.1"), {"skipped-microbatch", "unclipped-rank", "stale-part"});
}

// Mixtures of experts on GPUs: they train like one rank under every axis, faults are detected, steps are not captured,
// and they train over NCCL.

using ExpertsTrainingGpu = test::OnGpu;
using ExpertsOverNcclGpu = test::OnGpus;

TypedOptions with_experts(const std::string& options) {
  return small_plan("device=cuda channels=16 context=8 batch=8 steps=3 experts=4 balance_loss=0.1 " + options);
}

TEST_F(ExpertsTrainingGpu, EveryAxisTrainsLikeOneRank) {
  expect_passes(with_experts(""),
                {"ranks=1 expert_capacity=0.7 shared_experts=1", "ranks=1 dtype=bf16 recompute=block microbatches=2",
                 "ranks=2 ep=2 dtype=bf16", "ranks=4 ep=2 zero=3 recompute=activation",
                 "ranks=4 ep=4 zero=1 family=llama dtype=bf16", "dp=2 ep=2 tp=2 sp=true dtype=fp64", "dp=2 ep=2 tp=2",
                 "dp=2 ep=2 pp=2 microbatches=2 schedule=zb-h1", "cp=2 ep=2 family=llama",
                 "cp=2 dp=2 ep=4 expert_capacity=0.7 shared_experts=1", "ranks=3 zero=2 batch=9",
                 "ranks=2 zero=2 offload=optimizer"});
}

TypedOptions sample_with_experts(Sampler& d) {
  TypedOptions o = with_experts("");
  sample(d, o, "dtype=fp32|bf16|fp64 dp=1|2|4 tp=1|1|2 cp=1|1|2");
  if (o.plan.tp * o.plan.cp == 1) o["pp"] = d.of<int64_t>({1, 2});
  o["sp"] = o.plan.tp > 1 && d.between(0, 1) == 1;
  sample(d, o, "zero=0..3 microbatches=1..2");
  o["batch"] = o.plan.dp * o.plan.microbatches * d.between(1, 2);
  o["heads"] = o.plan.tp * o.plan.cp;
  o["channels"] = o.model.heads * 4 * d.between(1, 4);
  sample(d, o, "family=gpt2|llama recompute=none|activation|block");
  sample_some_experts(d, o, o.plan.dp * o.plan.cp);
  return o;
}

TEST_F(ExpertsTrainingGpu, RandomPlansTrainLikeOneRank) {
  expect_random_pass(12, "experts on a GPU", sample_with_experts);
}

TEST_F(ExpertsTrainingGpu, DetectsInjectedFaults) {
  expect_detected(with_experts("ranks=2 ep=2"), {"misrouted-token", "swapped-expert-counts"});
}

TEST(ExpertsStepGraph, IsNotCaptured) {
  TypedOptions o = with_experts("ranks=1");
  EXPECT_EQ(no_graph_because(resolve(o), false), "the host needs the number of tokens of each of the 4 `experts`");
  EXPECT_FALSE(steps_without_host(resolve(o), false));
  o["cuda_graph"] = "on";
  EXPECT_THROW(no_graph_because(resolve(o), false), Error);
  forget(o, {"experts"});
  EXPECT_EQ(no_graph_because(resolve(o), false), "");
}

std::vector<double> train_losses(const TypedOptions& o) {
  std::vector<double> losses;
  on_ranks(resolve(o), [&](Trainer& trainer) {
    for (int64_t i = 0; i < o.optim.steps; ++i) {
      const double loss = trainer.step().loss;
      if (trainer.state().groups.world.rank() == 0) losses.push_back(loss);
    }
  });
  return losses;
}

// Float64, where summation order affects only the last digits.
TEST_F(ExpertsOverNcclGpu, RanksTrainLikeOneRank) {
  if (const std::string why = no_float64(); !why.empty()) GTEST_SKIP() << why;
  const std::vector<double> alone = train_losses(with_experts("ranks=1 dtype=fp64"));
  for (const std::string zero : {"zero=0", "zero=2", "zero=3"}) {  // collectives overlap with row messages
    const std::vector<double> many =
        train_losses(with_experts("ranks=2 dtype=fp64 ep=2 backend=nccl all_reduce=native " + zero));
    for (size_t step = 0; step < alone.size(); ++step) EXPECT_NEAR(many.at(step), alone[step], 1e-11 * alone[step]);
  }
}

// ZeRO-3 parameters in host memory are trained and saved like those on the GPU.

using OffloadGpu = test::OnGpu;

// Every axis, sharding groups, adapters, schedules, dtypes and optimizers supported with ZeRO-3 on a GPU.
TypedOptions sample_offloaded(Sampler& d) {
  TypedOptions o = small_plan("device=cuda zero=3 offload=parameters steps=2");
  o["heads"] = 2 * d.between(1, 2);
  o["channels"] = o.model.heads * 4 * d.between(1, 3);
  o["context"] = 2 * d.between(2, 6);
  sample(d, o, "vocab=8..40 dp=1|2|2|3");
  if (d.between(0, 2) == 0) o["pp"] = 2;
  if (d.between(0, 2) == 0) o["tp"] = 2;
  sample(d, o, "layers=2 microbatches=1..3");
  o["batch"] = o.plan.dp * o.plan.microbatches * d.between(1, 2);
  sample(d, o, "dtype=fp32|bf16|fp64 optimizer=sgd|adam|adamw momentum=0|0.9 recompute=none|none|attention|block");
  o["lr"] = value_name(o.optim.optimizer) == "sgd" ? 0.3 : 0.01;
  if (d.between(0, 2) == 0) o["shard_ranks"] = d.of<int64_t>({1, o.plan.dp});
  sample(d, o, "family=gpt2|llama untied=false|true");
  sample_adapters(d, o);
  return o;
}

TEST_F(OffloadGpu, ParametersTrainLikeOneRank) {
  for (uint64_t trial = 0; trial < 5; ++trial) {
    Sampler d("parameters of the host", trial);
    const TypedOptions o = sample_offloaded(d);
    SCOPED_TRACE(make_command(o));
    if (!has_kernels(o)) continue;
    const VerifyResult r = expect_passes(o);
    for (const MemoryByCategory& held : r.held) EXPECT_EQ(held.parameters, 0);
    ASSERT_FALSE(r.sent.empty());
    EXPECT_EQ(r.sent.back().operation, "copy_to_gpu");
    EXPECT_GT(r.sent.back().bytes, 0);
  }
}

// Checkpoint tensors after two steps, and the second loss. Afterwards a rank's GPU holds no parameters, and rank 0's
// shards have the same size wherever they are stored.
TEST_F(OffloadGpu, SavedParametersMatchUnoffloadedRun) {
  for (const std::string dtype : {"fp32", "bf16"}) {
    Saved saved[2];
    double loss[2];
    int64_t bytes[2];
    for (const size_t moved : {0, 1}) {
      const auto train = [&](Trainer& trainer) {
        trainer.step();
        const double own = trainer.step().loss;
        if (trainer.state().groups.world.rank() == 0) loss[moved] = own;
      };
      const auto look = [&](Trainer& trainer) {
        const ArenaPtr& host = trainer.state().strategy().shards()[0].values.arena();
        EXPECT_EQ(trainer.state().arena->usage(Category::parameters).live == 0, moved == 1);
        EXPECT_EQ(host->device() == Device::cpu, moved == 1);
        if (trainer.state().groups.world.rank() == 0) bytes[moved] = host->usage(Category::parameters).live;
      };
      const std::string offload = moved == 1 ? "parameters" : "none";
      saved[moved] = complete_run(
          small_plan("device=cuda zero=3 ranks=3 batch=6 dtype=" + dtype + " offload=" + offload), train, look);
    }
    EXPECT_FALSE(saved[1].empty());
    EXPECT_TRUE(saved[1] == saved[0]) << dtype;
    EXPECT_EQ(loss[1], loss[0]) << dtype;
    EXPECT_EQ(bytes[1], bytes[0]) << dtype;
  }
}

TEST(Offload, RejectsParameterOffloadWithoutZero3) {
  const std::string requirement = "`offload`: parameters requires `zero` 3, because it moves the shards; got `zero` ";
  const std::pair<const char*, std::string> cases[] = {
      {"zero=0", requirement + "0"},
      {"zero=1", requirement + "1"},
      {"zero=2", requirement + "2"},
      {"zero=3", "`offload`: parameters are offloaded to host memory, where `device` cpu already stores them"},
      {"zero=3", "expected `device` cuda, got cpu"}};
  for (const auto& [zero, why] : cases) {
    const TypedOptions o = small_plan(std::string("ranks=2 offload=parameters ") + zero);
    EXPECT_TRUE(has(error_message([&] { check(resolve(o)); }), why)) << zero;
  }
}

}  // namespace
}  // namespace tessera
