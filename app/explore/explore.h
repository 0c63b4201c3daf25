// The planner's web page and its server on 127.0.0.1, for a single local user. Paths:
//
//   /          the page
//   /choices   the selectable names and their sizes
//   /predict   ?model=llama3-8b&hardware=h100&dp=2&pp=4&...: prediction of a plan, as printed by `plan`, and figures
//   /search    ?model=llama3-8b&hardware=h100&ranks=8&batch=256: the best plans, as printed by `plan`, and a table
//
// The server accepts GET and HEAD requests of at most 16 KiB without a body and closes connections that are silent for
// a few seconds; a search is cancelled when its client disconnects. The Host header must name this server, which
// prevents DNS rebinding, and requests from pages of other sites are rejected. The server is stateless.
#pragma once
#include <nlohmann/json.hpp>

#include "app/plan/plan.h"

namespace tessera::explore {

struct Request {
  std::string path;
  std::vector<std::pair<std::string, std::string>> query = {};  // decoded, in the order of the request
  planner::ProgressCallback meanwhile = [] {};                  // called during a search; may throw
};

struct Answer {
  int status = 200;
  std::string type = "application/json";
  std::string body = {};
};

// {"error": message, "field": field}; an empty field is omitted.
Answer refusal(int status, const std::string& message, const std::string& field = "");

// Invalid cases are answered with status 400 and {"error": .., "field": ..}. Thread-safe; reads no files and has no
// state. The caller answers exceptions with status 500.
Answer answer(const Request& request);

// The HTML page with inlined style and script, built from app/explore/page/.
extern const std::string_view kPage;

// Width in pixels of a figure across both columns and of one in a single column.
struct Widths {
  double wide = 1000, narrow = 480;
};
nlohmann::ordered_json render_prediction(const planner::Case& c, const planner::Prediction& p, const Widths& widths);
std::string render_ranking(const PlanAnswer& answer);

}  // namespace tessera::explore
