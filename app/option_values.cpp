// Reading, checking and writing the values of options.
#include "app/option_values.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <type_traits>
#include <utility>

#include "data/config_file.h"
#include "data/files.h"
#include "data/utf8.h"
#include "tensor/error.h"
#include "tensor/findings.h"

namespace tessera {
namespace {

// `above`: the number is larger than any can be, so that the upper bound is to be said even where it is that of all.
std::string range_of(const OptionInfo& info, bool above = false) {
  const bool low = info.least > -1e300, high = info.most < 1e300 || above;
  if (low && high) return fmt::format(" in [{}, {}{}", info.least, info.most, info.most_excluded ? ")" : "]");
  return low ? fmt::format(" of at least {}", info.least) : "";
}

bool in_range(double v, const OptionInfo& info) {
  return v >= info.least && (info.most_excluded ? v < info.most : v <= info.most);
}

[[noreturn]] void wrong(const std::string& where, std::string_view expected, std::string_view found) {
  throw Error(fmt::format("{}: expected {}, found '{}'", where, expected, found));
}

std::vector<std::string> split_choices(std::string_view choices) {
  std::vector<std::string> out;
  for (size_t at = 0; at <= choices.size();) {
    const size_t bar = std::min(choices.find('|', at), choices.size());
    out.emplace_back(choices.substr(at, bar - at));
    at = bar + 1;
  }
  return out;
}

void check_text(const std::string& where, const OptionInfo& info, const std::string& value) {
  if (info.choices.empty()) {
    if (value.empty()) wrong(where, "a value", value);
    if (find_invalid_utf8(value) != std::string_view::npos) wrong(where, "UTF-8", value);
    return;
  }
  const std::vector<std::string> allowed = split_choices(info.choices);
  if (std::ranges::find(allowed, value) == allowed.end())
    throw Error(fmt::format("{}: expected {}, found '{}'{}", where, fmt::join(allowed, ", "), value,
                            did_you_mean(value, allowed)));
}

template <class T>
T to_integer(const std::string& where, const OptionInfo& info, const std::string& text) {
  T v{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), v);
  const bool whole = error == std::errc() && end == text.data() + text.size();
  if (!whole || !in_range(static_cast<double>(v), info)) wrong(where, "a whole number" + range_of(info), text);
  return v;
}

double to_double(const std::string& where, const OptionInfo& info, const std::string& text) {
  double v = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), v);
  const bool whole = error == std::errc() && end == text.data() + text.size();
  if (!whole || !std::isfinite(v) || !in_range(v, info))
    wrong(where, "a number" + range_of(info, v > info.most || error == std::errc::result_out_of_range), text);
  return v;
}

void assign(std::string& field, const OptionInfo& info, const std::string& where, const std::string& text) {
  check_text(where, info, text);
  field = text;
}
void assign(int64_t& field, const OptionInfo& info, const std::string& where, const std::string& text) {
  field = to_integer<int64_t>(where, info, text);
}
void assign(double& field, const OptionInfo& info, const std::string& where, const std::string& text) {
  field = to_double(where, info, text);
}
void assign(bool& field, const OptionInfo&, const std::string& where, const std::string& text) {
  if (text != "true" && text != "false") wrong(where, "true or false", text);
  field = text == "true";
}
template <class T>
void assign(std::optional<T>& field, const OptionInfo& info, const std::string& where, const std::string& text) {
  T value{};
  assign(value, info, where, text);
  field = std::move(value);
}

std::string show(const std::string& v) {
  std::string out = "\"";
  for (const char c : v) {
    if (c == '"' || c == '\\') out += '\\';
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f)
      out += fmt::format("\\u{:04X}", static_cast<unsigned char>(c));
    else
      out += c;
  }
  return out + "\"";
}
std::string show(int64_t v) { return std::to_string(v); }
std::string show(double v) {
  const std::string s = fmt::format("{}", v);
  return s.find_first_of(".e") == std::string::npos ? s + ".0" : s;
}
std::string show(bool v) { return v ? "true" : "false"; }
template <class T>
std::string show(const std::optional<T>& v) {
  return v ? show(*v) : "";
}

}  // namespace

std::string with_options(const std::string& message) {
  std::vector<std::string> known{"hardware", "software", "defect"};  // of plan and verify
  for_each_option(TrainOptions{}, [&](const OptionInfo& info, const auto&) { known.emplace_back(info.name); });
  std::string out;
  size_t at = 0;
  for (size_t open; (open = message.find('`', at)) != std::string::npos;) {
    const size_t close = message.find('`', open + 1);
    if (close == std::string::npos) break;
    std::string name = message.substr(open + 1, close - open - 1);
    std::ranges::replace(name, '_', '-');
    const bool ours = std::ranges::find(known, name) != known.end();
    out += message.substr(at, open - at) + (ours ? "--" + name : "`");
    at = ours ? close + 1 : open + 1;
  }
  return out + message.substr(at);
}

void throw_with_options(const Error& error) {
  std::vector<std::string> messages = messages_of(error);
  for (std::string& message : messages) message = with_options(message);
  if (messages.size() == 1) throw Error(messages.front(), error.status());
  throw Errors(messages, error.status());
}

void throw_of_option(std::string_view option, const std::string& path, const InputError& error) {
  const std::string words = with_options(error.what());
  if (path.empty() || words.starts_with("--") || words.find(one_line(path)) == std::string::npos)
    throw InputError(words);
  throw InputError(fmt::format("--{}: {}", option, words));
}

int64_t parse_integer(const std::string& shown, const std::string& text, double least, double most) {
  return to_integer<int64_t>(shown, OptionInfo{"", "", "", "", least, most}, text);
}
double parse_number(const std::string& shown, const std::string& text, const OptionInfo& info) {
  return to_double(shown, info, text);
}
std::string parse_choice(const std::string& shown, const std::string& text, std::string_view choices) {
  check_text(shown, OptionInfo{"", "", "", choices}, text);
  return text;
}

void set_option(TrainOptions& options, std::string_view name, const std::string& text) {
  for_each_option(options, [&](const OptionInfo& info, auto& field) {
    if (info.name == name) assign(field, info, fmt::format("--{}", name), text);
  });
}

void apply_config_file(TrainOptions& options, const std::string& path) { apply_config(options, read_file(path), path); }

void apply_config(TrainOptions& options, std::string_view file, const std::string& path) {
  std::vector<std::string> known;
  for_each_option(options, [&](const OptionInfo& info, auto&) {
    if (info.in_file) known.emplace_back(info.name);
  });
  Findings found;
  for (const ConfigEntry& entry : read_config(file, path))
    found.check([&] {
      const std::string where = fmt::format("{}: {}", entry.where, entry.key);
      if (std::ranges::find(known, entry.key) == known.end())
        throw Error(fmt::format("{}: unknown key{}", where, did_you_mean(entry.key, known)));
      for_each_option(options, [&](const OptionInfo& info, auto& field) {
        if (info.name != entry.key) return;
        constexpr bool wants_text = std::is_convertible_v<std::string, std::remove_reference_t<decltype(field)>>;
        if (wants_text && !entry.text) wrong(where, "a string", entry.value);
        assign(field, info, where, wants_text ? *entry.text : entry.value);
      });
    });
  found.raise();
}

namespace {

template <class Chosen>
std::vector<std::pair<std::string, std::string>> values(const TrainOptions& options, const Chosen& chosen) {
  std::vector<std::pair<std::string, std::string>> out;
  for_each_option(options, [&](const OptionInfo& info, const auto& field) {
    if (std::string value = show(field); chosen(info) && !value.empty()) out.emplace_back(info.name, std::move(value));
  });
  return out;
}

}  // namespace

std::vector<std::pair<std::string, std::string>> config_values(const TrainOptions& options) {
  return values(options, [](const OptionInfo& info) { return info.in_file; });
}

std::vector<std::pair<std::string, std::string>> all_values(const TrainOptions& options) {
  return values(options, [](const OptionInfo& info) {
    return info.name != "format" && info.name != "quiet" && info.name != "config";
  });
}

std::string to_toml(const TrainOptions& options) {
  std::string out;
  for (const auto& [key, value] : config_values(options)) out += fmt::format("{} = {}\n", key, value);
  return out;
}

}  // namespace tessera
