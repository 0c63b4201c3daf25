// A plan's fields by name: JSON there and back, and the short text.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <nlohmann/json.hpp>
#include <type_traits>
#include <utility>
#include <vector>

#include "tensor/error.h"
#include "train/names.h"

namespace tessera {
namespace {

using Json = nlohmann::ordered_json;

template <class P, class F>
void for_each_field(P& p, const F& f) {
  f("pp", p.pp), f("dp", p.dp), f("cp", p.cp), f("tp", p.tp), f("ep", p.ep), f("sp", p.sp);
  f("tie_copies", p.tie_copies);
  f("zero", p.zero), f("shard_ranks", p.shard_ranks), f("dp_mode", p.dp_mode), f("sync_every", p.sync_every);
  f("sync_fragments", p.sync_fragments);
  f("outer_lr", p.outer_lr), f("outer_momentum", p.outer_momentum);
  f("servers", p.servers), f("staleness", p.staleness);
  f("record", p.record), f("replay", p.replay), f("bucket_mb", p.bucket_mb), f("grad_dtype", p.grad_dtype);
  f("all_reduce", p.all_reduce), f("offload", p.offload);
  f("schedule", p.schedule), f("schedule_file", p.schedule_file), f("chunks", p.chunks), f("cp_mode", p.cp_mode);
  f("microbatches", p.microbatches), f("recompute", p.recompute);
  f("device", p.device), f("backend", p.backend), f("rendezvous", p.rendezvous), f("cuda_graph", p.cuda_graph),
      f("attention", p.attention);
  f("deterministic", p.deterministic), f("threads_per_rank", p.threads_per_rank), f("timeout", p.timeout);
}

template <class T>
Json json_of(const T& value) {
  if constexpr (std::is_same_v<T, ZeroStage>)
    return static_cast<int>(value);
  else if constexpr (std::is_enum_v<T>)
    return text_of(value);
  else
    return value;
}

void take(const char* name, const Json& from, int64_t& to) {
  if (!from.is_number_integer()) throw FieldError(name, "expected a whole number, found " + from.dump());
  to = from.get<int64_t>();
}
void take(const char* name, const Json& from, double& to) {
  if (!from.is_number()) throw FieldError(name, "expected a number, found " + from.dump());
  to = from.get<double>();
}
void take(const char* name, const Json& from, bool& to) {
  if (!from.is_boolean()) throw FieldError(name, "expected true or false, found " + from.dump());
  to = from.get<bool>();
}
void take(const char* name, const Json& from, std::string& to) {
  if (!from.is_string()) throw FieldError(name, "expected a string, found " + from.dump());
  to = from.get<std::string>();
}
void take(const char* name, const Json& from, ZeroStage& to) {
  if (!from.is_number_integer() || from < 0 || from > 3)
    throw FieldError(name, "expected 0, 1, 2 or 3, found " + from.dump());
  to = static_cast<ZeroStage>(from.get<int>());
}
template <class Enum>
void take(const char* name, const Json& from, Enum& to) {
  const std::string text = from.is_string() ? from.get<std::string>() : "";
  const auto found = value_named<Enum>(names_of(to), recompute_name(text));
  if (!found)
    throw FieldError(name, fmt::format("expected {}, found {}{}", fmt::join(names_of(to), ", "), from.dump(),
                                       did_you_mean(text, names_of(to))));
  to = *found;
}

Json fields_of(const Plan& plan) {
  Json out = Json::object();
  for_each_field(plan, [&](const char* name, const auto& value) {
    Json json = json_of(value);
    if (!json.is_string() || !json.get_ref<const std::string&>().empty()) out[name] = std::move(json);
  });
  return out;
}

}  // namespace

std::string to_json(const Plan& plan) { return fields_of(plan).dump(); }

Plan plan_from_json(std::string_view text) {
  const Json json = Json::parse(text, nullptr, false);
  if (!json.is_object()) throw Error("a plan: expected a JSON object, found " + std::string(text));
  Plan plan;
  std::vector<std::string> known;
  for_each_field(plan, [&](const char* name, auto& value) {
    known.emplace_back(name);
    if (const auto found = json.find(name); found != json.end()) take(name, *found, value);
  });
  for (const auto& [key, value] : json.items())
    if (std::ranges::find(known, key) == known.end())
      throw FieldError(key, fmt::format("no field of a plan; expected one of {}{}", fmt::join(known, ", "),
                                        did_you_mean(key, known)));
  return plan;
}

std::string to_text(const Plan& plan) {
  const Json fields = fields_of(plan), usual = fields_of({});
  std::string out;
  for (const auto& [name, value] : fields.items())
    if (const auto found = usual.find(name); found == usual.end() || *found != value)
      out += fmt::format("{}{}={}", out.empty() ? "" : " ", name,
                         value.is_string() ? value.get<std::string>() : value.dump());
  return out.empty() ? "one rank" : out;
}

}  // namespace tessera
