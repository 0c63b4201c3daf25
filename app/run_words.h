// Options of a run on the command line of any command: as words, to be set when all of them are known.
#pragma once
#include <functional>
#include <span>
#include <string>
#include <string_view>

#include "app/options.h"
#include "tensor/findings.h"

namespace CLI {  // NOLINT(readability-identifier-naming): CLI11's
class App;
class Option;
}  // namespace CLI

namespace tessera {

// Adds those of the table that are wanted, each by its name. `defaults` are shown.
struct RunWords {
  const TrainOptions& defaults;
  std::function<bool(std::string_view name)> wanted;
  bool flags_take_values = false;                                   // --sp=false
  std::function<bool(std::string_view name)> without_default = {};  // its default is not a value
};
void add_run_words(CLI::App& command, Words& words, const RunWords& how);
// Those with these names.
void add_run_words(CLI::App& command, Words& words, std::span<const std::string_view> names);

// An option whose words go to `set`; what that refuses is added to `wrong`, so that the user hears of all of it.
struct Set {
  std::function<void(const std::string&)> set;
  Findings& wrong;
};
CLI::Option* add_words(CLI::App& command, const std::string& name, const std::string& help, const Set& set);

}  // namespace tessera
