// Settings as JSON: a struct there and back, what makes two runs the same, and the entries themselves.
#pragma once
#include <nlohmann/json.hpp>

#include "settings/setting.h"

namespace tessera {

// A value; null where there is none.
nlohmann::ordered_json json_of(const Setting& setting);
// Every field by its name; empty texts and values that are not there are left out.
nlohmann::ordered_json json_of(const Settings& all);
// Fields that are left out keep their values. `what` names the struct ("a plan"). Throws FieldError for an unknown key
// or a value of the wrong kind, Error for text that is no JSON object. Ranges are not checked.
void take_json(const Settings& all, std::string_view json, std::string_view what);
// The fields in which runs must agree, of those that apply; where a usual value is as good as none, the others.
nlohmann::json identity_of(const Settings& all, const Settings& usual);
// One entry: its name, group, kind, default, range, choices and help, in which `shown` writes the names of fields.
nlohmann::ordered_json entry_of(const Setting& setting, std::string (*shown)(const std::string& help));

}  // namespace tessera
