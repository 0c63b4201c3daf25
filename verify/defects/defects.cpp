// The list of all defects, and the way of one into a run.
#include "verify/defects/defects.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>

#include "tensor/error.h"
#include "tensor/random.h"
#include "verify/defects/groups.h"

namespace tessera {
namespace {

int64_t value_of(const std::vector<Need>& needs, const std::string& field, int64_t now) {
  const auto found = std::ranges::find_if(needs, [&](const Need& n) { return n.field == field; });
  return found == needs.end() ? now : std::stoll(found->value);
}

}  // namespace

std::vector<Need> Needs::batch_of(int64_t least) {
  const int64_t parts =
      value_of(lacking_, "dp", job_.plan.dp) * value_of(lacking_, "microbatches", job_.plan.microbatches);
  const int64_t batch = job_.optim.batch;
  if (batch % parts == 0 && batch / parts >= least) return lacking_;
  const int64_t wanted = std::max(least, (batch + parts - 1) / parts) * parts;
  lacking_.push_back({"batch", std::to_string(wanted)});
  return lacking_;
}

const std::vector<Defect>& defects() {
  static const std::vector<Defect> all = [] {
    std::vector<Defect> out;
    for (const auto& group : {defects_of_sums, defects_of_calls, defects_of_data, defects_of_layers, defects_of_experts,
                              defects_of_updates, defects_of_replicas, defects_of_resources})
      std::ranges::move(group(), std::back_inserter(out));
    return out;
  }();
  return all;
}

const Defect& defect(std::string_view name) {
  const auto found = std::ranges::find_if(defects(), [&](const Defect& d) { return d.name == name; });
  if (found != defects().end()) return *found;
  std::vector<std::string_view> names;
  for (const Defect& d : defects()) names.push_back(d.name);
  throw FieldError("defect", fmt::format("expected random or one of {}; found '{}'", fmt::join(names, ", "), name));
}

const Defect& random_defect(const Job& job, uint64_t draw) {
  std::vector<const Defect*> some;
  for (const Defect& d : defects())
    if (d.needs(job).empty()) some.push_back(&d);
  if (some.empty()) throw FieldError("defect", "none can be planted in this plan; more ranks give it some, as `dp` 2");
  return *some[Philox::named(draw, "defect").below(some.size(), 0)];
}

void check_applies(const Defect& d, const Job& job) {
  const std::vector<Need> needs = d.needs(job);
  if (needs.empty()) return;
  std::vector<std::string> changes;
  for (const Need& n : needs)
    changes.push_back(n.value == "true"    ? fmt::format("`{}`", n.field)
                      : n.value == "false" ? fmt::format("no `{}`", n.field)
                                           : fmt::format("`{}` {}", n.field, n.value));
  throw FieldError(
      "defect", fmt::format("{} cannot be planted in this plan; it can with {}", d.name, fmt::join(changes, " and ")));
}

VerifyHooks planted(const Defect& d, const Job& job, VerifyHooks hooks) {
  hooks.failure_is_seen = true;
  if (d.needs(job).empty()) d.plant(hooks, job);
  return hooks;
}

}  // namespace tessera
