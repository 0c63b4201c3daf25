// The list of all faults, and their injection.
#include "verify/defects/defects.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "tensor/random.h"
#include "verify/defects/planting.h"

namespace tessera {

std::vector<Need> InjectedFault::needs(const TrainConfig& job) const {
  std::vector<Need> lacking;
  if (job.plan.backend != Backend::threads) lacking.push_back({"backend", "threads"});
  for (const Requirement& want : wants)
    if (!want.there(job)) lacking.push_back({want.field, want.value});
  const auto read_value = [&](const char* field, int64_t now) {
    const auto found = std::ranges::find(lacking, field, &Need::field);
    return found == lacking.end() ? now : std::stoll(found->value);
  };
  if (const int64_t stages = read_value("pp", job.plan.pp) * std::max<int64_t>(1, job.plan.chunks);
      stages > job.model.layers)
    lacking.push_back({"layers", std::to_string(stages)});
  // The smallest batch divisible by all partitions.
  const int64_t divisor = read_value("dp", job.plan.dp) * read_value("microbatches", job.plan.microbatches),
                batch = job.optim.batch;
  if (batch % divisor != 0 || batch / divisor < sequences)
    lacking.push_back({"batch", std::to_string(std::max(sequences, (batch + divisor - 1) / divisor) * divisor)});
  return lacking;
}

std::string InjectedFault::where(const TrainConfig& job) const {
  return fmt::format(fmt::runtime(place), fmt::arg("rank", last_rank(job)), fmt::arg("dp", job.plan.dp - 1),
                     fmt::arg("pp", job.plan.pp - 1), fmt::arg("block", job.model.layers - 1));
}

const std::vector<InjectedFault>& all_faults() {
  static const std::vector<InjectedFault> all = [] {
    std::vector<InjectedFault> out;
    for (const auto& table : {call_faults, computation_faults, group_faults, resource_faults})
      std::ranges::move(table(), std::back_inserter(out));
    return out;
  }();
  return all;
}

const InjectedFault& find_fault(std::string_view name) {
  const auto found = std::ranges::find(all_faults(), name, &InjectedFault::name);
  if (found != all_faults().end()) return *found;
  throw FieldError("defect", fmt::format("expected random, list or a name printed by list, got '{}'", name));
}

const InjectedFault& random_fault(const TrainConfig& job, uint64_t random) {
  std::vector<const InjectedFault*> some;
  for (const InjectedFault& d : all_faults())
    if (d.needs(job).empty()) some.push_back(&d);
  if (some.empty())
    throw FieldError("defect", "no fault applies to this plan; faults require more ranks, such as `dp` 2");
  return *some[Philox::named(random, "defect").below(some.size(), 0)];
}

void check_applies(const InjectedFault& d, const TrainConfig& job) {
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
  throw FieldError("defect",
                   fmt::format("{} does not apply to this plan; it requires {}{}", d.name, fmt::join(changes, " and "),
                               ranks == job.plan.ranks() ? "" : fmt::format(" ({} ranks)", ranks)));
}

VerifyHooks with_fault(const InjectedFault& d, const TrainConfig& job, VerifyHooks hooks) {
  check_applies(d, job);
  return with_fault_if_applicable(d, job, std::move(hooks));
}

VerifyHooks with_fault_if_applicable(const InjectedFault& d, const TrainConfig& job, VerifyHooks hooks) {
  hooks.failure_is_seen = true;
  if (d.needs(job).empty()) d.inject(hooks, job);
  return hooks;
}

}  // namespace tessera
