// CLI11 splits the words; values are checked by app/option_values.
#include "app/run_words.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <optional>

#include "app/option_table.h"

namespace tessera {
namespace {

std::string help_of(const OptionInfo& info, const std::string& value) {
  std::string text(info.help);
  if (!info.choices.empty()) text += fmt::format(": {}", info.choices);
  return value.empty() ? text : fmt::format("{} [{}]", text, value);
}

}  // namespace

void add_run_words(CLI::App& command, Words& words, const RunWords& how) {
  for_each_option(how.defaults, [&]<class T>(const OptionInfo& info, const T& field) {
    if (!how.wanted(info.name)) return;
    const std::string name(info.name), shown = "--" + name, group(info.group);
    constexpr bool flag = std::is_same_v<T, bool>;
    if (flag && !how.flags_take_values) {
      command
          .add_flag_callback(
              shown, [&words, name] { words.emplace_back(name, "true"); }, std::string(info.help))
          ->group(group);
    } else if constexpr (flag || std::is_same_v<T, std::optional<bool>>) {  // --untied, or --untied=false
      command
          .add_flag_function(
              shown, [&words, name](int64_t n) { words.emplace_back(name, n > 0 ? "true" : "false"); },
              std::string(info.help))
          ->check([](const std::string& text) {  // CLI11 lets stoll throw
            return text == "true" || text == "false" ? "" : fmt::format("expected true or false, found '{}'", text);
          })
          ->group(group);
    } else {
      std::string value;
      if constexpr (std::is_same_v<T, std::string>)
        value = field;
      else if constexpr (std::is_arithmetic_v<T>)
        value = fmt::format("{}", field);
      if (how.without_default && how.without_default(name)) value.clear();
      command
          .add_option_function<std::string>(
              shown, [&words, name](const std::string& text) { words.emplace_back(name, text); }, help_of(info, value))
          ->group(group)
          ->type_name("");
    }
  });
}

void add_run_words(CLI::App& command, Words& words, std::span<const std::string_view> names) {
  const TrainOptions usual;
  const auto is_one = [&](std::string_view name) { return std::ranges::find(names, name) != names.end(); };
  add_run_words(command, words,
                {.defaults = usual, .wanted = is_one, .without_default = [](std::string_view) { return true; }});
}

CLI::Option* add_words(CLI::App& command, const std::string& name, const std::string& help, const Set& how) {
  const auto set = [how](const std::string& text) { how.wrong.check([&] { how.set(text); }); };
  return command.add_option_function<std::string>(name, set, help)->type_name("");
}

}  // namespace tessera
