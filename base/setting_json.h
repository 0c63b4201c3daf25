// Settings as JSON: conversion of structs, run identities, and descriptors.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "base/setting.h"

namespace tessera {

// Null if there is no value.
nlohmann::ordered_json to_json(const Setting& setting);
// All fields by name, without empty strings and missing values.
nlohmann::ordered_json to_json(const Settings& all);
// Sets fields from JSON; omitted fields are unchanged. `what` names the struct ("a plan"). Throws FieldError for
// unknown keys, values of the wrong type, and omitted fields without a valid default; Error unless `json` is a JSON
// object. Ranges are not checked, except for the sign.
void take_json(const Settings& all, std::string_view json, std::string_view what);
// As take_json(), for a nested object: messages name its fields "path.name".
void take_object(const Settings& all, const nlohmann::json& object, const std::string& path,
                 const std::string& unknown = "unknown key");
// `name` names the field in messages.
void take_value(const Setting& setting, const nlohmann::json& value, const std::string& name);
// Throws FieldError for an unknown key: "path.key: unknown key; expected one of ...".
void check_keys(const nlohmann::json& object, const std::string& path, const std::vector<std::string>& known,
                const std::string& unknown = "unknown key");
// The fields of a run's identity, or of its record.
nlohmann::json identity_fields(const Settings& all, const Settings& defaults, IdentityRole Field::*role = &Field::same);
// A descriptor: name, group, kind, default, range, choices and help; `shown` converts field names in the help.
nlohmann::ordered_json make_entry(const Setting& setting, std::string (*shown)(const std::string& help));

}  // namespace tessera
