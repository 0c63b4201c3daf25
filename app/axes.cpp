// From options to axes.
#include "app/axes.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "app/plan.h"
#include "parallel/comm/surroundings.h"

namespace tessera {
namespace {

constexpr int64_t kDefaultRanks = 2;

std::string one_or_two(int64_t below, int64_t above) {
  return below == above || below < 1 ? std::to_string(above) : fmt::format("{} or {}", below, above);
}

}  // namespace

int64_t given_ranks(const TrainOptions& o) {
  if (backend_of(o) == Backend::mpi) {
    const std::optional<MpiSurroundings> job = mpi_surroundings();
    return job ? job->ranks : 1;
  }
  return o.ranks.value_or(0);
}

Axes axes_of(const TrainOptions& o) {
  Axes axes{o.pp.value_or(1), o.dp.value_or(1), o.cp.value_or(1), o.tp.value_or(1)};
  const int64_t ranks = given_ranks(o);
  if (ranks == 0) {
    const bool silent = !o.pp && !o.dp && !o.cp && !o.tp;
    if (silent && std::thread::hardware_concurrency() >= kDefaultRanks &&
        o.batch % (kDefaultRanks * o.microbatches) == 0)
      axes.dp = kDefaultRanks;
    return axes;
  }
  std::vector<int64_t*> open;
  if (!o.dp) {
    open.push_back(&axes.dp);
  } else {
    if (!o.pp) open.push_back(&axes.pp);
    if (!o.cp) open.push_back(&axes.cp);
    if (!o.tp) open.push_back(&axes.tp);
  }
  if (open.size() == 1 && ranks % axes.ranks() == 0) *open[0] = ranks / axes.ranks();
  return axes;
}

std::string divisors_near(int64_t n, int64_t wanted) {
  int64_t below = std::min(wanted, n), above = wanted;
  while (below > 1 && n % below != 0) --below;
  while (above < n && n % above != 0) ++above;
  return one_or_two(below, above > n ? below : above);
}

std::string multiples_near(int64_t n, int64_t wanted) {
  const int64_t below = wanted / n * n;
  return one_or_two(below, below == wanted ? wanted : below + n);
}

}  // namespace tessera
