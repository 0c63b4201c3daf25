// From tokens to the tree: Jinja's grammar.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <map>

#include "data/jinja/syntax.h"
#include "data/utf8.h"

namespace tessera::jinja {
namespace {

constexpr int kDeepestSyntax = 150, kMostLinks = 1500;

template <class Node>
ExpressionPtr make(Node node) {
  return std::make_unique<const Expression>(Expression{std::move(node)});
}

class Parser {
 public:
  Parser(std::vector<Token> tokens, const std::string& what) : tokens_(std::move(tokens)), what_(what) {
    for (const char* const name : {"", "loop", "caller"}) symbol(name);
  }
  Syntax run() {
    Body all = body({});
    return {std::move(names_), std::move(all)};
  }

 private:
  using Ends = std::initializer_list<std::string_view>;

  // Counts what is open, so that no template takes more stack than there is.
  class Level {
   public:
    explicit Level(Parser& p) : p_(p) {
      if (++p_.level_ > kDeepestSyntax) p_.fail("nested too deep");
    }
    ~Level() { --p_.level_; }
    Level(const Level&) = delete;
    Level& operator=(const Level&) = delete;

   private:
    Parser& p_;
  };

  const Token& now() const { return tokens_[at_]; }
  [[noreturn]] void fail(const std::string& why) const { fail_at(what_, now().line, why); }
  [[noreturn]] void fail_unexpected(std::string_view expected) const {
    fail(fmt::format("expected {}, found '{}'", expected, escape_broken(now().text.substr(0, 40))));
  }
  bool is(std::string_view word, size_t ahead = 0) const {
    const Token& token = tokens_[std::min(at_ + ahead, tokens_.size() - 1)];
    return (token.kind == Kind::name || token.kind == Kind::sign) && token.text == word;
  }
  bool is_one_of(Ends words) const {
    return std::any_of(words.begin(), words.end(), [&](std::string_view word) { return is(word); });
  }
  bool skip(std::string_view word) {
    const bool there = is(word);
    at_ += there ? 1 : 0;
    return there;
  }
  void expect(std::string_view word) {
    if (!skip(word)) fail_unexpected(fmt::format("'{}'", word));
  }
  std::string take(Kind kind, std::string_view expected) {
    if (now().kind != kind) fail_unexpected(expected);
    return tokens_[at_++].text;
  }
  void link() {
    if (++links_ > kMostLinks) fail("one tag does too much");
  }
  Symbol symbol(const std::string& name) {
    const auto [found, fresh] = symbols_.emplace(name, names_.size());
    if (fresh) names_.push_back(std::make_shared<const std::string>(name));
    return found->second;
  }

  // Statements.

  // Up to a tag that begins with one of the words, which is the next token then.
  Body body(Ends ends) {
    const Level level(*this);
    Body out;
    for (;;) {
      const int line = now().line;
      links_ = 0;
      if (now().kind == Kind::end) {
        if (ends.size() > 0) fail_unexpected(fmt::format("'{}'", *(ends.end() - 1)));
        return out;
      }
      const Token& token = tokens_[at_++];
      if (token.kind == Kind::text) {
        out.push_back({Output{make(Constant{token.text})}, line});
      } else if (token.kind == Kind::output) {
        ExpressionPtr value = tuple(true);
        if (is_safe(*value)) --safes_;
        close(Kind::output_end);
        out.push_back({Output{std::move(value)}, line});
      } else {
        if (is_one_of(ends)) return out;
        out.push_back({statement(), line});
      }
    }
  }
  static bool is_safe(const Expression& e) {
    const auto* const applied = std::get_if<Applied>(&e.node);
    return applied && applied->builtin->name == "safe";
  }
  void close(Kind kind) {
    take(kind, "the end of the tag");
    if (safes_ > 0) fail("the filter 'safe' is known only as the last of what is printed");
  }
  void close() { close(Kind::block_end); }
  void close(std::string_view word) {
    expect(word);
    close();
  }
  // A body in which `break` and `continue` mean a loop, or do not.
  Body body_of(Ends ends, bool loops) {
    close();
    const bool before = std::exchange(loops_, loops);
    Body out = body(ends);
    loops_ = before;
    return out;
  }

  decltype(Statement::node) statement() {
    const std::string word = take(Kind::name, "a statement");
    if (word == "if") return if_statement();
    if (word == "for") return for_statement();
    if (word == "set") return set_statement();
    if (word == "macro") return macro({symbol(name()), parameters(), {}}, "endmacro");
    if (word == "call") {
      Macro made{kCaller, is("(") ? parameters() : decltype(Macro::parameters)(), {}};
      made.call = expression();
      if (!std::holds_alternative<Call>(made.call->node)) fail("`call` needs a call");
      return macro(std::move(made), "endcall");
    }
    if (word == "filter") {
      ExpressionPtr value = filter(make(Name{kText}));
      while (skip("|")) value = filter(std::move(value));
      return captured({{}, std::move(value), {}}, "endfilter");
    }
    if (word == "generation") return captured({{}, make(Name{kText}), {}, true}, "endgeneration");
    if (word == "with") {
      Set out{{}, true, {}};
      while (now().kind != Kind::block_end) {
        if (!out.values.empty()) expect(",");
        Target to = target();
        expect("=");
        out.values.emplace_back(std::move(to), expression());
      }
      out.body = body_of({"endwith"}, loops_);
      close("endwith");
      return out;
    }
    if (word == "break" || word == "continue") {
      if (!loops_) fail(fmt::format("`{}` stands in no loop", word));
      close();
      return Jump{word == "break"};
    }
    --at_;
    fail(fmt::format("the statement '{}' is not known here", escape_broken(word.substr(0, 40))));
  }
  If if_statement() {
    If out;
    for (bool more = true; more;) {
      ExpressionPtr condition = tuple(false);
      Body then = body_of({"elif", "else", "endif"}, loops_);
      out.branches.emplace_back(std::move(condition), std::move(then));
      more = skip("elif");
    }
    if (skip("else")) out.branches.emplace_back(nullptr, body_of({"endif"}, loops_));
    close("endif");
    return out;
  }
  For for_statement() {
    For out{target(), nullptr, nullptr, {}, {}};
    if (std::find(out.target.names.begin(), out.target.names.end(), kLoop) != out.target.names.end())
      fail("a loop cannot set `loop`");
    expect("in");
    out.over = tuple(false);
    if (skip("if")) out.condition = expression();
    if (is("recursive")) fail("recursive loops are not known");
    out.body = body_of({"else", "endfor"}, true);
    if (skip("else")) out.otherwise = body_of({"endfor"}, loops_);
    close("endfor");
    return out;
  }
  decltype(Statement::node) set_statement() {
    Target to = target();
    if (is(".")) {
      if (to.unpacks) fail("one attribute is set at a time");
      ++at_;
      to.attribute = name();
    }
    if (skip("=")) {
      Set out{{}, false, {}};
      out.values.emplace_back(std::move(to), tuple(true));
      close();
      return out;
    }
    ExpressionPtr value = make(Name{kText});
    while (skip("|")) value = filter(std::move(value));
    return captured({{}, std::move(value), std::move(to)}, "endset");
  }
  Captured captured(Captured out, std::string_view end) {
    out.body = body_of({end}, false);
    close(end);
    return out;
  }
  Macro macro(Macro out, std::string_view end) {
    const bool before = std::exchange(calls_back_, false);
    out.body = body_of({end}, false);
    out.calls_back = std::exchange(calls_back_, before);
    close(end);
    return out;
  }
  decltype(Macro::parameters) parameters() {
    decltype(Macro::parameters) out;
    expect("(");
    while (!is(")")) {
      if (!out.empty()) expect(",");
      const Symbol parameter = symbol(name());
      ExpressionPtr otherwise = skip("=") ? expression() : nullptr;
      if (!otherwise && !out.empty() && out.back().second)
        fail("an argument without a default follows one that has it");
      out.emplace_back(parameter, std::move(otherwise));
    }
    expect(")");
    return out;
  }
  std::string name() {
    if (is_one_of({"true", "false", "none", "True", "False", "None"})) fail_unexpected("a name");
    return take(Kind::name, "a name");
  }
  Target target() {
    Target out;
    const bool bracketed = skip("(");
    do {
      if (is("in") || is("=") || is(")")) break;
      out.names.push_back(symbol(name()));
      out.unpacks = out.unpacks || bracketed || is(",");
    } while (skip(","));
    if (bracketed) expect(")");
    if (out.names.empty()) fail_unexpected("a name");
    return out;
  }

  // Expressions.

  ExpressionPtr tuple(bool conditional, bool bracketed = false) {
    std::vector<ExpressionPtr> items;
    bool commas = false;
    while (now().kind != Kind::output_end && now().kind != Kind::block_end && !is(")")) {
      items.push_back(conditional ? expression() : binary(0));
      if (!skip(",")) break;
      commas = true;
    }
    if (!commas && items.size() == 1) return std::move(items.front());
    if (items.empty() && !bracketed) fail_unexpected("an expression");
    return make(Listed{std::move(items), Form::tuple});
  }
  ExpressionPtr expression() {
    const Level level(*this);
    ExpressionPtr out = binary(0);
    while (skip("if")) {
      link();
      ExpressionPtr condition = binary(0);
      out = make(Conditional{std::move(condition), std::move(out), skip("else") ? expression() : nullptr});
    }
    return out;
  }
  // The operators from the loosest to the tightest: `not` and the comparisons stand between `and` and +.
  ExpressionPtr binary(size_t level) {
    static constexpr std::array<std::array<std::string_view, 4>, 6> kLevels{
        {{"or"}, {"and"}, {"+", "-"}, {"~"}, {"*", "/", "//", "%"}, {"**"}}};
    if (level == kLevels.size()) return unary(true);
    const auto next = [&] { return level == 1 ? negated() : binary(level + 1); };
    ExpressionPtr out = next();
    for (;;) {
      const auto found = std::find_if(kLevels[level].begin(), kLevels[level].end(),
                                      [&](std::string_view op) { return !op.empty() && is(op); });
      if (found == kLevels[level].end()) return out;
      link();
      ++at_;
      const char op = *found == "or"    ? '|'
                      : *found == "and" ? '&'
                      : *found == "//"  ? 'i'
                      : *found == "**"  ? 'p'
                                        : (*found)[0];
      out = make(Operation{op, std::move(out), next()});
    }
  }
  ExpressionPtr negated() {
    const Level level(*this);
    if (skip("not")) return make(Operation{'!', nullptr, negated()});
    Comparison out{binary(2), {}};
    for (;;) {
      std::string op;
      if (is("not") && is("in", 1))
        op = "not in", at_ += 2;
      else if (is_one_of({"==", "!=", "<", "<=", ">", ">=", "in"}))
        op = tokens_[at_++].text;
      else
        break;
      out.rest.emplace_back(op, binary(2));
    }
    return out.rest.empty() ? std::move(out.first) : make(std::move(out));
  }
  ExpressionPtr unary(bool with_filters) {
    const Level level(*this);
    ExpressionPtr out;
    if (is("-") || is("+")) {
      const char op = tokens_[at_++].text[0];
      out = make(Operation{op, nullptr, unary(false)});
    } else {
      out = primary();
    }
    out = postfix(std::move(out));
    for (; with_filters; link()) {
      if (skip("|"))
        out = filter(std::move(out));
      else if (skip("is"))
        out = test(std::move(out));
      else if (is("("))
        out = make(Call{std::move(out), given()});
      else
        break;
    }
    return out;
  }
  ExpressionPtr postfix(ExpressionPtr out) {
    for (;; link()) {
      if (skip(".")) {
        if (now().kind == Kind::integer)
          out = make(Member{std::move(out), primary(), false});
        else
          out = make(Member{std::move(out), make(Constant{take(Kind::name, "a name")}), true});
      } else if (skip("[")) {
        out = subscript(std::move(out));
        expect("]");
      } else if (is("(")) {
        out = make(Call{std::move(out), given()});
      } else {
        return out;
      }
    }
  }
  ExpressionPtr subscript(ExpressionPtr of) {
    const auto part = [&] { return is(":") || is("]") ? nullptr : expression(); };
    ExpressionPtr first = part();
    if (!is(":")) {
      if (!first) fail_unexpected("an index");
      return make(Member{std::move(of), std::move(first), false});
    }
    ++at_;
    ExpressionPtr to = part();
    return make(Slice{std::move(of), std::move(first), std::move(to), skip(":") ? part() : nullptr});
  }
  ExpressionPtr primary() {
    if (now().kind == Kind::string) {
      std::string text;
      while (now().kind == Kind::string) text += tokens_[at_++].text;
      return make(Constant{text});
    }
    if (now().kind == Kind::integer || now().kind == Kind::real) {
      const Token& token = tokens_[at_++];
      if (token.kind == Kind::real) return make(Constant{std::strtod(token.text.c_str(), nullptr)});
      int64_t value = 0;
      const char* const end = token.text.data() + token.text.size();
      if (std::from_chars(token.text.data(), end, value).ec != std::errc()) fail("an integer is beyond 64 bits");
      return make(Constant{value});
    }
    if (skip("true") || skip("True")) return make(Constant{true});
    if (skip("false") || skip("False")) return make(Constant{false});
    if (skip("none") || skip("None")) return make(Constant{None{}});
    if (now().kind == Kind::name) {
      calls_back_ = calls_back_ || is("caller");
      return make(Name{symbol(tokens_[at_++].text)});
    }
    if (skip("(")) {
      ExpressionPtr out = tuple(true, true);
      expect(")");
      return out;
    }
    if (skip("[")) {
      Listed out{{}, Form::list};
      all_until("]", [&] { out.items.push_back(expression()); });
      return make(std::move(out));
    }
    if (!skip("{")) fail_unexpected("an expression");
    Mapped out;
    all_until("}", [&] {
      ExpressionPtr key = expression();
      expect(":");
      out.items.emplace_back(std::move(key), expression());
    });
    return make(std::move(out));
  }
  // What stands between commas, of which one may stand before the end.
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
      if (is("*") || is("**")) fail("arguments by * or ** are not known");
      if (now().kind == Kind::name && is("=", 1)) {
        std::string key = tokens_[at_].text;
        at_ += 2;
        out.named.emplace_back(std::move(key), expression());
      } else {
        if (!out.named.empty()) fail("an argument without a name follows one that has it");
        out.in_order.push_back(expression());
      }
    });
    return out;
  }
  const Builtin* known(Group group, std::string_view kind) {
    std::string called = take(Kind::name, "a name");
    const Builtin* const found = find_builtin(group, called);
    if (!found) fail(fmt::format("the {} '{}' is not known", kind, escape_broken(called.substr(0, 40))));
    return found;
  }
  static ExpressionPtr applied(const Builtin* builtin, ExpressionPtr to, Given arguments) {
    arguments.in_order.insert(arguments.in_order.begin(), std::move(to));
    return make(Applied{builtin, std::move(arguments)});
  }
  ExpressionPtr filter(ExpressionPtr to) {
    const Builtin* const builtin = known(Group::filters, "filter");
    if (builtin->name == "safe") ++safes_;
    return applied(builtin, std::move(to), is("(") ? given() : Given());
  }
  ExpressionPtr test(ExpressionPtr of) {
    const bool no = skip("not");
    const Builtin* const builtin = known(Group::tests, "test");
    Given arguments;
    const Kind kind = now().kind;
    if (is("(")) {
      arguments = given();
    } else if (is_one_of({"[", "{"}) || kind == Kind::string || kind == Kind::integer || kind == Kind::real ||
               (kind == Kind::name && !is_one_of({"else", "or", "and"}))) {
      if (is("is")) fail("tests are not chained");
      arguments.in_order.push_back(postfix(primary()));
    }
    ExpressionPtr out = applied(builtin, std::move(of), std::move(arguments));
    return no ? make(Operation{'!', nullptr, std::move(out)}) : std::move(out);
  }

  std::vector<Token> tokens_;
  const std::string& what_;
  size_t at_ = 0;
  int level_ = 0, links_ = 0, safes_ = 0;
  bool loops_ = false, calls_back_ = false;
  std::vector<std::shared_ptr<const std::string>> names_ = {};
  std::map<std::string, Symbol> symbols_ = {};
};

}  // namespace

Syntax parse(std::string_view source, const std::string& what) { return Parser(tokens_of(source, what), what).run(); }

}  // namespace tessera::jinja
