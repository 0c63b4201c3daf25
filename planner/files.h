// The descriptions that the program carries with it: planner/hardware/*.toml and planner/software/*.toml, as they are
// there.
#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace tessera::planner {

struct File {
  std::string_view name, text;  // the name without .toml
};
// In the order of names.
const std::vector<File>& hardware_files();
const std::vector<File>& software_files();

std::vector<std::string> names_of(const std::vector<File>& files);
// Throws FieldError of `field` that lists the names.
const File& file_named(const std::vector<File>& files, std::string_view name, const std::string& field);

}  // namespace tessera::planner
