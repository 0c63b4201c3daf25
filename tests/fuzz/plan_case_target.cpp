// One line of `plan --cases`: a model, a plan, hardware and software. The plan of an accepted line can be printed.
#include <nlohmann/json.hpp>
#include <string_view>

#include "planner/case_json.h"
#include "tests/fuzz/target.h"

namespace tessera::fuzz {
const Target target("plan_case", [](std::string_view bytes) {
  named<FieldError>([&] {  // names the field; the caller adds the line
    const planner::Case c = planner::case_from_json(bytes, kWhat);
    require(planner::to_json(c.layout).contains("schedule"), "an accepted plan can be printed");
  });
});

}  // namespace tessera::fuzz
