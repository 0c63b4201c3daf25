// The parser, which compiles a template to functions that print it.
#include "data/jinja/template.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "base/bad_input.h"
#include "base/utf8.h"

namespace tessera::jinja {
namespace {

constexpr size_t kMaxBytes = size_t{1} << 20;
constexpr int kDeepestSyntax = 150, kMaxLinks = 1500, kDeepestRun = 500;

[[noreturn]] void fail_at(const std::string& what, int line, std::string_view why) {
  bad_input("{}:{}: {}", what, line, escape_broken(why.substr(0, 500)));
}

// Limits nesting, so that no template overflows the stack.
struct Level : NotCopied {
  Level(int& level, int max) : now(level) {
    if (++now > max) throw InputError("nested too deeply, or infinite recursion of a macro");
  }
  ~Level() { --now; }

  int& now;
};

using Code = std::function<Value(RenderContext&)>;
struct Given {
  std::vector<Code> in_order = {};
  std::vector<std::pair<std::string, Code>> named = {};
};

Value eval(const Code& code, RenderContext& work) {
  work.charge(64);
  const Level level(work.depth, kDeepestRun);
  return code(work);
}
template <class F>
auto within(RenderContext& work, std::shared_ptr<Scope> outer, const F& f) {
  const std::shared_ptr<Scope> before = std::exchange(work.scope, std::make_shared<Scope>(Scope{std::move(outer)}));
  auto out = f();
  work.scope = before;
  return out;
}
std::string to_string(const Step& body, RenderContext& work) {
  std::string text;
  std::string* const before = std::exchange(work.out, &text);
  within(work, work.scope, [&] { return body(work); });
  work.out = before;
  return text;
}

Call evaluated(const Given& given, RenderContext& work) {
  Call out{work, {}};
  for (const Code& one : given.in_order) out.given.push_back(eval(one, work));
  for (const auto& [name, value] : given.named) out.named.emplace_back(name, eval(value, work));
  return out;
}

class Parser {
 public:
  explicit Parser(std::string_view source) {
    for (size_t i = 0; i < source.size(); ++i)
      if (source[i] != '\r')
        s_ += source[i];
      else if (source.substr(i + 1, 1) != "\n")
        s_ += '\n';
    if (s_.ends_with('\n')) s_.pop_back();
  }
  Step run(const std::string& what) {
    try {
      if (s_.size() > kMaxBytes) throw InputError("a template of more than 1 MiB");
      if (find_invalid_utf8(s_) != std::string::npos) throw InputError("not UTF-8");
      return body({});
    } catch (const InputError& e) {
      fail_at(what, 1 + newlines(0, at_), e.what());
    }
  }

 private:
  using Ends = std::initializer_list<std::string_view>;

  int newlines(size_t from, size_t to) const {
    return static_cast<int>(std::count(s_.data() + from, s_.data() + to, '\n'));
  }
  std::string_view rest() const { return std::string_view(s_).substr(at_); }
  bool is_any(std::string_view characters) const {
    return at_ < s_.size() && characters.find(s_[at_]) != std::string_view::npos;
  }
  static bool is_digit(char c) { return c >= '0' && c <= '9'; }
  static bool is_letter(char c) { return c == '_' || (c & 0x80) != 0 || std::isalnum(c) != 0; }
  static bool is_name(std::string_view token) { return !token.empty() && is_letter(token[0]) && !is_digit(token[0]); }
  void skip_space() { at_ = s_.size() - stripped(rest(), true, false).size(); }
  [[noreturn]] void fail_expected(std::string_view expected) {
    skip_space();
    const std::string_view found = rest().empty() ? "the end" : rest().substr(0, rest().find_first_of(" \n", 1));
    bad_input("expected {}, got '{}'", expected, found.substr(0, 40));
  }
  // Skips "%}", "}}" or "#}" with its sign, and the white space it removes.
  bool closes(char c) {
    const bool takes = rest().starts_with('-'), keeps = c != '}' && rest().starts_with('+');
    if (rest().substr(takes || keeps ? 1 : 0, 2) != std::string{c, '}'}) return false;
    at_ += takes || keeps ? 3 : 2;
    if (takes) skip_space();
    if (!takes && !keeps && c != '}' && is_any("\n")) ++at_;
    return true;
  }
  void close(char c) {
    skip_space();
    if (!closes(c)) fail_expected("the end of the tag");
  }
  void close(std::string_view word) {
    expect(word);
    close('%');
  }
  // A word, an operator, or the opening quote of a string.
  std::string_view next() {
    skip_space();
    size_t length = 0;
    while (at_ + length < s_.size() && is_letter(s_[at_ + length])) ++length;
    for (const std::string_view sign : {"==", "!=", "<=", ">=", "//", "**", "%}", "-%}", "+%}", "-}}", "+}}"})
      if (length == 0 && rest().starts_with(sign)) length = sign.size();
    return rest().substr(0, std::max<size_t>(length, 1));
  }
  bool is(std::string_view token) { return next() == token; }
  bool at_any_keyword(Ends ends) {
    return std::any_of(ends.begin(), ends.end(), [&](std::string_view word) { return is(word); });
  }
  bool skip(std::string_view word) {
    const size_t before = at_;
    if (word == "not in") return (skip("not") && skip("in")) || (at_ = before, false);
    const bool there = is(word);
    at_ += there ? word.size() : 0;
    return there;
  }
  void expect(std::string_view word) {
    if (!skip(word)) fail_expected(fmt::format("'{}'", word));
  }
  Text word(std::string_view expected = "a name") {
    const std::string_view token = next();
    if (!is_name(token)) fail_expected(expected);
    at_ += token.size();
    return std::make_shared<const std::string>(token);
  }
  void link() {
    if (++links_ > kMaxLinks) throw InputError("a tag is too complex");
  }

  // Parses up to a tag that begins with one of `ends`, which is then the next token. White space follows transformers'
  // environment: lstrip_blocks here, trim_blocks in closes().
  Step body(Ends ends) {
    const Level level(level_, kDeepestSyntax);
    std::vector<std::pair<int, Step>> steps;
    for (;; links_ = 0) {
      const size_t begin = at_;
      while (at_ < s_.size() && (s_[at_] != '{' || std::string_view("{%#").find(s_[at_ + 1]) == std::string::npos))
        ++at_;
      std::string_view text = std::string_view(s_).substr(begin, at_ - begin);
      const char kind = at_ == s_.size() ? '\0' : s_[at_ + 1];
      at_ += kind == '\0' ? 0 : 2;
      const size_t line = text.rfind('\n') + 1;
      const bool begins_line = line > 0 || begin == 0 || s_[begin - 1] == '\n';
      const bool takes = is_any("-"), keeps = is_any("+");
      at_ += takes || keeps ? 1 : 0;
      if (takes)
        text = stripped(text, false, true);
      else if (!keeps && (kind == '%' || kind == '#') && begins_line &&
               stripped(text.substr(line), true, false).empty())
        text = text.substr(0, line);
      line_ += newlines(std::exchange(counted_, at_), at_);
      if (!text.empty()) steps.emplace_back(line_, print(constant(std::string(text))));
      if (kind == '\0' && ends.size() > 0) fail_expected(fmt::format("'{}'", *(ends.end() - 1)));
      if (kind == '\0' || (kind == '%' && at_any_keyword(ends))) break;
      if (kind == '{') {
        steps.emplace_back(line_, print(expression()));
        close('}');
      } else if (kind == '%') {
        const int at_line = line_;
        steps.emplace_back(at_line, statement());
      }
      for (; kind == '#' && !closes('#'); ++at_)
        if (at_ == s_.size()) throw InputError("a comment is not closed");
    }
    return [all = std::move(steps)](RenderContext& work) {
      const Level deeper(work.depth, kDeepestRun);
      for (const auto& [line, step] : all) {
        work.line = line;
        work.charge(64);
        if (const Flow flow = step(work); flow != Flow::on) return flow;
      }
      return Flow::on;
    };
  }
  static Step print(Code value) {
    return [v = std::move(value)](RenderContext& work) {
      *work.out += printed(work, eval(v, work));
      return Flow::on;
    };
  }
  // `loops`: whether the body may contain `break` and `continue`.
  Step parse_body(Ends ends, bool loops) {
    close('%');
    const bool before = std::exchange(loops_, loops);
    Step out = body(ends);
    loops_ = before;
    return out;
  }

  Step statement() {
    const std::string kind = *word("a statement");
    if (kind == "if") return if_statement();
    if (kind == "for") return for_statement();
    if (kind == "set") return set_statement();
    if (kind == "macro") return macro_statement();
    if (kind == "generation") {
      Step inner = parse_body({"endgeneration"}, false);
      close("endgeneration");
      return [inner](RenderContext& work) {
        if (work.out != &work.main.text) throw InputError("a generation block is inside another block or a macro");
        const size_t begin = work.main.text.size();
        work.main.text += to_string(inner, work);
        work.main.generated.emplace_back(begin, work.main.text.size());
        return Flow::on;
      };
    }
    if (kind == "break" || kind == "continue") {
      if (!loops_) bad_input("`{}` is outside a loop", kind);
      close('%');
      return [flow = kind == "break" ? Flow::broken : Flow::continued](RenderContext&) { return flow; };
    }
    bad_input("unexpected statement '{}'", kind.substr(0, 40));
  }
  Step if_statement() {
    std::vector<std::pair<Code, Step>> branches;
    do {
      Code condition = expression(kOr);
      branches.emplace_back(std::move(condition), parse_body({"elif", "else", "endif"}, loops_));
    } while (skip("elif"));
    if (skip("else")) branches.emplace_back(nullptr, parse_body({"endif"}, loops_));
    close("endif");
    return [all = std::move(branches)](RenderContext& work) {
      for (const auto& [condition, then] : all)
        if (!condition || truth(eval(condition, work))) return then(work);
      return Flow::on;
    };
  }
  Step for_statement() {
    const std::vector<Text> to = targets();
    expect("in");
    const Code over = expression(kOr), condition = skip("if") ? expression() : nullptr;
    const Step each = parse_body({"else", "endfor"}, true);
    const Step otherwise = skip("else") ? parse_body({"endfor"}, loops_) : nullptr;
    close("endfor");
    return [=](RenderContext& work) {
      Values items;
      for (Value& one : to_items(work, eval(over, work)))
        if (!condition || within(work, work.scope, [&] { return assign(work, to, one), truth(eval(condition, work)); }))
          items.push_back(std::move(one));
      const auto at = std::make_shared<size_t>(0);
      const Value known =
          work.store({.attribute = [items, at](const std::string& name) { return loop_attribute(items, *at, name); }});
      bool empty = true;  // also true after a loop whose bodies all `continue`, as in Jinja
      for (Flow flow = Flow::on; flow != Flow::broken && *at < items.size(); ++*at) {
        flow = within(work, work.scope, [&] {
          work.scope->values["loop"] = known;
          assign(work, to, items[*at]);
          return each(work);
        });
        empty = empty && flow != Flow::on;
      }
      return empty && otherwise ? within(work, work.scope, [&] { return otherwise(work); }) : Flow::on;
    };
  }
  Step set_statement() {
    const std::vector<Text> to = targets();
    if (is(".") && to.size() > 1) throw InputError("only one attribute can be set at a time");
    const std::string attribute = skip(".") ? *word() : "";
    Code value = nullptr;
    if (skip("=")) {
      value = expression();
      close('%');
    } else {
      value = [inner = parse_body({"endset"}, false)](RenderContext& work) { return to_string(inner, work); };
      close("endset");
    }
    return [=](RenderContext& work) {
      const Value v = eval(value, work);
      Object* const object = attribute.empty() ? nullptr : named_value(work, to[0]).object();
      if (attribute.empty()) return assign(work, to, v), Flow::on;
      if (!object || !object->fields) throw InputError("attributes can be set only on a namespace");
      (*object->fields)[attribute] = v;
      return Flow::on;
    };
  }
  Step macro_statement() {
    const Text called = word();
    std::vector<std::pair<Text, Code>> parameters;
    expect("(");
    all_until(")", [&] {
      const Text parameter = word();
      parameters.emplace_back(parameter, skip("=") ? expression() : nullptr);
    });
    const Step inner = parse_body({"endmacro"}, false);
    close("endmacro");
    return [=](RenderContext& work) {
      const auto expand = [&work, called, parameters, inner, outer = work.scope](const Call& c) {
        std::map<std::string, Value> named(c.named.begin(), c.named.end());
        const int line = work.line;
        Value out = within(work, outer, [&] {
          for (size_t i = 0; i < parameters.size(); ++i) {
            const auto& [parameter, otherwise] = parameters[i];
            const bool has = i >= c.given.size() && named.contains(*parameter);
            Value missing = otherwise && !has && i >= c.given.size() ? eval(otherwise, work) : Undefined{parameter};
            work.scope->values[*parameter] = i < c.given.size() ? c.given[i] : has ? named[*parameter] : missing;
            if (has) named.erase(*parameter);
          }
          if (!named.empty() || c.given.size() > parameters.size())
            bad_input("the macro '{}' is called with an unknown argument", *called);
          return to_string(inner, work);
        });
        work.line = line;
        return out;
      };
      work.scope->values[*called] = work.store({.call = expand});
      return Flow::on;
    };
  }
  std::vector<Text> targets() {
    std::vector<Text> out;
    const bool bracketed = skip("(");
    do out.push_back(word());
    while (skip(","));
    if (bracketed) expect(")");
    return out;
  }

  static Code constant(Value value) {
    return [v = std::move(value)](RenderContext&) { return v; };
  }
  template <class F>
  static Code made(std::vector<Code> values, F f) {
    return [all = Given{std::move(values)}, f](RenderContext& work) -> Value {
      return f(work, evaluated(all, work).given);
    };
  }
  static Code listed(std::vector<Code> items, Form form) {
    return made(std::move(items),
                [form](RenderContext& work, Values v) { return make_sequence(work, std::move(v), form); });
  }
  static Code inverted(Code of) {
    return made({std::move(of)}, [](RenderContext&, const Values& v) { return !truth(v[0]); });
  }
  // By precedence. Signs precede their operand, to which calls, members and items belong.
  enum Power { kTernary, kOr, kAnd, kNot, kCompare, kPlus, kTilde, kTimes, kFilter, kSign };
  static constexpr std::pair<std::string_view, Power> kOperators[] = {
      {"or", kOr},     {"and", kAnd},    {"==", kCompare}, {"!=", kCompare},     {"<", kCompare}, {"<=", kCompare},
      {">", kCompare}, {">=", kCompare}, {"in", kCompare}, {"not in", kCompare}, {"+", kPlus},    {"-", kPlus},
      {"~", kTilde},   {"*", kTimes},    {"/", kTimes},    {"//", kTimes},       {"%", kTimes}};

  // Parses operators of at least this precedence.
  Code expression(int min = kTernary) {
    const Level level(level_, kDeepestSyntax);
    Code out;
    if (min <= kNot && skip("not")) {
      out = inverted(expression(kNot));
    } else if (is("-") || is("+")) {
      const char* const op = s_[at_++] == '-' ? "-" : "+";
      out = made({expression(kSign)}, [op](RenderContext& work, const Values& v) {
        return operated(work, op, v[0].is<double>() ? Value(-0.0) : Value(int64_t{0}), v[0]);
      });
    } else {
      out = postfix(primary());
    }
    for (bool compared = false;; link()) {
      if (min <= kFilter && skip("|")) {
        out = applied(Group::filters, std::move(out));
      } else if (min <= kFilter && skip("is")) {
        out = skip("not") ? inverted(applied(Group::tests, std::move(out))) : applied(Group::tests, std::move(out));
      } else if (min <= kTernary && skip("if")) {
        const Code condition = expression(kOr), otherwise = skip("else") ? expression() : nullptr;
        out = [yes = std::move(out), condition, otherwise](RenderContext& work) {
          if (truth(eval(condition, work))) return eval(yes, work);
          return otherwise ? eval(otherwise, work) : Undefined{};
        };
      } else {
        const auto* const found = std::find_if(std::begin(kOperators), std::end(kOperators),
                                               [&](const auto& o) { return o.second >= min && skip(o.first); });
        if (found == std::end(kOperators)) return out;
        if (found->second == kCompare && std::exchange(compared, true))
          throw InputError("chained comparisons are not supported");
        out = operation(*found, out, expression(found->second + 1));
      }
    }
  }
  static Code operation(const std::pair<std::string_view, Power>& op, const Code& left, const Code& right) {
    if (op.second <= kAnd)
      return [left, right, by_truth = op.second == kOr](RenderContext& work) {
        const Value first = eval(left, work);
        return truth(first) == by_truth ? first : eval(right, work);
      };
    return made({left, right},
                [sign = op.first](RenderContext& work, const Values& v) { return operated(work, sign, v[0], v[1]); });
  }
  Code call(Code callee) {
    return [callee = std::move(callee), arguments = given()](RenderContext& work) {
      const Value function = eval(callee, work);
      if (Object* const object = function.object(); object && object->call)
        return object->call(evaluated(arguments, work));
      if (const Undefined* const u = function.as<Undefined>())
        bad_input("'{}' is called but not defined", u->name ? u->name->substr(0, 60) : "a value");
      bad_input("{} cannot be called", type_name(function));
    };
  }
  Code postfix(Code of) {
    for (;; link()) {
      if (is("(")) {
        of = call(std::move(of));
      } else if (skip(".")) {
        of = made({std::move(of), constant(word())},
                  [](RenderContext& work, const Values& v) { return member(work, v[0], v[1], true); });
      } else if (skip("[")) {
        of = subscript(of);
      } else {
        return of;
      }
    }
  }
  // An index, or a slice.
  Code subscript(const Code& of) {
    if (is("]")) fail_expected("an index");
    std::vector<Code> operands{of};
    do operands.push_back(is(":") || is("]") ? constant(None{}) : expression());
    while (operands.size() < 4 && skip(":"));
    expect("]");
    if (operands.size() == 2)
      return made(std::move(operands),
                  [](RenderContext& work, const Values& v) { return member(work, v[0], v[1], false); });
    operands.resize(4, constant(None{}));
    return made(std::move(operands),
                [](RenderContext& work, const Values& v) { return slice(work, v[0], v[1], v[2], v[3]); });
  }
  Value number() {
    const size_t begin = at_;
    const auto skip_digits = [&] {
      while (is_digit(s_[at_])) ++at_;
    };
    skip_digits();
    const bool real = s_[at_] == '.' && is_digit(s_[at_ + 1]);
    if (real) ++at_, skip_digits();
    if (is_letter(s_[at_])) throw InputError("a number has an unknown format");
    const std::string text = s_.substr(begin, at_ - begin);
    if (real) return std::strtod(text.c_str(), nullptr);
    int64_t value = 0;
    if (std::from_chars(text.data(), text.data() + text.size(), value).ec != std::errc())
      throw InputError("an integer does not fit in 64 bits");
    return value;
  }
  Code primary() {
    const std::string_view token = next();
    if (!token.empty() && is_digit(token[0])) return constant(number());
    if (is_any("'\"")) {
      std::string text;
      for (; is_any("'\""); skip_space()) {
        const size_t begin = at_++;
        while (at_ < s_.size() && s_[at_] != s_[begin]) at_ += s_[at_] == '\\' ? 2 : 1;
        if (at_ >= s_.size()) throw InputError("a string is not closed");
        text += unescaped(std::string_view(s_).substr(begin + 1, at_++ - begin - 1));
      }
      return constant(text);
    }
    if (skip("true") || skip("True")) return constant(true);
    if (skip("false") || skip("False")) return constant(false);
    if (skip("none") || skip("None")) return constant(None{});
    std::vector<Code> items;
    if (skip("(")) {
      bool commas = false;
      all_until(")", [&] {
        items.push_back(expression());
        commas = is(",");
      });
      return items.size() == 1 && !commas ? items.front() : listed(std::move(items), Form::tuple);
    }
    if (skip("[")) {
      all_until("]", [&] { items.push_back(expression()); });
      return listed(std::move(items), Form::list);
    }
    if (!skip("{")) return [name = word("an expression")](RenderContext& work) { return named_value(work, name); };
    all_until("}", [&] {
      items.push_back(expression());
      expect(":");
      items.push_back(expression());
    });
    return made(std::move(items), [](RenderContext& work, const Values& v) {
      Pairs out;
      for (size_t i = 0; i < v.size(); i += 2) out.emplace_back(to_key(v[i]), v[i + 1]);
      return make_dict(work, out);
    });
  }
  // Comma-separated items up to `end`, with an optional trailing comma.
  template <class F>
  void all_until(std::string_view end, const F& one) {
    while (!is(end)) {
      one();
      if (!is(end)) expect(",");
    }
    expect(end);
  }
  Given given() {
    Given out;
    expect("(");
    all_until(")", [&] {
      const size_t before = at_;
      const Text key = is_name(next()) ? word() : nullptr;
      if (key && skip("=")) {
        out.named.emplace_back(*key, expression());
      } else {
        at_ = before;
        if (!out.named.empty()) throw InputError("a positional argument follows a named one");
        out.in_order.push_back(expression());
      }
    });
    return out;
  }
  // The parentheses of a test's only argument are optional.
  Code applied(Group group, Code to) {
    const Text called = word();
    const auto builtin = find_builtin(group, *called);
    if (!builtin) bad_input("unknown {} '{}'", group == Group::tests ? "test" : "filter", called->substr(0, 40));
    Given all{{std::move(to)}};
    if (is("(")) {
      Given more = given();
      all.in_order.insert(all.in_order.end(), more.in_order.begin(), more.in_order.end());
      all.named = std::move(more.named);
    } else if (group == Group::tests && at_ < s_.size() && (is_letter(s_[at_]) || is_any("'\"[{")) &&
               !at_any_keyword({"else", "or", "and"})) {
      if (is("is")) throw InputError("tests cannot be chained");
      all.in_order.push_back(postfix(primary()));
    }
    return [b = *builtin, all = std::move(all)](RenderContext& work) { return apply(b, evaluated(all, work)); };
  }

  std::string s_ = {};
  size_t at_ = 0, counted_ = 0;
  int line_ = 1, level_ = 0, links_ = 0;
  bool loops_ = false;
};

}  // namespace

Template::Template(std::string_view source, std::string what)
    : what_(std::move(what)), body_(Parser(source).run(what_)) {}

Rendered Template::render(RenderContext& work, const Variables& variables) const {
  const auto given = std::make_shared<Scope>();
  for (const auto& [name, value] : variables) given->values[name] = value;
  work.scope = std::make_shared<Scope>(Scope{given});
  try {
    body_(work);
  } catch (const InputError& e) {
    fail_at(what_, work.line, e.what());
  }
  return std::move(work.main);
}

}  // namespace tessera::jinja
