// Runs on GPUs: ranks that share one train like one rank on it, and what they begin with and save is what ranks on the
// CPU begin with and save.
#include "tests/support/gpu.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>

#include "tensor/ops/matmul/cuda/product.h"
#include "tests/verify/draw.h"
#include "train/checkpoint/state.h"
#include "train/plan.h"
#include "train/trainer.h"
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

TrainOptions plan(const std::function<void(TrainOptions&)>& change) {
  TrainOptions o = small_plan();
  o["steps"] = 4;
  change(o);
  return o;
}

std::vector<TrainOptions> layouts() {
  return {plan([](TrainOptions& o) { o.ranks = 1; }),
          plan([](TrainOptions& o) {
            o.ranks = 4;
            o["tp"] = 2;
          }),
          plan([](TrainOptions& o) {
            o.ranks = 4;
            o["tp"] = 2;
            o["sp"] = true;
            o["zero"] = 3;
            o["dtype"] = "bf16";
          }),
          plan([](TrainOptions& o) {
            o.ranks = 4;
            o["pp"] = 2;
            o["zero"] = 1;
            o["microbatches"] = 2;
          }),
          plan([](TrainOptions& o) {
            o.ranks = 3;
            o["zero"] = 2;
            o["optimizer"] = "sgd";
          }),
          plan([](TrainOptions& o) {
            o.ranks = 2;
            o["dp_mode"] = "ps-sync";
            o["servers"] = 2;
          })};
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
  for (const auto& change : std::vector<std::function<void(TrainOptions&)>>{
           [](TrainOptions& o) { o.ranks = 4, o["dp"] = 2, o["tp"] = 2; },
           [](TrainOptions& o) { o.ranks = 2, o["pp"] = 2, o["microbatches"] = 4; },
           [](TrainOptions& o) { o.ranks = 2, o["pp"] = 2, o["microbatches"] = 3, o["schedule"] = "zb-h1"; },
           [](TrainOptions& o) { o.ranks = 2, o["cp"] = 2; },
           [](TrainOptions& o) { o.ranks = 2, o["cp"] = 2, o["cp_mode"] = "ulysses"; },
           [](TrainOptions& o) { o.ranks = 2, o["cp"] = 2, o["document_mask"] = true, o["vocab"] = 12; },
           [](TrainOptions& o) {
             o.ranks = 2, o["pp"] = 2, o["document_mask"] = true, o["vocab"] = 12, o["family"] = "llama";
           },
           [](TrainOptions& o) { o.ranks = 3, o["all_reduce"] = "ring"; },
           [](TrainOptions& o) { o.ranks = 3, o["all_reduce"] = "tree", o["bucket_mb"] = 0.001; },
           [](TrainOptions& o) { o.ranks = 2, o["dp_mode"] = "dataparallel"; },
           [](TrainOptions& o) { o.ranks = 2, o["recompute"] = "block", o["dtype"] = "bf16"; },
           [](TrainOptions& o) { o.ranks = 2, o["zero"] = 2, o["offload"] = "optimizer", o["dtype"] = "bf16"; },
           [](TrainOptions& o) { o.ranks = 2, o["dtype"] = "fp64"; }}) {
    TrainOptions o = plan(change);
    o["device"] = "cuda";
    expect_passes(o);
  }
}

// Parts of matrices go to their owners and back, and owners make the bits of one rank.
TEST_F(TrainingGpu, OwnersOfMatrices) {
  for (const auto& change : std::vector<std::function<void(TrainOptions&)>>{
           [](TrainOptions& o) { o.ranks = 1, o["microbatches"] = 2; },
           [](TrainOptions& o) { o.ranks = 3, o["dtype"] = "bf16"; },
           [](TrainOptions& o) {
             o.ranks = 2, o["zero"] = 1, o["microbatches"] = 2, o["family"] = "llama", o["ffn"] = 37;
           },
           [](TrainOptions& o) { o.ranks = 3, o["zero"] = 2, o["dtype"] = o["grad_dtype"] = "bf16"; },
           [](TrainOptions& o) { o.ranks = 4, o["zero"] = 3, o["shard_ranks"] = 2; },
           [](TrainOptions& o) { o.ranks = 2, o["zero"] = 3, o["offload"] = "parameters"; },
           [](TrainOptions& o) { o.ranks = 2, o["zero"] = 2, o["offload"] = "optimizer", o["dtype"] = "bf16"; },
           [](TrainOptions& o) { o.ranks = 4, o["tp"] = 2, o["family"] = "llama", o["ffn"] = 37; },
           [](TrainOptions& o) { o.ranks = 4, o["tp"] = 2, o["zero"] = 3, o["dtype"] = "fp64"; },
           [](TrainOptions& o) { o.ranks = 4, o["pp"] = 2, o["zero"] = 1, o["microbatches"] = 2; },
           [](TrainOptions& o) { o.ranks = 2, o["dp_mode"] = "dataparallel"; }}) {
    TrainOptions o = plan(change);
    o["device"] = "cuda";
    o["optimizer"] = "muon";
    expect_passes(o);
  }
}

// A model whose matrices are larger than what its passes keep; without what a library may take.
TEST_F(TrainingGpu, UpdatesOfMatricesTakeNoMoreMemoryThanExpected) {
  for (const int64_t zero : {0, 1}) {
    TrainOptions o =
        plan([&](TrainOptions& p) { p["zero"] = zero, p.ranks = 3, p["channels"] = 64, p["context"] = 8; });
    o["device"] = "cuda";
    o["batch"] = 3;
    o["steps"] = 2;
    const auto peaks = [&](const char* optimizer) {
      o["optimizer"] = optimizer;
      const VerifyResult r = verify(job_of(o));
      EXPECT_TRUE(r.passed()) << test::command_of(o);
      for (size_t rank = 0; test::emulated() && rank < r.peak.size(); ++rank)
        EXPECT_LE(r.peak[rank], r.expected_peak[rank] - cuda::kMostWorkspace) << test::command_of(o) << " " << rank;
      return *std::ranges::max_element(r.peak);
    };
    EXPECT_GT(peaks("muon"), peaks("adamw")) << zero;
  }
}

// Each like a serial run of its own on a GPU, with outer steps.
TEST_F(TrainingGpu, RanksThatTrainAlone) {
  for (const auto& change : std::vector<std::function<void(TrainOptions&)>>{
           [](TrainOptions& o) { o.ranks = 3; },
           [](TrainOptions& o) { o.ranks = 2, o["outer_momentum"] = 0, o["optimizer"] = "sgd", o["dtype"] = "fp64"; },
           [](TrainOptions& o) { o.ranks = 2, o["sync_fragments"] = 2, o["dtype"] = "bf16", o["clip"] = 0.1; },
           [](TrainOptions& o) {
             o.ranks = 2, o["sync_fragments"] = 2, o["channels"] = 24, o["dtype"] = o["grad_dtype"] = "bf16";
           },
           [](TrainOptions& o) {
             o.ranks = 3, o["offload"] = "optimizer", o["dtype"] = "bf16", o["all_reduce"] = "ring";
           },
           [](TrainOptions& o) { o.ranks = 2, o["optimizer"] = "muon", o["untied"] = true, o["microbatches"] = 2; },
           [](TrainOptions& o) { o.ranks = 2, o["lora_rank"] = 2; },
           [](TrainOptions& o) { o.ranks = 4, o["pp"] = 2, o["sync_fragments"] = 2, o["microbatches"] = 2; },
           [](TrainOptions& o) { o.ranks = 4, o["tp"] = 2, o["all_reduce"] = "tree"; },
           [](TrainOptions& o) { o.ranks = 4, o["cp"] = 2, o["cp_mode"] = "ulysses", o["dtype"] = "bf16"; }}) {
    TrainOptions o = plan(change);
    o["steps"] = 5;
    o["device"] = "cuda";
    o["dp_mode"] = "diloco";
    o["sync_every"] = 2;
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
  TrainOptions o = plan([](TrainOptions& p) { p.ranks = 2; });
  o["device"] = "cuda";
  o["clip"] = 0.1;
  for (const char* name : {"skipped-microbatch", "unclipped-rank", "stale-part"}) {
    check_applies(defect(name), job_of(o));
    EXPECT_FALSE(verify(job_of(o), planted(defect(name), job_of(o))).passed()) << name;
  }
}

}  // namespace
}  // namespace tessera
