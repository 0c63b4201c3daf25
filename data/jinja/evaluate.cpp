// Walks the tree.
#include <fmt/format.h>

#include <functional>

#include "data/jinja/template.h"

namespace tessera::jinja {
namespace {

constexpr int kDeepestRun = 500;

struct Scope {
  Scope* outer = nullptr;
  std::vector<std::pair<Symbol, Value>> values = {};
  bool kept = false;  // a macro was made within, and reads it later

  void set(Symbol symbol, Value value) {
    for (auto& [name, old] : values)
      if (name == symbol) return void(old = std::move(value));
    values.emplace_back(symbol, std::move(value));
  }
};

// A filter of a loop is asked no earlier than an item is needed, as a generator's.
class Loop final : public Object {
 public:
  using Condition = std::function<bool(const Value&)>;
  Loop(Values items, Condition condition) : items_(std::move(items)), condition_(std::move(condition)) {}

  // Whether there is an item so many behind the present one.
  bool has(size_t more) {
    for (; passed_.size() <= at_ + more && next_ < items_.size(); ++next_)
      if (!condition_ || condition_(items_[next_])) passed_.push_back(items_[next_]);
    return passed_.size() > at_ + more;
  }
  const Value& item() const { return passed_[at_]; }
  void advance() { ++at_; }

  Value attribute(const std::string& name) override {
    const auto number = [](size_t n) { return Value(static_cast<int64_t>(n)); };
    if (name == "index") return number(at_ + 1);
    if (name == "index0") return number(at_);
    if (name == "first") return at_ == 0;
    if (name == "last") return !has(1);
    if (name == "depth") return int64_t{1};
    if (name == "depth0") return int64_t{0};
    if (name == "previtem") return at_ > 0 ? passed_[at_ - 1] : Undefined{};
    if (name == "nextitem") return has(1) ? passed_[at_ + 1] : Undefined{};
    has(items_.size());
    if (name == "length") return number(passed_.size());
    if (name == "revindex") return number(passed_.size() - at_);
    if (name == "revindex0") return number(passed_.size() - at_ - 1);
    throw InputError(fmt::format("'loop.{}' is not known", name));
  }

 private:
  Values items_, passed_ = {};
  size_t next_ = 0, at_ = 0;
  Condition condition_;
};

// A function of the language's own, or a method with what it is of.
class Function final : public Object {
 public:
  Function(const Builtin& builtin, Values of) : builtin_(builtin), of_(std::move(of)) {}
  Value call(Work& work, Arguments&& arguments) override {
    arguments.given.insert(arguments.given.begin(), of_.begin(), of_.end());
    return apply(work, builtin_, std::move(arguments));
  }

 private:
  const Builtin& builtin_;
  Values of_;
};

class Machine {
 public:
  Machine(Work& work, const Syntax& syntax, const std::string& what, Template::Rendered& out)
      : work_(work), syntax_(syntax), what_(what), main_(out), out_(&out.text) {}

  void run(const Variables& variables) {
    Scope& given = open(nullptr);
    for (const auto& [name, value] : variables)
      for (Symbol s = 0; s < syntax_.names.size(); ++s)
        if (*syntax_.names[s] == name) given.set(s, value);
    try {
      run(syntax_.body, open(&given));
    } catch (const InputError& e) {
      fail_at(what_, line_, e.what());
    }
  }

 private:
  enum class Flow : uint8_t { on, broken, continued };

  class Deeper {
   public:
    explicit Deeper(Machine& m) : m_(m) {
      m_.work_.charge(64);
      if (++m_.depth_ > kDeepestRun) throw InputError("nested too deep, or a macro that calls itself without end");
    }
    ~Deeper() { --m_.depth_; }
    Deeper(const Deeper&) = delete;
    Deeper& operator=(const Deeper&) = delete;

   private:
    Machine& m_;
  };

  class MacroFunction final : public Object {
   public:
    MacroFunction(Machine& machine, const Macro& macro, Scope& scope)
        : machine_(machine), macro_(macro), scope_(scope) {}
    Value call(Work&, Arguments&& arguments) override { return machine_.expand(macro_, scope_, std::move(arguments)); }

   private:
    Machine& machine_;
    const Macro& macro_;
    Scope& scope_;
  };

  Scope& open(Scope* outer) {
    if (free_.empty()) free_.push_back(&scopes_.emplace_back());
    Scope& scope = *free_.back();
    free_.pop_back();
    scope.outer = outer;
    return scope;
  }
  void close(Scope& scope) {
    if (scope.kept) return;
    scope.values.clear();
    free_.push_back(&scope);
  }

  // Statements.

  Flow run(const Body& body, Scope& scope) {
    const Deeper deeper(*this);
    for (const Statement& statement : body) {
      line_ = statement.line;
      const Flow flow = std::visit([&](const auto& node) { return run(node, scope); }, statement.node);
      if (flow != Flow::on) return flow;
    }
    return Flow::on;
  }
  Flow run_within(const Body& body, Scope& outer) {
    Scope& scope = open(&outer);
    const Flow flow = run(body, scope);
    close(scope);
    return flow;
  }
  // The text that a body makes.
  std::string text_of(const Body& body, Scope& scope) {
    std::string text;
    std::string* const before = std::exchange(out_, &text);
    run(body, scope);
    out_ = before;
    return text;
  }

  Flow run(const Output& o, Scope& scope) {
    *out_ += printed(work_, eval(*o.value, scope));
    return Flow::on;
  }
  Flow run(const If& f, Scope& scope) {
    for (const auto& [condition, body] : f.branches)
      if (!condition || truth(eval(*condition, scope))) return run(body, scope);
    return Flow::on;
  }
  Flow run(const For& f, Scope& scope) {
    const auto passes = [this, &f, &scope](const Value& value) {
      Scope& inner = open(&scope);
      assign(f.target, value, inner);
      const bool out = truth(eval(*f.condition, inner));
      close(inner);
      return out;
    };
    Loop* const loop = work_.keep(
        std::make_unique<Loop>(items_of(work_, eval(*f.over, scope)), f.condition ? Loop::Condition(passes) : nullptr));
    bool to_the_end = false;
    for (; loop->has(0); loop->advance()) {
      Scope& inner = open(&scope);
      inner.set(kLoop, static_cast<Object*>(loop));
      assign(f.target, loop->item(), inner);
      const Flow flow = run(f.body, inner);
      close(inner);
      to_the_end = to_the_end || flow == Flow::on;  // Jinja takes a loop whose bodies all `continue` for an empty one
      if (flow == Flow::broken) break;
    }
    return to_the_end ? Flow::on : run_within(f.otherwise, scope);
  }
  Flow run(const Set& s, Scope& scope) {
    Scope& into = s.scoped ? open(&scope) : scope;
    for (const auto& [target, value] : s.values) assign(target, eval(*value, scope), into);
    if (!s.scoped) return Flow::on;
    const Flow flow = run(s.body, into);
    close(into);
    return flow;
  }
  Flow run(const Captured& c, Scope& scope) {
    Scope& inner = open(&scope);
    const size_t begin = main_.text.size();
    if (c.generated && out_ != &main_.text) throw InputError("a generation block stands in another block or a macro");
    inner.set(kText, text_of(c.body, inner));
    const Value value = eval(*c.value, inner);
    close(inner);
    if (c.target)
      assign(*c.target, value, scope);
    else
      *out_ += printed(work_, value);
    if (c.generated) main_.generated.emplace_back(begin, main_.text.size());
    return Flow::on;
  }
  Flow run(const Macro& m, Scope& scope) {
    for (Scope* s = &scope; s && !s->kept; s = s->outer) s->kept = true;
    Object* const made = work_.keep(std::make_unique<MacroFunction>(*this, m, scope));
    if (m.call)
      *out_ += printed(work_, call(std::get<Call>(m.call->node), scope, made));
    else
      scope.set(m.name, made);
    return Flow::on;
  }
  Flow run(const Jump& j, Scope&) { return j.breaks ? Flow::broken : Flow::continued; }

  void assign(const Target& target, const Value& value, Scope& scope) {
    if (target.attribute) {
      const Value of = eval(Name{target.names.front()}, scope);
      Object* const* const object = of.as<Object*>();
      if (!object) throw InputError("an attribute is set of what is no namespace");
      return (*object)->set_attribute(*target.attribute, value);
    }
    if (!target.unpacks) return scope.set(target.names.front(), value);
    Values items = items_of(work_, value);
    if (items.size() != target.names.size())
      throw InputError(fmt::format("{} values for {} names", items.size(), target.names.size()));
    for (size_t i = 0; i < items.size(); ++i) scope.set(target.names[i], std::move(items[i]));
  }

  Value expand(const Macro& m, Scope& outer, Arguments&& arguments) {
    Scope& scope = open(&outer);
    if (arguments.given.size() > m.parameters.size()) throw InputError("a macro is given too many arguments");
    for (size_t i = 0; i < m.parameters.size(); ++i) {
      const auto& [symbol, otherwise] = m.parameters[i];
      const std::string& name = *syntax_.names[symbol];
      const auto named = std::find_if(arguments.named.begin(), arguments.named.end(),
                                      [&](const auto& argument) { return argument.first == name; });
      if (i < arguments.given.size())
        scope.set(symbol, arguments.given[i]);
      else if (named != arguments.named.end())
        scope.set(symbol, named->second), arguments.named.erase(named);
      else
        scope.set(symbol, otherwise ? eval(*otherwise, scope) : Undefined{syntax_.names[symbol]});
    }
    for (const auto& [name, value] : arguments.named) {
      if (name != "caller" || !m.calls_back) throw InputError(fmt::format("a macro has no argument '{}'", name));
      scope.set(kCaller, value);
    }
    const int line = line_;
    std::string text = text_of(m.body, scope);
    line_ = line;
    close(scope);
    return text;
  }

  // Expressions.

  Value eval(const Expression& e, Scope& scope) {
    const Deeper deeper(*this);
    return std::visit([&](const auto& node) { return eval(node, scope); }, e.node);
  }

  Value eval(const Constant& c, Scope&) { return c.value; }
  Value eval(const Name& n, Scope& scope) {
    for (const Scope* s = &scope; s; s = s->outer)
      for (const auto& [symbol, value] : s->values)
        if (symbol == n.symbol) return value;
    for (const char* const other : {"cycler", "joiner", "lipsum", "self", "super", "varargs", "kwargs"})
      if (*syntax_.names[n.symbol] == other) throw InputError(fmt::format("'{}' is not known", other));
    if (const Builtin* const found = find_builtin(Group::globals, *syntax_.names[n.symbol]))
      return work_.keep(std::make_unique<Function>(*found, Values{}));
    return Undefined{syntax_.names[n.symbol]};
  }
  Value eval(const Member& m, Scope& scope) { return member(eval(*m.of, scope), eval(*m.key, scope), m.dotted); }
  // A method comes before a key behind a dot, and behind it in brackets.
  Value member(const Value& of, const Value& key, bool dotted) {
    if (Object* const* const object = of.as<Object*>(); object && key.text()) return (*object)->attribute(*key.text());
    const Builtin* const method = find_method(of, key);
    auto found = method && dotted ? std::nullopt : item(work_, of, key);
    if (found) return *std::move(found);
    if (method) return work_.keep(std::make_unique<Function>(*method, Values{of}));
    return Undefined{key.text() ? *key.as<Text>() : nullptr};
  }
  Value eval(const Slice& s, Scope& scope) {
    const Value of = eval(*s.of, scope);
    const auto part = [&](const ExpressionPtr& e) { return e ? eval(*e, scope) : None{}; };
    const Value from = part(s.from), to = part(s.to);
    return slice(work_, of, from, to, part(s.step));
  }
  Value eval(const Call& c, Scope& scope) { return call(c, scope, nullptr); }
  Value call(const Call& c, Scope& scope, Object* caller) {
    const auto* const m = std::get_if<Member>(&c.callee->node);
    const Value of = m ? eval(*m->of, scope) : eval(*c.callee, scope);
    const Value key = m ? eval(*m->key, scope) : Undefined{};
    const Builtin* const method = m && m->dotted ? find_method(of, key) : nullptr;
    Arguments arguments = evaluated(c.given, scope);
    if (caller) arguments.named.emplace_back("caller", caller);
    if (method) {
      arguments.given.insert(arguments.given.begin(), of);
      return apply(work_, *method, std::move(arguments));
    }
    const Value callee = m ? member(of, key, m->dotted) : of;
    if (Object* const* const function = callee.as<Object*>()) return (*function)->call(work_, std::move(arguments));
    item(work_, callee, None{});  // throws for what is undefined
    throw InputError(fmt::format("{} is called as a function", type_name(callee)));
  }
  Arguments evaluated(const Given& given, Scope& scope) {
    Arguments out;
    for (const ExpressionPtr& one : given.in_order) out.given.push_back(eval(*one, scope));
    for (const auto& [name, value] : given.named) out.named.emplace_back(name, eval(*value, scope));
    return out;
  }
  Value eval(const Applied& a, Scope& scope) { return apply(work_, *a.builtin, evaluated(a.given, scope)); }
  Value eval(const Operation& o, Scope& scope) {
    const Value left = o.left ? eval(*o.left, scope) : Undefined{};
    if ((o.op == '&' && !truth(left)) || (o.op == '|' && truth(left))) return left;
    const Value right = eval(*o.right, scope);
    if (o.op == '!') return !truth(right);
    if (o.op == '&' || o.op == '|') return right;
    const Value nothing = right.is<double>() ? Value(-0.0) : Value(int64_t{0});
    return arithmetic(work_, o.op, o.left ? left : nothing, right);
  }
  Value eval(const Comparison& c, Scope& scope) {
    Value left = eval(*c.first, scope);
    for (const auto& [op, expression] : c.rest) {
      Value right = eval(*expression, scope);
      if (!compare(work_, op, left, right)) return false;
      left = std::move(right);
    }
    return true;
  }
  Value eval(const Conditional& c, Scope& scope) {
    if (truth(eval(*c.condition, scope))) return eval(*c.yes, scope);
    return c.no ? eval(*c.no, scope) : Undefined{};
  }
  Value eval(const Listed& l, Scope& scope) {
    Values items;
    for (const ExpressionPtr& one : l.items) items.push_back(eval(*one, scope));
    return sequence_of(work_, std::move(items), l.form);
  }
  Value eval(const Mapped& m, Scope& scope) {
    Pairs items;
    for (const auto& [key, value] : m.items) {
      Value name = eval(*key, scope);
      items.emplace_back(std::move(name), eval(*value, scope));
    }
    return dict_of(work_, std::move(items));
  }

  Work& work_;
  const Syntax& syntax_;
  const std::string& what_;
  Template::Rendered& main_;
  std::string* out_;
  std::deque<Scope> scopes_ = {};
  std::vector<Scope*> free_ = {};
  int depth_ = 0, line_ = 1;
};

}  // namespace

Template::Template(std::string_view source, std::string what) : what_(std::move(what)), syntax_(parse(source, what_)) {}

Template::Rendered Template::render(Work& work, const Variables& variables) const {
  Rendered out;
  Machine(work, syntax_, what_, out).run(variables);
  return out;
}

}  // namespace tessera::jinja
