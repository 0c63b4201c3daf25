// The global norm: of gradients that are all one, and of a training step beside one rank's.
#include <fmt/format.h>

#include "lab/compare.h"
#include "models/decoder.h"
#include "optim/grad_norm.h"
#include "parallel/gradient_norm.h"
#include "train/trainer.h"

namespace tessera::lab {
namespace {

// A small model that graders train, under a plan and on one rank.

// Two layers, whose sizes two and three tensor ranks divide, 12 sequences in a step.
Job small_job(const Plan& plan, uint64_t seed) {
  Job job{
      .model = {.layers = 2, .heads = 6, .channels = 48, .context = 16, .vocab = 42},
      .optim =
          {.optimizer = OptimizerKind::sgd, .momentum = 0, .lr = 0.1, .warmup = 0, .steps = 10, .clip = 0, .batch = 12},
      .plan = plan};
  job.plan.threads_per_rank = 1;
  job.plan.deterministic = true;
  job.optim.seed = static_cast<int64_t>(seed % (uint64_t{1} << 31));
  return job;
}

// A job of one rank with the sequences of `job`, cut into as many micro-batches as all ranks together have.
Job one_rank(Job job) {
  Plan plan{.microbatches = job.plan.dp * job.plan.microbatches};
  plan.threads_per_rank = 1;
  plan.deterministic = true;
  job.plan = plan;
  return job;
}

// The findings of a Trainer on each rank.
template <class F>
auto on_job_ranks(const Job& job, const F& body) {
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

// The part of a slot that a shard has.
Range part_here(const Slot& slot, const FlatUnit& shard) {
  return {std::max(slot.begin, int64_t{0}), std::min(slot.end(), shard.grads.numel())};
}

// The axis that the last unit, a norm, is said to be cut over beside tensor ranks: for them its parameters are whole.
constexpr const char* kOtherAxis = "other";

// Counts and sums of gradients that are all one, unit by unit.
struct Counted {
  std::vector<double> found;             // the sums of squares, as the rank knows them
  std::vector<double> here, whole_here;  // gradients that it has; among them those that every tensor rank has too
  std::vector<std::vector<double>> blocks;
  auto fields() { return std::tie(found, here, whole_here, blocks); }
};

std::vector<Counted> count_ones(const Job& job) {
  return on_job_ranks(job, [&](Trainer& trainer) {
    Counted mine;
    const std::vector<FlatUnit>& shards = trainer.strategy().shards();
    if (job.plan.tp > 1)
      for (const Slot& slot : shards.back().slots) slot.parameter->shard.axis = kOtherAxis;
    for (const FlatUnit& shard : shards) {
      double& here = mine.here.emplace_back(0);
      double& whole = mine.whole_here.emplace_back(0);
      auto& blocks = mine.blocks.emplace_back();
      if (!shard.trainable()) continue;
      Tensor(shard.grads).fill(0);
      for (const Slot& slot : shard.slots)
        if (const Range own = part_here(slot, shard); own.size() > 0) {
          shard.grads.narrow(0, own.begin, own.size()).fill(1);
          here += static_cast<double>(own.size());
          if (slot.parameter->shard.axis != "tp") whole += static_cast<double>(own.size());
        }
      const Tensor sums = Tensor::empty({norm_blocks(shard.grads.numel())}, DType::float64, trainer.strategy().arena());
      block_sums(shard.grads, sums);
      blocks = numbers(sums);
    }
    mine.found = unit_sums(trainer.strategy(), &trainer.mesh()["tp"]);
    return mine;
  });
}

// The runs of all ranks' blocks where each goes on behind itself, and not at the same unit of the next rank.
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

// Whose work a plan shows.
std::string where_text(const Job& job, const std::string& what) {
  const Plan& p = job.plan;
  const char* function = p.tp > 1                    ? "squares_of_own with `beside`"
                         : p.zero == ZeroStage::none ? "squares_of_own without `beside`"
                                                     : "squares_of_shards";
  return fmt::format("{}, {}{}, {}", function, p.ranks() == 1 ? "1 rank" : describe(p),
                     job.model.lora.rank > 0 ? ", adapters of a frozen model" : "", what);
}

void check_ones(Grading& grading, const Job& job) {
  const auto ranks = grading.ask(static_cast<int>(job.plan.ranks()), [&] { return count_ones(job); });
  if (!grading.compares()) return;
  const std::vector<double> all = count_ones(one_rank(job))[0].here, zero(all.size(), 0.0);
  const int n = job.plan.ranks(), tp = static_cast<int>(job.plan.tp), dp = static_cast<int>(job.plan.dp);
  std::vector<double> whole = zero, everything = zero;
  for (const Counted& c : ranks) {
    whole = whole + c.whole_here;
    everything = everything + c.here;
  }
  whole = whole * (1.0 / (job.plan.zero == ZeroStage::none ? n : tp));
  for (int r = 0; r < n; ++r) {
    const Counted& mine = ranks[r];
    const std::string where =
        where_text(job, fmt::format("all gradients one, rank {}: the sums of squares of the units", r));
    if (mine.found.size() != all.size())
      throw Failure{"values", fmt::format("{}: {} numbers; expected {}", where, mine.found.size(), all.size()),
                    "there is one number for each unit, and for a frozen one it is 0"};
    std::vector<Guess> guesses;
    for (int q = 0; q < n; ++q)
      guesses.push_back(
          {fmt::format("it is the sum of the shards of rank {} alone: add the sums of all shards", q), ranks[q].here});
    if (dp > 1) {
      guesses.push_back(
          {"it is the sum of this rank's own shards, counted once for each data rank: the runs do not go "
           "through the blocks of the others",
           mine.here * dp});
      guesses.push_back(
          {"the stride of a run is as long as the blocks of its unit: the next rank's blocks of a unit are "
           "as far away as the blocks of all units are long",
           with_short_stride(ranks)});
    }
    if (tp > 1) {
      guesses.push_back({"norms and row biases, which every tensor rank has whole, are counted on every tensor rank",
                         all + whole * (tp - 1)});
      guesses.push_back(
          {"norms and row biases, which every tensor rank has whole, are counted on no tensor rank", all + whole * -1});
      std::vector<double> other = all;
      other.back() *= tp;
      guesses.push_back(
          {"what is cut over another axis is counted on every tensor rank: compare with beside->axis()", other});
      guesses.push_back(
          {"what every tensor rank has whole is counted on all tensor ranks but one", all + whole * (tp - 2)});
      guesses.push_back(
          {"the condition is the wrong way round: what is cut is counted on rank 0 alone, and what every "
           "tensor rank has whole on every one",
           all * (1.0 / tp) + whole * (tp - 1.0 / tp)});
    }
    if (dp > 1) guesses.push_back({"every gradient is counted once for each data rank", all * dp});
    guesses.push_back({"every gradient is counted on each rank that has it", everything});
    std::vector<double> roots = all;
    for (double& x : roots) x = std::sqrt(x);
    guesses.push_back({"it is the norm, not its square", roots});
    expect_values(where, mine.found, all, guesses, n);
  }
}

void check_step(Grading& grading, const Job& job, double tolerance) {
  // The norm, and what it is made of.
  const auto norm = [](Trainer& t) {
    std::vector<double> out{t.compute_gradients().grad_norm};
    for (const double sum : unit_sums(t.strategy(), &t.mesh()["tp"])) out.push_back(sum);
    return out;
  };
  const auto found = grading.ask(static_cast<int>(job.plan.ranks()), [&] { return on_job_ranks(job, norm); });
  if (!grading.compares()) return;
  const std::vector<double> expected = on_job_ranks(one_rank(job), norm)[0];
  for (size_t r = 0; r < found.size(); ++r)
    expect_values(where_text(job, fmt::format("a training step, rank {}: the norm, and the sums of squares", r)),
                  found[r], expected, {}, 1, tolerance);
}

// Nothing is to be added up.
void check_frozen(Grading& grading) {
  Decoder model(small_job({}, 0).model);
  model.freeze();
  const auto sums = grading.ask(1, [&] {
    return by_ranks(
        1, [&](Communicator& world) { return unit_sums(*make_data_strategy(model, world, make_arena(), {})); });
  });
  grading.check([&] {
    expect_values("squares_of_own without `beside`, a model that is frozen: the sums of squares of the units", sums[0],
                  std::vector<double>(model.layout().size()));
  });
}

Job with_adapters(Job job) {
  job.model.lora = {.rank = 2, .alpha = 4, .targets = {"c_attn", "attn.c_proj"}};
  return job;
}

}  // namespace

PassedChecks grade_clipping(Grading& grading) {
  // The simple ones first: each plan needs the functions of those before it.
  std::vector<Plan> plans{{}, {.dp = 2}};
  for (const int dp : {2, 3})
    for (const ZeroStage zero : {ZeroStage::two, ZeroStage::three, ZeroStage::none})
      plans.push_back({.dp = dp, .zero = zero});
  for (const Plan& plan : {Plan{.tp = 2}, Plan{.tp = 3}, Plan{.dp = 2, .tp = 2, .zero = ZeroStage::two}})
    plans.push_back(plan);
  for (const Plan& plan : plans) {
    const Job job = small_job(plan, grading.seed());
    check_ones(grading, job);
    check_step(grading, job, plan.tp > 1 ? 1e-5 : 0);
    if (plan.dp < 3) check_ones(grading, with_adapters(job));
  }
  check_frozen(grading);
  return {"gradients that are all one have a norm of sqrt(N), under DDP, ZeRO-2, ZeRO-3, TP and TP with ZeRO-2",
          "units of a frozen model count 0",
          "the norm of a training step has the bits of one rank if only the batch is divided",
          "parameters that every tensor rank has whole count once"};
}

}  // namespace tessera::lab
