// Least-squares fit of kernel constants, call times, and a machine's measurement file.
#include "planner/machine.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>
#include <system_error>
#include <thread>
#include <utility>

#include "base/config_file.h"
#include "base/error.h"
#include "base/files.h"
#include "base/setting.h"
#include "train/device.h"

namespace tessera::planner {
namespace {

// Solves the normal equations for the `chosen` sizes; nullopt if singular.
std::optional<Cost> solve(const std::vector<Timed>& timed, unsigned chosen) {
  std::array<size_t, kSizes> of{};
  size_t n = 0;
  for (size_t i = 0; i < kSizes; ++i)
    if ((chosen >> i & 1U) != 0) of[n++] = i;
  std::array<std::array<double, kSizes + 1>, kSizes> a{};
  std::array<double, kSizes> unit{};  // scales the sizes to similar magnitude
  for (size_t i = 0; i < n; ++i) {
    for (const Timed& t : timed) unit[i] += std::pow(t.sizes[of[i]] / t.seconds, 2);
    unit[i] = std::sqrt(unit[i]);
    if (unit[i] == 0) return std::nullopt;
  }
  for (size_t i = 0; i < n; ++i)
    for (const Timed& t : timed) {
      const double x = t.sizes[of[i]] / t.seconds / unit[i];
      for (size_t j = 0; j < n; ++j) a[i][j] += x * t.sizes[of[j]] / t.seconds / unit[j];
      a[i][n] += x;
    }
  for (size_t i = 0; i < n; ++i) {
    size_t best = i;
    for (size_t j = i + 1; j < n; ++j)
      if (std::abs(a[j][i]) > std::abs(a[best][i])) best = j;
    std::swap(a[i], a[best]);
    if (std::abs(a[i][i]) < 1e-10) return std::nullopt;
    for (size_t j = 0; j < n; ++j) {
      const double factor = j == i ? 0 : a[j][i] / a[i][i];
      for (size_t k = i; k <= n; ++k) a[j][k] -= factor * a[i][k];
    }
  }
  Cost cost{};
  for (size_t i = 0; i < n; ++i) cost[of[i]] = a[i][n] / a[i][i] / unit[i];
  return cost;
}

double error_message(const Cost& cost, const std::vector<Timed>& timed) {
  double sum = 0;
  for (const Timed& t : timed) sum += std::pow(seconds(cost, t.sizes) / t.seconds - 1, 2);
  return sum;
}

// The value of the first "key   : value" of /proc/cpuinfo.
std::string cpu_field(const std::string& text, std::string_view key) {
  for (const std::string& line : split(text, '\n'))
    if (line.starts_with(key) && line.find_first_not_of(" \t", key.size()) == line.find(':'))
      return line.substr(std::min(line.size(), line.find(':') + 2));
  return "?";
}

constexpr std::array<std::string_view, 2> kTypes = {"fp32", "bf16"};
constexpr int64_t kFormat = 1;

// Visits fields in file order, for reading and writing.
void each_field(Machine& m, const auto& text, const auto& number) {
  text("processor", m.identity.processor);
  text("gpu", m.identity.gpu);
  text("version", m.identity.version);
  number("memory_bytes", m.memory_bytes);
  number("copy_bytes_per_s", m.copy_bytes_per_s);
  for (size_t t = 0; t < kTypes.size(); ++t)
    number(fmt::format("product_flops_per_s_{}", kTypes[t]), m.product_flops_per_s[t]);
  for (size_t c = 0; c < kMachineLoadNames.size(); ++c)
    for (size_t t = 0; t < kTypes.size(); ++t)
      for (size_t k = 0; k < kKernels; ++k) {
        const std::vector<std::string_view>& names = size_names(static_cast<Kernel>(k));
        for (size_t i = 0; i < names.size(); ++i)
          number(fmt::format("{}_{}_{}_{}", kMachineLoadNames[c], kTypes[t], kKernelNames[k], names[i]),
                 m.costs[c][t][k][i]);
      }
  for (size_t e = 0; e < kExchangeNames.size(); ++e)
    for (auto& [ranks, link] : m.links[e]) {
      number(fmt::format("{}_{}_latency_s", kExchangeNames[e], ranks), link.latency_s);
      number(fmt::format("{}_{}_s_per_byte", kExchangeNames[e], ranks), link.s_per_byte);
    }
}

double number_in(const ConfigEntry& entry) {
  const auto value = nlohmann::json::parse(entry.value, nullptr, false);
  if (!value.is_number() || !std::isfinite(value.get<double>()) || value.get<double>() < 0)
    throw InputError(
        fmt::format("{}: {}: expected a number of at least 0, got {}", entry.where, entry.key, entry.value));
  return value.get<double>();
}

}  // namespace

const std::vector<std::string_view>& size_names(Kernel kernel) {
  static const std::vector<std::string_view> matmuls{"call", "flop", "output", "left", "right"},
      attention{"call", "query", "score", "product"}, rows{"call", "row", "element"};
  if (kernel <= Kernel::matmul_weight) return matmuls;
  return kernel <= Kernel::attention_backward ? attention : rows;
}

Sizes matmul_sizes(double m, double n, double k) { return {1, 2 * m * n * k, m * n, m * k, n * k}; }

Sizes attention_sizes(double heads, double queries, double keys, double head_dim) {
  return {1, heads * queries * head_dim, heads * queries * keys, heads * queries * keys * head_dim};
}

Sizes row_sizes(double rows, double columns) { return {1, rows, rows * columns}; }

double seconds(const Cost& cost, const Sizes& sizes) {
  double sum = 0;
  for (size_t i = 0; i < kSizes; ++i) sum += cost[i] * sizes[i];
  return sum;
}

// Exhaustive active-set search: the best subset of sizes with non-negative constants is the non-negative optimum.
Cost fit(const std::vector<Timed>& timed) {
  for (const Timed& t : timed)
    if (!(t.seconds > 0) || !std::isfinite(t.seconds)) throw Error("[fit] expected positive times");
  Cost best{};
  double min_error = std::numeric_limits<double>::infinity();
  for (unsigned chosen = 1; chosen < 1U << kSizes; ++chosen) {
    const std::optional<Cost> cost = solve(timed, chosen);
    if (!cost) continue;
    bool negative = false;
    for (const double c : *cost) negative = negative || c < 0;
    const double error = negative ? min_error : error_message(*cost, timed);
    if (error >= min_error) continue;
    min_error = error;
    best = *cost;
  }
  if (timed.empty() || !std::isfinite(min_error)) throw Error("[fit] expected times of at least two sizes");
  return best;
}

Identity identity_of_this(std::string_view version) {
  std::ifstream file("/proc/cpuinfo");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  return {
      .processor = fmt::format("{} family {} model {} {}", cpu_field(text, "vendor_id"), cpu_field(text, "cpu family"),
                               cpu_field(text, "model"), cpu_field(text, "model name")),
      .cores = std::max(1, static_cast<int>(std::thread::hardware_concurrency())),
      .gpu = gpu_count() > 0 ? describe_device() : "none",
      .version = std::string(version)};
}

// Interpolates linearly between measurements, in the number of busy cores and in the cores per rank.
double Machine::seconds(Kernel kernel, const Sizes& sizes, DType dtype, int64_t threads, double busy) const {
  const auto p = static_cast<double>(identity.cores), wanted = busy * static_cast<double>(threads);
  const auto of = [&](MachineLoad company) {
    return planner::seconds(
        costs[static_cast<size_t>(company)][dtype == DType::bfloat16 ? 1 : 0][static_cast<size_t>(kernel)], sizes);
  };
  const double alone = of(MachineLoad::alone);
  if (p == 1) return alone * std::max(1.0, wanted);
  if (threads > 1) {
    const double fraction = 1 - 1 / static_cast<double>(threads), full = 1 - 1 / p;
    const double local = alone + (of(MachineLoad::threads) - alone) * std::min(1.0, fraction / full);
    return local * std::max(1.0, wanted / p);
  }
  const double company = std::clamp((busy - 1) / (p - 1), 0.0, 1.0);
  return (alone + (of(MachineLoad::together) - alone) * company) * std::max(1.0, wanted / p);
}

double Machine::seconds(Exchange exchange, int64_t ranks, double bytes) const {
  if (ranks < 2) return 0;
  const auto& measured = links[static_cast<size_t>(exchange)];
  const auto of = [&](const LinkCost& link) { return link.latency_s + link.s_per_byte * bytes; };
  const auto above = measured.lower_bound(ranks);
  if (above == measured.end())  // more ranks on the same cores
    return of(measured.rbegin()->second) * static_cast<double>(ranks) / static_cast<double>(measured.rbegin()->first);
  if (above->first == ranks || above == measured.begin()) return of(above->second);
  const auto below = std::prev(above);
  const double at = static_cast<double>(ranks - below->first) / static_cast<double>(above->first - below->first);
  return of(below->second) + (of(above->second) - of(below->second)) * at;
}

std::filesystem::path machine_file(const Identity& identity) {
  const std::string all =
      fmt::format("{}\n{}\n{}\n{}", identity.processor, identity.cores, identity.gpu, identity.version);
  return cache_directory() / fmt::format("machine-{:016x}.toml", checksum(all));
}

std::string to_text(const Machine& machine) {
  Machine m = machine;
  std::string out =
      "# Measurements of this machine. Constants are in seconds per unit; the last word of a key names the unit: "
      "call,\n"
      "# row, element, FLOP, attention score. alone: one rank, other cores idle; together: one rank on each core;\n"
      "# threads: one rank with a thread on each core. all_reduce_2_latency_s: collective, number of thread ranks,\n"
      "# constant.\n";
  out += fmt::format("format = {}\nprocessors = {}\n", kFormat, m.identity.cores);
  std::string ranks;
  for (const auto& [count, link] : m.links[0]) ranks += fmt::format("{}{}", ranks.empty() ? "" : " ", count);
  out += fmt::format("ranks = {}\n", nlohmann::json(ranks).dump());
  each_field(
      m,
      [&](std::string_view key, const std::string& value) {
        out += fmt::format("{} = {}\n", key, nlohmann::json(value).dump());
      },
      [&](std::string_view key, double value) { out += fmt::format("{} = {:.5g}\n", key, value); });
  return out;
}

Machine machine_from_text(std::string_view text, const std::string& path) {
  std::map<std::string, ConfigEntry> entries;
  try {
    for (ConfigEntry& entry : read_config(text, path)) entries.emplace(entry.key, std::move(entry));
  } catch (const Error& e) {
    throw InputError(e.what());
  }
  const auto take = [&](std::string_view key) {
    auto entry = entries.extract(std::string(key));
    if (entry.empty()) throw InputError(fmt::format("{}: missing line; expected {} = VALUE", path, key));
    return std::move(entry.mapped());
  };
  if (const double format = number_in(take("format")); format != static_cast<double>(kFormat))
    throw InputError(fmt::format("{}: format: expected {}, got {}", path, kFormat, format));
  Machine m;
  const ConfigEntry cores = take("processors");
  m.identity.cores = static_cast<int64_t>(std::min(number_in(cores), 1e6));
  if (m.identity.cores < 1)
    throw InputError(fmt::format("{}: processors: expected a number of at least 1", cores.where));
  const ConfigEntry ranks = take("ranks");
  std::istringstream fields(ranks.text.value_or(""));
  for (std::string digits; fields >> digits;) {
    if (digits.size() > 4 || digits.find_first_not_of("0123456789") != std::string::npos)
      throw InputError(fmt::format("{}: ranks: expected integers, got {}", ranks.where, ranks.value));
    for (auto& links : m.links) links[std::stol(digits)] = {};
  }
  if (m.links[0].empty()) throw InputError(fmt::format("{}: ranks: expected integers, got an empty list", ranks.where));
  each_field(
      m,
      [&](std::string_view key, std::string& value) {
        const ConfigEntry entry = take(key);
        if (!entry.text) throw InputError(fmt::format("{}: {}: expected a quoted string", entry.where, key));
        value = *entry.text;
      },
      [&](std::string_view key, double& value) { value = number_in(take(key)); });
  if (!entries.empty())
    throw InputError(fmt::format("{}: unknown key {}", entries.begin()->second.where, entries.begin()->first));
  return m;
}

void save_machine(const Machine& machine) {
  make_directories(cache_directory());
  write_file(machine_file(machine.identity), to_text(machine));
}

std::optional<Machine> load_machine(const Identity& identity) {
  const std::filesystem::path file = machine_file(identity);
  std::error_code none;
  if (!std::filesystem::exists(file, none)) return std::nullopt;
  Machine machine = machine_from_text(read_file(file), file.string());
  if (!(machine.identity == identity))
    throw InputError(
        fmt::format("{}: measured on a different machine or by a different version: {} ({} cores, GPU: {}), version {}",
                    file.string(), machine.identity.processor, machine.identity.cores, machine.identity.gpu,
                    machine.identity.version));
  return machine;
}

}  // namespace tessera::planner
