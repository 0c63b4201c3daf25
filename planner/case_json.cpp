// Cases from JSON, hardware and software descriptions also from files; predictions to JSON.
#include "planner/case_json.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <vector>

#include "base/config_file.h"
#include "base/error.h"
#include "base/json.h"
#include "base/setting_json.h"
#include "planner/pipeline.h"

namespace tessera::planner {
namespace {

using Json = nlohmann::json;

std::string text_in(const std::string& name, const Json& value) {
  if (!value.is_string()) throw FieldError(name, "expected a string, got " + value.dump());
  return value.get<std::string>();
}

void take_number(const std::string& name, const Json& value, double& to) {
  if (!value.is_number()) throw FieldError(name, "expected a number, got " + value.dump());
  to = value.get<double>();
}

// Reads attention_KERNEL_flops and attention_KERNEL_half_tokens, or `attention` with the FLOP/s of several kernels.
bool take_other(Hardware& h, const std::string& key, const Json& value) {
  if (key == "attention" && value.is_object()) {  // {"flash2": 2e14}
    for (const auto& [kernel, rate] : value.items())
      take_number("attention." + kernel, rate, h.attention[kernel].flops);
    return true;
  }
  const std::string begin = "attention_", flops = "_flops", half = "_half_tokens";
  if (!key.starts_with(begin)) return false;
  for (const std::string& end : {flops, half})
    if (key.ends_with(end) && key.size() > begin.size() + end.size()) {
      AttentionThroughput& rate = h.attention[key.substr(begin.size(), key.size() - begin.size() - end.size())];
      take_number(key, value, end == flops ? rate.flops : rate.half_tokens);
      return true;
    }
  return false;
}
bool take_other(Software&, const std::string&, const Json&) { return false; }

template <class T>
T from_json(const Json& object, T out, const char* what, T (*by_name)(std::string_view)) {
  if (const auto base = object.find("base"); base != object.end()) out = by_name(text_in("base", *base));
  const Settings all = field_descriptors(out);
  for (const auto& [key, value] : object.items())
    if (const Setting* field = all.find(key))
      take_value(*field, value, key);
    else if (key != "base" && !take_other(out, key, value))
      throw FieldError(key, fmt::format("unknown field of {}", what));
  check(out);
  return out;
}
Hardware hardware_from_json(const Json& object) { return from_json(object, Hardware{}, "hardware", hardware_named); }
Software software_from_json(const Json& object) {
  return from_json(object, Software{.name = "other"}, "software", software_named);
}

// From KEY = VALUE lines. Throws Error with line and column.
Json json_of_file(std::string_view text, const std::string& path) {
  Json out = Json::object();
  for (const ConfigEntry& e : read_config(text, path))
    out[e.key] = e.text ? Json(*e.text) : parse_json(e.value, e.where);
  return out;
}

std::vector<std::string> file_names(const std::vector<EmbeddedFile>& files) {
  std::vector<std::string> out;
  for (const EmbeddedFile& f : files) out.emplace_back(f.name);
  return out;
}

template <class T>
T named(const std::vector<EmbeddedFile>& files, std::string_view name, const char* field,
        T (*read)(std::string_view, const std::string&)) {
  const auto found = std::ranges::find(files, name, &EmbeddedFile::name);
  if (found == files.end())
    throw FieldError(field, fmt::format("expected {} or a file, got {}{}", fmt::join(file_names(files), ", "), name,
                                        did_you_mean(name, file_names(files))));
  T out = read(found->text, std::string(name) + ".toml");
  out.name = name;
  return out;
}

}  // namespace

const std::vector<std::string>& hardware_names() {
  static const std::vector<std::string> names = file_names(hardware_files());
  return names;
}
const std::vector<std::string>& software_names() {
  static const std::vector<std::string> names = file_names(software_files());
  return names;
}
Hardware hardware_named(std::string_view name) { return named(hardware_files(), name, "hardware", hardware_from_file); }
Software software_named(std::string_view name) { return named(software_files(), name, "software", software_from_file); }
Hardware hardware_from_file(std::string_view text, const std::string& path) {
  return hardware_from_json(json_of_file(text, path));
}
Software software_from_file(std::string_view text, const std::string& path) {
  return software_from_json(json_of_file(text, path));
}

Case case_from_json(std::string_view text, const std::string& what) {
  const Json json = parse_json(text, what);
  if (!json.is_object()) throw InputError(what + ": expected an object, got " + json.dump());
  const auto member = [&](const char* key) -> const Json& {
    if (const auto found = json.find(key); found != json.end()) return *found;
    throw FieldError(key, "missing; expected a value");
  };
  Case c{.software = software_named("tessera")};
  take_object(field_descriptors(c.model), member("model"), "model");
  take_object(field_descriptors(c.layout), member("plan"), "plan");
  const Json &hardware = member("hardware"), &software = value_at(json, "software");
  c.hardware = hardware.is_object() ? hardware_from_json(hardware) : hardware_named(text_in("hardware", hardware));
  if (software.is_object())
    c.software = software_from_json(software);
  else if (json.contains("software"))
    c.software = software_named(text_in("software", software));
  check_keys(json, "", {"model", "plan", "hardware", "software"});
  return c;
}

ModelShape model_from_json(std::string_view text, const std::string& what) {
  ModelShape m;
  take_object(field_descriptors(m), parse_json(text, what), "model");
  return m;
}

nlohmann::ordered_json to_json(const Layout& layout) {
  Layout l = layout;
  l.plan.chunks = std::ssize(rank_of_stages(l.plan)) / l.plan.pp;
  return to_json(field_descriptors(l));
}

nlohmann::ordered_json to_json(const MemoryParts& m) {
  nlohmann::ordered_json out;
  for (const auto& [name, part] : kMemoryParts) out[std::string(name)] = m.*part;
  out["peak"] = m.peak();
  return out;
}

nlohmann::ordered_json to_json(const Case& c, const Prediction& p) {
  nlohmann::ordered_json out = {{"event", "plan"},
                                {"plan", to_json(c.layout)},
                                {"fits", p.fits},
                                {"step_s", p.step_s},
                                {"step_s_range", {p.fastest_s, p.slowest_s}},
                                {"tokens_per_s", p.tokens_per_s},
                                {"mfu", p.mfu},
                                {"hfu", p.hfu},
                                {"tflops_per_rank", p.tflops_per_rank}};
  for (const auto& [name, part] : kParts) out["parts"][std::string(name)] = p.parts.*part;
  out["bubble"] = p.bubble;
  out["memory"] = to_json(p.memory.at(p.peak_rank));
  for (const MemoryParts& m : p.memory) out["memory_per_stage"].push_back(m.peak());
  out["bytes"] = p.bytes;
  if (!p.fits) out["over"] = {{"bytes", p.over_bytes}, {"largest", p.largest}};
  return out;
}

}  // namespace tessera::planner
