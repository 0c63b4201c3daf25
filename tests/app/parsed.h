// Command lines, parsed by the program's own parser.
#pragma once
#include <iomanip>
#include <sstream>
#include <string>
#include <vector>

#include "app/command_line.h"
#include "tests/support/errors.h"

namespace tessera::test {

// The arguments of a line; single-quoted arguments may contain spaces or be empty.
inline std::vector<std::string> split(const std::string& line) {
  std::istringstream in(line);
  std::vector<std::string> out;
  for (std::string word; in >> std::quoted(word, '\'');) out.push_back(word);
  return out;
}

inline Command parsed(const std::string& line) {
  const std::vector<std::string> args = split("tessera " + line);
  std::vector<const char*> argv;
  for (const std::string& word : args) argv.push_back(word.c_str());
  return parse_command_line(static_cast<int>(argv.size()), argv.data());
}
inline TrainCommand parsed_command(const std::string& line) { return std::get<TrainCommand>(parsed("train " + line)); }
inline TrainConfig parsed_train(const std::string& line) { return parsed_command(line).config; }
// The keys and values of config.toml.
inline Args written_values(const std::string& line) {
  const TrainCommand command = parsed_command(line);
  return config_values(command.config, &command.set);
}

}  // namespace tessera::test
