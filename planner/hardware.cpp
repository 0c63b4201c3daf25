// Hardware by name, from files and from JSON.
#include "planner/hardware.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "planner/fields.h"
#include "tensor/error.h"

namespace tessera::planner {
namespace {

// attention_flash2_flops, attention_flash2_half_tokens: of a kernel; or the first of several in an object.
bool take_attention(Hardware& h, const std::string& key, const nlohmann::json& value) {
  if (key == "attention" && value.is_object()) {  // {"flash2": 2e14}
    for (const auto& [kernel, rate] : value.items())
      take(("attention." + kernel).c_str(), rate, h.attention[kernel].flops);
    return true;
  }
  const std::string begin = "attention_", flops = "_flops", half = "_half_tokens";
  if (!key.starts_with(begin)) return false;
  for (const std::string& end : {flops, half})
    if (key.ends_with(end) && key.size() > begin.size() + end.size()) {
      AttentionRate& rate = h.attention[key.substr(begin.size(), key.size() - begin.size() - end.size())];
      take(key.c_str(), value, end == flops ? rate.flops : rate.half_tokens);
      return true;
    }
  return false;
}

}  // namespace

const std::vector<std::string>& hardware_names() {
  static const std::vector<std::string> names = names_of(hardware_files());
  return names;
}

Hardware hardware_named(std::string_view name) {
  const File& file = file_named(hardware_files(), name, "hardware");
  Hardware h = hardware_from_file(file.text, std::string(name) + ".toml");
  h.name = name;
  return h;
}

Hardware hardware_from_file(std::string_view text, const std::string& path) {
  return hardware_from_json(json_of_file(text, path));
}

Hardware hardware_from_json(const nlohmann::json& object) {
  Hardware h;
  if (const auto base = object.find("base"); base != object.end()) {
    std::string name;
    take("base", *base, name);
    h = hardware_named(name);
  }
  for (const auto& [key, value] : object.items()) {
    bool known = key == "base" || take_attention(h, key, value);
    for_each_field_of_hardware(h, [&, &key = key, &value = value](const char* name, auto& field) {
      if (key != name) return;
      take(name, value, field);
      known = true;
    });
    if (!known) throw FieldError(key, "no field of hardware");
  }
  check(h);
  return h;
}

void check(const Hardware& h) {
  // Latencies, and what is taken from something, may be nothing.
  static const std::set<std::string> may_be_zero = {"intra_latency_s", "inter_latency_s", "launch_s",
                                                    "contention",      "processors",      "reserved_bytes"};
  for_each_field_of_hardware(h, [](const std::string& name, auto field) {
    const auto value = static_cast<double>(field);
    if (!std::isfinite(value) || value < 0 || (value == 0 && !may_be_zero.contains(name)))
      throw FieldError(
          name, fmt::format("expected {} 0, found {}", may_be_zero.contains(name) ? "at least" : "more than", value));
    const bool share = name.ends_with("_efficiency") || name == "contention";
    if (share && value > 1) throw FieldError(name, fmt::format("expected at most 1, found {}", value));
  });
  for (const auto& [kernel, rate] : h.attention)
    if (!(rate.flops > 0) || !std::isfinite(rate.flops) || !(rate.half_tokens >= 0) || !std::isfinite(rate.half_tokens))
      throw FieldError("attention_" + kernel + "_flops", fmt::format("expected more than 0, found {}", rate.flops));
  if (h.range_fastest > h.range_slowest)
    throw FieldError("range_fastest", fmt::format("expected at most {}, found {}", h.range_slowest, h.range_fastest));
}

}  // namespace tessera::planner
