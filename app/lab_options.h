// The words of the command `lab`.
#pragma once
#include <string>

namespace CLI {  // NOLINT(readability-identifier-naming): CLI11's
class App;
}

namespace tessera {

struct LabOptions {
  enum class Way { list, start, check, grade };
  Way way = Way::list;
  std::string exercise, folder;
};

void add_lab(CLI::App& app, LabOptions& options);
// What was asked for.
void choose_what(const CLI::App& command, LabOptions& options);

}  // namespace tessera
