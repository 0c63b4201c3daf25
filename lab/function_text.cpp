// Braces are counted outside of comments, strings and characters.
#include "lab/function_text.h"

#include <fmt/format.h>

#include <algorithm>

#include "tensor/error.h"

namespace tessera::lab {
namespace {

// Behind the comment, string or character that begins at `at`; `at` itself where there is none.
size_t behind_quiet(std::string_view text, size_t at) {
  const auto behind = [&](std::string_view end) {
    const size_t found = text.find(end, at + 1);
    return found == std::string_view::npos ? text.size() : found + end.size();
  };
  if (text.substr(at).starts_with("//")) return behind("\n");
  if (text.substr(at).starts_with("/*")) return behind("*/");
  const bool digits = text[at] == '\'' && at > 0 && std::isalnum(static_cast<unsigned char>(text[at - 1])) != 0;
  if (text[at] != '"' && (text[at] != '\'' || digits)) return at;
  for (size_t i = at + 1; i < text.size(); ++i) {
    if (text[i] == '\\')
      ++i;
    else if (text[i] == text[at])
      return i + 1;
  }
  return text.size();
}

// The place of the character that closes the bracket at `open`.
size_t closing(std::string_view text, size_t open) {
  const char opens = text[open], closes = opens == '(' ? ')' : '}';
  int depth = 0;
  for (size_t at = open; at < text.size();) {
    const size_t next = behind_quiet(text, at);
    if (next != at) {
      at = next;
      continue;
    }
    depth += (text[at] == opens) - (text[at] == closes);
    if (depth == 0) return at;
    ++at;
  }
  return text.size();
}

bool begins_line(std::string_view text, size_t at) {
  const size_t before = text.find_last_not_of(' ', at == 0 ? 0 : at - 1);
  return at == 0 || before == std::string_view::npos || text[before] == '\n';
}

// The opening brace of the definition, npos where this is a declaration.
size_t opening_brace(std::string_view source, size_t at) {
  const size_t parenthesis = source.find('(', at);
  const size_t behind = source.find_first_of(";{", closing(source, parenthesis));
  return behind == std::string_view::npos || source[behind] == ';' ? std::string_view::npos : behind;
}

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
  std::vector<size_t> found;
  for (size_t at = source.find(blank.function); at != std::string_view::npos; at = source.find(blank.function, at + 1))
    if (const size_t brace = begins_line(source, at) ? opening_brace(source, at) : std::string_view::npos;
        brace != std::string_view::npos)
      found.push_back(brace);
  if (found.size() != 1)
    throw Error(fmt::format("[lab] {} definitions that begin with '{}'; expected one", found.size(), blank.function));
  const size_t close = closing(source, found[0]);
  Part part{source.find('\n', found[0]) + 1, source.rfind('\n', close) + 1};
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
