// Checkpoints in parts: what a layout says of its ranks is what they hold, parts read back to the whole, and what no
// layout can be is refused.

#include <fstream>

#include "tests/support/draw.h"
#include "tests/support/errors.h"
#include "train/checkpoint/state.h"

namespace tessera {
namespace {
namespace fs = std::filesystem;

SavedPart part_of(const HeldPart& h) {
  ShardSpec shard = h.parameter->shard;
  shard.axis.clear();
  return {h.name, h.parameter->whole, shard, h.begin, h.part.numel()};
}

// In the order of names, since a rank's optimizer lists kinds before units.
std::string text_of(std::vector<SavedPart> parts) {
  std::ranges::sort(parts, {}, &SavedPart::name);
  std::string out;
  for (const SavedPart& p : parts) out += describe_parts({p}) + " " + std::to_string(p.count) + "\n";
  return out;
}

void write_part(const fs::path& file, const std::vector<HeldPart>& held) {
  std::vector<SavedPart> parts;
  std::vector<TensorBytes> tensors;
  for (const HeldPart& h : held) {
    parts.push_back(part_of(h));
    tensors.push_back(bytes_of(h.name, h.part));
  }
  write_safetensors(file, tensors, {{"parts", describe_parts(parts)}});
}

void expect_whole(const SavedTensors& saved, const std::vector<NamedTensor>& tensors, test::Draw& draw) {
  ASSERT_EQ(saved.all().size(), tensors.size());
  for (const NamedTensor& t : tensors) {
    const int64_t element = size_of(t.tensor.dtype()), begin = draw.between(0, t.tensor.numel() - 1),
                  count = draw.between(1, t.tensor.numel() - begin);
    std::vector<std::byte> read(static_cast<size_t>(count * element));
    saved.tensors()(t.name, t.tensor.dtype(), t.tensor.shape())(begin, read);
    EXPECT_TRUE(std::equal(read.begin(), read.end(), t.tensor.raw() + begin * element)) << t.name;
  }
}

// All that a run keeps beside its model, on rank 0: of ranks that train alone of each, and their values.
std::vector<NamedTensor> whole_states(Trainer& trainer) {
  const bool apart = trainer.strategy().layout().apart;
  std::vector<NamedTensor> out = whole_state(trainer);
  for (int copy = 0; apart && copy < trainer.strategy().copies(); ++copy) {
    for (NamedTensor& t : whole_values(trainer, copy))
      out.push_back({t.name + ".value" + suffix_of_copy(copy), t.tensor});
    for (NamedTensor& t : whole_state(trainer, copy))
      if (copy > 0 && !t.name.ends_with(".common") && !t.name.ends_with(".outer"))
        out.push_back({t.name + suffix_of_copy(copy), t.tensor});
  }
  return out;
}

class SavedTensorsTest : public testing::Test {
 protected:
  fs::path path(const std::string& name = "") const { return made_.path() / name; }

 private:
  TemporaryDirectory made_{fs::temp_directory_path() / "saved"};
};

TEST_F(SavedTensorsTest, ALayoutSaysWhatItsRanksHoldAndPartsReadBackToTheWhole) {
  for (uint64_t trial = 0; trial < test::plans(12); ++trial) {
    test::Draw draw("saved parts", trial);
    Job job{
        .model = {.layers = 4, .heads = 2, .channels = 16, .context = 8, .vocab = 37, .tied = draw.of({true, false})},
        .optim = {.steps = 1, .batch = 8}};
    job.model.family = draw.of({Family::gpt2, Family::llama});
    job.optim.optimizer = draw.of({OptimizerKind::adamw, OptimizerKind::sgd});
    job.optim.dtype = draw.of({DType::float32, DType::bfloat16});
    Plan& plan = job.plan;
    plan = {.pp = draw.of<int64_t>({1, 2}),
            .dp = draw.of<int64_t>({1, 2}),
            .cp = draw.of<int64_t>({1, 2}),
            .tp = draw.of<int64_t>({1, 2})};
    plan.threads_per_rank = 1;
    plan.zero = draw.of({ZeroStage::none, ZeroStage::one, ZeroStage::two, ZeroStage::three});
    if (plan.pp > 1) plan.microbatches = 2;
    plan.schedule = plan.pp > 1 ? draw.of({ScheduleKind::one_f_one_b, ScheduleKind::zb_v}) : ScheduleKind::one_f_one_b;
    if (plan.ranks() == plan.dp && plan.zero == ZeroStage::none)
      plan.dp_mode = draw.of({DataMode::ddp, DataMode::dataparallel, DataMode::ps_sync});
    if (plan.dp_mode == DataMode::ddp && plan.zero == ZeroStage::none && draw.of({true, false}))
      plan.dp_mode = DataMode::diloco, plan.dp = plan.ranks() > 4 ? plan.dp : 2;
    if (plan.dp_mode == DataMode::ps_sync) plan.servers = plan.dp;
    if (plan.zero != ZeroStage::none && plan.dp * plan.cp == 4) plan.shard_ranks = draw.of<int64_t>({0, 1, 2});
    if (plan.dp_mode != DataMode::ps_sync && draw.of({true, false})) job.optim.optimizer = OptimizerKind::muon;
    SCOPED_TRACE(to_text(plan));
    check(job);
    for (const auto& e : fs::directory_iterator(path())) fs::remove(e.path());
    const auto values = parts_of_ranks(job, false), state = parts_of_ranks(job, true);
    ASSERT_EQ(std::ssize(values), plan.ranks());
    std::vector<std::string> held(values.size()), held_state(values.size());
    std::vector<NamedTensor> whole, whole_of_state;
    launch(launch_options(plan), [&](Communicator& world) {
      Trainer trainer(job, counted_sequences(job.model.vocab, job.model.context, job.optim.batch, 1), world);
      trainer.step();
      const auto rank = static_cast<size_t>(world.rank());
      const std::vector<HeldPart> mine = own_values(trainer), mine_of_state = own_state(trainer);
      const auto text = [](const std::vector<HeldPart>& parts) {
        std::vector<SavedPart> out;
        for (const HeldPart& h : parts) out.push_back(part_of(h));
        return text_of(std::move(out));
      };
      held[rank] = text(mine), held_state[rank] = text(mine_of_state);
      write_part(path(part_name("model", rank, values.size())), mine);
      write_part(path(part_name("optimizer", rank, values.size())), mine_of_state);
      std::vector<NamedTensor> all = whole_values(trainer), all_of_state = whole_states(trainer);
      if (rank == 0) whole = std::move(all), whole_of_state = std::move(all_of_state);
    });
    for (size_t r = 0; r < values.size(); ++r) {
      EXPECT_EQ(text_of(values[r]), held[r]) << "rank " << r;
      EXPECT_EQ(text_of(state[r]), held_state[r]) << "rank " << r;
    }
    expect_whole(SavedTensors(path(), "model"), whole, draw);
    expect_whole(SavedTensors(path(), "optimizer"), whole_of_state, draw);
  }
}

TEST_F(SavedTensorsTest, WhatNoPartHasIsNamed) {
  const std::vector<float> values{1, 2, 3, 4};
  const auto write = [&](int rank, const std::string& described, int64_t count) {
    const TensorBytes t{
        "w", DType::float32, {count}, std::as_bytes(std::span(values)).first(static_cast<size_t>(count) * 4)};
    write_safetensors(path("model.rank-" + std::to_string(rank) + "-of-2.safetensors"), std::span(&t, 1),
                      {{"parts", described}});
  };
  const auto refused = [&](const std::string& words) {
    expect_error(Status::input, {words}, [&] {
      const SavedTensors saved(path(), "model");
      std::vector<float> out(6);
      saved.tensors()("w", DType::float32, {3, 2})(0, std::as_writable_bytes(std::span(out)));
    });
  };
  const auto described = [](const std::string& shape, const std::string& dim, const std::string& runs,
                            const std::string& begin) {
    return R"({"w": {"shape": )" + shape + R"(, "dim": )" + dim + R"(, "runs": )" + runs + R"(, "begin": )" + begin +
           "}}";
  };
  refused("no parts of it");
  write(0, described("[3, 2]", "0", "[[0, 2]]", "0"), 4);
  refused("element 4 of 'w' is in no part here");
  write(1, described("[3, 2]", "0", "[[1, 2]]", "0"), 4);
  refused("element 2 of 'w' is in two parts");
  write(1, described("[2, 3]", "0", "[[1, 1]]", "0"), 3);
  refused("of another kind than in the other parts");
  write(1, described("[3, 2]", "0", "[[2, 1]]", "0"), 3);
  refused("'w' has 3 elements from 0 on; its part ends at 2");
  write(1, "{}", 2);
  refused("the parts do not name tensor 'w'");
  for (const auto& [shape, dim, runs, begin] :
       std::vector<std::array<std::string, 4>>{{"[3, 0]", "0", "[[2, 1]]", "0"},
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
  std::vector<float> out(6);
  SavedTensors(path(), "model").tensors()("w", DType::float32, {3, 2})(0, std::as_writable_bytes(std::span(out)));
  EXPECT_EQ(out, (std::vector<float>{1, 2, 3, 4, 1, 2}));
}

}  // namespace
}  // namespace tessera
