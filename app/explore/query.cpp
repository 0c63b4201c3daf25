// A query becomes a case in JSON, which the planner's own reader takes.
#include "app/explore/query.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>

#include "app/plan/command.h"
#include "app/plan_question.h"
#include "models/language_model.h"
#include "planner/case_json.h"
#include "tensor/error.h"

namespace tessera::explore {
namespace {

using Ordered = nlohmann::ordered_json;

constexpr size_t kLongest = 64;  // characters of a value

enum class Kind : uint8_t { number, yes_or_no, word };
enum class Part : uint8_t { top, model, plan, question };
struct Key {
  std::string_view name;
  Part part = Part::plan;
  Kind kind = Kind::number;
  int64_t most = 1'000'000'000;  // the largest number; more would take the planner long
};
constexpr std::array<Key, 30> kKeys = {{{"model", Part::top, Kind::word},
                                        {"hardware", Part::top, Kind::word},
                                        {"software", Part::top, Kind::word},
                                        {"layers", Part::model, Kind::number, 1000},
                                        {"channels", Part::model},
                                        {"heads", Part::model},
                                        {"kv_heads", Part::model},
                                        {"head_dim", Part::model},
                                        {"ffn", Part::model},
                                        {"experts", Part::model, Kind::number, 4096},
                                        {"experts_per_token", Part::model},
                                        {"gated", Part::model, Kind::yes_or_no},
                                        {"vocab", Part::model, Kind::number, 10'000'000},
                                        {"context", Part::model, Kind::number, 10'000'000},
                                        {"tied", Part::model, Kind::yes_or_no},
                                        {"positions", Part::model, Kind::word},
                                        {"dp", Part::plan},
                                        {"tp", Part::plan},
                                        {"pp", Part::plan},
                                        {"cp", Part::plan},
                                        {"ep", Part::plan},
                                        {"sp", Part::plan, Kind::yes_or_no},
                                        {"zero", Part::plan},
                                        {"sequences", Part::plan},
                                        {"microbatches", Part::plan},
                                        {"schedule", Part::plan, Kind::word},
                                        {"chunks", Part::plan},
                                        {"recompute", Part::plan, Kind::word},
                                        {"ranks", Part::question, Kind::number, 65'536},
                                        {"batch", Part::question, Kind::number, 1'000'000}}};

Ordered value_of(const Key& key, const std::string& text) {
  const std::string name(key.name);
  if (text.size() > kLongest)
    throw FieldError(name, fmt::format("expected at most {} characters, found {}", kLongest, text.size()));
  if (key.kind == Kind::word) return text;
  if (key.kind == Kind::yes_or_no) {
    if (text == "true" || text == "false") return text == "true";
    throw FieldError(name, fmt::format("expected true or false, found '{}'", text));
  }
  int64_t number = 0;
  const char* const end = text.data() + text.size();
  if (const auto [stop, error] = std::from_chars(text.data(), end, number);
      error != std::errc() || stop != end || number < 0 || number > key.most)
    throw FieldError(name, fmt::format("expected a whole number from 0 to {}, found '{}'", key.most, text));
  return number;
}

// The given values, by part. `other` is the part that this request has no keys of.
std::map<Part, Ordered> parts_of(const Request& request, Part other) {
  std::map<Part, Ordered> out;
  for (const Part part : {Part::top, Part::model, Part::plan, Part::question}) out[part] = Ordered::object();
  for (const auto& [name, text] : request.query) {
    const auto key = std::ranges::find(kKeys, std::string_view(name), &Key::name);
    if (key == kKeys.end() || key->part == other) {
      std::string known;
      for (const Key& k : kKeys)
        if (k.part != other) known += fmt::format("{}{}", known.empty() ? "" : ", ", k.name);
      throw FieldError(name.substr(0, kLongest), "unknown key; expected one of " + known);
    }
    if (out[key->part].contains(name)) throw FieldError(name, "expected it once, found it twice");
    out[key->part][name] = value_of(*key, text);
  }
  return out;
}

planner::Case case_of(std::map<Part, Ordered> parts) {
  Ordered& top = parts[Part::top];
  Ordered sizes = Ordered::object();
  planner::ModelShape preset;  // whose sizes stand where no others are given
  if (top.contains("model")) sizes = to_json(preset = shape_of_preset(top["model"].get<std::string>()));
  sizes.update(parts[Part::model]);
  top["model"] = sizes;
  top["plan"] = parts[Part::plan];
  planner::Case c = planner::case_from_json(top.dump(-1, ' ', false, Ordered::error_handler_t::replace), "the request");
  c.model.qkv_bias = preset.qkv_bias;
  c.model.qk_norm = preset.qk_norm;
  return c;
}

}  // namespace

planner::Case case_of_query(const Request& request) { return case_of(parts_of(request, Part::question)); }

PlanAnswer answer_of_query(const Request& request) {
  std::map<Part, Ordered> parts = parts_of(request, Part::plan);
  const Ordered numbers = parts[Part::question], top = parts[Part::top];
  const bool as_named = parts[Part::model].empty();
  const planner::Case c = case_of(std::move(parts));
  PlanOptions options;
  if (as_named)
    options.words = {{"model", top.value("model", "")}};
  else
    options.model_file = "the page";  // its sizes stand in the command
  return answer_of(options, {.question = {.model = c.model,
                                          .hardware = c.hardware,
                                          .software = c.software,
                                          .ranks = numbers.value("ranks", int64_t{1}),
                                          .batch = numbers.value("batch", int64_t{1})},
                             .model = top.value("model", "the page's model")});
}

planner::ModelShape shape_of_preset(std::string_view name) {
  const std::optional<ModelConfig> config = preset(name);
  if (!config) throw FieldError("model", fmt::format("expected one of {}, found '{}'", preset_names(), name));
  planner::ModelShape shape = planner::shape_of(*config);
  if (shape.vocab == 0) shape.vocab = usual_vocab(name);
  return shape;
}

Ordered to_json(const planner::ModelShape& m) {
  return {{"layers", m.layers},
          {"channels", m.channels},
          {"heads", m.heads},
          {"kv_heads", m.key_heads()},
          {"head_dim", m.head_size()},
          {"ffn", m.hidden()},
          {"experts", m.experts},
          {"experts_per_token", m.experts_per_token},
          {"gated", m.gated},
          {"vocab", m.vocab},
          {"context", m.context},
          {"tied", m.tied},
          {"positions", m.positions == planner::Positions::rope ? "rope" : "learned"}};
}

}  // namespace tessera::explore
