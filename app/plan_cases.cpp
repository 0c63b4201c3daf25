// `plan --cases`: one prediction for each line of a file, in order.
#include "app/plan_cases.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string_view>

#include "app/option_values.h"
#include "app/output.h"
#include "data/files.h"
#include "planner/case_json.h"

namespace tessera {
namespace {

// The user knows a field by its key.
std::string without_backticks(std::string text) {
  std::erase(text, '`');
  return text;
}

}  // namespace

int predict_cases(const std::string& path) {
  const std::string file = of_option("cases", path, [&] { return read_file(path); });
  std::string_view rest = file;
  for (int64_t number = 1; !rest.empty(); ++number) {
    const std::string_view line = rest.substr(0, rest.find('\n'));
    rest.remove_prefix(std::min(line.size() + 1, rest.size()));
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    const std::string where = fmt::format("{}:{}", path, number);
    std::string out;
    try {
      const planner::Case c = planner::case_from_json(line, where);
      out = to_json(c, planner::predict(c)).dump() + "\n";
    } catch (const InputError&) {
      throw;  // says where
    } catch (const Error& e) {
      throw Error(fmt::format("{}: {}", where, without_backticks(e.what())), e.status());
    }
    if (!print(out)) return 0;
  }
  return 0;
}

}  // namespace tessera
