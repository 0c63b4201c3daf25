// Two runs beside each other. Either may have no trace, and they may have made different numbers of steps: what both
// have is compared, and what one lacks is said.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "app/report/record.h"

namespace tessera::report {

enum class Unit : uint8_t { ms, share, bytes, rate, loss };
struct ComparedRow {
  std::string name;
  Unit unit = Unit::ms;
  std::optional<double> a = {}, b = {};  // nothing: not known
};
struct ComparedPart {
  std::string name;
  std::vector<ComparedRow> rows;
};
struct Comparison {
  std::vector<ComparedPart> parts;
  std::vector<std::string> notes;  // what is missing, and what to be careful with
};
Comparison compare(const Record& a, const Record& b);

std::string comparison_text(const Record& a, const Record& b);
std::string comparison_page(const Record& a, const Record& b);

}  // namespace tessera::report
