// Converts a query to a case, which the planner validates.
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <system_error>

#include "app/explore/explore.h"
#include "base/setting_json.h"
#include "planner/case_json.h"

namespace tessera::explore {
namespace {

using Ordered = nlohmann::ordered_json;

// With explicit sizes, so that another size of the request does not change them.
planner::ModelShape shape_of_preset(std::string_view name) {
  const std::optional<ModelConfig> config = preset(name);
  if (!config) throw FieldError("model", fmt::format("expected one of {}, got '{}'", preset_names(), name));
  planner::ModelShape m(*config);
  if (m.vocab == 0) m.vocab = default_vocab(name);
  m.kv_heads = m.key_heads(), m.head_dim = m.head_size(), m.ffn = m.hidden();
  return m;
}

constexpr size_t kMaxValueSize = 64;

constexpr int64_t kDefaultMax = 1'000'000'000;
// Above these values the planner becomes slow.
constexpr std::array<std::pair<std::string_view, int64_t>, 6> kFieldMax = {{{"layers", 1000},
                                                                            {"experts", 4096},
                                                                            {"vocab", 10'000'000},
                                                                            {"context", 10'000'000},
                                                                            {"ranks", 65'536},
                                                                            {"batch", 1'000'000}}};

std::optional<int64_t> parse_number(const std::string& text, int64_t min, int64_t max) {
  int64_t out = 0;
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), out);
  const bool is_complete = error == std::errc() && stop == text.data() + text.size();
  return is_complete && out >= min && out <= max ? std::optional(out) : std::nullopt;
}

nlohmann::json parse_value(const Setting& s, const std::string& text) {
  const std::string name(s.name);
  if (text.size() > kMaxValueSize)
    throw FieldError(name, fmt::format("expected at most {} characters, got {}", kMaxValueSize, text.size()));
  if (s.is_text()) return text;
  if (s.is_flag()) {
    if (text == "true" || text == "false") return text == "true";
    throw FieldError(name, fmt::format("expected true or false, got '{}'", text));
  }
  const auto own = std::ranges::find(kFieldMax, s.name, &decltype(kFieldMax)::value_type::first);
  const int64_t max = own == kFieldMax.end() ? kDefaultMax : own->second;
  const std::optional<int64_t> number = parse_number(text, 0, max);
  if (!number) throw FieldError(name, fmt::format("expected an integer from 0 to {}, got '{}'", max, text));
  return static_cast<uint64_t>(*number);
}

struct Asked {
  std::string model, hardware, software = "tessera";
  planner::ModelShape shape;
  planner::Layout layout;
  int64_t ranks = 1, batch = 1;
  bool has_sizes = false;  // that replace the model's
};
Settings field_descriptors(Asked& a, bool is_plan) {
  Settings s{{"model", &a.model}, {"hardware", &a.hardware}, {"software", &a.software}};
  s.add("model", planner::field_descriptors(a.shape));
  if (!is_plan) s.append({{"ranks", &a.ranks}, {"batch", &a.batch}});
  for (Setting field : planner::field_descriptors(a.layout)) {
    field.field.group = "plan";
    if (is_plan) s.add(field);
  }
  return s;
}

Asked parse_query(const Request& request, bool is_plan) {
  Asked out;
  const Settings all = field_descriptors(out, is_plan);
  auto query = request.query;  // the model first, because it has all sizes that the request omits
  std::ranges::stable_sort(query, {}, [](const auto& entry) { return entry.first != "model"; });
  std::set<std::string> seen;
  for (const auto& [name, text] : query) {
    const Setting* key = all.find(name);
    if (!key)
      throw FieldError(name.substr(0, kMaxValueSize),
                       fmt::format("unknown key; expected one of {}", fmt::join(all.names(), ", ")));
    if (!seen.insert(name).second) throw FieldError(name, "expected this key once, got it twice");
    const std::string group(key->field.group);
    take_value(*key, parse_value(*key, text), group.empty() ? name : group + "." + name);
    if (name == "model") out.shape = shape_of_preset(text);
    out.has_sizes = out.has_sizes || group == "model";
  }
  if (out.model.empty()) take_object(planner::field_descriptors(out.shape), nlohmann::json::object(), "model");
  if (out.hardware.empty()) throw FieldError("hardware", "missing; expected a value");
  return out;
}

planner::Case make_case(const Asked& a) {
  return {.model = a.shape,
          .layout = a.layout,
          .hardware = planner::hardware_named(a.hardware),
          .software = planner::software_named(a.software)};
}

PlanAnswer search_answer(const Request& request) {
  const Asked asked = parse_query(request, false);
  const planner::Case c = make_case(asked);
  PlanOptions options;
  if (asked.has_sizes)
    options.model_file = "the page";  // the command must list the sizes
  else
    options.args = {{"model", asked.model}};
  return compute_answer(options,
                        {.question = {.model = c.model,
                                      .hardware = c.hardware,
                                      .software = c.software,
                                      .ranks = asked.ranks,
                                      .batch = asked.batch},
                         .model = asked.model.empty() ? "the page's model" : asked.model},
                        request.meanwhile);
}

constexpr int64_t kMaxTokens = 10'000'000;  // per micro-batch
constexpr int64_t kMaxPasses = 200'000;     // per pipeline: stages x micro-batches

Answer json_answer(const Ordered& json) {
  return {.body = json.dump(-1, ' ', false, Ordered::error_handler_t::replace) + "\n"};
}

Ordered choices() {
  Ordered models = Ordered::object(), hardware = Ordered::object();
  for (const std::string& name : split(preset_names(), '|')) {
    planner::ModelShape shape = shape_of_preset(name);
    models[name] = to_json(planner::field_descriptors(shape));
  }
  for (const std::string& name : planner::hardware_names()) {
    const planner::Hardware h = planner::hardware_named(name);
    hardware[name] = {{"memory_bytes", h.memory_bytes},
                      {"ranks_per_node", h.ranks_per_node},
                      {"words", fmt::format("{} ({})", name, report::short_bytes(h.memory_bytes))}};
  }
  return {{"model", models},
          {"hardware", hardware},
          {"software", planner::software_names()},
          {"schedule", kScheduleNames},
          {"recompute", kRecomputeNames}};
}

void check_size(const planner::Case& c) {
  const Plan& p = c.layout.plan;
  if (static_cast<double>(c.layout.sequences) * static_cast<double>(c.model.context) > kMaxTokens)
    throw FieldError("sequences",
                     "expected fewer sequences: the web planner accepts at most 10 million tokens per micro-batch");
  const double passes = static_cast<double>(p.pp) * static_cast<double>(std::max<int64_t>(p.chunks, 2)) *
                        static_cast<double>(p.microbatches);
  if (passes > kMaxPasses)
    throw FieldError("microbatches",
                     "the pipeline is too long for the web planner to simulate; expected fewer micro-batches, "
                     "chunks or pipeline ranks");
}

// Removes a figure width, which the planner would reject as an unknown field.
void take_width(Request& request, const char* name, double& to) {
  for (const auto& [key, text] : request.query) {
    if (key != name) continue;
    const std::optional<int64_t> pixels = parse_number(text, 200, 20'000);
    if (!pixels) throw FieldError(name, "expected a number of pixels from 200 to 20000");
    to = static_cast<double>(*pixels);
  }
  std::erase_if(request.query, [&](const auto& given) { return given.first == name; });
}

Ordered prediction(Request request) {
  Widths widths;
  take_width(request, "wide", widths.wide), take_width(request, "narrow", widths.narrow);
  const planner::Case given = make_case(parse_query(request, true));
  check_size(given);
  const planner::Case c = planner::checked_case(given);
  const planner::Prediction p = planner::predict(c);
  Ordered out = planner::to_json(c, p);
  out["memory_bytes"] = c.hardware.usable_bytes();
  for (const planner::MemoryParts& m : p.memory) out["memory_of_stages"].push_back(planner::to_json(m));
  out["html"] = render_prediction(c, p, widths);
  return out;
}

// Searches are serialized, because each uses all cores.
Answer search(const Request& request) {
  static std::timed_mutex one;
  const std::unique_lock lock(one, std::chrono::seconds(5));
  if (!lock) return refusal(503, "another search is running; try again later");
  const PlanAnswer found = search_answer(request);
  std::string lines = plan_json_lines(found);
  lines.pop_back();
  std::ranges::replace(lines, '\n', ',');
  return {.body = "{\"plans\":[" + lines + "],\"html\":" + Ordered(render_ranking(found)).dump() + "}\n"};
}

}  // namespace

Answer answer(const Request& request) {
  try {
    if (request.path == "/predict") return json_answer(prediction(request));
    if (request.path == "/search") return search(request);
    if (!request.query.empty()) return refusal(400, "expected no query for this path");
    if (request.path == "/") return {.type = "text/html", .body = std::string(kPage)};
    if (request.path == "/choices") return json_answer(choices());
    return refusal(404, "expected /, /choices, /predict or /search");
  } catch (const FieldError& e) {
    return refusal(400, e.what(), e.field());
  } catch (const Error& e) {
    return refusal(400, e.what());
  }
}

}  // namespace tessera::explore
