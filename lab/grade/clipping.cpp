// The global norm: of gradients that are all one, and of a training step beside one rank's.
#include <fmt/format.h>

#include <cmath>

#include "lab/compare.h"
#include "lab/grade/training.h"
#include "lab/graders.h"
#include "parallel/gradient_norm.h"

namespace tessera::lab {
namespace {

// The part of a slot that a shard has.
Range here(const Slot& slot, const FlatUnit& shard) {
  return {std::max(slot.begin, int64_t{0}), std::min(slot.end(), shard.grads.numel())};
}

struct Counted {
  double found = 0;                 // the sum of squares, as the rank knows it
  double here = 0, whole_here = 0;  // gradients that the rank has; among them those that every tensor rank has too
};

std::vector<Counted> count_ones(const Job& job) {
  std::vector<Counted> out(static_cast<size_t>(job.plan.ranks()));
  on_ranks_of(job, [&](Trainer& trainer, int rank) {
    Counted& mine = out[static_cast<size_t>(rank)];
    for (const FlatUnit& shard : trainer.strategy().shards()) {
      Tensor(shard.grads).fill(0);
      for (const Slot& slot : shard.slots)
        if (const Range own = here(slot, shard); own.size() > 0) {
          shard.grads.narrow(0, own.begin, own.size()).fill(1);
          mine.here += static_cast<double>(own.size());
          if (slot.parameter->shard.axis != "tp") mine.whole_here += static_cast<double>(own.size());
        }
    }
    for (const double x : unit_sums(trainer.strategy(), &trainer.mesh()["tp"])) mine.found += x;
  });
  return out;
}

void check_ones(const Job& job) {
  const std::vector<Counted> ranks = count_ones(job);
  double all = 0;
  on_ranks_of(one_rank(job), [&](Trainer& t, int) { all = static_cast<double>(t.model().parameter_count()); });
  const int n = job.plan.ranks(), tp = static_cast<int>(job.plan.tp), dp = static_cast<int>(job.plan.dp);
  double whole = 0, everything = 0;
  for (const Counted& c : ranks) {
    whole += c.whole_here;
    everything += c.here;
  }
  whole /= job.plan.zero == ZeroStage::none ? n : tp;
  for (int r = 0; r < n; ++r) {
    const std::string where = fmt::format("{}, all gradients one, rank {}: the sum of squares", describe(job.plan), r);
    std::vector<Guess> guesses;
    for (int q = 0; q < n; ++q)
      guesses.push_back({fmt::format("it is the sum of the shards of rank {} alone: add the sums of all shards", q),
                         {ranks[static_cast<size_t>(q)].here}});
    if (dp > 1)
      guesses.push_back(
          {"it is the sum of this rank's own shards, counted once for each data rank: the runs do not go "
           "through the blocks of the others",
           {ranks[static_cast<size_t>(r)].here * dp}});
    if (tp > 1) {
      guesses.push_back({"norms and row biases, which every tensor rank has whole, are counted on every tensor rank",
                         {all + (tp - 1) * whole}});
      guesses.push_back(
          {"norms and row biases, which every tensor rank has whole, are counted on no tensor rank", {all - whole}});
    }
    if (dp > 1) guesses.push_back({"every gradient is counted once for each data rank", {all * dp}});
    guesses.push_back({"every gradient is counted on each rank that has it", {everything}});
    guesses.push_back({"it is the norm, not its square", {std::sqrt(all)}});
    expect_values(where, {ranks[static_cast<size_t>(r)].found}, {all}, guesses, n);
  }
}

void check_step(const Job& job, double tolerance) {
  double expected = 0;
  std::vector<double> found(static_cast<size_t>(job.plan.ranks()));
  on_ranks_of(one_rank(job), [&](Trainer& t, int) { expected = t.compute_gradients().grad_norm; });
  on_ranks_of(job, [&](Trainer& t, int rank) { found[static_cast<size_t>(rank)] = t.compute_gradients().grad_norm; });
  for (size_t r = 0; r < found.size(); ++r)
    expect_values(fmt::format("{}, a training step, rank {}: the norm of the gradients", describe(job.plan), r),
                  {found[r]}, {expected}, {}, static_cast<int>(found.size()), tolerance);
}

}  // namespace

Held grade_clipping() {
  for (const int dp : {2, 3})
    for (const ZeroStage zero : {ZeroStage::two, ZeroStage::none, ZeroStage::three}) {
      const Job job = small_job({.dp = dp, .zero = zero});
      check_ones(job);
      check_step(job, 0);
    }
  for (const Plan& plan : {Plan{.tp = 2}, Plan{.dp = 2, .tp = 2, .zero = ZeroStage::two}}) {
    check_ones(small_job(plan));
    check_step(small_job(plan), 1e-5);
  }
  return {"gradients that are all one have a norm of sqrt(N), under DDP, ZeRO-2, ZeRO-3, TP and TP with ZeRO-2",
          "the norm of a training step has the bits of one rank if only the batch is divided",
          "parameters that every tensor rank has whole count once"};
}

}  // namespace tessera::lab
