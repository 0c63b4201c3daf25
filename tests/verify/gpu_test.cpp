// Runs on GPUs: ranks that share one train like one rank on it, and what they begin with and save is what ranks on the
// CPU begin with and save.

#include <cstring>

#include "tensor/ops/matmul/cuda/product.h"
#include "tests/verify/draw.h"
#include "train/checkpoint/state.h"
#include "verify/defects/defects.h"

namespace tessera {
namespace {

using test::expect_passes;
using test::small_plan;
using TrainingGpu = test::OnGpu;

using Saved = std::map<std::string, std::vector<std::byte>>;  // by the tensor's name

Saved bytes_of(const std::vector<NamedTensor>& tensors) {
  Saved out;
  for (const NamedTensor& t : tensors) {
    const Tensor here = t.tensor.contiguous();
    out[t.name] = {here.raw(), here.raw() + here.nbytes()};
  }
  return out;
}

// Tensors that a run begins with and keeps for its optimizer, as a checkpoint has them: rank 0's.
Saved whole_run(const TrainOptions& o, const std::function<void(Trainer&)>& before) {
  const Sequences sequences = counted_sequences(o.sizes.vocab, o.sizes.context, o.optim.batch, 1);
  Saved saved;
  launch(launch_options(job_of(o).plan), [&](Communicator& world) {
    Trainer trainer(job_of(o), sequences, world);
    before(trainer);
    Saved all = bytes_of(whole_values(trainer));
    all.merge(bytes_of(whole_state(trainer)));
    if (world.rank() == 0) saved = std::move(all);
  });
  return saved;
}

TrainOptions plan(std::string_view words) {
  TrainOptions o = small_plan();
  o["steps"] = 4;
  say(o, words);
  return o;
}

std::vector<TrainOptions> layouts() {
  return {plan("ranks=1"),
          plan("ranks=4 tp=2"),
          plan("ranks=4 tp=2 sp=true zero=3 dtype=bf16"),
          plan("ranks=4 pp=2 zero=1 microbatches=2"),
          plan("ranks=3 zero=2 optimizer=sgd"),
          plan("ranks=2 dp_mode=ps-sync servers=2")};
}

TEST_F(TrainingGpu, BeginsAndSavesAsOnTheCpu) {
  for (TrainOptions o : layouts()) {
    const Saved expected = whole_run(o, [](Trainer&) {});
    o["device"] = "cuda";
    EXPECT_TRUE(whole_run(o, [](Trainer&) {}) == expected) << test::command_of(o);
  }
}

// Tensors that are a function of their name alone are read and written again.
TEST_F(TrainingGpu, ReadsWhatWasSaved) {
  std::map<std::string, std::vector<std::byte>> files;
  std::mutex mutex;
  const WholeTensors source = [&](const std::string& name, DType dtype, const Shape& shape) {
    const std::lock_guard lock(mutex);
    std::vector<std::byte>& bytes = files[name];
    if (bytes.empty()) {
      bytes.resize(static_cast<size_t>(shape.numel() * size_of(dtype)));
      const Philox random = Philox::named(3, name);
      for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(random.below(120, i));
    }
    return reader_of(bytes, dtype);
  };
  for (TrainOptions o : layouts()) {
    o["device"] = "cuda";
    const Saved found = whole_run(o, [&](Trainer& trainer) {
      read_values(trainer.strategy().residents(), source);
      read_state(trainer.optimizer(), source);
    });
    for (const auto& [name, bytes] : found) EXPECT_TRUE(bytes == files.at(name)) << test::command_of(o) << " " << name;
    files.clear();
  }
}

TEST_F(TrainingGpu, LayoutsTrainLikeOneRank) {
  for (TrainOptions o : layouts()) {
    o["device"] = "cuda";
    expect_passes(o);
  }
}

TEST_F(TrainingGpu, EveryAxisAndSchedule) {
  for (const std::string_view words : std::vector<std::string_view>{
           "ranks=4 dp=2 tp=2", "ranks=2 pp=2 microbatches=4", "ranks=2 pp=2 microbatches=3 schedule=zb-h1",
           "ranks=2 cp=2", "ranks=2 cp=2 cp_mode=ulysses", "ranks=2 cp=2 document_mask=true vocab=12",
           "ranks=2 pp=2 document_mask=true vocab=12 family=llama", "ranks=3 all_reduce=ring",
           "ranks=3 all_reduce=tree bucket_mb=0.001", "ranks=2 dp_mode=dataparallel",
           "ranks=2 recompute=block dtype=bf16", "ranks=2 zero=2 offload=optimizer dtype=bf16", "ranks=2 dtype=fp64"}) {
    TrainOptions o = plan(words);
    o["device"] = "cuda";
    expect_passes(o);
  }
}

// Parts of matrices go to their owners and back, and owners make the bits of one rank.
TEST_F(TrainingGpu, OwnersOfMatrices) {
  for (const std::string_view words : std::vector<std::string_view>{
           "ranks=1 microbatches=2", "ranks=3 dtype=bf16", "ranks=2 zero=1 microbatches=2 family=llama ffn=37",
           "ranks=3 zero=2 dtype=bf16 grad_dtype=bf16", "ranks=4 zero=3 shard_ranks=2",
           "ranks=2 zero=3 offload=parameters", "ranks=2 zero=2 offload=optimizer dtype=bf16",
           "ranks=4 tp=2 family=llama ffn=37", "ranks=4 tp=2 zero=3 dtype=fp64", "ranks=4 pp=2 zero=1 microbatches=2",
           "ranks=2 dp_mode=dataparallel"}) {
    TrainOptions o = plan(words);
    say(o, "device=cuda optimizer=muon");
    expect_passes(o);
  }
}

// A model whose matrices are larger than what its passes keep; without what a library may take. The sums of a step (its
// loss, its norm) are no part of what is expected.
TEST_F(TrainingGpu, UpdatesOfMatricesTakeNoMoreMemoryThanExpected) {
  constexpr int64_t kSums = 16;
  for (const int64_t zero : {0, 1}) {
    TrainOptions o = plan("ranks=3 channels=64 context=8 device=cuda batch=3 steps=2");
    o["zero"] = zero;
    const auto peaks = [&](const char* optimizer) {
      o["optimizer"] = optimizer;
      const VerifyResult r = verify(job_of(o));
      EXPECT_TRUE(r.passed()) << test::command_of(o);
      for (size_t rank = 0; test::emulated() && rank < r.peak.size(); ++rank)
        EXPECT_LE(r.peak[rank], r.expected_peak[rank] - cuda::kMostWorkspace + kSums)
            << test::command_of(o) << " " << optimizer << " " << rank;
      return *std::ranges::max_element(r.peak);
    };
    EXPECT_GT(peaks("muon"), peaks("adamw")) << zero;
  }
}

// Each like a serial run of its own on a GPU, with outer steps.
TEST_F(TrainingGpu, RanksThatTrainAlone) {
  for (const std::string_view words : std::vector<std::string_view>{
           "ranks=3", "ranks=2 outer_momentum=0 optimizer=sgd dtype=fp64",
           "ranks=2 sync_fragments=2 dtype=bf16 clip=0.1",
           "ranks=2 sync_fragments=2 channels=24 dtype=bf16 grad_dtype=bf16",
           "ranks=3 offload=optimizer dtype=bf16 all_reduce=ring", "ranks=2 optimizer=muon untied=true microbatches=2",
           "ranks=2 lora_rank=2", "ranks=4 pp=2 sync_fragments=2 microbatches=2", "ranks=4 tp=2 all_reduce=tree",
           "ranks=4 cp=2 cp_mode=ulysses dtype=bf16"}) {
    TrainOptions o = plan(words);
    say(o, "steps=5 device=cuda dp_mode=diloco sync_every=2");
    expect_passes(o);
  }
}

// Not in its command alone: no clock chooses what verify() compares, and attention is by kernels that promise bits.
TEST(Verifiable, ChoosesKernelsThatPromiseBits) {
  EXPECT_TRUE(verifiable({}).plan.deterministic);
  EXPECT_EQ(verifiable({}).plan.attention, AttentionKernels::own);
  EXPECT_EQ(verifiable({.plan = {.attention = AttentionKernels::cudnn}}).plan.attention, AttentionKernels::cudnn);
}

// A defect is seen there too.
TEST_F(TrainingGpu, DefectsAreSeen) {
  TrainOptions o = plan("ranks=2");
  say(o, "device=cuda clip=0.1");
  for (const char* name : {"skipped-microbatch", "unclipped-rank", "stale-part"}) {
    check_applies(defect(name), job_of(o));
    EXPECT_FALSE(verify(job_of(o), planted(defect(name), job_of(o))).passed()) << name;
  }
}

}  // namespace
}  // namespace tessera
