// Requests to the planner and back.
#include "app/explore/answers.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <mutex>

#include "app/explore/query.h"
#include "models/language_model.h"
#include "planner/case_json.h"
#include "planner/predict.h"
#include "tensor/error.h"
#include "train/job.h"

namespace tessera::explore {
namespace {

using Ordered = nlohmann::ordered_json;

constexpr int64_t kMostTokens = 10'000'000;  // in a micro-batch
constexpr int64_t kMostPasses = 200'000;     // in a pipeline: stages times micro-batches

Answer json_answer(const Ordered& json) {
  return {.body = json.dump(-1, ' ', false, Ordered::error_handler_t::replace) + "\n"};
}

// "gpt-nano|gpt-mini" as a list.
std::vector<std::string> split(const std::string& names) {
  std::vector<std::string> out(1);
  for (const char c : names)
    if (c == '|')
      out.emplace_back();
    else
      out.back() += c;
  return out;
}

Ordered choices() {
  Ordered models = Ordered::object(), hardware = Ordered::object();
  for (const std::string& name : split(preset_names())) models[name] = to_json(shape_of_preset(name));
  for (const std::string& name : planner::hardware_names()) {
    const planner::Hardware h = planner::hardware_named(name);
    hardware[name] = {{"memory_bytes", h.memory_bytes},
                      {"ranks_per_node", h.ranks_per_node},
                      {"words", fmt::format("{} ({})", name, bytes_words(h.memory_bytes))}};
  }
  return {{"model", models},
          {"hardware", hardware},
          {"software", planner::software_names()},
          {"schedule", kScheduleNames},
          {"recompute", kRecomputeNames}};
}

// Refuses a case that the planner would take long for.
void check_size(const planner::Case& c) {
  const Plan& p = c.layout.plan;
  if (static_cast<double>(c.layout.sequences) * static_cast<double>(c.model.context) > kMostTokens)
    throw FieldError("sequences", "expected fewer: a micro-batch has at most ten million tokens here");
  const double passes = static_cast<double>(p.pp) * static_cast<double>(std::max<int64_t>(p.chunks, 2)) *
                        static_cast<double>(p.microbatches);
  if (passes > kMostPasses)
    throw FieldError("microbatches",
                     "the pipeline is too long to be simulated here; expected fewer micro-batches, "
                     "chunks or pipeline ranks");
}

// Takes the width of a picture, which the planner does not know, out of a request.
void take_width(Request& request, const char* name, double& to) {
  for (const auto& [key, text] : request.query) {
    if (key != name) continue;
    int pixels = 0;
    const char* const end = text.data() + text.size();
    if (const auto [stop, error] = std::from_chars(text.data(), end, pixels);
        error != std::errc() || stop != end || pixels < 200 || pixels > 20'000)
      throw FieldError(name, "expected a number of pixels from 200 to 20000");
    to = pixels;
  }
  std::erase_if(request.query, [&](const auto& given) { return given.first == name; });
}

Ordered prediction(Request request) {
  Widths widths;
  take_width(request, "wide", widths.wide), take_width(request, "narrow", widths.narrow);
  const planner::Case given = case_of_query(request);
  check_size(given);
  const planner::Case c = planner::checked_case(given);
  const planner::Prediction p = planner::predict(c);
  Ordered out = planner::to_json(c, p);
  out["memory_bytes"] = c.hardware.memory_bytes - c.hardware.reserved_bytes;
  for (const planner::MemoryParts& m : p.memory) out["memory_of_stages"].push_back(planner::to_json(m));
  out["html"] = drawn_prediction(c, p, widths);
  return out;
}

// One at a time, since it takes both processors for a while.
Answer search(const Request& request) {
  static std::timed_mutex one;
  const std::unique_lock lock(one, std::chrono::seconds(5));
  if (!lock) return refusal(503, "another search takes long; try again");
  const PlanAnswer found = answer_of_query(request);
  std::string lines = plan_json_lines(found);
  lines.pop_back();
  std::ranges::replace(lines, '\n', ',');
  return {.body = "{\"plans\":[" + lines + "],\"html\":" + Ordered(drawn_ranking(found)).dump() + "}\n"};
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
