// Graders of ring attention (compared with plain attention in double) and expert parallelism.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <numeric>
#include <string>
#include <tuple>
#include <vector>

#include "lab/compare.h"
#include "parallel/experts/expert_parallel.h"

namespace tessera::lab {

namespace {

constexpr int64_t kHead = 4;  // head_dim; one head, one sequence

struct RingProblem {
  int ranks = 2;
  int64_t tokens = 8;
  SequencePartition balance = SequencePartition::zigzag;
  bool causal = true;
  uint64_t seed = 0;
  bool in_tiles = false;  // with a window of the sequence length, which splits a hop into several tiles

  std::vector<int64_t> positions(int rank) const { return context_positions(tokens, ranks, rank, balance); }
  // Element c of q, k or v (0, 1, 2) of a token.
  double number(int64_t token, int which, int64_t c) const {
    return Philox(seed).normal(static_cast<uint64_t>((token * 3 + which) * kHead + c)) * (which == 0 ? 2 : 1);
  }
  std::string where(int rank) const {
    return fmt::format("{} tokens on {} ranks, {}{}{}, rank {}", tokens, ranks,
                       balance == SequencePartition::zigzag ? "zig-zag" : "contiguous", causal ? ", causal" : "",
                       in_tiles ? ", several tiles per hop" : "", rank);
  }
  AttentionOptions options() const { return {.causal = causal, .window = in_tiles ? tokens : 0}; }
};

struct Row {
  std::vector<double> out = std::vector<double>(kHead);
  double sum = 0;  // sum of exp(score)
};
template <class Sees>
Row attend(const RingProblem& p, int64_t query, const Sees& sees) {
  Row row;
  for (int64_t key = 0; key < p.tokens; ++key) {
    if (!sees(key)) continue;
    double score = 0;
    for (int64_t c = 0; c < kHead; ++c) score += p.number(query, 0, c) * p.number(key, 1, c);
    const double weight = std::exp(score / std::sqrt(static_cast<double>(kHead)));
    row.sum += weight;
    for (int64_t c = 0; c < kHead; ++c) row.out[c] += weight * p.number(key, 2, c);
  }
  for (double& x : row.out) x = row.sum > 0 ? x / row.sum : 0;
  return row;
}

// By query of a rank and hop.
std::vector<std::vector<Row>> rows_by_hop(const RingProblem& p, int rank) {
  std::vector<int> holder(p.tokens);
  for (int r = 0; r < p.ranks; ++r)
    for (const int64_t t : p.positions(r)) holder[t] = r;
  std::vector<std::vector<Row>> out;
  for (const int64_t query : p.positions(rank)) {
    std::vector<Row>& hops = out.emplace_back();
    for (int hop = 0; hop < p.ranks; ++hop)
      hops.push_back(attend(p, query, [&](int64_t key) {
        return holder[key] == (rank + p.ranks - hop) % p.ranks && (!p.causal || key <= query);
      }));
  }
  return out;
}

std::vector<Guess> guesses(const RingProblem& p, int rank, const std::vector<double>& non_causal) {
  const std::vector<std::vector<Row>> all = rows_by_hop(p, rank);
  // Outputs with a given weight of each hop.
  const auto weighted = [&](const std::function<double(const std::vector<Row>& rows, size_t hop)>& weight) {
    std::vector<double> out;
    for (const std::vector<Row>& rows : all) {
      std::vector<double> one(kHead);
      for (size_t hop = 0; hop < rows.size(); ++hop) one = one + rows[hop].out * weight(rows, hop);
      out.insert(out.end(), one.begin(), one.end());
    }
    return out;
  };
  const auto seen = [](const std::vector<Row>& rows, size_t from) {
    return std::count_if(rows.begin() + static_cast<std::ptrdiff_t>(from), rows.end(),
                         [](const Row& r) { return r.sum > 0; });
  };
  return {
      {"attention only to this rank's own keys: the blocks of other ranks are not merged",
       weighted([](const auto&, size_t hop) { return hop == 0 ? 1 : 0; })},
      {"attention only to the last visible hop: each block overwrites the previous one; merge them",
       weighted([&](const auto& rows, size_t hop) { return seen(rows, hop) == 1 && rows[hop].sum > 0 ? 1 : 0; })},
      {"blocks are added unweighted; each has its own denominator, so weight them by exp(lse_i - lse)",
       weighted([](const auto&, size_t) { return 1; })},
      {"blocks are averaged; weight them by exp(lse_i - lse)",
       weighted([&](const auto& rows, size_t) { return 1.0 / std::max<double>(1, seen(rows, 0)); })},
      {"the block of the last hop is missing: n ranks require n hops, the first with the rank's own keys",
       weighted([](const auto& rows, size_t hop) {
         double sum = 0;
         for (size_t i = 0; i + 1 < rows.size(); ++i) sum += rows[i].sum;
         return hop + 1 < rows.size() && sum > 0 ? rows[hop].sum / sum : 0;
       })},
      {"queries attend to later keys: the causal mask uses positions in the sequence; tiles(hop) returns the visible "
       "token ranges",
       non_causal}};
}

struct RingSeen {
  std::vector<double> out, gradient;
  int64_t sent = 0;
  auto fields() { return std::tie(out, gradient, sent); }
};

Tensor packed(const RingProblem& p, const std::vector<int64_t>& positions, const ArenaPtr& arena) {
  std::vector<double> all;
  for (const int64_t t : positions)
    for (int which = 0; which < 3; ++which)
      for (int64_t c = 0; c < kHead; ++c) all.push_back(p.number(t, which, c));
  return Tensor::of<double>(all, {1, std::ssize(positions), 3 * kHead}, arena);
}

void backward_from_ones(const Var& y) {
  Tensor seed = y.value().make(y.shape());
  seed.fill(1);
  backward(y, {.seed = seed});
}

// The full sequence on one rank.
RingSeen attended_alone(const RingProblem& p) {
  return by_ranks(1, [&](Communicator&) {
    const ArenaPtr arena = make_arena();
    std::vector<int64_t> all(p.tokens);
    std::iota(all.begin(), all.end(), 0);
    const Var qkv(packed(p, all, arena), true), y = packed_attention(qkv, {.query = 1, .key = 1}, p.options());
    backward_from_ones(y);
    return RingSeen{to_doubles(y.value()), to_doubles(qkv.grad())};
  })[0];
}

// The values of a rank's tokens, `width` each.
std::vector<double> own_tokens(const RingProblem& p, int rank, const std::vector<double>& all, int64_t width) {
  std::vector<double> out;
  for (const int64_t t : p.positions(rank))
    out.insert(out.end(), all.begin() + t * width, all.begin() + (t + 1) * width);
  return out;
}

std::vector<RingSeen> attended(const RingProblem& p) {
  return by_ranks(p.ranks, [&](Communicator& world) {
    const ArenaPtr arena = make_arena();
    const Var qkv(packed(p, p.positions(world.rank()), arena), true);
    const Var y = ring_attention(qkv, {.query = 1, .key = 1}, p.options(), world, p.balance);
    const int64_t forward = sent(world);
    backward_from_ones(y);
    return RingSeen{to_doubles(y.value()), to_doubles(qkv.grad()), forward};
  });
}

void check_problem(Grading& grading, const RingProblem& p, const std::vector<RingSeen>& ranks) {
  RingProblem open = p;
  open.causal = open.in_tiles = false;
  const RingSeen alone = attended_alone(p), non_causal = attended_alone(open);
  const int64_t block = 2 * p.tokens / p.ranks * kHead * 8;
  for (int r = 0; r < p.ranks; ++r) {
    const RingSeen& seen = ranks[r];
    std::vector<Guess> known = guesses(p, r, own_tokens(p, r, non_causal.out, kHead));
    if (p.in_tiles)
      known.push_back(
          {"correct with one tile per hop, but every hop, including the first, may have several: the first tile of a "
           "query "
           "range writes (tile.first_of_queries) instead of hop 0; all others merge",
           seen.out});
    expect_values(p.where(r), seen.out, own_tokens(p, r, alone.out, kHead), known, 1, 1e-10);
    expect_bytes(grading, p.where(r), seen.sent, (p.ranks - 1) * block, "n - 1 blocks of its keys and values",
                 {{"one message too many: nothing is sent after the last hop", p.ranks * block}});
    expect_values(p.where(r) + ": gradient of q, k, v", seen.gradient, own_tokens(p, r, alone.gradient, 3 * kHead), {},
                  1, 1e-10);
  }
}

}  // namespace

PassedChecks grade_ring_attention(Grading& grading) {
  std::vector<RingProblem> all;
  for (const bool causal : {false, true})
    for (const SequencePartition balance : {SequencePartition::contiguous, SequencePartition::zigzag})
      for (const int n : {2, 3, 4}) all.push_back({n, 4 * n, balance, causal, grading.seed()});
  for (const int n : {2, 3}) all.push_back({n, 4 * n, SequencePartition::zigzag, true, grading.seed(), true});
  for (const RingProblem& p : all) {
    const auto ranks = grading.ask(p.ranks, [&] { return attended(p); });
    grading.check([&] { check_problem(grading, p, ranks); });
  }
  return {"outputs and gradients of unsharded attention on 2, 3 and 4 ranks within 1e-10, causal and non-causal",
          "zig-zag and contiguous chunks, one and several tiles per hop",
          "bytes: n - 1 blocks of keys and values from each rank"};
}

namespace {

constexpr int64_t kChannels = 4, kHidden = 6;

// `here` experts per rank, top-2 routing; token counts differ between ranks.
struct ExpertsProblem {
  int ranks = 2;
  int64_t here = 2;
  uint64_t seed = 0;
  std::string where(int rank) const {
    return fmt::format("{} ranks with {} expert{} each, rank {}", ranks, here, here == 1 ? "" : "s", rank);
  }
  int64_t tokens(int rank) const { return 5 + 2 * rank; }
};

struct ExpertsSeen {
  std::vector<double> out, input_gradient;
  std::vector<std::vector<double>> expert_gradients;  // first matrix by expert; empty: on another rank
  std::vector<int64_t> rows;                          // routed rows of this rank's tokens by expert
  int64_t sent = 0;
  auto fields() { return std::tie(out, input_gradient, expert_gradients, rows, sent); }
};

Tensor sample(const ExpertsProblem& p, int rank, const char* name, const ArenaPtr& arena) {
  const Philox random = Philox::named(p.seed + static_cast<uint64_t>(rank), name);
  std::vector<double> all;
  for (int64_t i = 0; i < p.tokens(rank) * kChannels; ++i)
    all.push_back(random.uniform(static_cast<uint64_t>(i)) - 0.5);
  return Tensor::of<double>(all, {1, p.tokens(rank), kChannels}, arena);
}

// No exchange and no gradient (a typical mistake).
MixtureOfExperts::Exchanged without_gradient(const Var& rows, const std::vector<int64_t>& counts) {
  MixtureOfExperts::Exchanged there;
  there.counts = {counts};
  there.rows = [x = record_one("without_gradient", rows.value().clone(), {rows.edge()}, [](Grads& g) {
                  Tensor none = g.output().clone();
                  none.fill(0);
                  g.set(0, none);
                })] { return x; };
  there.back = [](const Var& done) { return done; };
  return there;
}

// `ep` null: all experts are local.
ExpertsSeen pass(const ExpertsProblem& p, int rank, Communicator* ep, bool loses_gradients = false) {
  const ArenaPtr arena = make_arena();
  MixtureOfExperts layer(kChannels,
                         {.hidden = kHidden, .experts = {.count = p.here * p.ranks, .balance_loss = 0, .z_loss = 0}});
  if (ep) shard_experts(layer, *ep);
  if (loses_gradients) layer.set_local_experts(0, p.here * p.ranks, without_gradient);
  layer.materialize(p.seed, arena, DType::float64, DType::float64);
  layer.set_step({.training = true});
  layer.clear_gradients();
  const Var x(sample(p, rank, "x", arena), true), y = layer(x);
  backward(y, {.seed = sample(p, rank, "dy", arena)});
  ExpertsSeen seen;
  seen.out = to_doubles(y.value());
  seen.input_gradient = gradient_values(x);
  seen.rows = layer.take_load().rows;
  for (int64_t e = 0; e < p.here * p.ranks; ++e) {
    std::vector<double>& gradient = seen.expert_gradients.emplace_back();
    for (const Parameter* parameter : layer.parameters())
      if (parameter->name == fmt::format("experts.{}.up.weight", e) && parameter->var.grad().defined())
        gradient = to_doubles(parameter->var.grad());
  }
  if (ep) seen.sent = sent(*ep);
  return seen;
}

void check_problem(Grading& grading, const ExpertsProblem& p, const std::vector<ExpertsSeen>& ranks) {
  std::vector<ExpertsSeen> alone;
  for (int r = 0; r < p.ranks; ++r) alone.push_back(pass(p, r, nullptr));
  for (int r = 0; r < p.ranks; ++r) {
    const ExpertsSeen &seen = ranks[r], &right = alone[r];
    const std::string where = p.where(r);
    // Which check fails first depends on the sampled tokens.
    const auto with_order = [&](std::vector<Guess> guesses, const std::vector<double>& found) {
      if (p.here > 1)
        guesses.push_back(
            {"correct with one expert per rank, so look at the order of `counts`: counts[r][i] is for rank r and "
             "expert "
             "i of this rank, in the order of the rows",
             found});
      return guesses;
    };
    expect_values(where + ": outputs", seen.out, right.out,
                  with_order({{"no results returned", std::vector<double>(right.out.size())}}, seen.out), p.ranks,
                  1e-12);
    expect_values(
        where + ": gradient of the input", seen.input_gradient, right.input_gradient,
        with_order({{"only the gradient of the router: the gradients of rows are not returned to their source ranks",
                     pass(p, r, nullptr, true).input_gradient}},
                   seen.input_gradient),
        p.ranks, 1e-12);
    int64_t leaving = 0;
    for (int64_t e = 0; e < p.here * p.ranks; ++e) {
      if (e / p.here != r) {
        leaving += right.rows[e];
        continue;
      }
      std::vector<double> sum(alone[0].expert_gradients[e].size());
      for (const ExpertsSeen& source : alone) sum = sum + source.expert_gradients[e];
      expect_values(where + fmt::format(": gradient of expert {}", e), seen.expert_gradients.at(e), sum,
                    with_order({{"only the gradient of this rank's own tokens: rows of other ranks are missing",
                                 right.expert_gradients[e]}},
                               seen.expert_gradients.at(e)),
                    p.ranks, 1e-12);
    }
    // Results and gradients of received rows are sent back.
    int64_t coming = 0;
    for (int source = 0; source < p.ranks; ++source)
      for (int64_t e = r * p.here; e < (r + 1) * p.here && source != r; ++e) coming += alone[source].rows[e];
    const int64_t row = kChannels * 8, counts = (p.ranks - 1) * p.here * 8;
    expect_bytes(grading, where, seen.sent, counts + 2 * (leaving + coming) * row,
                 "the counts, and 4 rows per choice with a remote expert: forward and backward, both directions",
                 {{"rows or their gradients are not returned", counts + (leaving + coming) * row}});
  }
}

}  // namespace

PassedChecks grade_experts(Grading& grading) {
  for (const int n : {2, 3})
    for (const int64_t here : {1, 2}) {
      const ExpertsProblem p{n, here, grading.seed()};
      const auto ranks = grading.ask(
          n, [&] { return by_ranks(n, [&](Communicator& world) { return pass(p, world.rank(), &world); }); });
      grading.check([&] { check_problem(grading, p, ranks); });
    }
  return {"outputs and gradients of the unsharded layer on 2 and 3 ranks with 1 and 2 experts each, within 1e-12",
          "the gradient of an expert includes its tokens from all ranks",
          "bytes: the counts, and 4 rows per choice with an expert on another rank"};
}

}  // namespace tessera::lab
