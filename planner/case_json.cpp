// Cases from JSON, hardware and software from files too; predictions to JSON.
#include "planner/case_json.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>
#include <type_traits>

#include "data/config_file.h"
#include "data/json.h"
#include "planner/pipeline.h"
#include "tensor/error.h"
#include "train/job.h"

namespace tessera::planner {
namespace {

using Json = nlohmann::json;

constexpr std::array<std::string_view, 3> kTensorOverlapNames = {"none", "backward", "all"};
constexpr std::array<std::string_view, 2> kPositionNames = {"learned", "rope"};
constexpr const auto& names_of(TensorOverlap) { return kTensorOverlapNames; }
constexpr const auto& names_of(Positions) { return kPositionNames; }
using tessera::names_of;

// The fields of a description by name: one list for files, JSON and checks.
template <class F>
void each_field(Hardware& h, const F& f) {
  f("peak_flops", h.peak_flops), f("hbm_bytes_per_s", h.hbm_bytes_per_s), f("memory_bytes", h.memory_bytes);
  f("multiprocessors", h.multiprocessors), f("ranks_per_node", h.ranks_per_node);
  f("intra_bytes_per_s", h.intra_bytes_per_s), f("inter_bytes_per_s", h.inter_bytes_per_s);
  f("intra_latency_s", h.intra_latency_s), f("inter_latency_s", h.inter_latency_s), f("launch_s", h.launch_s);
  f("product_efficiency", h.product_efficiency), f("memory_efficiency", h.memory_efficiency);
  f("intra_efficiency", h.intra_efficiency), f("inter_efficiency", h.inter_efficiency);
  f("contention", h.contention), f("reserved_bytes", h.reserved_bytes);
  f("processors", h.processors), f("range_fastest", h.range_fastest), f("range_slowest", h.range_slowest);
}
template <class F>
void each_field(Software& s, const F& f) {
  f("attention", s.attention), f("fused_elementwise", s.fused_elementwise);
  f("parameter_bytes", s.parameter_bytes), f("gradient_bytes", s.gradient_bytes), f("state_bytes", s.state_bytes);
  f("gather_bytes", s.gather_bytes), f("reduce_bytes", s.reduce_bytes), f("logit_bytes", s.logit_bytes);
  f("tp_overlap", s.tp_overlap), f("dp_overlap", s.dp_overlap), f("pp_overlap", s.pp_overlap);
  f("scatter_messages", s.scatter_messages), f("dropout", s.dropout), f("fp8", s.fp8),
      f("reshard_after_forward", s.reshard_after_forward);
  f("fewer_layers_at_ends", s.fewer_layers_at_ends), f("gated_activation_pieces", s.gated_activation_pieces);
}

template <class F>
void each_field(ModelShape& m, const F& f) {
  f("layers", m.layers), f("channels", m.channels), f("heads", m.heads);
  f("kv_heads", m.kv_heads), f("head_dim", m.head_dim), f("ffn", m.ffn);
  f("experts", m.experts), f("experts_per_token", m.experts_per_token), f("gated", m.gated);
  f("vocab", m.vocab), f("context", m.context), f("tied", m.tied), f("positions", m.positions);
}
template <class F>
void each_field(Layout& l, const F& f) {
  Plan& p = l.plan;
  f("dp", p.dp), f("tp", p.tp), f("pp", p.pp), f("cp", p.cp), f("ep", l.ep);
  f("sp", p.sp), f("sequences", l.sequences), f("microbatches", p.microbatches);
  f("chunks", p.chunks), f("schedule", p.schedule), f("recompute", p.recompute), f("zero", p.zero);
}
template <class F>
void each_field(Case& c, const F& f) {
  f("model", c.model), f("plan", c.layout), f("hardware", c.hardware), f("software", c.software);
}

// Reads an object whose keys are all fields. Throws FieldError for others, and where one of `needed` is missing.
template <class T>
void read_object(const std::string& path, const Json& json, const std::set<std::string>& needed, T& to);
Hardware hardware_from_json(const Json& object);
Software software_from_json(const Json& object);

template <class T = std::string>
T taken(const std::string& name, const Json& from);
// Takes one field from JSON. Throws FieldError that says what was expected and found.
template <class T>
void take(const std::string& name, const Json& from, T& to) {
  const auto refuse = [&](const std::string& expected, const std::string& more = "") {
    throw FieldError(name, fmt::format("expected {}, found {}{}", expected, from.dump(), more));
  };
  if constexpr (std::is_same_v<T, ModelShape>) {
    read_object(name, from, {"layers", "channels", "heads", "vocab", "context"}, to);
  } else if constexpr (std::is_same_v<T, Layout>) {
    read_object(name, from, {}, to);
  } else if constexpr (std::is_same_v<T, Hardware>) {
    to = from.is_object() ? hardware_from_json(from) : hardware_named(taken(name, from));
  } else if constexpr (std::is_same_v<T, Software>) {
    to = from.is_object() ? software_from_json(from) : software_named(taken(name, from));
  } else if constexpr (std::is_same_v<T, ZeroStage>) {
    const auto number = taken<int64_t>(name, from);
    if (number > 3) refuse("0, 1, 2 or 3");
    to = static_cast<ZeroStage>(number);
  } else if constexpr (std::is_same_v<T, int64_t>) {
    const auto found = natural(from);
    if (!found) refuse("a whole number from 0 on");
    to = *found;
  } else if constexpr (std::is_enum_v<T>) {
    const auto& names = names_of(T());
    const std::string text = from.is_string() ? std::string(recompute_name(from.get<std::string>())) : "";
    const auto found = value_named<T>(names, text);
    const bool is_guessed = !std::is_same_v<T, TensorOverlap>;
    if (!found) refuse(fmt::format("{}", fmt::join(names, ", ")), is_guessed ? did_you_mean(text, names) : "");
    to = *found;
  } else {
    constexpr bool number = std::is_same_v<T, double>, flag = std::is_same_v<T, bool>;
    if (number ? !from.is_number() : flag ? !from.is_boolean() : !from.is_string())
      refuse(number ? "a number" : flag ? "true or false" : "a string");
    to = from.get<T>();
  }
}

template <class T>
T taken(const std::string& name, const Json& from) {
  T out;
  take(name, from, out);
  return out;
}

template <class T>
void read_object(const std::string& path, const Json& json, const std::set<std::string>& needed, T& to) {
  if (!json.is_object()) throw FieldError(path, "expected an object, found " + json.dump());
  const auto where = [&](const std::string& key) { return path.empty() ? key : path + "." + key; };
  std::vector<std::string> known;
  each_field(to, [&](const std::string& key, auto& field) {
    known.push_back(key);
    if (const auto found = json.find(key); found != json.end())
      take(where(key), *found, field);
    else if (needed.contains(key))
      throw FieldError(where(key), "expected a value, found none");
  });
  for (const auto& [key, value] : json.items())
    if (std::ranges::find(known, key) == known.end())
      throw FieldError(where(key), fmt::format("unknown key; expected one of {}{}", fmt::join(known, ", "),
                                               did_you_mean(key, known)));
}

// Takes attention_flash2_flops or attention_flash2_half_tokens, of a kernel; or the first of several in an object.
bool take_other(Hardware& h, const std::string& key, const Json& value) {
  if (key == "attention" && value.is_object()) {  // {"flash2": 2e14}
    for (const auto& [kernel, rate] : value.items()) take("attention." + kernel, rate, h.attention[kernel].flops);
    return true;
  }
  const std::string begin = "attention_", flops = "_flops", half = "_half_tokens";
  if (!key.starts_with(begin)) return false;
  for (const std::string& end : {flops, half})
    if (key.ends_with(end) && key.size() > begin.size() + end.size()) {
      AttentionRate& rate = h.attention[key.substr(begin.size(), key.size() - begin.size() - end.size())];
      take(key, value, end == flops ? rate.flops : rate.half_tokens);
      return true;
    }
  return false;
}
bool take_other(Software&, const std::string&, const Json&) { return false; }

template <class T>
T from_json(const Json& object, T out, const char* what, T (*by_name)(std::string_view)) {
  if (const auto base = object.find("base"); base != object.end()) out = by_name(taken("base", *base));
  for (const auto& [key, value] : object.items()) {
    bool known = key == "base" || take_other(out, key, value);
    each_field(out, [&, &key = key, &value = value](const char* name, auto& field) {
      if (key != name) return;
      take(name, value, field);
      known = true;
    });
    if (!known) throw FieldError(key, fmt::format("no field of {}", what));
  }
  check(out);
  return out;
}
Hardware hardware_from_json(const Json& object) { return from_json(object, Hardware{}, "hardware", hardware_named); }
Software software_from_json(const Json& object) {
  return from_json(object, Software{.name = "other"}, "software", software_named);
}

// Reads a KEY = VALUE file as one JSON object. Throws Error with line and column.
Json json_of_file(std::string_view text, const std::string& path) {
  Json out = Json::object();
  for (const ConfigEntry& e : read_config(text, path))
    out[e.key] = e.text ? Json(*e.text) : parse_json(e.value, e.where);
  return out;
}

std::vector<std::string> names_of(const std::vector<File>& files) {
  std::vector<std::string> out;
  for (const File& f : files) out.emplace_back(f.name);
  return out;
}

// The description of that name. Throws FieldError of `field` that lists the names.
template <class T>
T named(const std::vector<File>& files, std::string_view name, const char* field,
        T (*read)(std::string_view, const std::string&)) {
  const auto found = std::ranges::find(files, name, &File::name);
  if (found == files.end())
    throw FieldError(field, fmt::format("expected {} or a file, found {}{}", fmt::join(names_of(files), ", "), name,
                                        did_you_mean(name, names_of(files))));
  T out = read(found->text, std::string(name) + ".toml");
  out.name = name;
  return out;
}

}  // namespace

const std::vector<std::string>& hardware_names() {
  static const std::vector<std::string> names = names_of(hardware_files());
  return names;
}
const std::vector<std::string>& software_names() {
  static const std::vector<std::string> names = names_of(software_files());
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

void check(const Hardware& given) {
  // Latencies, and what is taken from something, may be nothing.
  static const std::set<std::string> may_be_zero = {"intra_latency_s", "inter_latency_s", "launch_s",
                                                    "contention",      "processors",      "reserved_bytes"};
  Hardware h = given;
  each_field(h, [](const std::string& name, auto field) {
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

void check(const Software& given) {
  Software s = given;
  each_field(s, [](const char* name, const auto& value) {
    if constexpr (std::is_same_v<std::decay_t<decltype(value)>, double>)
      if (!(value >= 0) || !std::isfinite(value))
        throw FieldError(name, fmt::format("expected a number from 0 on, found {}", value));
  });
}

Case case_from_json(std::string_view text, const std::string& what) {
  const Json json = parse_json(text, what);
  if (!json.is_object()) throw InputError(what + ": expected an object, found " + json.dump());
  Case c{.software = software_named("tessera")};
  read_object("", json, {"model", "plan", "hardware"}, c);
  return c;
}

ModelShape model_from_json(std::string_view text, const std::string& what) {
  return taken<ModelShape>("model", parse_json(text, what));
}

nlohmann::ordered_json to_json(const Layout& l) {
  const Plan& p = l.plan;
  return {{"dp", p.dp},
          {"tp", p.tp},
          {"pp", p.pp},
          {"cp", p.cp},
          {"ep", l.ep},
          {"sp", p.sp},
          {"zero", static_cast<int>(p.zero)},
          {"sequences", l.sequences},
          {"microbatches", p.microbatches},
          {"schedule", text_of(p.schedule)},
          {"chunks", std::ssize(rank_of_stages(p)) / p.pp},
          {"recompute", text_of(p.recompute)}};
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
  out["memory"] = to_json(p.memory.at(p.fullest));
  for (const MemoryParts& m : p.memory) out["memory_per_stage"].push_back(m.peak());
  out["bytes"] = p.bytes;
  if (!p.fits) out["over"] = {{"bytes", p.over_bytes}, {"largest", p.largest}};
  return out;
}

}  // namespace tessera::planner
