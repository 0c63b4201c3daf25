// The closed forms themselves, against the table of the paper and numbers worked out by hand.
#include <gtest/gtest.h>

#include "tests/verify/plans.h"
#include "train/expected_bytes.h"
#include "train/memory.h"
#include "train/trainer.h"

namespace tessera {
namespace {

// GPT-2 with 124 million parameters, mixed precision.
TrainOptions gpt2(int64_t ranks, int64_t zero, const char* grad_dtype) {
  TrainOptions o = verify_defaults();
  o.model = "gpt2";
  o["vocab"] = 50304;
  o.ranks = ranks;
  o["batch"] = ranks;
  o["zero"] = zero;
  o["dtype"] = "bf16";
  o["grad_dtype"] = grad_dtype;
  return o;
}

// Rajbhandari et al. 2020, section 5: bytes per rank with 2-byte parameters, g-byte gradients and K = 12.
TEST(Expected, MemoryIsTheTableOfThePaper) {
  const double psi = 124'475'904;
  for (const char* grad_dtype : {"bf16", "fp32"}) {
    const double g = std::string(grad_dtype) == "bf16" ? 2 : 4;
    for (const double n : {2.0, 8.0, 64.0, 1024.0}) {
      const double stages[] = {2 + g + 12, 2 + g + 12 / n, 2 + (g + 12) / n, (2 + g + 12) / n};
      for (int64_t zero = 0; zero <= 3; ++zero) {
        const TrainOptions o = gpt2(static_cast<int64_t>(n), zero, grad_dtype);
        const std::vector<HeldBytes> held = expected_memory(job_of(o));
        const HeldBytes& h = held.front();
        const double found = static_cast<double>(h.parameters + h.gradients + h.optimizer);
        EXPECT_NEAR(found / (stages[zero] * psi), 1, n > 100 ? 0.03 : 0.003) << "stage " << zero << ", n " << n;
        EXPECT_GE(found, stages[zero] * psi * 0.999999);  // padding only adds
      }
    }
  }
}

// With all of it in bfloat16 a parameter takes 8 bytes.
TEST(Expected, StatesOfBfloat16TakeEightBytes) {
  TrainOptions o = gpt2(4, 0, "bf16");
  o["state_dtype"] = "bf16";
  const std::vector<HeldBytes> held = expected_memory(job_of(o));
  const HeldBytes& h = held.front();
  EXPECT_NEAR(static_cast<double>(h.parameters + h.gradients + h.optimizer) / 124'475'904, 8, 0.001);
}

int64_t bytes_of(const std::vector<SentBytes>& all, const std::string& operation, const std::string& axis = "dp") {
  int64_t sum = 0;
  for (const SentBytes& s : all)
    if (s.axis == axis && s.operation == operation) sum += s.bytes;
  return sum;
}

// One layer of 16 channels, 8 tokens of context, 32 words. Units in elements, each parameter rounded up to 16: tokens
// 512, positions 128, the block 16 + 16 + 768 + 48 + 256 + 16 + 16 + 16 + 1024 + 64 + 1024 + 16 = 3280, norm 32: 3952.
// Cut over two ranks at 256: 512 + 512 + 3584 + 512 = 5120, which is 20 norm blocks.
TrainOptions tiny(int64_t ranks) {
  TrainOptions o = verify_defaults();
  say(o, "layers=1 heads=2 channels=16 context=8 vocab=32");
  o.ranks = ranks;
  return o;
}

TEST(Expected, BytesWorkedByHand) {
  TrainOptions o = tiny(2);
  EXPECT_EQ(bytes_of(expected_bytes(job_of(o), 1), "all_reduce"), 2 * 3952 * 4);
  o["zero"] = 1;
  EXPECT_EQ(bytes_of(expected_bytes(job_of(o), 1), "reduce_scatter"), 5120 * 4);
  EXPECT_EQ(bytes_of(expected_bytes(job_of(o), 1), "all_gather"), 5120 * 4 + 20 * 8);
  say(o, "zero=2 microbatches=3");
  EXPECT_EQ(bytes_of(expected_bytes(job_of(o), 1), "reduce_scatter"), 3 * 5120 * 4);
  o["zero"] = 3;  // gathered: tokens three times, positions once, block and norm twice
  EXPECT_EQ(bytes_of(expected_bytes(job_of(o), 1), "all_gather"),
            3 * (3 * 512 + 512 + 2 * 3584 + 2 * 512) * 4 + 20 * 8);
  say(o, "zero=0 dp_mode=dataparallel microbatches=1");
  EXPECT_EQ(bytes_of(expected_bytes(job_of(o), 1), "reduce"), 3952 * 4);
  EXPECT_EQ(bytes_of(expected_bytes(job_of(o), 1), "gather"),
            6 * 8 * 32 * 4);  // the logits of half of 12 sequences
}

// The same model on four ranks, in two groups of two: each group as above, and two all-reduces over two ranks, of 2560
// elements each, once per step.
TEST(Expected, BytesOfGroupsWorkedByHand) {
  TrainOptions o = tiny(4);
  say(o, "zero=2 shard_ranks=2 microbatches=3");
  EXPECT_EQ(bytes_of(expected_bytes(job_of(o), 1), "reduce_scatter", "dp.shard"), 2 * 3 * 5120 * 4);
  EXPECT_EQ(bytes_of(expected_bytes(job_of(o), 1), "all_gather", "dp.shard"), 2 * (5120 * 4 + 20 * 8));
  EXPECT_EQ(bytes_of(expected_bytes(job_of(o), 1), "all_reduce", "dp.replicate"), 2 * 2 * 2560 * 4);
  EXPECT_EQ(bytes_of(expected_bytes(job_of(o), 1), "all_reduce"), 0);
  const HeldBytes held = expected_memory(job_of(o)).at(3);
  EXPECT_EQ(held.parameters, 5120 * 4);
  EXPECT_EQ(held.gradients, 2560 * 4);
  EXPECT_EQ(held.optimizer, 2560 * 8);
}

// Matrices of 768, 256, 1024 and 1024 elements, of which one rank owns 1024 + 768, and the other 1024 + 256.
TEST(Expected, BytesOfMuonWorkedByHand) {
  TrainOptions o = tiny(2);
  o["optimizer"] = "muon";
  EXPECT_EQ(bytes_of(expected_bytes(job_of(o), 1), "broadcast"), 3072 * 4);
  EXPECT_EQ(expected_memory(job_of(o)).at(0).optimizer, 3072 * 4 + (3952 - 3072) * 8);
  // Shards of 1536: rank 0 has qkv and proj and the first half of up. The first owns up and qkv, the second down and
  // proj: so the second sends 512 of up, the first 256 of proj, and both get them back.
  o["zero"] = 1;
  EXPECT_EQ(bytes_of(expected_bytes(job_of(o), 1), "send"), 2 * (512 + 256) * 4);
}

// Matrices of all ranks: qkv 768, proj 256, the router of four experts 64. Of each expert 2048 and 1024, on two of the
// four ranks.
TEST(Expected, BytesOfMuonBesideExpertsWorkedByHand) {
  TrainOptions o = tiny(4);
  say(o, "family=llama experts=4 ep=2 optimizer=muon");
  EXPECT_EQ(bytes_of(expected_bytes(job_of(o), 1), "broadcast"), 3 * (768 + 256 + 64) * 4);
  EXPECT_EQ(bytes_of(expected_bytes(job_of(o), 1), "broadcast", "edp"), 4 * 3072 * 4);
  EXPECT_EQ(expected_memory(job_of(o)).at(0).optimizer, (1088 + 2 * 3072) * 4 + (512 + 3 * 16) * 8);
  // Shards of 512: the third rank owns the router, which it has; of qkv the second one sends 256. An expert's shards
  // are 1536: of one expert the first rank owns both matrices, of the other the second does.
  o["zero"] = 1;
  EXPECT_EQ(bytes_of(expected_bytes(job_of(o), 1), "send"), 2 * 256 * 4);
  EXPECT_EQ(bytes_of(expected_bytes(job_of(o), 1), "send", "edp"), 2 * 2 * (512 + 1024 + 1536) * 4);
}

// Eight ranks in two groups of four. Over four ranks the table of 512, the block of 16 + 768 + 256 + 16 + 64 and the
// norm of 16 are 1024, 2048 and 1024. Two of the four have an expert of 3072, in shards of 1536.
TEST(Expected, BytesOfGroupsBesideExpertsWorkedByHand) {
  TrainOptions o = tiny(8);
  say(o, "batch=24 family=llama experts=4 ep=2 zero=2 shard_ranks=4 microbatches=3");
  const std::vector<SentBytes> sent = expected_bytes(job_of(o), 1);
  EXPECT_EQ(bytes_of(sent, "reduce_scatter", "dp.shard"), 2 * 3 * 3 * 4096 * 4);
  EXPECT_EQ(bytes_of(sent, "reduce_scatter", "edp"), 4 * 3 * 2 * 3072 * 4);
  EXPECT_EQ(bytes_of(sent, "all_gather", "dp.shard"), 2 * 3 * (4096 * 4 + 16 * 8));
  EXPECT_EQ(bytes_of(sent, "all_gather", "edp"), 4 * 2 * (3072 * 4 + 12 * 8));
  EXPECT_EQ(bytes_of(sent, "all_reduce", "dp.replicate"), 2 * 4 * (1024 + 2 * 1536) * 4);
  const HeldBytes held = expected_memory(job_of(o)).at(7);
  EXPECT_EQ(held.parameters, (4096 + 2 * 3072) * 4);
  EXPECT_EQ(held.gradients, (1024 + 2 * 1536) * 4);
  EXPECT_EQ(held.optimizer, (1024 + 2 * 1536) * 8);
}

// Sums in steps 3, 6, 9, and in step 10, the last one.
TEST(Expected, BytesOfRanksThatTrainAloneWorkedByHand) {
  TrainOptions o = tiny(2);
  say(o, "dp_mode=diloco sync_every=3 steps=10");
  EXPECT_EQ(bytes_of(expected_bytes(job_of(o), 2), "all_reduce"), 0);
  EXPECT_EQ(bytes_of(expected_bytes(job_of(o), 9), "all_reduce"), 3 * 2 * 3952 * 4);
  EXPECT_EQ(bytes_of(expected_bytes(job_of(o), 10), "all_reduce"), 4 * 2 * 3952 * 4);
  EXPECT_EQ(bytes_of(expected_bytes(job_of(o), 10), "all_reduce", "world"), 10 * 2 * 24);
  EXPECT_EQ(expected_memory(job_of(o)).at(0).optimizer, 3952 * (8 + 8));
  o["steps"] = 9;  // whose last sum is not a second one
  EXPECT_EQ(bytes_of(expected_bytes(job_of(o), 9), "all_reduce"), 3 * 2 * 3952 * 4);
}

// Two layers in two fragments: the embeddings and a block are 512 + 128 + 3280, the other block and the norm 3280 + 32.
// With H = 5 the first is summed in steps 5 and 10, the second in 2, 7 and 12, and both in step 13.
TEST(Expected, BytesOfFragmentsWorkedByHand) {
  TrainOptions o = tiny(2);
  say(o, "layers=2 dp_mode=diloco sync_every=5 sync_fragments=2 steps=13");
  const auto sent = [&](int64_t steps) { return bytes_of(expected_bytes(job_of(o), steps), "all_reduce"); };
  EXPECT_EQ(sent(1), 0);
  EXPECT_EQ(sent(2), 2 * 3312 * 4);
  EXPECT_EQ(sent(5), 2 * (3312 + 3920) * 4);
  EXPECT_EQ(sent(12), 2 * (3 * 3312 + 2 * 3920) * 4);
  EXPECT_EQ(sent(13), 2 * (4 * 3312 + 3 * 3920) * 4);
  o["steps"] = 1;  // the last one is the first
  EXPECT_EQ(sent(1), 2 * (3312 + 3920) * 4);
}

// Differences have the dtype of gradients, and what ranks have in common is in fp32 beside parameters of bf16.
TEST(Expected, BytesOfOuterStepsInBfloat16) {
  TrainOptions o = tiny(2);
  say(o, "dp_mode=diloco steps=1 dtype=bf16");
  EXPECT_EQ(bytes_of(expected_bytes(job_of(o), 1), "all_reduce"), 2 * 3952 * 4);
  EXPECT_EQ(expected_memory(job_of(o)).at(0).optimizer, 3952 * (12 + 8));
  o["grad_dtype"] = "bf16";
  EXPECT_EQ(bytes_of(expected_bytes(job_of(o), 1), "all_reduce"), 2 * 3952 * 2);
}

// Two groups of two context ranks: in each step gradients within a group, and, with this H, one sum between them.
TEST(Expected, BytesOfContextRanksThatTrainAloneTogether) {
  TrainOptions o = tiny(4);
  say(o, "cp=2 dp_mode=diloco sync_every=3 steps=10");
  const std::vector<SentBytes> sent = expected_bytes(job_of(o), 3);
  EXPECT_EQ(bytes_of(sent, "all_reduce", "cp"), 3 * 2 * 2 * 3952 * 4);
  EXPECT_EQ(bytes_of(sent, "all_reduce"), 2 * 2 * 3952 * 4);
}

}  // namespace
}  // namespace tessera
