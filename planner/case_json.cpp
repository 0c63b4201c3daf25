// Cases from JSON, predictions to JSON.
#include "planner/case_json.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <set>

#include "data/json.h"
#include "planner/fields.h"
#include "planner/pipeline.h"
#include "tensor/error.h"
#include "train/names.h"

namespace tessera::planner {
namespace {

using Json = nlohmann::json;

// An object whose keys are taken one after another; whatever is left at the end is unknown.
class Object {
 public:
  Object(const Json& json, std::string path) : json_(json), path_(std::move(path)) {
    if (!json.is_object()) throw FieldError(path_, "expected an object, found " + json.dump());
  }
  const Json* find(const std::string& key) {
    known_.push_back(key);
    const auto found = json_.find(key);
    return found == json_.end() ? nullptr : &*found;
  }
  const Json& at(const std::string& key) {
    const Json* found = find(key);
    if (!found) throw FieldError(where(key), "expected a value, found none");
    return *found;
  }
  template <class T>
  void take(const std::string& key, T& to) {
    if (const Json* found = find(key)) planner::take(where(key).c_str(), *found, to);
  }
  template <class T>
  void need(const std::string& key, T& to) {
    planner::take(where(key).c_str(), at(key), to);
  }
  // Of a value that has a name.
  template <class Enum, size_t n>
  void choose(const std::string& key, const std::array<std::string_view, n>& names, Enum& to) {
    const Json* found = find(key);
    if (!found) return;
    const std::string text = found->is_string() ? std::string(recompute_name(found->get<std::string>())) : "";
    const auto value = value_named<Enum>(names, text);
    if (!value)
      throw FieldError(where(key), fmt::format("expected {}, found {}{}", fmt::join(names, ", "), found->dump(),
                                               did_you_mean(text, names)));
    to = *value;
  }
  void end() {
    for (const auto& [key, value] : json_.items())
      if (std::ranges::find(known_, key) == known_.end())
        throw FieldError(where(key), fmt::format("unknown key; expected one of {}{}", fmt::join(known_, ", "),
                                                 did_you_mean(key, known_)));
  }
  std::string where(const std::string& key) const { return path_.empty() ? key : path_ + "." + key; }

 private:
  const Json& json_;
  std::string path_;
  std::vector<std::string> known_;
};

ModelShape model_from(const Json& json) {
  constexpr std::array<std::string_view, 2> positions = {"learned", "rope"};
  Object o(json, "model");
  ModelShape m;
  o.need("layers", m.layers), o.need("channels", m.channels), o.need("heads", m.heads);
  o.take("kv_heads", m.kv_heads), o.take("head_dim", m.head_dim), o.take("ffn", m.ffn);
  o.take("experts", m.experts), o.take("experts_per_token", m.experts_per_token), o.take("gated", m.gated);
  o.need("vocab", m.vocab), o.need("context", m.context), o.take("tied", m.tied);
  o.choose("positions", positions, m.positions);
  o.end();
  return m;
}

Layout layout_from(const Json& json) {
  Object o(json, "plan");
  Layout l;
  Plan& p = l.plan;
  o.take("dp", p.dp), o.take("tp", p.tp), o.take("pp", p.pp), o.take("cp", p.cp), o.take("ep", l.ep);
  o.take("sp", p.sp), o.take("sequences", l.sequences), o.take("microbatches", p.microbatches);
  o.take("chunks", p.chunks);
  o.choose("schedule", kScheduleNames, p.schedule), o.choose("recompute", kRecomputeNames, p.recompute);
  int64_t zero = 0;
  o.take("zero", zero);
  if (zero > 3) throw FieldError("plan.zero", fmt::format("expected 0, 1, 2 or 3, found {}", zero));
  p.zero = static_cast<ZeroStage>(zero);
  o.end();
  return l;
}

std::string name_of(const Json& json, const std::string& field) {
  std::string name;
  take(field.c_str(), json, name);
  return name;
}

}  // namespace

Case case_from_json(std::string_view text, const std::string& what) {
  const Json json = parse_json(text, what);
  if (!json.is_object()) throw InputError(what + ": expected an object, found " + json.dump());
  Object o(json, "");
  Case c{.model = model_from(o.at("model")), .layout = layout_from(o.at("plan"))};
  const Json& hardware = o.at("hardware");
  c.hardware = hardware.is_object() ? hardware_from_json(hardware) : hardware_named(name_of(hardware, "hardware"));
  const Json* software = o.find("software");
  if (!software)
    c.software = software_named("tessera");
  else
    c.software = software->is_object() ? software_from_json(*software) : software_named(name_of(*software, "software"));
  o.end();
  return c;
}

ModelShape model_from_json(std::string_view text, const std::string& what) {
  return model_from(parse_json(text, what));
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
  return {{"parameters", m.parameters},
          {"gradients", m.gradients},
          {"optimizer", m.optimizer},
          {"activations", m.activations},
          {"communication", m.communication},
          {"workspace", m.workspace},
          {"peak", m.peak()}};
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
                                {"tflops_per_rank", p.tflops_per_rank},
                                {"parts",
                                 {{"compute", p.parts.compute},
                                  {"recompute", p.parts.recompute},
                                  {"bubble", p.parts.bubble},
                                  {"tp", p.parts.tp},
                                  {"cp", p.parts.cp},
                                  {"ep", p.parts.ep},
                                  {"dp", p.parts.dp},
                                  {"optimizer", p.parts.optimizer}}},
                                {"bubble", p.bubble},
                                {"memory", to_json(p.memory.at(p.fullest))}};
  for (const MemoryParts& m : p.memory) out["memory_per_stage"].push_back(m.peak());
  out["bytes"] = p.bytes;
  if (!p.fits) out["over"] = {{"bytes", p.over_bytes}, {"largest", p.largest}};
  return out;
}

}  // namespace tessera::planner
