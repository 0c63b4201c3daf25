// The planner's web page and its server on 127.0.0.1, for a single local user. Paths:
//
//   /          the page
//   /choices   the selectable names and their sizes
//   /predict   ?model=llama3-8b&hardware=h100&dp=2&pp=4&...: prediction of a plan, as printed by `plan`, and figures
//   /search    ?model=llama3-8b&hardware=h100&ranks=8&batch=256: the best plans, as printed by `plan`, and a table
//
// The stateless server accepts GET and HEAD requests of at most 16 KiB without a body, closes connections that are idle
// for a few seconds, and cancels a search when its client disconnects. It rejects requests from other sites' pages and,
// against DNS rebinding, requests whose Host header does not name this server.
#pragma once
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "app/plan/plan.h"

namespace tessera::explore {

struct Request {
  std::string path;
  std::vector<std::pair<std::string, std::string>> query = {};  // decoded, in request order
  planner::ProgressCallback meanwhile = [] {};                  // called during a search; may throw
};

struct Answer {
  int status = 200;
  std::string type = "application/json";
  std::string body = {};
};

// {"error": message, "field": field}; an empty field is omitted.
Answer refusal(int status, const std::string& message, const std::string& field = "");

// Answers invalid cases with status 400 and {"error": .., "field": ..}; the caller answers exceptions with 500.
// Thread-safe; reads no files.
Answer answer(const Request& request);

// With inlined style and script, built from app/explore/page/.
extern const std::string_view kPage;

// Figure widths in pixels: across both columns, and in one column.
struct Widths {
  double wide = 1000, narrow = 480;
};
nlohmann::ordered_json render_prediction(const planner::Case& c, const planner::Prediction& p, const Widths& widths);
std::string render_ranking(const PlanAnswer& answer);

}  // namespace tessera::explore
