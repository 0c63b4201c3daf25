// The page's questions, answered by the planner:
//
//   /          the page
//   /choices   the names that can be chosen, and what stands behind them
//   /predict   ?model=llama3-8b&hardware=h100&dp=2&pp=4&...: one plan, as `plan` prints it, and drawn
//   /search    ?model=llama3-8b&hardware=h100&ranks=8&batch=256: the best plans, as `plan` prints them, and as a table
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "app/explore/server.h"
#include "app/plan/text.h"
#include "planner/predict.h"

namespace tessera::explore {

// A case that cannot be is answered with status 400 and {"error": .., "field": ..}. Reads no files and keeps nothing.
Answer answer(const Request& request);

// The page: HTML with its style and script inside, made of the files in app/explore/page/.
extern const std::string_view kPage;

// "85.5 GB": three digits.
std::string bytes_words(double bytes);

// How many pixels the page has for a picture across both columns, and for one in a column.
struct Widths {
  double wide = 1000, narrow = 480;
};
// The verdict, and of each picture the sentence and the SVG.
nlohmann::ordered_json drawn_prediction(const planner::Case& c, const planner::Prediction& p, const Widths& widths);
// The best plans, those that nearly fit, and the recommendation.
std::string drawn_ranking(const PlanAnswer& answer);

}  // namespace tessera::explore
