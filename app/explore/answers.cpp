// Requests to the planner and back.
#include "app/explore/answers.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>

#include "app/explore/page.h"
#include "app/explore/query.h"
#include "app/plan/text.h"
#include "models/language_model.h"
#include "parallel/pipeline/simulate.h"
#include "planner/case_json.h"
#include "planner/predict.h"
#include "tensor/error.h"
#include "train/names.h"

namespace tessera::explore {
namespace {

using Json = nlohmann::ordered_json;

constexpr int64_t kMostTokens = 10'000'000;  // of a micro-batch
constexpr int64_t kMostPasses = 200'000;     // of a pipeline: stages times micro-batches
constexpr size_t kMostDrawn = 6000;          // actions
constexpr double kSpan = 1e6;                // of a step in the times of actions

Answer json_answer(const Json& json) {
  return {.body = json.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n"};
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

Json choices() {
  Json models = Json::object(), hardware = Json::object();
  for (const std::string& name : split(preset_names())) models[name] = to_json(shape_of_preset(name));
  for (const std::string& name : planner::hardware_names()) {
    const planner::Hardware h = planner::hardware_named(name);
    hardware[name] = {{"memory_bytes", h.memory_bytes}, {"ranks_per_node", h.ranks_per_node}};
  }
  return {{"model", models},
          {"hardware", hardware},
          {"software", planner::software_names()},
          {"schedule", kScheduleNames},
          {"recompute", kRecomputeNames}};
}

// What the planner would take long for.
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

// The passes of each rank, [what, stage, micro-batch, begin, end], on a clock that ends at kSpan; of a long pipeline
// those that begin before `shown`.
Json pipeline(const planner::Case& c, const planner::Prediction& p) {
  const Simulation s = simulate(schedule_of(c.layout.plan), {.stages = p.stages, .message = p.message_s});
  std::vector<double> starts;
  for (const auto& rank : s.actions)
    for (const TimedAction& a : rank) starts.push_back(a.start);
  std::ranges::sort(starts);
  const bool whole = starts.size() <= kMostDrawn;
  const double end = whole ? s.makespan : starts[kMostDrawn], clock = kSpan / std::max(end, 1e-300);
  Json ranks = Json::array();
  for (const auto& rank : s.actions) {
    Json row = Json::array();
    for (const TimedAction& a : rank)
      if (!a.action.is_message() && (whole || a.start < end))
        row.push_back({name_of(a.action.what), a.action.stage, a.action.microbatch, std::llround(a.start * clock),
                       std::llround(std::min(a.end, end) * clock)});
    ranks.push_back(row);
  }
  return {{"makespan_s", s.makespan},
          {"shown_s", end},
          {"bubble", s.bubble_share()},
          {"chunks", s.schedule.chunks()},
          {"actions", ranks}};
}

Json prediction(const Request& request) {
  const planner::Case given = case_of_query(request);
  check_size(given);
  const planner::Case c = planner::checked_case(given);
  const planner::Prediction p = planner::predict(c);
  Json out = planner::to_json(c, p);
  out["memory_bytes"] = c.hardware.memory_bytes - c.hardware.reserved_bytes;
  for (const planner::MemoryParts& m : p.memory) out["memory_of_stages"].push_back(planner::to_json(m));
  out["pipeline"] = pipeline(c, p);
  return out;
}

// One at a time, since it takes both processors for a while.
Answer search(const Request& request) {
  static std::timed_mutex one;
  const std::unique_lock lock(one, std::chrono::seconds(5));
  if (!lock) return refusal(503, "another search takes long; try again");
  std::string lines = plan_json_lines(answer_of_query(request));
  lines.pop_back();
  std::ranges::replace(lines, '\n', ',');
  return {.body = "[" + lines + "]\n"};
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
