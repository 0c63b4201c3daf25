// Graders of tensor parallelism: redistributions with their gradients, and cross-entropy over column-sharded logits.
#include "parallel/tensor_parallel.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "lab/compare.h"

namespace tessera::lab {

namespace {

constexpr int64_t kRows = 4, kColumns = 12;  // divisible by 2 and 3 ranks

std::vector<double> sample(uint64_t name, int64_t count) {
  std::vector<double> out;
  for (int64_t i = 0; i < count; ++i) out.push_back(Philox(name).normal(static_cast<uint64_t>(i)));
  return out;
}

std::vector<double> columns(const std::vector<double>& full, int n, int rank) {
  std::vector<double> out;
  const Range own = chunk_range(kColumns, n, rank);
  for (int64_t row = 0; row < kRows; ++row)
    for (int64_t c = own.begin; c < own.end; ++c) out.push_back(full[row * kColumns + c]);
  return out;
}

// A matrix's local tensors in a placement; for P, partial sums.
struct Spread {
  int n;
  std::vector<std::vector<double>> rank;

  Spread(int ranks, const Placement& p, uint64_t name) : n(ranks) {
    const std::vector<double> full = sample(name, kRows * kColumns);
    for (int r = 0; r < n; ++r)
      rank.push_back(p == P ? sample(name + 100 + static_cast<uint64_t>(r), kRows * kColumns)
                     : p.kind == Placement::Kind::sharded ? columns(full, n, r)
                                                          : full);
  }
  std::vector<double> sum() const {
    std::vector<double> out = rank[0];
    for (int r = 1; r < n; ++r) out = out + rank[r];
    return out;
  }
  std::vector<double> joined() const {
    std::vector<double> out(kRows * kColumns);
    for (int r = 0; r < n; ++r) {
      const Range own = chunk_range(kColumns, n, r);
      for (int64_t i = 0; i < kRows * own.size(); ++i)
        out[i / own.size() * kColumns + own.begin + i % own.size()] = rank[r][i];
    }
    return out;
  }
};

// The value on rank r after a redistribution; to P only from unsharded values.
std::vector<double> moved(const Spread& x, const Placement& from, const Placement& to, int r) {
  const bool cut = to.kind == Placement::Kind::sharded, was_cut = from.kind == Placement::Kind::sharded;
  if (was_cut && cut) return x.rank[r];
  const std::vector<double> full = from == P ? x.sum() : was_cut ? x.joined() : x.rank[0];
  if (from == P && to == P) return x.rank[r];
  if (to == P && r > 0) return std::vector<double>(full.size());
  return cut ? columns(full, x.n, r) : full;
}

struct ProductSeen {
  std::vector<double> value = {}, gradient = {};
  int64_t sent_forward = 0, sent_backward = 0;
  auto fields() { return std::tie(value, gradient, sent_forward, sent_backward); }
};

struct Case {
  const char* name;
  Placement from, to;
  std::string backward;  // as text
};

void check_case(Grading& grading, const Case& c, int n) {
  const Spread x(n, c.from, grading.seed()), dy(n, dual(c.to), grading.seed() + 1);
  const auto redistributed = [&](Communicator& world) {
    const ArenaPtr arena = make_arena();
    const auto mine = [&](const Spread& s) {
      const std::vector<double>& v = s.rank[world.rank()];
      return Tensor::of<double>(v, {kRows, std::ssize(v) / kRows}, arena);
    };
    const Var leaf(mine(x), true);
    const Var y = redistribute(scale(leaf, 1), world, c.from, c.to);
    ProductSeen seen{.value = to_doubles(y.value()), .sent_forward = sent(world)};
    backward(y, {.seed = mine(dy)});
    seen.sent_backward = sent(world) - seen.sent_forward;
    seen.gradient = gradient_values(leaf);
    return seen;
  };
  const auto ranks = grading.ask(n, [&] { return by_ranks(n, redistributed); });
  const int64_t all = kRows * kColumns * 8;
  for (int r = n; r-- > 0;)
    grading.check([&] {  // in descending order: on rank 0 some redistributions coincide
      const ProductSeen& seen = ranks[r];
      const std::string where =
          fmt::format("{} ({} -> {}) on {} ranks, rank {}", c.name, c.from.str(), c.to.str(), n, r);
      expect_values(where + ", forward", seen.value, moved(x, c.from, c.to, r),
                    {{"the local value is unchanged: no redistribution in the forward pass", x.rank[r]}}, n, 1e-12);
      const std::vector<double> expected = moved(dy, dual(c.to), dual(c.from), r);
      const std::string conversion = fmt::format("{} -> {}", dual(c.to).str(), dual(c.from).str());
      std::vector<Guess> guesses{
          {fmt::format("the local gradient is unchanged; expected {}: {}", c.backward, conversion), dy.rank[r]}};
      if (dual(c.to) != P)
        guesses.push_back({"the gradient is summed although every rank has the same one", expected * n});
      else if (dy.rank[0].size() == expected.size())
        guesses.push_back({fmt::format("the gradient is the sum over the ranks; expected {}", c.backward), dy.sum()});
      const auto goes = [&](const Placement& from, const Placement& to, const char* names) {
        if (from.kind == Placement::Kind::sharded ? dual(c.to) != from : dual(c.to).kind == Placement::Kind::sharded)
          return;
        guesses.push_back(
            {fmt::format("the gradient is converted {} -> {}, which is {}; expected {}: dual(to) -> dual(from)",
                         from.str(), to.str(), names, conversion),
             moved(dy, from, to, r)});
      };
      goes(dual(c.from), dual(c.to), "dual(from) -> dual(to)");
      goes(c.to, c.from, "to -> from");
      goes(c.from, c.to, "from -> to");
      expect_values(where + ", gradient", seen.gradient, expected, guesses, n, 1e-12);
      const auto bytes = [&](const Placement& from, const Placement& to) {
        if (from == P && to.kind != Placement::Kind::sharded) return 2 * all - 2 * all / n;
        const bool scatters = from == P,
                   gathers = from.kind == Placement::Kind::sharded && to.kind != Placement::Kind::sharded;
        return scatters || gathers ? all - all / n : 0;
      };
      expect_bytes(grading, where + ", forward", seen.sent_forward, bytes(c.from, c.to), "one collective, or none");
      expect_bytes(grading, where + ", backward", seen.sent_backward, bytes(dual(c.to), dual(c.from)),
                   fmt::format("the bytes of {}", conversion));
    });
}

}  // namespace

PassedChecks grade_f_and_g(Grading& grading) {
  const std::array<Case, 4> cases{
      {{"g", P, I, "the unchanged gradient: every rank has the full one"},
       {"f", I, R, "the sum of all ranks' gradients"},
       {"f of sequence parallelism", S(1), R, "the sum of all ranks' gradients, sharded"},
       {"g of sequence parallelism", P, S(1), "the concatenated gradient shards of all ranks"}}};
  for (const int n : {2, 3})
    for (const Case& c : cases) check_case(grading, c, n);
  return {"f: identity in forward, all-reduce in backward; g: all-reduce in forward, identity in backward",
          "with sequence parallelism an all-gather and a reduce-scatter instead",
          "on 2 and 3 ranks, values, gradients and bytes"};
}

namespace {

struct VocabularyProblem {
  int ranks = 2;
  int64_t rows = 3, vocab = 10;
  double spread = 3;  // of the logits
  uint64_t seed = 0;

  double logit(int64_t row, int64_t column) const {
    return spread * Philox(seed).normal(static_cast<uint64_t>(row * vocab + column));
  }
  int32_t target(int64_t row) const {
    return static_cast<int32_t>(Philox(seed + 1).below(static_cast<uint64_t>(vocab), static_cast<uint64_t>(row)));
  }
  Range own(int r) const { return chunk_range(vocab, ranks, r); }
  int owner(int64_t row) const {
    int r = 0;
    while (target(row) >= own(r).end) ++r;
    return r;
  }
  double sum_exp(int64_t row, Range columns, double top) const {
    double s = 0;
    for (int64_t j = columns.begin; j < columns.end; ++j) s += std::exp(logit(row, j) - top);
    return s;
  }
  double top(int64_t row, Range columns) const {
    double maximum = -INFINITY;
    for (int64_t j = columns.begin; j < columns.end; ++j) maximum = std::max(maximum, logit(row, j));
    return maximum;
  }
  double log_sum_exp(int64_t row, Range columns) const {
    const double m = top(row, columns);
    return std::log(sum_exp(row, columns, m)) + m;
  }
};

constexpr double kScale = 0.25;

struct VocabularySeen {
  double loss = 0;  // sum over rows
  std::vector<double> root = {}, gradient = {};
  int64_t sent = 0;
  auto fields() { return std::tie(loss, root, gradient, sent); }
};

// `world` null: the unsharded loss.
VocabularySeen solve(const VocabularyProblem& p, Communicator* world) {
  const ArenaPtr arena = make_arena();
  const Range own = world ? p.own(world->rank()) : Range{0, p.vocab};
  std::vector<double> mine;
  std::vector<int32_t> targets;
  for (int64_t row = 0; row < p.rows; ++row) {
    for (int64_t j = own.begin; j < own.end; ++j) mine.push_back(p.logit(row, j));
    targets.push_back(p.target(row));
  }
  const Var logits(Tensor::of<double>(mine, {p.rows, own.size()}, arena), true), copy = scale(logits, 1);
  const Tensor all_targets = Tensor::of<int32_t>(targets, {p.rows}, arena);
  const Loss loss = world ? vocab_parallel_cross_entropy(copy, all_targets, kScale, *world, p.vocab)
                          : cross_entropy(copy, all_targets, kScale);
  VocabularySeen seen{.loss = loss.loss_sum, .root = to_doubles(loss.mean.value()), .sent = world ? sent(*world) : 0};
  backward(loss.mean);
  seen.gradient = gradient_values(logits);
  return seen;
}

std::vector<double> own_columns(const VocabularyProblem& p, int rank, const std::vector<double>& all) {
  std::vector<double> out;
  for (auto row = all.begin(); row != all.end(); row += p.vocab)
    out.insert(out.end(), row + p.own(rank).begin, row + p.own(rank).end);
  return out;
}

std::vector<Guess> guesses_of_gradient(const VocabularyProblem& p, int rank, const std::vector<double>& full) {
  const std::vector<double> right = own_columns(p, rank, full);
  std::vector<double> of_top;
  for (int64_t row = 0; row < p.rows; ++row)
    for (int64_t j = p.own(rank).begin; j < p.own(rank).end; ++j)
      of_top.push_back(kScale * (std::exp(p.logit(row, j) - p.top(row, {0, p.vocab})) - (j == p.target(row) ? 1 : 0)));
  std::vector<Guess> out{{"the gradient is not scaled: the loss is the sum times `scale`", right * (1 / kScale)},
                         {"the gradient is scaled twice: `by` already has the scale", right * kScale},
                         {"exp(x - m) instead of exp(x - lse): pass r.lse instead of `top`", of_top}};
  if (p.vocab % p.ranks != 0) return out;
  std::vector<double> all(right.size());
  for (int r = 0; r < p.ranks; ++r) all = all + own_columns(p, r, full);
  out.push_back(
      {"the gradients are reduced over ranks, but each rank has different columns: no message is needed", all});
  return out;
}

std::vector<Guess> guesses(const VocabularyProblem& p, int rank) {
  const Range own = p.own(rank), all{0, p.vocab};
  std::vector<Guess> out;
  for (int64_t row = 0; row < p.rows; ++row) {
    const double target = p.logit(row, p.target(row)), here = p.owner(row) == rank ? target : 0;
    const double top = p.top(row, all), own_top = p.top(row, own), right = p.log_sum_exp(row, all);
    double tops = 0, sums = 0, shifted = 0;  // summed over ranks
    for (int r = 0; r < p.ranks; ++r) {
      const Range theirs = p.own(r);
      tops += p.top(row, theirs);
      sums += p.sum_exp(row, theirs, p.top(row, theirs));
      if (p.target(row) < theirs.size()) shifted += p.logit(row, theirs.begin + p.target(row));
    }
    const std::vector<Guess> of_row{
        {"the target's logit is missing if another rank has it: target_logits() returns 0 then, so all-reduce it over "
         "the "
         "ranks",
         {right - here}},
        {"the denominator covers only this rank's columns: all-reduce the sums of exponentials over the ranks",
         {std::log(p.sum_exp(row, own, top)) + top - target}},
        {"each rank uses the maximum of its own columns, so the sums have different scales: the maximum of a row must "
         "be "
         "equal on all ranks",
         {std::log(sums) + own_top - target}},
        {"the maxima are summed over ranks; expected their maximum (Reduction::max)",
         {std::log(p.sum_exp(row, all, tops)) + tops - target}},
        {"row_sum_exp() uses this rank's own maximum: all-reduce `top` before it", {std::log(sums) + top - target}},
        {"the target's logit is reduced by max over ranks; expected the sum, since a rank without the target has 0",
         {right - std::max(target, 0.0)}},
        {"every rank assumes that its columns start at 0: `part` begins at own.begin", {right - shifted}},
        {"the loss covers only this rank's columns: nothing was reduced over ranks", {p.log_sum_exp(row, own) - here}},
        {"the target's logit is not subtracted", {right}}};
    if (out.empty()) out.resize(of_row.size(), {"", {0}});
    for (size_t i = 0; i < out.size(); ++i) out[i] = {of_row[i].cause, out[i].would_be + of_row[i].would_be};
  }
  return out;
}

void check_problem(Grading& grading, const VocabularyProblem& p, const std::vector<VocabularySeen>& ranks) {
  int64_t all_sent = 0;
  const VocabularySeen full = solve(p, nullptr);
  for (int r = 0; r < p.ranks; ++r) {
    const VocabularySeen& seen = ranks[r];
    const std::string where = fmt::format("{} rows of {} logits on {} ranks, rank {}", p.rows, p.vocab, p.ranks, r);
    if (!std::isfinite(seen.loss))
      throw Failure{"values",
                    fmt::format("{}: the sum of the losses is {}; expected {:.6g}", where, seen.loss, full.loss),
                    "exponentials overflow or all underflow: subtract the maximum logit of the row over all ranks "
                    "(Reduction::max), neither a sum nor a local maximum"};
    expect_values(where + ": the sum of the losses", {seen.loss}, {full.loss}, guesses(p, r), p.ranks, 1e-10);
    expect_values(where + ": the loss, the sum times `scale`", seen.root, full.root,
                  {{"the value is only the sum: pass tessera::scale(r.sum, scale) to record_one()", {full.loss}},
                   {"the value is scaled twice", full.root * kScale}},
                  1, 1e-10);
    expect_values(where + ": the gradient of the logits", seen.gradient, own_columns(p, r, full.gradient),
                  guesses_of_gradient(p, r, full.gradient), p.ranks, 1e-10);
    all_sent += seen.sent;
  }
  const int64_t row_bytes = 2 * (p.ranks - 1) * p.rows * 8;
  expect_bytes(grading, fmt::format("{} rows on {} ranks, all ranks", p.rows, p.ranks), all_sent, 3 * row_bytes,
               "three all-reduces of one value per row, 3 x 2 (n - 1) x 8 N",
               {{"two all-reduces; expected three", 2 * row_bytes},
                {"four all-reduces; expected three", 4 * row_bytes},
                {"the logits are gathered: vocabulary parallelism must avoid this",
                 3 * row_bytes + (p.ranks - 1) * p.rows * p.vocab * 8}});
}

}  // namespace

PassedChecks grade_vocabulary(Grading& grading) {
  for (const int n : {2, 3, 4})
    for (VocabularyProblem p : {VocabularyProblem{n, 3, 12, 3}, VocabularyProblem{n, 1, n, 1},
                                VocabularyProblem{n, 17, 101, 5}, VocabularyProblem{n, 5, 23, 2000}}) {
      p.seed = grading.seed();
      const auto ranks =
          grading.ask(n, [&] { return by_ranks(n, [&](Communicator& world) { return solve(p, &world); }); });
      grading.check([&] { check_problem(grading, p, ranks); });
    }
  return {"losses and gradients of 1 to 17 rows on 2, 3 and 4 ranks within 1e-10, even and uneven shards",
          "logits in the thousands, which overflow without the global maximum",
          "bytes: three all-reduces of one value per row"};
}

}  // namespace tessera::lab
