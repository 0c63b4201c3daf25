// The build's own commands, with the learner's file in the place of the product's.
#include "lab/check.h"

#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <regex>
#include <sstream>

#include "data/files.h"
#include "data/process.h"
#include "tensor/error.h"

namespace tessera::lab {

namespace {

namespace fs = std::filesystem;
using Words = std::vector<std::string>;

constexpr int kBuildSeconds = 600, kGradeSeconds = 30;  // graders take less than one
constexpr uint64_t kMemory = uint64_t{2} << 30;         // beyond what the program has when it begins
constexpr size_t kShownLines = 30;

// How the build compiles one file of the product.
struct Compilation {
  fs::path directory, source;
  Words command;
};

// The folder of the build that this program was made in: build/release of build/release/bin/tessera.
fs::path build_folder() {
  std::error_code none;
  const fs::path folder = fs::read_symlink("/proc/self/exe", none).parent_path().parent_path();
  for (const char* needed : {"compile_commands.json", "lab_link.txt"})
    if (!fs::exists(folder / needed, none))
      throw Error(
          fmt::format("lab: {} is no build folder of a checkout (it has no {}); expected this program to be "
                      "started as ./tessera in a clone of the repository",
                      folder.string(), needed));
  return folder;
}

// The words of a command for a shell, as CMake writes it: blanks between them, quotes and backslashes.
Words words_of(const std::string& command) {
  static const std::regex word(R"re((\\.|"(\\.|[^"\\])*"|[^ "\\])+)re"), mark(R"re(\\(.)|")re");
  Words out;
  for (std::sregex_iterator at(command.begin(), command.end(), word), end; at != end; ++at)
    out.push_back(std::regex_replace(at->str(), mark, "$1"));
  return out;
}

Compilation compilation_of(const Exercise& e) {
  const fs::path list = build_folder() / "compile_commands.json";
  const auto commands = nlohmann::json::parse(read_file(list), nullptr, false);
  const std::string end = "/" + std::string(e.file);
  for (const auto& entry : commands) {
    if (!entry.is_object()) break;
    const std::string file = entry.value("file", "");
    if (!file.ends_with(end)) continue;
    return {entry.value("directory", ""), file, words_of(entry.value("command", ""))};
  }
  throw InputError(
      fmt::format("{}: no command for {}; expected the file of a build by ./tessera", list.string(), e.file));
}

// The same for a learner's file: quickly, and with warnings that say something of a file that is half written.
Words learners(const Compilation& product, const fs::path& source, const fs::path& object) {
  Words out;
  for (size_t i = 0; i < product.command.size(); ++i) {
    const std::string& word = product.command[i];
    if (word == "-o" || word == "-c")
      ++i;
    else if (!word.starts_with("-O") && word != "-Werror")
      out.push_back(word);
  }
  out.insert(out.end(), {"-O1", "-fdiagnostics-color=never", "-Wno-unused", "-Wno-unused-parameter", "-o",
                         object.string(), "-c", source.string()});
  return out;
}

// The link of this program, with one more object, before the libraries: it has all that the product's own object has,
// which is why nobody takes that one out of its library.
Words link_with(const fs::path& build, const fs::path& object, const fs::path& program) {
  Words out;
  std::istringstream lines(read_file(build / "lab_link.txt"));
  for (std::string word; std::getline(lines, word);) out.push_back(word);
  const auto output = std::ranges::find(out, "-o");
  if (out.end() - output < 2) throw InputError((build / "lab_link.txt").string() + ": the link command has no -o");
  *(output + 1) = program.string();
  out.insert(output, object.string());
  return out;
}

std::string first_lines(const std::string& text) {
  std::istringstream in(text);
  std::string out;
  size_t count = 0;
  for (std::string line; std::getline(in, line); ++count)
    if (count < kShownLines) out += "  " + line + "\n";
  return count > kShownLines ? out + fmt::format("  ... {} lines more\n", count - kShownLines) : out;
}

// Nothing where it was built.
std::optional<Verdict> failed(const Exercise& e, const char* what, const Words& command, const fs::path& directory) {
  const ProgramResult built = run_program(command, directory, kBuildSeconds);
  if (built.status == 0) return {};
  if (built.status == 127)
    throw Error(fmt::format("lab: {}: {}; expected the compiler of the build", command[0], built.last_line));
  return refused(e, {what, fmt::format("the {} found errors and stopped:", what), "", first_lines(built.output)});
}

}  // namespace

void limit_memory() {
  std::ifstream sizes("/proc/self/statm");  // in pages; the sixth is what RLIMIT_DATA limits
  uint64_t now = 0;
  for (int i = 0; i < 6; ++i) sizes >> now;
  rlimit limit{};
  if (!sizes || ::getrlimit(RLIMIT_DATA, &limit) != 0) return;
  limit.rlim_cur = std::min<rlim_t>(limit.rlim_max, now * static_cast<uint64_t>(::sysconf(_SC_PAGESIZE)) + kMemory);
  ::setrlimit(RLIMIT_DATA, &limit);
}

void give_out(const Exercise& e, const fs::path& given) {
  const fs::path folder = fs::absolute(given).lexically_normal();
  const Compilation product = compilation_of(e);
  std::error_code none;
  if (fs::exists(folder, none) && !(fs::is_directory(folder, none) && fs::is_empty(folder, none)))
    throw Error(
        fmt::format("lab start: {} has something in it; expected a folder that is new or empty", folder.string()));
  const fs::path source = folder / product.source.filename();
  const std::string from = product.source.string(), root = from.substr(0, from.size() - e.file.size());
  const std::string file = blanked_file(read_file(from), e),
                    page = read_file(fmt::format("{}lab/pages/{}.md", root, e.name));
  nlohmann::ordered_json commands = nlohmann::ordered_json::array();
  commands.push_back({{"directory", product.directory.string()},
                      {"file", source.string()},
                      {"arguments", learners(product, source, folder / "build" / "learner.o")}});
  make_directories(folder.parent_path());
  const TemporaryDirectory whole(folder);
  write_file(whole.path() / "compile_commands.json", commands.dump(1) + "\n");
  write_file(whole.path() / "README.md", page);
  write_file(whole.path() / source.filename(), file);
  fs::rename(whole.path(), folder, none);  // takes the place of an empty folder
  if (none) throw OutputError(fmt::format("{}: {}", folder.string(), none.message()));
}

Verdict check(const Exercise& e, const fs::path& given) {
  const fs::path folder = fs::absolute(given).lexically_normal(), build = build_folder();
  const Compilation product = compilation_of(e);
  const fs::path source = folder / product.source.filename(), made = folder / "build";
  std::error_code none;
  if (!fs::exists(source, none))
    throw InputError(fmt::format("{} is missing; `tessera lab start {} {}` gives it out", source.string(), e.number,
                                 given.string()));
  make_directories(made);
  const fs::path object = made / "learner.o", program = made / "tessera";
  if (auto verdict = failed(e, "compiler", learners(product, source, object), product.directory)) return *verdict;
  if (auto verdict = failed(e, "linker", link_with(build, object, program), build)) return *verdict;
  const ProgramResult graded =
      run_program({program.string(), "lab", "grade", std::string(e.name)}, folder, kGradeSeconds);
  if (graded.status == 1) return {false, graded.output};
  if (graded.status == 0)
    return {true, fmt::format("{}  made   {}: all of Tessera, with your code in it\n", graded.output,
                              one_line((given / "build" / "tessera").string()))};
  if (graded.status == static_cast<int>(Status::communication))
    return refused(e, {"time", graded.last_line, "a rank neither ends nor communicates: a loop that does not end"});
  if (graded.status == 124)
    return refused(e, {"time", fmt::format("no end within {} s", kGradeSeconds), "a loop that does not end"});
  if (graded.status > 128)
    return refused(
        e, {"crash", fmt::format("signal {} ended the program", graded.status - 128),
            graded.status == 128 + 11 ? "it reads or writes outside of an array, or a tensor that is undefined, "
                                        "or a lambda reads a variable that is gone (capture by value)"
                                      : "memory was overwritten, or std::abort() was called"});
  return refused(e, {"error", graded.last_line, ""});
}

// Where a function is: it begins a line, the first line of its body is behind one that ends with a brace, and the last
// one before a brace that stands as far to the right as the function: so clang-format lays out all files here.

namespace {

std::string_view line_indent(std::string_view source, size_t at) {
  const size_t begin = source.rfind('\n', at) + 1;
  return source.substr(begin, source.find_first_not_of(' ', begin) - begin);
}

// "reduce_scatter" of "void reduce_scatter(const"
std::string plain_name(std::string_view function) {
  const std::string_view before = function.substr(0, function.find('('));
  return std::string(before.substr(before.find_last_of(' ') + 1));
}

}  // namespace

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
  const Part part = found[0];
  if (blank.from.empty()) return part;
  for (size_t line = part.begin; line < part.end; line = source.find('\n', line) + 1)
    if (source.substr(source.find_first_not_of(' ', line)).starts_with(blank.from)) return {line, part.end};
  throw Error(fmt::format("[lab] no line of '{}' begins with '{}'", blank.function, blank.from));
}

std::string filled_file(std::string_view source, const Exercise& e, const std::vector<std::string>& bodies) {
  std::string out(source);
  for (size_t i = 0; i < e.blanks.size(); ++i) {
    const Part part = blanked_part(out, e.blanks[i]);
    out.replace(part.begin, part.end - part.begin, bodies.at(i));
  }
  return out;
}

std::string blanked_file(std::string_view source, const Exercise& e) {
  std::vector<std::string> bodies;
  for (const Blank& blank : e.blanks) {
    const Part part = blanked_part(source, blank);
    bodies.push_back(fmt::format("{0}// Yours to write: README.md says what.\n{0}lab::not_yet(\"{1}\");\n",
                                 line_indent(source, part.begin), plain_name(blank.function)));
  }
  std::string out = filled_file(source, e, bodies);
  const std::string include = "#include \"lab/not_yet.h\"  // only for the exercise; you may delete it at the end\n";
  return out.insert(out.find("#include"), include);
}

}  // namespace tessera::lab
