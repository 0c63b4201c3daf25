// Dumped steps: the file of any plan equals that of one rank, whose values match PyTorch; a dump does not affect the
// run, and an aborted dump leaves no file.

#include "train/dump.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "data/safetensors.h"
#include "tests/support/errors.h"
#include "tests/support/python.h"
#include "tests/support/tensors.h"
#include "tests/verify/draw.h"
#include "train/checkpoint/full_state.h"
#include "verify/verify.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr double kBound = 1e-12;

Sequences sequences_for(const TrainConfig& job) { return test::synthetic(job, job.optim.seed); }

// Calls `first` on every rank and then trains under the plan to the end, dumping the given step, or none if it is 0.
// Returns the losses and the final parameters.
std::vector<std::vector<double>> train(
    const TrainConfig& job, int64_t step, const fs::path& directory,
    const std::function<void(Trainer&)>& first = [](Trainer&) {}) {
  std::vector<std::vector<double>> out(1);
  test::on_ranks(job, sequences_for(job), [&](Trainer& trainer) {
    first(trainer);
    if (step > 0) trainer.dump(step, directory);
    while (trainer.state().steps_done() < job.optim.steps) {
      const StepReport report = trainer.step();
      if (trainer.state().groups.world.rank() == 0) out[0].push_back(report.loss);
    }
    for (const NamedTensor& t : full_values(trainer.state())) out.push_back(test::host_values(t.tensor));
  });
  return out;
}

std::vector<double> to_doubles(const TensorBytes& t) {
  EXPECT_EQ(t.dtype, DType::float64);
  std::vector<double> out(t.bytes.size() / sizeof(double));
  std::memcpy(out.data(), t.bytes.data(), t.bytes.size());
  return out;
}

void expect_same(const fs::path& found, const fs::path& expected, const std::string& plan) {
  const Safetensors ours(found), theirs(expected);
  EXPECT_EQ(ours.metadata(), theirs.metadata()) << plan;
  ASSERT_EQ(ours.tensors().size(), theirs.tensors().size()) << plan;
  for (const TensorBytes& t : theirs.tensors()) {
    const TensorBytes& o = ours.at(t.name);
    EXPECT_EQ(o.shape, t.shape) << plan << ": " << t.name;
    if (t.dtype == DType::int32)
      EXPECT_TRUE(std::ranges::equal(o.bytes, t.bytes)) << plan << ": " << t.name;
    else
      EXPECT_LE(test::distance(to_doubles(o), to_doubles(t)), kBound) << plan << ": " << t.name;
  }
}

// The same job on one rank with a single micro-batch.
TrainConfig alone(TrainConfig job) {
  const Plan plan = job.plan;
  job.plan = {.attention = plan.attention, .deterministic = true, .threads_per_rank = 1, .timeout = plan.timeout};
  return job;
}

void expect_dump_of_one_rank(const TypedOptions& o) {
  const TrainConfig job = verifiable(resolve(o));
  const test::Exchange one, all;
  const std::string file = fmt::format("dump_{}.safetensors", o.run.dump);
  train(alone(job), o.run.dump, one.path(""));
  try {
    train(job, o.run.dump, all.path(""));
    expect_same(all.path(file), one.path(file), test::make_command(o));
  } catch (const Error& e) {
    ADD_FAILURE() << test::make_command(o) << "\n" << e.what();
  }
}

using namespace test;

// A plan of at most 12 ranks, with an optimizer that does not amplify rounding errors.
TypedOptions sample_dumped(Sampler& d) {
  TypedOptions o = small_plan("dtype=fp64 optimizer=sgd lr=0.1 timeout=60");
  do sample(d, o, "tp=1|1|2|3 cp=1|1|2|3 dp=1|2|3 pp=1|1|2|3");
  while (o.plan.ranks() > 12);
  sample(d, o, "microbatches=1..3 cp_mode=ring|ulysses sp=false|true zero=0..3 layers=1..3 vocab=5..70 dropout=0|0.2");
  sample(d, o, "recompute=none|activation|activation+norm|attention|block|block dump=1|2");
  if (o.plan.pp > 1) {
    sample_schedule(d, o, "", 2, 1);
  } else if (o.plan.tp == 1 && o.plan.cp == 1 && d.between(0, 2) == 0) {
    say(o, d.of<const char*>({"dp_mode=dataparallel zero=0", "dp_mode=ps-sync zero=0"}));
  }
  const int64_t unit = o.plan.tp * (value_name(o.plan.cp_mode) == "ulysses" ? o.plan.cp : 1);
  o["heads"] = unit * d.between(1, 2);
  o["channels"] = o.model.heads * 4 * d.between(1, 3);
  o["context"] = 2 * o.plan.cp * o.plan.tp * d.between(1, 3);
  o["batch"] = o.plan.dp * o.plan.microbatches * d.between(1, 2);
  o["steps"] = o.run.dump;
  sample_family(d, o, unit);
  sample_experts(d, o, o.plan.dp * o.plan.cp);
  return o;
}

TEST(Dump, RandomPlanMatchesOneRank) {
  for (uint64_t trial = 0; trial < plans(40); ++trial) {
    SCOPED_TRACE(trial);
    Sampler d("dumps", trial);
    expect_dump_of_one_rank(sample_dumped(d));
  }
}

// One plan of each kind, so that failures are identified.
TEST(Dump, EachKindOfPlanMatchesOneRank) {
  for (const char* options :
       {"dp=2 microbatches=2", "dp=2 zero=3 recompute=block", "dp=2 dp_mode=dataparallel", "dp=2 dp_mode=ps-sync",
        "tp=2", "tp=2 sp=true", "cp=2 cp_mode=ring", "cp=2 cp_mode=ulysses", "cp=2 tp=2 sp=true family=llama",
        "pp=2 microbatches=4 layers=4 schedule=interleaved chunks=2", "pp=2 microbatches=4 layers=4 schedule=zb-v",
        "pp=2 dp=2 microbatches=2 schedule=zb-h1", "dp=2 ep=2 experts=4 family=llama untied=true",
        "tp=2 experts=4 family=llama recompute=block", "dp=2 lora_rank=2 lora_targets=all"})
    expect_dump_of_one_rank(small_plan(std::string("dtype=fp64 steps=1 dump=1 batch=8 ") + options));
}

// Compares the dumped step and the steps around it, in fp32, where a different summation order would be visible.
TEST(Dump, DoesNotAffectTraining) {
  for (const std::string options : {"dp=2 microbatches=2 zero=3 recompute=block", "pp=2 microbatches=2 schedule=zb-h1",
                                    "tp=2 sp=true recompute=activation+norm", "dp=2 dtype=bf16 family=llama"}) {
    const TrainConfig job = verifiable(resolve(small_plan("steps=3 batch=8 " + options)));
    const Exchange directory;
    EXPECT_EQ(train(job, 2, directory.path("")), train(job, 0, directory.path(""))) << options;
    EXPECT_TRUE(fs::exists(directory.path("dump_2.safetensors")));
  }
}

// A rank fails within the step, whatever other ranks have already written.
TEST(Dump, AbortedDumpLeavesNoFile) {
  const Exchange directory;
  const TrainConfig job = verifiable(resolve(small_plan("dp=2 steps=3")));
  Sequences sequences = sequences_for(job);
  sequences.load = [load = sequences.load](int64_t step, int64_t first, int64_t count, int32_t* in, int32_t* out) {
    if (step == 1 && first > 0) throw Error("these cannot be read");  // rank 1's
    load(step, first, count, in, out);
  };
  const auto run = [&](Trainer& trainer) {
    trainer.dump(2, directory.path(""));
    trainer.step();
    trainer.step();
  };
  expect_error(Status::usage, {"[rank 1] these cannot be read"}, [&] { on_ranks(job, sequences, run); });
  EXPECT_TRUE(fs::is_empty(directory.path("")));
}

// Hooks are missing on one rank, so the file would contain zeros in place of its values.
TEST(Dump, IncompleteDumpIsAnError) {
  const Exchange directory;
  const TrainConfig job = verifiable(resolve(small_plan("dp=2 steps=1")));
  const auto run = [&](Trainer& trainer) {
    StepDump dump(trainer.state(), 1, directory.path(""));
    dump.begin(sequences_for(job));
    dump.write_gradients({});
    dump.finish();
  };
  expect_error(Status::usage, {"bytes of", "dump_1.safetensors were not written"},
               [&] { on_ranks(job, sequences_for(job), run); });
  EXPECT_TRUE(fs::is_empty(directory.path("")));
}

TEST(Dump, RejectsUnsynchronizedRanks) {
  const auto refused = [](const char* options, int64_t step, const char* why) {
    const TrainConfig job = resolve(small_plan(options));
    expect_error(Status::usage, {why}, [&] { check_dump(job, step); });
    EXPECT_NO_THROW(check_dump(job, 0));
  };
  refused("dp=2 dp_mode=ps-async", 1, "`dump`: expected synchronized steps, got `dp_mode` ps-async");
  refused("dp=2 dp_mode=diloco", 1, "`dump`: expected synchronized steps, got `dp_mode` diloco");
  refused("steps=3", 4, "`dump`: expected one of the 3 `steps`, got 4");
}

// PyTorch modules with the hub's names, and hooks on them.
TEST(Dump, MatchesPyTorchHooks) {
  if (const std::string why = missing("torch"); !why.empty()) GTEST_SKIP() << why;
  for (const std::string options : {"family=gpt2", "family=gpt2 untied=true pp=2 tp=2 sp=true microbatches=2",
                                    "family=llama kv_heads=2 heads=4 untied=true cp=2 dp=2 recompute=block"}) {
    const TrainConfig job = verifiable(resolve(small_plan("dtype=fp64 dropout=0 steps=1 batch=4 " + options)));
    const Exchange directory;
    train(job, 1, directory.path(""), [&](Trainer& trainer) {
      std::vector<TensorBytes> bytes;
      const std::vector<NamedTensor> values = full_values(trainer.state());
      for (const NamedTensor& t : values) bytes.push_back(as_bytes(t.name, t.tensor));
      const ModelConfig& c = trainer.state().full_model().config;
      if (trainer.state().groups.world.rank() == 0)
        write_safetensors(directory.path("weights"), bytes,
                          {{"heads", std::to_string(c.heads)}, {"shared", std::to_string(c.key_heads())}});
    });
    EXPECT_NO_THROW(directory.run(TESSERA_SOURCE_DIR "/tests/compare/dump_reference.py")) << options;
  }
}

}  // namespace
}  // namespace tessera
