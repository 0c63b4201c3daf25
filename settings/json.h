// Settings as JSON: a struct there and back, what makes two runs the same, and the entries themselves.
#pragma once
#include <nlohmann/json.hpp>

#include "settings/setting.h"

namespace tessera {

// A value; null where there is none.
nlohmann::ordered_json to_json(const Setting& setting);
// Every field by its name; empty texts and values that are not there are left out.
nlohmann::ordered_json to_json(const Settings& all);
// Fields that are left out keep their values. `what` names the struct ("a plan"). Throws FieldError for an unknown key,
// for a value of the wrong kind, and where a field without a usual value in its range is left out; Error for text that
// is no JSON object. Ranges are not checked but for numbers below 0.
void take_json(const Settings& all, std::string_view json, std::string_view what);
// The same of an object that stands in another: messages name its fields "path.name".
void take_object(const Settings& all, const nlohmann::json& object, const std::string& path,
                 const std::string& unknown = "unknown key");
// One value; messages call the field `name`.
void take_value(const Setting& setting, const nlohmann::json& value, const std::string& name);
// Throws FieldError for a key that is none of the known ones: "path.key: unknown key; expected one of ...".
void check_keys(const nlohmann::json& object, const std::string& path, const std::vector<std::string>& known,
                const std::string& unknown = "unknown key");
// The fields that the identity of a run says, or its record.
nlohmann::json identity_fields(const Settings& all, const Settings& usual, IdentityRole Field::*which = &Field::same);
// One entry: its name, group, kind, default, range, choices and help, in which `shown` writes the names of fields.
nlohmann::ordered_json make_entry(const Setting& setting, std::string (*shown)(const std::string& help));

}  // namespace tessera
