// Values of options: from text, from and to a configuration file.
#pragma once
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "app/option_table.h"
#include "tensor/error.h"

namespace tessera {

// Sets the option of that name ("min-lr") from the words of the command line. Throws Error (usage) that names the
// option, what is expected and what was found.
void set_option(TrainOptions& options, std::string_view name, const std::string& text);
// Parses one value of a field by itself, for the other commands; `shown` is the option as the user typed it.
int64_t parse_integer(const std::string& shown, const std::string& text, double least, double most);
double parse_number(const std::string& shown, const std::string& text, const OptionInfo& info);
std::string parse_choice(const std::string& shown, const std::string& text, std::string_view choices);

// Applies a TOML file. Throws InputError when it cannot be read, and what apply_config() throws.
void apply_config_file(TrainOptions& options, const std::string& path);
// Applies the text of one that `path` names in messages (read_config() says what may stand there). Throws Error (usage)
// with line and column for a syntax error, an unknown key (with the nearest known one) or a value of the wrong type or
// range.
void apply_config(TrainOptions& options, std::string_view file, const std::string& path);
// The options as a TOML file that apply_config_file() reads back to the same values.
std::string to_toml(const TrainOptions& options);
// Keys and values of to_toml() one by one; options that were not given are left out.
std::vector<std::pair<std::string, std::string>> config_values(const TrainOptions& options);

// The same of all options but those about what is said to the user, and of --config, which is one of the files that the
// others come from.
std::vector<std::pair<std::string, std::string>> all_values(const TrainOptions& options);

// A message of a library, which names fields between backticks, as the user knows them: "`grad_dtype`: expected ..."
// becomes "--grad-dtype: expected ...". What is no option's name stays as it is.
std::string with_options(const std::string& message);

// The same of all messages of an error, which is being handled.
[[noreturn]] void throw_with_options(const Error& error);

// That error again, with the option before it where it is about `path` and names none.
[[noreturn]] void throw_of_option(std::string_view option, const std::string& path, const InputError& error);
// What f returns. Its InputError about `path`, a file that cannot be read or used, begins with the option that named
// it.
template <class F>
auto of_option(std::string_view option, const std::string& path, const F& f) {
  try {
    return f();
  } catch (const InputError& e) {
    throw_of_option(option, path, e);
  }
}

}  // namespace tessera
