// Grader of the global gradient norm: gradients whose elements are all 1, and a training step compared with one rank.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "lab/compare.h"
#include "models/decoder.h"
#include "optim/grad_norm.h"
#include "parallel/gradient_norm.h"
#include "train/check.h"
#include "train/trainer.h"

namespace tessera::lab {
namespace {

// Sizes are divisible by two and three tensor ranks; 12 sequences per step.
TrainConfig small_job(const Plan& plan, uint64_t seed) {
  TrainConfig job{
      .model = {.layers = 2, .heads = 6, .channels = 48, .context = 16, .vocab = 42},
      .optim =
          {.optimizer = OptimizerKind::sgd, .momentum = 0, .lr = 0.1, .warmup = 0, .steps = 10, .clip = 0, .batch = 12},
      .plan = plan};
  job.plan.threads_per_rank = 1;
  job.plan.deterministic = true;
  job.optim.seed = static_cast<int64_t>(seed % (uint64_t{1} << 31));
  return job;
}

// One rank with the sequences of `job` and the micro-batches of all its ranks.
TrainConfig one_rank(TrainConfig job) {
  Plan plan{.microbatches = job.plan.dp * job.plan.microbatches};
  plan.threads_per_rank = 1;
  plan.deterministic = true;
  job.plan = plan;
  return job;
}

template <class F>
auto on_job_ranks(const TrainConfig& job, const F& body) {
  check(job);
  const auto rank = [&](Communicator& world) {
    Trainer trainer(
        job,
        synthetic_sequences(job.model.vocab, job.model.context, job.optim.batch, static_cast<uint64_t>(job.optim.seed)),
        world);
    return body(trainer);
  };
  return by_ranks(static_cast<int>(job.plan.ranks()), rank, job.plan.all_reduce);
}

Range part_here(const Slot& slot, const FlatUnit& shard) {
  return {std::max(slot.begin, int64_t{0}), std::min(slot.end(), shard.grads.numel())};
}

// A second axis over which the last unit, a norm, is declared as sharded; over tp it is replicated.
constexpr const char* kOtherAxis = "other";

struct Counted {
  std::vector<double> found;                  // sums of squares computed by the rank
  std::vector<double> here, replicated_here;  // local gradient elements; those replicated over tp
  std::vector<std::vector<double>> blocks;
  auto fields() { return std::tie(found, here, replicated_here, blocks); }
};

std::vector<Counted> count_ones(const TrainConfig& job) {
  return on_job_ranks(job, [&](Trainer& trainer) {
    Counted mine;
    const std::vector<FlatUnit>& shards = trainer.state().strategy().shards();
    if (job.plan.tp > 1)
      for (const Slot& slot : shards.back().slots) slot.parameter->shard.axis = kOtherAxis;
    for (const FlatUnit& shard : shards) {
      double& here = mine.here.emplace_back(0);
      double& replicated = mine.replicated_here.emplace_back(0);
      auto& blocks = mine.blocks.emplace_back();
      if (!shard.trainable()) continue;
      Tensor(shard.grads).fill(0);
      for (const Slot& slot : shard.slots)
        if (const Range own = part_here(slot, shard); own.size() > 0) {
          shard.grads.narrow(0, own.begin, own.size()).fill(1);
          here += static_cast<double>(own.size());
          if (slot.parameter->shard.axis != "tp") replicated += static_cast<double>(own.size());
        }
      const Tensor sums =
          Tensor::empty({norm_blocks(shard.grads.numel())}, DType::float64, trainer.state().strategy().arena());
      block_sums(shard.grads, sums);
      blocks = to_doubles(sums);
    }
    mine.found = unit_sums(trainer.state().strategy(), &trainer.state().groups.mesh["tp"]);
    return mine;
  });
}

// Result if a run's stride is its unit's number of blocks instead of the total over all units.
std::vector<double> with_short_stride(const std::vector<Counted>& ranks) {
  std::vector<double> all, out;
  for (const Counted& c : ranks)
    for (const auto& blocks : c.blocks) all.insert(all.end(), blocks.begin(), blocks.end());
  size_t at = 0;
  for (const auto& blocks : ranks[0].blocks) {
    double sum = 0;
    for (size_t i = at; i < std::min(at + ranks.size() * blocks.size(), all.size()); ++i) sum += all[i];
    out.push_back(sum);
    at += blocks.size();
  }
  return out;
}

std::string where_text(const TrainConfig& job, const std::string& what) {
  const Plan& p = job.plan;
  const char* function = p.tp > 1                    ? "squares_of_own with `tp`"
                         : p.zero == ZeroStage::none ? "squares_of_own without `tp`"
                                                     : "squares_of_shards";
  return fmt::format("{}, {}{}, {}", function, p.ranks() == 1 ? "1 rank" : describe(p),
                     job.model.lora.rank > 0 ? ", adapters of a frozen model" : "", what);
}

void check_ones(Grading& grading, const TrainConfig& job) {
  const auto ranks = grading.ask(static_cast<int>(job.plan.ranks()), [&] { return count_ones(job); });
  if (!grading.compares()) return;
  const std::vector<double> all = count_ones(one_rank(job))[0].here, zero(all.size(), 0.0);
  const int n = job.plan.ranks(), tp = static_cast<int>(job.plan.tp), dp = static_cast<int>(job.plan.dp);
  std::vector<double> replicated = zero, everything = zero;
  for (const Counted& c : ranks) {
    replicated = replicated + c.replicated_here;
    everything = everything + c.here;
  }
  replicated = replicated * (1.0 / (job.plan.zero == ZeroStage::none ? n : tp));
  for (int r = 0; r < n; ++r) {
    const Counted& mine = ranks[r];
    const std::string where = where_text(job, fmt::format("gradients of ones, rank {}: sums of squares per unit", r));
    if (mine.found.size() != all.size())
      throw Failure{"values", fmt::format("{}: {} values; expected {}", where, mine.found.size(), all.size()),
                    "expected one value per unit, 0 for a frozen unit"};
    std::vector<Guess> guesses;
    for (int q = 0; q < n; ++q)
      guesses.push_back(
          {fmt::format("only the shards of rank {} are summed: add the sums of all shards", q), ranks[q].here});
    if (dp > 1) {
      guesses.push_back(
          {"this rank's shards are counted once per data rank: the runs do not cover the blocks of other ranks",
           mine.here * dp});
      guesses.push_back(
          {"the stride of a run is the number of blocks of its unit; expected `total`, the sum over all units",
           with_short_stride(ranks)});
    }
    if (tp > 1) {
      guesses.push_back(
          {"norms and row-parallel biases, which are replicated over tp, are counted on every tensor rank",
           all + replicated * (tp - 1)});
      guesses.push_back({"norms and row-parallel biases, which are replicated over tp, are counted on no tensor rank",
                         all + replicated * -1});
      std::vector<double> other = all;
      other.back() *= tp;
      guesses.push_back(
          {"parameters sharded over another axis are counted on every tensor rank: compare with tp->axis()", other});
      guesses.push_back(
          {"parameters replicated over tp are counted on all tensor ranks except one", all + replicated * (tp - 2)});
      guesses.push_back(
          {"the condition is inverted: sharded parameters are counted only on rank 0, replicated ones on every rank",
           all * (1.0 / tp) + replicated * (tp - 1.0 / tp)});
    }
    if (dp > 1) guesses.push_back({"every gradient is counted once per data rank", all * dp});
    guesses.push_back({"every gradient is counted on each rank that has it", everything});
    std::vector<double> roots = all;
    for (double& x : roots) x = std::sqrt(x);
    guesses.push_back({"the norm is returned instead of its square", roots});
    expect_values(where, mine.found, all, guesses, n);
  }
}

void check_step(Grading& grading, const TrainConfig& job, double tolerance) {
  const auto norm = [](Trainer& t) {
    std::vector<double> out{t.compute_gradients().grad_norm};
    for (const double sum : unit_sums(t.state().strategy(), &t.state().groups.mesh["tp"])) out.push_back(sum);
    return out;
  };
  const auto found = grading.ask(static_cast<int>(job.plan.ranks()), [&] { return on_job_ranks(job, norm); });
  if (!grading.compares()) return;
  const std::vector<double> expected = on_job_ranks(one_rank(job), norm)[0];
  for (size_t r = 0; r < found.size(); ++r)
    expect_values(where_text(job, fmt::format("training step, rank {}: the norm, and the sums of squares", r)),
                  found[r], expected, {}, 1, tolerance);
}

void check_frozen(Grading& grading) {
  Decoder model(small_job({}, 0).model);
  model.freeze();
  const auto sums = grading.ask(1, [&] {
    return by_ranks(
        1, [&](Communicator& world) { return unit_sums(*make_data_strategy(model, world, make_arena(), {})); });
  });
  grading.check([&] {
    expect_values("squares_of_own without `tp`, frozen model: sums of squares per unit", sums[0],
                  std::vector<double>(model.layout().size()));
  });
}

TrainConfig with_adapters(TrainConfig job) {
  job.model.lora = {.rank = 2, .alpha = 4, .targets = {"c_attn", "attn.c_proj"}};
  return job;
}

}  // namespace

PassedChecks grade_clipping(Grading& grading) {
  // Each plan requires the functions tested by the preceding ones.
  std::vector<Plan> plans{{}, {.dp = 2}};
  for (const int dp : {2, 3})
    for (const ZeroStage zero : {ZeroStage::two, ZeroStage::three, ZeroStage::none})
      plans.push_back({.dp = dp, .zero = zero});
  for (const Plan& plan : {Plan{.tp = 2}, Plan{.tp = 3}, Plan{.dp = 2, .tp = 2, .zero = ZeroStage::two}})
    plans.push_back(plan);
  for (const Plan& plan : plans) {
    const TrainConfig job = small_job(plan, grading.seed());
    check_ones(grading, job);
    check_step(grading, job, plan.tp > 1 ? 1e-5 : 0);
    if (plan.dp < 3) check_ones(grading, with_adapters(job));
  }
  check_frozen(grading);
  return {"gradients of ones have the norm sqrt(N) with DDP, ZeRO-2, ZeRO-3, TP and TP with ZeRO-2",
          "units of a frozen model contribute 0",
          "the norm of a training step is bitwise identical to one rank if only the batch is sharded",
          "parameters replicated over tensor ranks count once"};
}

}  // namespace tessera::lab
