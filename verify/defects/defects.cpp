// The list of all defects, and the way of one into a run.
#include "verify/defects/defects.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <iterator>

#include "tensor/error.h"
#include "tensor/random.h"
#include "verify/defects/planting.h"

namespace tessera {

std::vector<Need> Defect::needs(const Job& job) const {
  std::vector<Need> lacking;
  if (job.plan.backend != Backend::threads) lacking.push_back({"backend", "threads"});
  for (const Want& want : wants)
    if (!want.there(job)) lacking.push_back({want.field, want.value});
  const auto value_of = [&](const char* field, int64_t now) {
    const auto found = std::ranges::find(lacking, field, &Need::field);
    return found == lacking.end() ? now : std::stoll(found->value);
  };
  if (const int64_t stages = value_of("pp", job.plan.pp) * std::max<int64_t>(1, job.plan.chunks);
      stages > job.model.layers)
    lacking.push_back({"layers", std::to_string(stages)});
  // The batch that all of it can be divided into.
  const int64_t parts = value_of("dp", job.plan.dp) * value_of("microbatches", job.plan.microbatches),
                batch = job.optim.batch;
  if (batch % parts != 0 || batch / parts < sequences)
    lacking.push_back({"batch", std::to_string(std::max(sequences, (batch + parts - 1) / parts) * parts)});
  return lacking;
}

std::string Defect::where(const Job& job) const {
  return fmt::format(fmt::runtime(place), fmt::arg("rank", last_rank(job)), fmt::arg("dp", job.plan.dp - 1),
                     fmt::arg("pp", job.plan.pp - 1), fmt::arg("block", job.model.layers - 1));
}

const std::vector<Defect>& defects() {
  static const std::vector<Defect> all = [] {
    std::vector<Defect> out;
    for (const auto& part : {defects_of_calls, defects_of_computation, defects_of_groups, defects_of_resources})
      std::ranges::move(part(), std::back_inserter(out));
    return out;
  }();
  return all;
}

const Defect& defect(std::string_view name) {
  const auto found = std::ranges::find(defects(), name, &Defect::name);
  if (found != defects().end()) return *found;
  throw FieldError("defect", fmt::format("expected random, list or a name that list prints; found '{}'", name));
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
  int64_t ranks = 1;
  for (const auto& [axis, size] :
       {std::pair("pp", job.plan.pp), {"dp", job.plan.dp}, {"cp", job.plan.cp}, {"tp", job.plan.tp}}) {
    const auto found = std::ranges::find(needs, axis, &Need::field);
    ranks *= found == needs.end() ? size : std::stoll(found->value);
  }
  throw FieldError(
      "defect", fmt::format("{} cannot be planted in this plan; it can with {}{}", d.name, fmt::join(changes, " and "),
                            ranks == job.plan.ranks() ? "" : fmt::format(" ({} ranks)", ranks)));
}

VerifyHooks planted(const Defect& d, const Job& job, VerifyHooks hooks) {
  check_applies(d, job);
  return planted_if_it_applies(d, job, std::move(hooks));
}

VerifyHooks planted_if_it_applies(const Defect& d, const Job& job, VerifyHooks hooks) {
  hooks.failure_is_seen = true;
  if (d.needs(job).empty()) d.plant(hooks, job);
  return hooks;
}

}  // namespace tessera
