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

[[noreturn]] inline void throw_with_options(const Error& error) {
  std::vector<std::string> messages = error_messages(error);
  for (std::string& message : messages) message = with_options(message);
  if (messages.size() == 1 && error.status() == Status::input) throw InputError(messages.front());
  if (messages.size() == 1) throw Error(messages.front(), error.status());
  throw Errors(messages, error.status());
}

// Errors name options, as in the program's output.
inline Command parsed(const std::string& line) {
  const std::vector<std::string> args = split("tessera " + line);
  std::vector<const char*> argv;
  for (const std::string& word : args) argv.push_back(word.c_str());
  try {
    return parse_command_line(static_cast<int>(argv.size()), argv.data());
  } catch (const Error& e) {
    throw_with_options(e);
  }
}
inline TrainCommand parsed_command(const std::string& line) { return std::get<TrainCommand>(parsed("train " + line)); }
inline TrainConfig parsed_train(const std::string& line) { return parsed_command(line).config; }
// The keys and values of config.toml.
inline Args written_values(const std::string& line) {
  const TrainCommand command = parsed_command(line);
  return config_values(command.config, &command.set);
}

}  // namespace tessera::test
