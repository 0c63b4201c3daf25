// Who this machine is, and what its figures say of a call.
#include "planner/machine.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <thread>

#include "train/device.h"

namespace tessera::planner {
namespace {

// The value of a line "key   : value" of /proc/cpuinfo, of the first processor.
std::string cpu_field(const std::string& text, std::string_view key) {
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    const std::string_view line(text.data() + at, end - at);
    if (line.starts_with(key) && line.find_first_not_of(" \t", key.size()) == line.find(':'))
      return std::string(line.substr(std::min(line.size(), line.find(':') + 2)));
    at = end + 1;
  }
  return "?";
}

}  // namespace

Identity identity_of_this(std::string_view version) {
  std::ifstream file("/proc/cpuinfo");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  return {
      .processor = fmt::format("{} family {} model {} {}", cpu_field(text, "vendor_id"), cpu_field(text, "cpu family"),
                               cpu_field(text, "model"), cpu_field(text, "model name")),
      .processors = std::max(1, static_cast<int>(std::thread::hardware_concurrency())),
      .gpu = gpu_count() > 0 ? describe_device() : "none",
      .version = std::string(version)};
}

// Between what was measured, linear: in the processors that are busy, and in a rank's share of them.
double Machine::seconds(Kernel kernel, const Sizes& sizes, DType dtype, int64_t threads, double busy) const {
  const auto p = static_cast<double>(identity.processors), wanted = busy * static_cast<double>(threads);
  const auto of = [&](Company company) {
    return planner::seconds(
        costs[static_cast<size_t>(company)][dtype == DType::bfloat16 ? 1 : 0][static_cast<size_t>(kernel)], sizes);
  };
  const double alone = of(Company::alone);
  if (p == 1) return alone * std::max(1.0, wanted);
  if (threads > 1) {
    const double part = 1 - 1 / static_cast<double>(threads), whole = 1 - 1 / p;
    const double mine = alone + (of(Company::threads) - alone) * std::min(1.0, part / whole);
    return mine * std::max(1.0, wanted / p);
  }
  const double company = std::clamp((busy - 1) / (p - 1), 0.0, 1.0);
  return (alone + (of(Company::together) - alone) * company) * std::max(1.0, wanted / p);
}

double Machine::seconds(Exchange exchange, int64_t ranks, double bytes) const {
  if (ranks < 2) return 0;
  const auto& measured = links[static_cast<size_t>(exchange)];
  const auto of = [&](const LinkCost& link) { return link.latency_s + link.s_per_byte * bytes; };
  const auto above = measured.lower_bound(ranks);
  if (above == measured.end())  // more ranks share the same processors
    return of(measured.rbegin()->second) * static_cast<double>(ranks) / static_cast<double>(measured.rbegin()->first);
  if (above->first == ranks || above == measured.begin()) return of(above->second);
  const auto below = std::prev(above);
  const double at = static_cast<double>(ranks - below->first) / static_cast<double>(above->first - below->first);
  return of(below->second) + (of(above->second) - of(below->second)) * at;
}

}  // namespace tessera::planner
