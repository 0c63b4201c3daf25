// The file of a machine's measurement.
#include <fmt/format.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <sstream>

#include "data/config_file.h"
#include "data/files.h"
#include "planner/machine.h"
#include "tensor/error.h"

namespace tessera::planner {
namespace {

constexpr std::array<std::string_view, 2> kTypes = {"fp32", "bf16"};
constexpr int64_t kFormat = 1;

// Every field with its key, in the order of the file: what writes and what reads walk through the same.
void each_field(Machine& m, const auto& text, const auto& number) {
  text("processor", m.identity.processor);
  text("gpu", m.identity.gpu);
  text("version", m.identity.version);
  number("memory_bytes", m.memory_bytes);
  number("copy_bytes_per_s", m.copy_bytes_per_s);
  for (size_t t = 0; t < kTypes.size(); ++t)
    number(fmt::format("product_flops_per_s_{}", kTypes[t]), m.product_flops_per_s[t]);
  for (size_t c = 0; c < kCompanyNames.size(); ++c)
    for (size_t t = 0; t < kTypes.size(); ++t)
      for (size_t k = 0; k < kKernels; ++k) {
        const std::vector<std::string_view>& names = size_names(static_cast<Kernel>(k));
        for (size_t i = 0; i < names.size(); ++i)
          number(fmt::format("{}_{}_{}_{}", kCompanyNames[c], kTypes[t], kKernelNames[k], names[i]),
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
    throw InputError(fmt::format("{}: {}: expected a number from 0 on, found {}", entry.where, entry.key, entry.value));
  return value.get<double>();
}

}  // namespace

std::filesystem::path machine_file(const Identity& identity) {
  const std::string all =
      fmt::format("{}\n{}\n{}\n{}", identity.processor, identity.processors, identity.gpu, identity.version);
  return cache_directory() / fmt::format("machine-{:016x}.toml", checksum(all));
}

std::string to_text(const Machine& machine) {
  Machine m = machine;
  std::string out =
      "# This machine, measured. A constant is seconds for one of what its key ends with: a call, a row, an element, "
      "a\n"
      "# FLOP, a score of attention; alone: one rank while the other processors rest; together: a rank on each of "
      "them;\n"
      "# threads: one rank with a thread on each. all_reduce_2_latency_s and the like are of so many thread ranks.\n";
  out += fmt::format("format = {}\nprocessors = {}\n", kFormat, m.identity.processors);
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
    if (entry.empty()) throw InputError(fmt::format("{}: expected a line {} = VALUE, found none", path, key));
    return std::move(entry.mapped());
  };
  if (const double format = number_in(take("format")); format != static_cast<double>(kFormat))
    throw InputError(fmt::format("{}: format: expected {}, found {}", path, kFormat, format));
  Machine m;
  const ConfigEntry processors = take("processors");
  m.identity.processors = static_cast<int64_t>(std::min(number_in(processors), 1e6));
  if (m.identity.processors < 1)
    throw InputError(fmt::format("{}: processors: expected a number from 1 on", processors.where));
  const ConfigEntry ranks = take("ranks");
  std::istringstream words(ranks.text.value_or(""));
  for (std::string digits; words >> digits;) {
    if (digits.size() > 4 || digits.find_first_not_of("0123456789") != std::string::npos)
      throw InputError(fmt::format("{}: ranks: expected numbers, found {}", ranks.where, ranks.value));
    for (auto& links : m.links) links[std::stol(digits)] = {};
  }
  if (m.links[0].empty()) throw InputError(fmt::format("{}: ranks: expected numbers, found none", ranks.where));
  each_field(
      m,
      [&](std::string_view key, std::string& value) {
        const ConfigEntry entry = take(key);
        if (!entry.text) throw InputError(fmt::format("{}: {}: expected a \"text\"", entry.where, key));
        value = *entry.text;
      },
      [&](std::string_view key, double& value) { value = number_in(take(key)); });
  if (!entries.empty())
    throw InputError(fmt::format("{}: unknown key {}", entries.begin()->second.where, entries.begin()->first));
  return m;
}

void keep(const Machine& machine) {
  make_directories(cache_directory());
  write_file(machine_file(machine.identity), to_text(machine));
}

std::optional<Machine> kept_machine(const Identity& identity) {
  const std::filesystem::path file = machine_file(identity);
  std::error_code none;
  if (!std::filesystem::exists(file, none)) return std::nullopt;
  Machine machine = machine_from_text(read_file(file), file.string());
  if (!(machine.identity == identity))
    throw InputError(fmt::format("{}: measured on {} ({} processors, GPU: {}) by version {}, not here", file.string(),
                                 machine.identity.processor, machine.identity.processors, machine.identity.gpu,
                                 machine.identity.version));
  return machine;
}

}  // namespace tessera::planner
