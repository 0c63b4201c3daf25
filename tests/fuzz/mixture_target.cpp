// Names and weights of a mixture, from the command line and both file formats: accepted weights yield valid ratios.
#include <cmath>
#include <cstdint>
#include <numeric>
#include <string>
#include <string_view>
#include <vector>

#include "data/mixture.h"
#include "tests/fuzz/target.h"

namespace tessera::fuzz {
namespace {

void check(const std::vector<Weighted>& all) {
  std::vector<double> weights;
  for (const Weighted& w : all) {
    require(!w.name.empty() && std::isfinite(w.weight) && w.weight > 0, "names and positive weights");
    weights.push_back(w.weight);
  }
  const std::vector<int64_t> ratios = integer_ratios(weights);
  for (const int64_t s : ratios) require(s > 0 && s <= 1'000'000, "a ratio is positive");
  const int64_t sum = std::reduce(ratios.begin(), ratios.end());
  require(ratios.size() == all.size() && sum <= 1'000'000, "a period is at most a million");
  if (sum >= 1000) return;
  const MixtureOrder::Place next = MixtureOrder(ratios).at(sum);  // the first of the second period
  require(next.nth == ratios[next.dataset], "each dataset has its fraction of a period");
}

}  // namespace

// The first byte selects the source.
const Target target("mixture", [](std::string_view bytes) {
  if (bytes.empty()) throw InputError(std::string(kWhat) + ": nothing");
  const std::string what(kWhat);
  if (bytes[0] == '{') return check(parse_weights_file(bytes, what + ".json"));
  if (bytes[0] == '#') return check(parse_weights_file(bytes, what + ".toml"));
  check(parse_weights(bytes.substr(1), what));
});

}  // namespace tessera::fuzz
