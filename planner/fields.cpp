// Fields from JSON and from files, and the files that the program carries.
#include "planner/fields.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "data/config_file.h"
#include "data/json.h"
#include "tensor/error.h"

namespace tessera::planner {

void take(const char* name, const nlohmann::json& from, int64_t& to) {
  const auto found = natural(from);
  if (!found) throw FieldError(name, "expected a whole number from 0 on, found " + from.dump());
  to = *found;
}
void take(const char* name, const nlohmann::json& from, double& to) {
  if (!from.is_number()) throw FieldError(name, "expected a number, found " + from.dump());
  to = from.get<double>();
}
void take(const char* name, const nlohmann::json& from, bool& to) {
  if (!from.is_boolean()) throw FieldError(name, "expected true or false, found " + from.dump());
  to = from.get<bool>();
}
void take(const char* name, const nlohmann::json& from, std::string& to) {
  if (!from.is_string()) throw FieldError(name, "expected a string, found " + from.dump());
  to = from.get<std::string>();
}
void take(const char* name, const nlohmann::json& from, TensorOverlap& to) {
  const auto found = value_named<TensorOverlap>(kTensorOverlapNames, from.is_string() ? from.get<std::string>() : "");
  if (!found)
    throw FieldError(name, fmt::format("expected {}, found {}", fmt::join(kTensorOverlapNames, ", "), from.dump()));
  to = *found;
}

nlohmann::json json_of_file(std::string_view text, const std::string& path) {
  nlohmann::json out = nlohmann::json::object();
  for (const ConfigEntry& e : read_config(text, path))
    out[e.key] = e.text ? nlohmann::json(*e.text) : parse_json(e.value, e.where);
  return out;
}

std::vector<std::string> names_of(const std::vector<File>& files) {
  std::vector<std::string> out;
  for (const File& f : files) out.emplace_back(f.name);
  return out;
}

const File& file_named(const std::vector<File>& files, std::string_view name, const std::string& field) {
  const auto found = std::ranges::find(files, name, &File::name);
  if (found == files.end())
    throw FieldError(field, fmt::format("expected {} or a file, found {}{}", fmt::join(names_of(files), ", "), name,
                                        did_you_mean(name, names_of(files))));
  return *found;
}

}  // namespace tessera::planner
