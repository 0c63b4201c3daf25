// The filter and the list.
#include "bench/selection.h"

#include <fmt/format.h>

#include <optional>

#include "tensor/error.h"

namespace tessera::bench {
namespace {

std::regex expression_of(const std::string& filter) {
  try {
    return std::regex(filter.empty() || filter == "all" ? "." : filter, std::regex::extended);
  } catch (const std::regex_error& e) {
    throw Error(fmt::format("--benchmark_filter: expected a regular expression, found '{}' ({})", filter, e.what()));
  }
}

}  // namespace

Selection::Selection(const std::string& filter)
    : inverted_(filter.starts_with('-')), expression_(expression_of(inverted_ ? filter.substr(1) : filter)) {}

bool take_listing(std::vector<std::string>& words) {
  constexpr std::string_view kFlag = "--benchmark_list_tests";
  bool lists = false;
  std::erase_if(words, [&](const std::string& word) {
    if (!word.starts_with(kFlag)) return false;
    const std::string value = word.substr(kFlag.size());
    if (!value.empty() && value != "=true" && value != "=false")
      throw Error(fmt::format("{}: expected true or false, found '{}'", kFlag, value.substr(1)));
    lists = value != "=false";
    return true;
  });
  return lists;
}

}  // namespace tessera::bench
