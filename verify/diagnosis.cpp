// The rules, from those whose symptoms say most to those that rest on what is left.
#include "verify/diagnosis.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <set>

#include "verify/group_rules.h"
#include "verify/symptoms.h"

namespace tessera {
namespace {

// What a rule has to say where its pattern is there: evidence.
using Found = std::optional<std::string>;

Found stopped(const Symptoms& s, bool out_of_step) {
  if (s.seen().stopped.empty() || s.seen().out_of_step != out_of_step) return {};
  return s.seen().stopped;
}

Found tied_copies(const Symptoms& s) {
  const SentDifference* sent = s.fewer("tied");
  if (!sent) return {};
  return s.bytes_text(*sent) + "; " + s.gradients_text();
}

Found norm(const Symptoms& s) {
  if (!s.right_gradients()) return {};
  const SentDifference* sent = s.fewer("pp", is_sum);  // of nothing else
  if (!sent && !s.parameters().empty()) sent = s.fewer("tp", is_sum);
  if (!sent && !s.wrong_norm()) return {};
  return fmt::format("step {}: all gradients are right, {}{}", s.step(), s.numbers_text(),
                     sent ? "; " + s.bytes_text(*sent) : "");
}

Found narrow_sums(const Symptoms& s) {
  const SentDifference* sent = s.fewer("data", is_sum);
  if (!sent || sent->calls != sent->expected_calls || sent->bytes == 0) return {};
  const bool half =
      std::abs(2 * static_cast<double>(sent->bytes) / static_cast<double>(sent->expected_bytes) - 1) < 0.1;
  const bool small = std::ranges::all_of(s.gradients(), [](const auto* g) { return g->distance < 0.02; });
  if (!half || !small || s.gradients().empty()) return {};
  return fmt::format("as many calls and about half the bytes: {}; gradients differ in the third digit only",
                     s.bytes_text(*sent));
}

Found missing_gradient_sum(const Symptoms& s) {
  const SentDifference* sent = s.fewer("data", is_sum);
  if (!sent || s.gradients().empty()) return {};
  return s.bytes_text(*sent) + "; " + s.gradients_text();
}

Found summed_twice(const Symptoms& s) {
  const SentDifference* sent = s.more("data", is_sum);
  if (!sent || s.gradients().empty()) return {};
  const double factor = s.common_factor();
  return s.bytes_text(*sent) + "; " +
         (factor == 0 ? s.gradients_text() : fmt::format("all gradients are {:.3g} times too large", factor));
}

Found missing_gather(const Symptoms& s) {
  const SentDifference* sent = s.fewer("data", is_gather);
  if (!sent || (sent->operation == "broadcast" && s.seen().copies.empty())) return {};
  return s.bytes_text(*sent) + (s.seen().copies.empty() ? "" : "; " + s.seen().copies.front());
}

// Of a tensor axis: what is wrong tells which sum is missing. Where a bound is so wide that nothing is, the size of the
// missing calls does: a weight has fewer numbers than an activation.
Found tensor_sum(const Symptoms& s, Cause cause) {
  const SentDifference* sent = s.fewer("tp");
  if (!sent || (s.right_gradients() && !s.parameters().empty())) return {};
  std::set<std::string> blocks;
  bool vectors = true;
  for (const TensorDifference* g : s.gradients()) {
    blocks.insert(g->name.substr(0, g->name.find('.', g->name.find('.') + 1)));
    vectors = vectors && g->shape.size() == 1;
  }
  const int64_t missing = sent->expected_calls - sent->calls;
  const bool small =
      missing > 0 && sent->calls > 0 && (sent->expected_bytes - sent->bytes) / missing < sent->bytes / sent->calls;
  const bool one_weight = s.right_gradients() ? small : blocks.size() == 1 && vectors;
  const Cause is = s.wrong_loss() ? Cause::missing_forward_sum
                   : one_weight   ? Cause::weight_not_summed
                                  : Cause::missing_backward_sum;
  if (is != cause) return {};
  if (s.right_gradients()) return s.bytes_text(*sent) + "; what was computed is within the bounds of its dtype";
  return fmt::format("{}; step {}: {}, {}{}", s.bytes_text(*sent), s.step(), s.numbers_text(), s.gradients_text(),
                     s.blocks_text());
}

Found needless(const Symptoms& s) {
  const SentDifference* sent = s.more("");
  if (!sent || !s.right_numbers()) return {};
  return s.bytes_text(*sent) + "; everything that was computed is right";
}

std::string given_text(const Observations& o) {
  std::set<int> ranks;
  for (const GivenDifference& g : o.given) ranks.insert(g.rank);
  return fmt::format("rank{} {} {} given other tokens than the plan's (step {}: in the place of sequence {} first)",
                     ranks.size() == 1 ? "" : "s", fmt::join(ranks, ", "), ranks.size() == 1 ? "is" : "are",
                     o.given[0].step, o.given[0].sequence);
}

Found wrong_targets(const Symptoms& s) {
  const Observations& o = s.seen();
  if (o.given.empty() || o.pp == 1) return {};
  if (!std::ranges::all_of(o.given, [&](const GivenDifference& g) { return g.pipeline_rank == o.pp - 1; })) return {};
  return given_text(o) + ", all of them of the last pipeline stage; " + s.numbers_text();
}

// What the shares of sequences in the gradient are, where they are wrong at all and explain it.
struct Shares {
  std::vector<int64_t> none, twice;  // sequences
  bool whole = true;                 // they are whole micro-batches
};
std::optional<Shares> shares_of(const Observations& o) {
  // With other dropout masks or another mask of attention shares say little, unless tokens are known to be others.
  if (!o.mixture || o.mixture->residual > (o.given.empty() ? 0.05 : 0.6)) return {};
  constexpr double kNone = 0.35, kTwice = 1.5, kOne = 0.45;
  const int64_t size = std::max<int64_t>(1, o.batch / (o.dp * o.microbatches));
  Shares found;
  std::vector<int> kinds;
  for (int64_t i = 0; i < std::ssize(o.mixture->shares); ++i) {
    const double share = o.mixture->shares[static_cast<size_t>(i)];
    if (share < kNone) found.none.push_back(i);
    if (share > kTwice) found.twice.push_back(i);
    if (share >= kNone && share <= kTwice && std::abs(share - 1) > kOne) return {};
    kinds.push_back(share < kNone ? 0 : share > kTwice ? 2 : 1);
    found.whole = found.whole && (i % size == 0 || kinds[static_cast<size_t>(i - 1)] == kinds.back());
  }
  if (found.none.empty() && found.twice.empty()) return {};
  if (found.none.size() == kinds.size() || found.twice.size() == kinds.size()) return {};
  return found;
}

Found shares(const Symptoms& s, Cause cause) {
  const auto found = shares_of(s.seen());
  if (!found) return {};
  const Cause is = !found->whole          ? Cause::wrong_sequences
                   : found->twice.empty() ? Cause::microbatch_skipped
                                          : Cause::microbatch_repeated;
  if (is != cause) return {};
  std::string text = fmt::format("step {}: the gradient is that of the batch", s.seen().mixture->step);
  if (!found->none.empty()) text += fmt::format(" without sequences {}", fmt::join(found->none, ", "));
  if (!found->twice.empty())
    text += fmt::format("{} with sequences {} twice", found->none.empty() ? "" : " and", fmt::join(found->twice, ", "));
  return text;
}

Found wrong_sequences(const Symptoms& s) {
  if (Found by_shares = shares(s, Cause::wrong_sequences)) return by_shares;
  if (s.seen().given.empty()) return {};
  return given_text(s.seen());
}

Found order_of_sums(const Symptoms& s) {
  if (s.gradients().empty() || !s.only_rounding()) return {};
  double worst = 0;
  for (const TensorDifference* g : s.gradients()) worst = std::max(worst, g->distance);
  return fmt::format("gradients differ in their last bits only, by {:.2g} of their norm", worst);
}

// A number of ranks, or one over it, that a factor is; empty: it is none.
std::string ranks_of(const Observations& o, double factor) {
  for (const auto& [n, axis] : {std::pair{o.dp * o.cp, "data"}, {o.tp, "tensor"}})
    for (const double f : {static_cast<double>(n), 1.0 / static_cast<double>(n)})
      if (n > 1 && std::abs(factor / f - 1) < 1e-2) return fmt::format(", and the {} axis has {} ranks", axis, n);
  return "";
}

// Where bounds are wide, the norm has the factor that single gradients only show roughly.
Found wrong_scale(const Symptoms& s) {
  if (s.wrong_loss()) return {};
  double factor = s.common_factor();
  for (const NumberDifference& n : s.seen().numbers)
    if (factor == 0 && n.step == s.step() && n.what == "gradient norm" &&
        !ranks_of(s.seen(), n.found / n.expected).empty())
      factor = n.found / n.expected;
  if (factor == 0) return {};
  return fmt::format("step {}: all gradients are {:.4g} times what they should be{}; loss and bytes are right",
                     s.step(), factor, ranks_of(s.seen(), factor));
}

Found probe(const Symptoms& s, Probe::Without without, const char* text) {
  const Probe* found = s.passing();
  if (!found || found->without != without || s.right_gradients()) return {};
  return fmt::format("step {}: {}, {}; bytes are right; the same run {} is right", s.step(), s.numbers_text(),
                     s.gradients_text(), text);
}

Found parameters(const Symptoms& s, Cause cause) {
  if (!s.right_gradients() || s.wrong_norm() || s.step() == 0 || s.parameters().empty()) return {};
  const double factor = s.moment_factor();
  const auto all = [&](auto is) { return std::ranges::all_of(s.parameters(), is); };
  const bool unchanged = all([](const auto*p) { return p->unchanged; }),
             whole = all([](const auto*p) { return p->wrong == p->elements; }) &&
                     std::ssize(s.parameters()) >= s.seen().trained / 2;
  const Cause is = s.seen().permuted                          ? Cause::misplaced_gather
                   : unchanged && !s.state().empty() && whole ? Cause::update_skipped
                   : unchanged                                ? Cause::stale_part
                   : factor != 0                              ? Cause::clipping
                                                              : Cause::unknown;
  if (is != cause) return {};
  const std::string where = fmt::format("step {}: gradients and norm are right, but {} parameters of {} are not",
                                        s.step(), s.parameters().size(), s.ranks_text());
  if (is == Cause::misplaced_gather) return where + ": all values are there, in other places";
  if (is == Cause::clipping)
    return where + fmt::format("; the optimizer's mean gradients are {:.4g} times too large", factor);
  return where + ": they have the values from before the step";
}

// Copies of what other ranks updated: the owners' are right, and later all goes wrong.
Found stale_copies(const Symptoms& s) {
  const int64_t since = s.seen().copies_step;
  if (since == 0 || (s.step() > 0 && s.step() <= since)) return {};
  return s.seen().copies.front() + "; until then everything was right";
}

Found schedule(const Symptoms& s) {
  if (s.seen().in_flight.empty() || !s.right_numbers()) return {};
  return fmt::format(
      "micro-batches in flight by pipeline rank: {} instead of {}; everything that was computed is right",
      fmt::join(s.seen().in_flight, " "), fmt::join(s.seen().expected_in_flight, " "));
}

Found kept_memory(const Symptoms& s) {
  if (!s.right_numbers()) return {};
  for (const HeldDifference& h : s.seen().held)
    if (h.found > h.expected)
      return fmt::format("rank {} holds {} bytes of {} instead of {}; everything that was computed is right", h.rank,
                         h.found, h.what, h.expected);
  return {};
}

struct Rule {
  Cause cause;
  Found (*look)(const Symptoms&);
};
// Earlier rules explain what later ones would see too.
constexpr auto kRules = std::to_array<Rule>({
    {Cause::lost_call, [](const Symptoms& s) { return stopped(s, true); }},
    {Cause::failed_rank, [](const Symptoms& s) { return stopped(s, false); }},
    {Cause::norm, norm},
    {Cause::narrow_sums, narrow_sums},
    {Cause::tied_copies, tied_copies},
    {Cause::group_not_summed, group_not_summed},
    {Cause::wrong_group, wrong_group},
    {Cause::outer_step, outer_step},
    {Cause::silent_owner, silent_owner},
    {Cause::wrong_expert_sum, wrong_expert_sum},
    {Cause::missing_gradient_sum, missing_gradient_sum},
    {Cause::summed_twice, summed_twice},
    {Cause::missing_gather, missing_gather},
    {Cause::missing_forward_sum, [](const Symptoms& s) { return tensor_sum(s, Cause::missing_forward_sum); }},
    {Cause::weight_not_summed, [](const Symptoms& s) { return tensor_sum(s, Cause::weight_not_summed); }},
    {Cause::missing_backward_sum, [](const Symptoms& s) { return tensor_sum(s, Cause::missing_backward_sum); }},
    {Cause::needless_communication, needless},
    {Cause::stale_part, stale_copies},
    {Cause::wrong_targets, wrong_targets},
    {Cause::microbatch_skipped, [](const Symptoms& s) { return shares(s, Cause::microbatch_skipped); }},
    {Cause::microbatch_repeated, [](const Symptoms& s) { return shares(s, Cause::microbatch_repeated); }},
    {Cause::wrong_sequences, wrong_sequences},
    {Cause::order_of_sums, order_of_sums},
    {Cause::wrong_scale, wrong_scale},
    {Cause::dropout_masks, [](const Symptoms& s) { return probe(s, Probe::Without::dropout, "without dropout"); }},
    {Cause::document_mask,
     [](const Symptoms& s) { return probe(s, Probe::Without::documents, "without the document mask"); }},
    {Cause::context_positions,
     [](const Symptoms& s) { return probe(s, Probe::Without::context_axis, "on one context rank"); }},
    {Cause::wrong_message, [](const Symptoms& s) { return probe(s, Probe::Without::pipeline, "without a pipeline"); }},
    {Cause::wrong_expert, wrong_expert},
    {Cause::misplaced_gather, [](const Symptoms& s) { return parameters(s, Cause::misplaced_gather); }},
    {Cause::update_skipped, [](const Symptoms& s) { return parameters(s, Cause::update_skipped); }},
    {Cause::stale_part, [](const Symptoms& s) { return parameters(s, Cause::stale_part); }},
    {Cause::clipping, [](const Symptoms& s) { return parameters(s, Cause::clipping); }},
    {Cause::schedule, schedule},
    {Cause::kept_memory, kept_memory},
});

}  // namespace

std::vector<Diagnosis> diagnose(const Observations& seen) {
  if (seen.empty()) return {};
  const Symptoms symptoms(seen);
  std::vector<Diagnosis> out;
  for (const Rule& rule : kRules)
    if (Found evidence = rule.look(symptoms))
      out.push_back({rule.cause, std::string(text_of(rule.cause)), std::move(*evidence)});
  if (out.empty()) out.push_back({Cause::unknown, std::string(text_of(Cause::unknown)), symptoms.numbers_text()});
  return out;
}

}  // namespace tessera
