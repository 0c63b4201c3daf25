// What says which group did not do its part.
#include "verify/group_rules.h"

#include <fmt/format.h>

#include <algorithm>

namespace tessera {
namespace {

// Of the data axis, by name, where there are fewer bytes of it.
const SentDifference* fewer(const Symptoms& s, const char* operation) {
  return s.fewer("data", [&](const SentDifference& d) { return d.operation == operation; });
}

}  // namespace

std::optional<std::string> group_not_summed(const Symptoms& s) {
  const SentDifference* sent = s.fewer("dp.replicate", is_sum);
  if (!sent || sent->bytes > 0 || s.gradients().empty()) return {};
  return s.bytes_text(*sent) + "; " + s.gradients_text();
}

// Sums of a group that is not the one with the same shards: then groups go on with different values at once.
std::optional<std::string> wrong_group(const Symptoms& s) {
  const Observations& o = s.seen();
  if (o.groups < 2 || s.gradients().empty() || o.copies_step != s.step()) return {};
  if (s.fewer("dp.shard") || s.more("dp.shard")) return {};
  return fmt::format("step {}: {}, and after it groups hold different values: {}", s.step(), s.gradients_text(),
                     o.copies.front());
}

std::optional<std::string> outer_step(const Symptoms& s) {
  const SentDifference* sent = fewer(s, "all_reduce");
  if (!sent || !s.right_gradients() || s.wrong_norm() || s.parameters().empty()) return {};
  return fmt::format("{}; step {}: all gradients are right, and {} parameters are not what ranks should have in common",
                     s.bytes_text(*sent), s.step(), s.parameters().size());
}

std::optional<std::string> silent_owner(const Symptoms& s) {
  const SentDifference* sent = fewer(s, "broadcast");
  if (!sent || s.seen().copies.empty()) return {};
  return s.bytes_text(*sent) + "; " + s.seen().copies.front();
}

// What else the forward pass of such a model could do wrong, rules before this one would have seen.
std::optional<std::string> wrong_expert(const Symptoms& s) {
  if (s.seen().experts == 0 || !s.wrong_loss() || s.passing() || !s.seen().given.empty()) return {};
  return fmt::format("step {}: {}, {}{}; its layers have {} experts, and every rank had the tokens of the plan",
                     s.step(), s.numbers_text(), s.gradients_text(), s.blocks_text(), s.seen().experts);
}

std::optional<std::string> wrong_expert_sum(const Symptoms& s) {
  const auto of_expert = [](const auto* g) { return g->of_expert; };
  if (s.wrong_loss() || s.gradients().empty() || !std::ranges::all_of(s.gradients(), of_expert)) return {};
  return fmt::format("step {}: the loss is right, and only gradients of experts are wrong: {}", s.step(),
                     s.gradients_text());
}

}  // namespace tessera
