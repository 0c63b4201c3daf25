// Experts that ranks share out: outputs, gradients of inputs and of experts, bytes.
#include <fmt/format.h>

#include <string>

#include "lab/compare.h"
#include "lab/exercise.h"
#include "parallel/experts/expert_parallel.h"
#include "tensor/random.h"

namespace tessera::lab {
namespace {

constexpr int64_t kChannels = 4, kHidden = 6;

// `here` experts on each rank, two of which each token meets. Ranks have different numbers of tokens.
struct ExpertsProblem {
  int ranks = 2;
  int64_t here = 2;
  std::string where(int rank) const {
    return fmt::format("{} ranks with {} expert{} each, rank {}", ranks, here, here == 1 ? "" : "s", rank);
  }
  int64_t tokens(int rank) const { return 5 + 2 * rank; }
};

struct ExpertsSeen {
  std::vector<double> out, input_gradient;
  std::vector<std::vector<double>> expert_gradients;  // by expert: of its first matrix; empty: it is elsewhere
  std::vector<int64_t> rows;                          // rows of each expert, from this rank's tokens
  int64_t sent = 0;
};

Tensor drawn(const ExpertsProblem& p, int rank, const char* name, const ArenaPtr& arena) {
  const Philox random = Philox::named(static_cast<uint64_t>(rank) + 1, name);
  std::vector<double> all;
  for (int64_t i = 0; i < p.tokens(rank) * kChannels; ++i)
    all.push_back(random.uniform(static_cast<uint64_t>(i)) - 0.5);
  return Tensor::of<double>(all, {1, p.tokens(rank), kChannels}, arena);
}

// Rows that stay here, and whose gradient is lost.
MixtureOfExperts::Exchanged without_gradient(const Var& rows, const std::vector<int64_t>& counts) {
  MixtureOfExperts::Exchanged there;
  there.counts = {counts};
  there.rows = [x = record_one("without_gradient", rows.value().clone(), {rows.edge()}, [](Grads& g) {
                  Tensor none = g.output().clone();
                  none.fill(0);
                  g.give(0, none);
                })] { return x; };
  there.back = [](const Var& done) { return done; };
  return there;
}

// The tokens of that rank through a layer whose experts `ep` shares out; null: all of them are here.
ExpertsSeen pass(const ExpertsProblem& p, int rank, Communicator* ep, bool loses_gradients = false) {
  const ArenaPtr arena = make_arena();
  MixtureOfExperts layer(kChannels,
                         {.hidden = kHidden, .experts = {.count = p.here * p.ranks, .balance_loss = 0, .z_loss = 0}});
  if (ep) share_out_experts(layer, *ep);
  if (loses_gradients) layer.keep_experts(0, p.here * p.ranks, without_gradient);
  layer.materialize(7, arena, DType::float64, DType::float64);
  layer.set_step({.training = true});
  layer.clear_gradients();
  const Var x(drawn(p, rank, "x", arena), true), y = layer(x);
  backward(y, {.seed = drawn(p, rank, "dy", arena)});
  ExpertsSeen seen;
  seen.out = numbers(y.value());
  seen.input_gradient = gradient_of(x);
  seen.rows = layer.take_load().rows;
  for (int64_t e = 0; e < p.here * p.ranks; ++e) {
    std::vector<double>& gradient = seen.expert_gradients.emplace_back();
    for (const Parameter* parameter : layer.parameters())
      if (parameter->name == fmt::format("experts.{}.up.weight", e) && parameter->var.grad().defined())
        gradient = numbers(parameter->var.grad());
  }
  if (ep) seen.sent = ep->counts()[static_cast<size_t>(Op::all_to_all)].sent;
  return seen;
}

void check_problem(const ExpertsProblem& p) {
  std::vector<ExpertsSeen> ranks(static_cast<size_t>(p.ranks)), alone;
  on_ranks(p.ranks,
           [&](Communicator& world) { ranks[static_cast<size_t>(world.rank())] = pass(p, world.rank(), &world); });
  for (int r = 0; r < p.ranks; ++r) alone.push_back(pass(p, r, nullptr));
  for (int r = 0; r < p.ranks; ++r) {
    const auto rank = static_cast<size_t>(r);
    const std::string where = p.where(r);
    std::vector<Guess> guesses{{"no result has come back", std::vector<double>(alone[rank].out.size())}};
    if (p.here > 1)
      guesses.push_back(
          {"with one expert on each rank all is right, so look at the order of `counts`: counts[r][i] is of rank r and "
           "of "
           "expert i of this rank, as the rows lie",
           ranks[rank].out});
    expect_values(where + ": outputs", ranks[rank].out, alone[rank].out, guesses, p.ranks, 1e-12);
    expect_values(
        where + ": gradient of the input", ranks[rank].input_gradient, alone[rank].input_gradient,
        {{"it is that of the router alone: the gradients of the rows do not come back to the rank that sent them",
          pass(p, r, nullptr, true).input_gradient}},
        p.ranks, 1e-12);
    int64_t leaving = 0;
    for (int64_t e = 0; e < p.here * p.ranks; ++e) {
      const auto expert = static_cast<size_t>(e);
      if (e / p.here != r) {
        leaving += alone[rank].rows[expert];
        continue;
      }
      std::vector<double> sum(alone[0].expert_gradients[expert].size());
      for (const ExpertsSeen& source : alone) sum = sum + source.expert_gradients[expert];
      expect_values(where + fmt::format(": gradient of expert {}", e), ranks[rank].expert_gradients[expert], sum,
                    {{"it is that of this rank's own tokens: rows of other ranks do not reach it",
                      alone[rank].expert_gradients[expert]}},
                    p.ranks, 1e-12);
    }
    // Results and gradients of rows that came from elsewhere leave this rank too.
    int64_t coming = 0;
    for (int source = 0; source < p.ranks; ++source)
      for (int64_t e = r * p.here; e < (r + 1) * p.here && source != r; ++e)
        coming += alone[static_cast<size_t>(source)].rows[static_cast<size_t>(e)];
    const int64_t row = kChannels * 8, counts = (p.ranks - 1) * p.here * 8;
    expect_bytes(
        where, ranks[rank].sent, counts + 2 * (leaving + coming) * row,
        "the counts, and a row forward and one backward for each choice whose expert is elsewhere, there and back",
        {{"rows do not come back, or their gradients do not", counts + (leaving + coming) * row}});
  }
}

}  // namespace

Held grade_experts() {
  for (const int ranks : {2, 3})
    for (const int64_t here : {1, 2}) check_problem({ranks, here});
  return {"outputs and gradients of a layer with all experts, on 2 and 3 ranks with 1 and 2 experts each, to 1e-12",
          "an expert's gradient is that of all tokens that it met, wherever they came from",
          "bytes: 4 rows for each choice whose expert is on another rank, and the counts"};
}

}  // namespace tessera::lab
