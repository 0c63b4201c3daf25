// The page of the planner: a web server for one user of this machine, on 127.0.0.1, for its own page alone, and answers
// to the page's questions:
//
//   /          the page
//   /choices   the names that can be chosen, and what stands behind them
//   /predict   ?model=llama3-8b&hardware=h100&dp=2&pp=4&...: one plan, as `plan` prints it, and drawn
//   /search    ?model=llama3-8b&hardware=h100&ranks=8&batch=256: the best plans, as `plan` prints them, and as a table
//
// The server reads requests of at most 16 KiB without a body, GET and HEAD only, and takes a few seconds for each
// connection; a search ends when who asked for it has hung up. A request must name this server as its host, so that no
// other site's name can be pointed at it (DNS rebinding), and what a page of another site asks for is refused. It keeps
// nothing between requests.
#pragma once
#include <nlohmann/json.hpp>

#include "app/plan/plan.h"

namespace tessera::explore {

struct Request {
  std::string path;
  std::vector<std::pair<std::string, std::string>> query = {};  // decoded, in the order in which they came
  planner::ProgressCallback meanwhile = [] {};                  // called while a search goes on; may throw
};

struct Answer {
  int status = 200;
  std::string type = "application/json";
  std::string body = {};
};

// {"error": message, "field": field}; without a field where that is empty.
Answer refusal(int status, const std::string& message, const std::string& field = "");

// A case that cannot be is answered with status 400 and {"error": .., "field": ..}. Reads no files and keeps nothing.
// Runs on several threads at once. What it throws becomes an answer with status 500.
Answer answer(const Request& request);

// The page: HTML with its style and script inside, made of the files in app/explore/page/.
extern const std::string_view kPage;

// How many pixels the page has for a picture across both columns, and for one in a column.
struct Widths {
  double wide = 1000, narrow = 480;
};
// The verdict, and of each picture the sentence and the SVG.
nlohmann::ordered_json drawn_prediction(const planner::Case& c, const planner::Prediction& p, const Widths& widths);
// The best plans, those that nearly fit, and the recommendation.
std::string drawn_ranking(const PlanAnswer& answer);

}  // namespace tessera::explore
