// --attention and --deterministic: what is refused, what is the default, and what a run says of its attention.
#include <gtest/gtest.h>

#include <string>
#include <variant>
#include <vector>

#include "app/command_line.h"
#include "app/job_of.h"
#include "app/options.h"
#include "tensor/error.h"
#include "tensor/kernels.h"
#include "tests/support/gpu.h"
#include "train/device.h"

namespace tessera {
namespace {

std::string refusal(std::vector<const char*> words) {
  words.insert(words.begin(), "tessera");
  try {
    parse_command_line(static_cast<int>(words.size()), words.data());
  } catch (const Error& e) {
    EXPECT_EQ(static_cast<int>(e.status()), static_cast<int>(Status::usage));
    return e.what();
  }
  return "";
}

// A run whose attention cuDNN can serve.
TrainOptions on_gpu() {
  TrainOptions o;
  o["device"] = "cuda";
  o["dtype"] = "bf16";
  o["channels"] = 256;
  o.ranks = 1;
  return o;
}

TEST(AttentionChoice, KernelsThatAreNotThereAreRefused) {
  const std::string without =
      "--attention: this program was built without cuDNN; expected own, or a build with -DTESSERA_CUDNN=ON";
  EXPECT_EQ(refusal({"train", "--attention", "cudnn"}),
            kWithCudnn ? "--attention: cuDNN's kernels are for GPUs; expected own, or --device cuda" : without);
  if (!kWithCudnn) {
    EXPECT_EQ(refusal({"train", "--attention", "cudnn", "--device", "cuda"}), without);
  }
  if (kWithCudnn) {
    EXPECT_EQ(refusal({"train", "--attention", "cudnn", "--device", "cuda"}),
              "--attention: cuDNN's take bf16, found fp32; expected own, found cudnn");
    EXPECT_EQ(refusal({"train", "--attention", "cudnn", "--device", "cuda", "--dtype", "bf16", "--dropout", "0.1"}),
              "--attention: cuDNN's cannot drop the elements that ours count; expected own, found cudnn");
  }
  EXPECT_EQ(refusal({"train", "--attention", "flash"}), "--attention: expected cudnn, own, found 'flash'");
  EXPECT_EQ(refusal({"train", "--attention", "own", "--deterministic"}), "");  // on the CPU both say what is so anyway
}

TEST(AttentionChoice, CudnnIsAskedWhereItIsBuiltAndOnAGpu) {
  TrainOptions o = on_gpu();
  EXPECT_EQ(asks_cudnn(job_of(o).plan), kWithCudnn);
  o["attention"] = "own";
  EXPECT_FALSE(asks_cudnn(job_of(o).plan));
  o = on_gpu();
  o["device"] = "cpu";
  EXPECT_FALSE(asks_cudnn(job_of(o).plan));
  o = verify_defaults();  // to the bit, so by kernels that promise it
  o["device"] = "cuda";
  EXPECT_FALSE(asks_cudnn(job_of(o).plan));
  EXPECT_TRUE(o.plan.deterministic);
  EXPECT_FALSE(TrainOptions().plan.deterministic);
}

TEST(AttentionChoice, ARunSaysWhoseKernelsAndWhy) {
  TrainOptions o = on_gpu();
  o["attention"] = "own";
  EXPECT_EQ(describe_attention(job_of(o)), "attention: our own kernels (`attention` own)");
  o = on_gpu();
  if (!kWithCudnn) {
    EXPECT_EQ(describe_attention(job_of(o)), "attention: our own kernels (built without cuDNN)");
    return;
  }
  o["dtype"] = "fp32";
  EXPECT_EQ(describe_attention(job_of(o)), "attention: our own kernels (cuDNN's take bf16, found fp32)");
  o = on_gpu();
  o["dropout"] = 0.1;
  EXPECT_EQ(describe_attention(job_of(o)),
            "attention: our own kernels (cuDNN's cannot drop the elements that ours count)");
}

TEST(AttentionChoice, TheirValuesAreKeptInTheConfiguration) {
  const std::vector<const char*> words{"tessera", "train", "--attention", "own", "--deterministic"};
  const auto o = std::get<TrainOptions>(parse_command_line(static_cast<int>(words.size()), words.data()));
  TrainOptions read;
  apply_config(read, to_toml(o), "c.toml");
  EXPECT_EQ(text_of(read.plan.attention), "own");
  EXPECT_TRUE(read.plan.deterministic);
}

using AttentionChoiceGpu = test::OnGpu;

TEST_F(AttentionChoiceGpu, CudnnServesAGpt) {
  if (!kWithCudnn) GTEST_SKIP() << "a build without cuDNN";
  TrainOptions o = on_gpu();
  EXPECT_TRUE(describe_attention(job_of(o)).starts_with("attention: cuDNN 9.")) << describe_attention(job_of(o));
  o.ranks = 2, o["dp"] = 1, o["cp"] = 2;  // the tiles of a ring
  EXPECT_TRUE(describe_attention(job_of(o)).starts_with("attention: cuDNN 9.")) << describe_attention(job_of(o));
  o = on_gpu();
  o["deterministic"] = true;
  EXPECT_TRUE(describe_attention(job_of(o)).ends_with(", gradients added in a fixed order"))
      << describe_attention(job_of(o));
  o["channels"] = 80;  // heads of 20
  EXPECT_TRUE(describe_attention(job_of(o)).starts_with("attention: our own kernels (cuDNN 9."))
      << describe_attention(job_of(o));
}

}  // namespace
}  // namespace tessera
