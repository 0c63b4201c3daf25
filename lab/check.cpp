// Runs the build's commands with the learner's file in place of the original.
#include "lab/check.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <iostream>
#include <nlohmann/json.hpp>
#include <optional>
#include <regex>
#include <sstream>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "base/files.h"
#include "base/process.h"

namespace tessera::lab {

namespace {

namespace fs = std::filesystem;
using Args = std::vector<std::string>;

constexpr int kBuildSeconds = 60;  // limit; compilation takes less than 10 s on slow machines
constexpr int64_t kMaxBytes = int64_t{1} << 20;
constexpr size_t kShownLines = 30;

struct Compilation {
  fs::path directory, source;
  Args command;
};

// The directory with compile commands and libraries: build/release of build/release/bin/tessera, or the directory
// installed by a package (cmake/package_contents.cmake).
fs::path build_directory() {
  std::error_code none;
  const fs::path prefix = fs::read_symlink("/proc/self/exe", none).parent_path().parent_path();
  for (const fs::path& candidate : {prefix, prefix / "lib" / "tessera" / "lab"})
    if (fs::exists(candidate / "compile_commands.json", none) && fs::exists(candidate / "lab_link.txt", none))
      return candidate;
  throw Error(
      fmt::format("lab: exercises require the build files, which are missing in {}; use ./tessera in a clone of the "
                  "repository, or a program installed by a Tessera package",
                  prefix.string()));
}

// Splits a shell command as written by CMake (spaces, quotes, backslashes).
Args split_command(const std::string& command) {
  static const std::regex word(R"re((\\.|"(\\.|[^"\\])*"|[^ "\\])+)re"), mark(R"re(\\(.)|")re");
  Args out;
  for (std::sregex_iterator at(command.begin(), command.end(), word), end; at != end; ++at)
    out.push_back(std::regex_replace(at->str(), mark, "$1"));
  return out;
}

Compilation compile_command(const Exercise& e) {
  const fs::path list = build_directory() / "compile_commands.json";
  const auto commands = nlohmann::json::parse(read_file(list), nullptr, false);
  const std::string end = "/" + std::string(e.file);
  for (const auto& entry : commands) {
    if (!entry.is_object()) break;
    const fs::path directory = list.parent_path() / entry.value("directory", "");  // relative in a package
    const fs::path file = (directory / entry.value("file", "")).lexically_normal();
    if (file.string().ends_with(end)) return {directory, file, split_command(entry.value("command", ""))};
  }
  throw InputError(
      fmt::format("{}: no command for {}; expected a file written by a build with ./tessera", list.string(), e.file));
}

std::string files_read(const fs::path& object) { return fs::path(object).replace_extension(".d").string(); }

// Compiles quickly, without warnings about incomplete code.
Args learners(const Compilation& product, const fs::path& source, const fs::path& object) {
  Args out;
  for (size_t i = 0; i < product.command.size(); ++i) {
    const std::string& word = product.command[i];
    if (word == "-o" || word == "-c")
      ++i;
    else if (!word.starts_with("-O") && word != "-Werror")
      out.push_back(word);
  }
  out.insert(out.end(), {"-O1", "-fdiagnostics-color=never", "-Wno-unused", "-Wno-unused-parameter", "-MD", "-MF",
                         files_read(object), "-o", object.string(), "-c", source.string()});
  return out;
}

// `library` is a copy of the original library without the original object, so no missing function is taken from it.
Args link_with(const fs::path& build, const Exercise& e, const fs::path& object, const fs::path& library,
               const fs::path& program) {
  const std::string product = fmt::format("libtessera_{}.a", e.file.substr(0, e.file.find('/')));
  std::error_code none;
  fs::copy_file(build / product, library, fs::copy_options::overwrite_existing, none);
  const ProgramResult taken =
      run_program({"ar", "dv", library.string(), fs::path(e.file).filename().string() + ".o"}, build, kBuildSeconds);
  Args out;
  std::istringstream lines(read_file(build / "lab_link.txt"));
  for (std::string word; std::getline(lines, word);) {
    constexpr std::string_view placeholder = "@FOLDER@";  // in a package
    if (const size_t at = word.find(placeholder); at != word.npos) word.replace(at, placeholder.size(), build.string());
    out.push_back(word == product ? library.string() : word);
  }
  const auto output = std::ranges::find(out, "-o");
  if (taken.status != 0 || taken.output.find("d - ") == std::string::npos || out.end() - output < 2 ||
      std::ranges::find(out, library.string()) == out.end())
    throw Error(fmt::format("lab: cannot link {} without {}: {}", product, e.file, one_line(taken.output)));
  *(output + 1) = program.string();
  out.insert(output, object.string());
  return out;
}

std::string first_lines(const std::string& text) {
  std::istringstream in(text);
  std::string out;
  size_t count = 0;
  for (std::string line; std::getline(in, line); ++count)
    if (count < kShownLines) out += "  " + one_line(line) + "\n";
  return count > kShownLines ? out + fmt::format("  ... {} more lines\n", count - kShownLines) : out;
}

// "reduce_scatter" of "void reduce_scatter(const"
std::string plain_name(std::string_view function) {
  const std::string_view before = function.substr(0, function.find('('));
  return std::string(before.substr(before.find_last_of(' ') + 1));
}

// nullopt on success. Limits memory and file size of the compiler.
std::optional<Verdict> failed(const Exercise& e, const char* what, const Args& command, const fs::path& directory) {
  Args limited{"sh", "-c", "ulimit -v 8388608; ulimit -f 2097152; exec \"$@\"", "sh"};
  limited.insert(limited.end(), command.begin(), command.end());
  const ProgramResult built = run_program(limited, directory, kBuildSeconds);
  if (built.status == 0) return {};
  if (built.status == 124)
    return refused(e, {"time", fmt::format("the {} did not finish within {} s", what, kBuildSeconds), ""});
  if (built.status == 127)
    throw Error(fmt::format("lab: {}: {}; expected the compiler used by the build", command[0], built.last_line));
  static const std::regex undefined("undefined reference to `([^']*)'");
  if (std::smatch missing; std::regex_search(built.output, missing, undefined))
    return refused(e, {what, fmt::format("undefined function {}", missing[1].str()),
                       "your file must define it with its original name and parameters"});
  return refused(e, {what, fmt::format("the {} reported errors:", what), "",
                     first_lines(built.output.empty() ? built.last_line : built.output)});
}

// Rejects sources and local includes that are not regular files, because reading them may never end.
void check_readable(const fs::path& source) {
  static const std::regex include(R"(#[ \t]*include[ \t]*["<]([^">\n]+)[">])");
  const std::string text = read_full(source, kMaxBytes);
  for (std::sregex_iterator at(text.begin(), text.end(), include), end; at != end; ++at) {
    const fs::path file = source.parent_path() / at->str(1);
    std::error_code none;
    const bool is_there = fs::exists(fs::symlink_status(file, none));
    if (is_there && !fs::is_regular_file(file, none))
      throw InputError(fmt::format("{}: includes {}, which is not a regular file; expected a file",
                                   one_line(source.string()), one_line(at->str(1))));
  }
}

// Detects calls of functions that implement the exercise.
std::optional<Failure> call_with_file(const Exercise& e, const Compilation& product, const fs::path& object) {
  const std::string called = run_program({"nm", "-uC", object.string()}, product.directory, kBuildSeconds).output;
  for (const std::string_view name : e.without)
    if (called.find(fmt::format(" tessera::{}(", name)) != std::string::npos)
      return Failure{"copy", fmt::format("your file calls {}(), which implements the exercise", name),
                     "implement it yourself instead of calling it"};
  return {};
}

// Notes for the lecturer: compiled files whose bodies are identical to the original except for comments and whitespace.
// They do not affect the result, because short functions have few variants.
std::vector<std::string> notes_on_text(const Exercise& e, const Compilation& product, const fs::path& source,
                                       const fs::path& object) {
  const std::string text = read_file(product.source), list = read_file(files_read(object)),
                    root = product.source.string().substr(0, product.source.string().size() - e.file.size());
  std::vector<std::string> out;
  for (const std::string& file : split_command(std::regex_replace(list, std::regex("\\\\?\n"), " "))) {
    if (file.ends_with(':')) continue;  // the target
    std::error_code none;
    const std::string name = std::regex_replace(file, std::regex("\\$\\$"), "$");
    const fs::path path = fs::canonical(product.directory / name, none);
    if (path.string().starts_with("/usr/") && !path.string().starts_with(root)) continue;
    if (none || !is_plain_file(path)) {
      out.push_back(fmt::format("includes {}, which cannot be read", one_line(name)));
      continue;
    }
    const std::string read = without_blanks(read_file(path));
    std::vector<std::string> same;
    for (const Blank& blank : e.blanks) {
      const Part body = blanked_part(text, blank);
      if (read.find(without_blanks(std::string_view(text).substr(body.begin, body.end - body.begin))) != read.npos)
        same.push_back(plain_name(blank.function) + "()");
    }
    if (same.empty()) continue;
    const bool own = fs::equivalent(path, source, none);
    out.push_back(fmt::format("{} code that is identical to Tessera's up to comments and whitespace: {}",
                              own ? "contains" : "includes " + one_line(name) + ", which contains",
                              fmt::join(same, ", ")));
  }
  return out;
}

}  // namespace

void give_out(const Exercise& e, const fs::path& given) {
  const fs::path directory = fs::absolute(given).lexically_normal();
  const Compilation product = compile_command(e);
  std::error_code none;
  if (fs::exists(directory, none) && !(fs::is_directory(directory, none) && fs::is_empty(directory, none)))
    throw Error(fmt::format("lab start: {} is not empty; expected a new or empty directory", directory.string()));
  const fs::path source = directory / product.source.filename();
  const std::string from = product.source.string(), file = blanked_file(read_file(from), e);
  nlohmann::ordered_json commands = nlohmann::ordered_json::array();
  commands.push_back({{"directory", product.directory.string()},
                      {"file", source.string()},
                      {"arguments", learners(product, source, directory / "build" / "learner.o")}});
  make_directories(directory.parent_path());
  const TemporaryDirectory created(directory);
  write_file(created.path() / "compile_commands.json", commands.dump(1) + "\n");
  write_file(created.path() / "README.md", e.page);
  write_file(created.path() / source.filename(), file);
  const fs::path header = fs::path(from).replace_extension(".h");
  if (e.page.find(header.filename().string()) != std::string::npos)
    fs::copy_file(header, created.path() / header.filename());
  fs::rename(created.path(), directory, none);  // replaces an empty directory
  if (none) throw OutputError(fmt::format("{}: {}", directory.string(), none.message()));
}

Verdict check(const Exercise& e, const fs::path& given, int seconds) {
  const fs::path directory = fs::absolute(given).lexically_normal(), build = build_directory();
  const Compilation product = compile_command(e);
  const fs::path source = directory / product.source.filename(), made = directory / "build";
  std::error_code none;
  if (!is_there(source))
    throw InputError(
        fmt::format("{} is missing; `tessera lab start {} {}` creates it", source.string(), e.number, given.string()));
  check_readable(source);
  // Remove submitted links and outputs: they could redirect compiler output or hide included files.
  if (fs::is_symlink(made, none)) fs::remove(made, none);
  make_directories(made);
  const fs::path object = made / "learner.o", program = made / "tessera", output = made / "output.txt",
                 library = made / "library.a";
  for (const fs::path& path : {object, fs::path(files_read(object)), program, output, library}) fs::remove(path, none);
  if (auto verdict = failed(e, "compiler", learners(product, source, object), product.directory)) return *verdict;
  if (const auto wrong = call_with_file(e, product, object)) return refused(e, *wrong);
  const auto verdict_of_link = failed(e, "linker", link_with(build, e, object, library, program), build);
  fs::remove(library, none);
  if (verdict_of_link) return *verdict_of_link;
  Verdict verdict = grade_program(e, program, output, seconds);
  verdict.notes = notes_on_text(e, product, source, object);
  if (verdict.solved)
    verdict.score = {{"bytes_of_text", static_cast<double>(without_blanks(read_full(source, kMaxBytes)).size())}};
  for (const std::string& note : verdict.notes) verdict.text += fmt::format("  note   your file {}\n", note);
  if (verdict.solved)
    verdict.text +=
        fmt::format("  built  {}: Tessera with your code\n", one_line((given / "build" / "tessera").string()));
  if (const std::string printed = first_lines(read_file(output)); !printed.empty())
    verdict.text += "\n  your code printed:\n" + printed;
  return verdict;
}

std::map<std::string, std::vector<Submission>> handed_in(const fs::path& directory) {
  if (!names_directory(directory))
    throw InputError(directory.string() + " is not a directory; expected one with a subdirectory per learner");
  std::map<std::string, std::vector<Submission>> out;
  std::error_code none;
  for (fs::recursive_directory_iterator at(directory, fs::directory_options::skip_permission_denied, none), end;
       at != end; at.increment(none)) {
    if (at.depth() == 2) at.disable_recursion_pending();
    const std::string learner = one_line(at->path().lexically_relative(directory).begin()->string());
    if (at->is_directory(none)) out[learner];
    for (const Exercise& e : exercises())
      if (at.depth() > 0 && at->path().filename() == fs::path(e.file).filename())
        out[learner].push_back({&e, nullptr, at->path().parent_path()});
    if (at.depth() > 0 && at->is_regular_file(none) && at->path().filename() == kTaskFile)
      if (const Puzzle* const p = puzzle_in(at->path().parent_path()))
        out[learner].push_back({nullptr, p, at->path().parent_path()});
  }
  for (auto& [learner, all] : out) std::ranges::sort(all, {}, &Submission::directory);
  return out;
}

// Location of a function body, relying on clang-format: the definition starts a line, its body follows a line that ends
// with a brace, and the closing brace has the indentation of the definition.

namespace {

std::string_view line_indent(std::string_view source, size_t at) {
  const size_t begin = source.rfind('\n', at) + 1;
  return source.substr(begin, source.find_first_not_of(' ', begin) - begin);
}

}  // namespace

std::string without_blanks(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    const std::string_view rest = text.substr(i);
    const bool is_digit_mark = c == '\'' && i > 0 && std::isalnum(static_cast<unsigned char>(text[i - 1]));
    if (rest.starts_with("//") || rest.starts_with("/*")) {
      const std::string_view end = c == rest[1] ? "\n" : "*/";
      i = std::min(text.find(end, i + 2), text.size() - end.size()) + end.size() - 1;
    } else if ((c == '"' || c == '\'') && !is_digit_mark) {
      size_t end = i + 1;
      while (end < text.size() && text[end] != c && text[end] != '\n') end += text[end] == '\\' ? 2 : 1;
      out += text.substr(i, end + 1 - i);
      i = end;
    } else if (!std::isspace(static_cast<unsigned char>(c))) {
      out += c;
    }
  }
  return out;
}

Part blanked_part(std::string_view source, const Blank& blank) {
  constexpr size_t none = std::string_view::npos;
  std::vector<Part> found;
  for (size_t at = source.find(blank.function); at != none; at = source.find(blank.function, at + 1)) {
    const size_t line = source.rfind('\n', at) + 1, brace = source.find("{\n", at);
    const std::string_view indent = source.substr(line, at - line);
    const size_t end = source.find(fmt::format("\n{}}}", indent), brace);
    const bool is_declaration = source.find(';', at) < brace;
    if (end != none && !is_declaration && indent.find_first_not_of(' ') == none) found.push_back({brace + 2, end + 1});
  }
  if (found.size() != 1)
    throw Error(fmt::format("[lab] {} definitions that begin with '{}'; expected one", found.size(), blank.function));
  const Part body = found[0];
  if (blank.from.empty()) return body;
  for (size_t line = body.begin; line < body.end; line = source.find('\n', line) + 1)
    if (source.substr(source.find_first_not_of(' ', line)).starts_with(blank.from)) return {line, body.end};
  throw Error(fmt::format("[lab] no line of '{}' begins with '{}'", blank.function, blank.from));
}

std::string filled_file(std::string_view source, const Exercise& e, const std::vector<std::string>& bodies) {
  std::string out(source);
  for (size_t i = 0; i < e.blanks.size(); ++i) {
    const Part body = blanked_part(out, e.blanks[i]);
    out.replace(body.begin, body.end - body.begin, bodies.at(i));
  }
  return out;
}

std::string blanked_file(std::string_view source, const Exercise& e) {
  std::vector<std::string> bodies;
  for (const Blank& blank : e.blanks) {
    const Part body = blanked_part(source, blank);
    bodies.push_back(fmt::format("{0}// Your code here: see README.md.\n{0}lab::not_yet(\"{1}\");\n",
                                 line_indent(source, body.begin), plain_name(blank.function)));
  }
  std::string out = filled_file(source, e, bodies);
  const std::string include = "#include \"lab/not_yet.h\"  // only for the exercise; may be deleted\n";
  return out.insert(out.find("#include"), include);
}

}  // namespace tessera::lab
