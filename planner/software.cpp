// Software by name, from files and from JSON.
#include "planner/software.h"

#include <fmt/format.h>

#include <cmath>
#include <type_traits>

#include "planner/fields.h"
#include "tensor/error.h"

namespace tessera::planner {

const std::vector<std::string>& software_names() {
  static const std::vector<std::string> names = names_of(software_files());
  return names;
}

Software software_named(std::string_view name) {
  const File& file = file_named(software_files(), name, "software");
  Software s = software_from_file(file.text, std::string(name) + ".toml");
  s.name = name;
  return s;
}

Software software_from_file(std::string_view text, const std::string& path) {
  return software_from_json(json_of_file(text, path));
}

Software software_from_json(const nlohmann::json& object) {
  Software s{.name = "other"};
  if (const auto base = object.find("base"); base != object.end()) {
    std::string name;
    take("base", *base, name);
    s = software_named(name);
  }
  for (const auto& [key, value] : object.items()) {
    bool known = key == "base";
    for_each_field_of_software(s, [&, &key = key, &value = value](const char* name, auto& field) {
      if (key != name) return;
      take(name, value, field);
      known = true;
    });
    if (!known) throw FieldError(key, "no field of software");
  }
  check(s);
  return s;
}

void check(const Software& s) {
  for_each_field_of_software(s, [](const char* name, const auto& value) {
    if constexpr (std::is_same_v<std::decay_t<decltype(value)>, double>)
      if (!(value >= 0) || !std::isfinite(value))
        throw FieldError(name, fmt::format("expected a number from 0 on, found {}", value));
  });
}

}  // namespace tessera::planner
