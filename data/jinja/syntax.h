// A template as a tree, which the parser makes and the evaluator walks.
#pragma once
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "data/jinja/value.h"

namespace tessera::jinja {

using Symbol = size_t;  // a name, by its number in Syntax::names
struct Expression;
using ExpressionPtr = std::unique_ptr<const Expression>;

struct Given {
  std::vector<ExpressionPtr> in_order;
  std::vector<std::pair<std::string, ExpressionPtr>> named;
};
struct Constant {
  Value value;
};
struct Name {
  Symbol symbol;
};
struct Member {  // of.key, or of[key]
  ExpressionPtr of, key;
  bool dotted;
};
struct Slice {
  ExpressionPtr of, from, to, step;
};
struct Call {
  ExpressionPtr callee;
  Given given;
};
struct Applied {  // a filter or a test; of `given` the first is what it is applied to
  const Builtin* builtin;
  Given given;
};
struct Operation {  // one letter: of arithmetic(), or ! & | for not, and, or; without `left` of one operand
  char op;
  ExpressionPtr left, right;
};
struct Comparison {
  ExpressionPtr first;
  std::vector<std::pair<std::string, ExpressionPtr>> rest;  // "<", "not in", ...
};
struct Conditional {
  ExpressionPtr condition, yes, no;
};
struct Listed {
  std::vector<ExpressionPtr> items;
  Form form;
};
struct Mapped {
  std::vector<std::pair<ExpressionPtr, ExpressionPtr>> items;
};
struct Expression {
  std::variant<Constant, Name, Member, Slice, Call, Applied, Operation, Comparison, Conditional, Listed, Mapped> node;
};

struct Statement;
using Body = std::vector<Statement>;

struct Target {
  std::vector<Symbol> names;
  bool unpacks = false;
  std::optional<std::string> attribute = {};  // of a namespace
};
struct Output {
  ExpressionPtr value;
};
struct If {
  std::vector<std::pair<ExpressionPtr, Body>> branches;  // the last may have no condition
};
struct For {
  Target target;
  ExpressionPtr over, condition;
  Body body, otherwise;
};
struct Set {
  std::vector<std::pair<Target, ExpressionPtr>> values;
  bool scoped;  // by `with`, for its body alone
  Body body;
};
struct Captured {  // set, filter and generation blocks: the body's text is kText in `value`
  Body body;
  ExpressionPtr value;
  std::optional<Target> target;
  bool generated = false;
};
struct Macro {
  Symbol name;
  std::vector<std::pair<Symbol, ExpressionPtr>> parameters;
  Body body;
  bool calls_back = false;       // reads `caller`
  ExpressionPtr call = nullptr;  // of a call block, whose body is `caller` in it
};
struct Jump {
  bool breaks;
};
struct Statement {
  std::variant<Output, If, For, Set, Captured, Macro, Jump> node;
  int line;
};

inline constexpr Symbol kText = 0, kLoop = 1, kCaller = 2;
struct Syntax {
  std::vector<std::shared_ptr<const std::string>> names;
  Body body;
};

[[noreturn]] void fail_at(const std::string& what, int line, std::string_view why);

enum class Kind : uint8_t { text, output, output_end, block, block_end, name, string, integer, real, sign, end };
struct Token {
  Kind kind;
  std::string text;
  int line;
};

// Throw InputError, naming `what` and the line, for what is no template or is not known.
std::vector<Token> tokens_of(std::string_view source, const std::string& what);
Syntax parse(std::string_view source, const std::string& what);

}  // namespace tessera::jinja
