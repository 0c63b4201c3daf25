// The exercises on parallel training: which functions of the real code are blanked, and who grades them.
//
// An exercise names one source file of the product and one or a few functions in it. A learner gets that file with
// the bodies blanked (lab/check.h), and a page of theory (lab/pages/NAME.md). What the learner writes is compiled
// and linked into a Tessera of their own in the place of the product's file (lab/check.h). So the solution of an
// exercise is the product's file, and a solved exercise is a Tessera that trains with it.
//
//   tessera lab check: never loads the learner's code           DIR/build/tessera lab answer: has it, and is confined
//
//     draws a seed              ------ seed ------------------->    draws the same inputs
//     ask(): waits              ------ number of an answer ---->    ask(): runs the learner's function, on ranks that
//     check(): computes what    <----- number, what ranks found --     are threads
//     is right, and compares                                        check(): does nothing
//     speaks
//
// A grader (lab/grade/) is one function, which both run. `lab grade` is both in one process, for the product's own.
#pragma once
#include <cstdint>
#include <cstring>
#include <functional>
#include <optional>
#include <tuple>
#include <type_traits>

#include "tensor/error.h"

namespace tessera::lab {

// A body that is blanked.
struct Blank {
  std::string_view function;   // how its definition begins, up to the opening parenthesis at least
  std::string_view from = {};  // how the first blanked line begins; empty: the whole body
};

// Properties that an exercise was found to keep, line by line, for a learner who has solved it.
using PassedChecks = std::vector<std::string>;

// Findings of a grader, in a learner's terms.
struct Failure {
  std::string bound;      // which one broke: "values", "bytes", "deadlock"
  std::string found;      // where, what was expected and what was found
  std::string cause;      // the likely one; empty: none is known
  std::string more = {};  // lines behind: a picture
};

// Returns a packed answer: the local one, which is computed here, or another process's. Throws Wrong for a process that
// gives none, and Error for what was thrown there.
using Ask = std::function<std::string(const std::function<std::string()>& local)>;

// A bound that a grader checks, and the points of an exercise that keeps it. The bounds of an exercise are in the order
// in which one gives sense to the next: behind a broken one none gives points.
struct Bound {
  std::string_view name;
  int points = 0;
};

class Grading;

// The pages, as the build found them.
struct File {
  std::string_view name, text;
};
const std::vector<File>& pages_files();
// "An all-reduce around a ring", of a page that begins "# 2. An all-reduce around a ring".
std::string_view page_title(std::string_view page);

struct Exercise {
  std::string_view name;
  std::string_view file;  // from the root of the repository
  std::vector<Blank> blanks;
  std::vector<Bound> bounds;
  // Throws Wrong, or tells the grading, for what is wrong.
  PassedChecks (*grade)(Grading& grading) = nullptr;
  std::vector<std::string_view> without = {};  // the product's functions that do the same under another name
  int number = 0;                              // its place in the list, from 1
  std::string_view page = {};                  // lab/pages/NAME.md

  std::string_view title() const { return page_title(page); }
};

const std::vector<Exercise>& exercises();

// By number or name. Throws Error (usage) that lists them.
const Exercise& exercise(std::string_view number_or_name);

// Packed answers: bytes that go from the process that has a learner's code to the grader.
//
// Numbers and plain structs go as they lie in memory, lists as their length and their elements, and a struct with lists
// in it field by field: its fields() names them.

struct NoAnswer : Error {
  NoAnswer() : Error("what came back is no answer to what was asked") {}
};

template <class T>
void pack(std::string& to, T& x) {
  if constexpr (std::is_trivially_copyable_v<T>) {
    to.append(reinterpret_cast<const char*>(&x), sizeof(x));
  } else if constexpr (requires { x.fields(); }) {
    std::apply([&](auto&... field) { (pack(to, field), ...); }, x.fields());
  } else {
    size_t count = x.size();
    pack(to, count);
    for (auto& element : x) pack(to, element);
  }
}

// Takes an object from the beginning of the bytes. Throws NoAnswer where they end too early.
template <class T>
T take(std::string_view& from) {
  T x{};
  if constexpr (std::is_trivially_copyable_v<T>) {
    if (from.size() < sizeof(x)) throw NoAnswer();
    std::memcpy(&x, from.data(), sizeof(x));
    from.remove_prefix(sizeof(x));
  } else if constexpr (requires { x.fields(); }) {
    std::apply([&](auto&... field) { ((field = take<std::decay_t<decltype(field)>>(from)), ...); }, x.fields());
  } else {
    for (auto count = take<size_t>(from); count > 0; --count) x.push_back(take<typename T::value_type>(from));
  }
  return x;
}

template <class T>
std::string packed(T x) {
  std::string out;
  pack(out, x);
  return out;
}

// One grading of an exercise: whom it asks, and what was found to be wrong.
class Grading {
 public:
  // `compares`: false in the process that only answers.
  Grading(const Exercise& exercise, Ask ask, uint64_t seed, bool compares = true)
      : exercise_(exercise), ask_(std::move(ask)), seed_(seed), compares_(compares) {}

  // The findings of so many ranks, which f computes with the learner's function. Empty where nothing is compared.
  template <class F>
  auto ask(int ranks, const F& f) const {
    const std::string bytes = ask_([&] { return packed(f()); });
    std::string_view left = bytes;
    std::invoke_result_t<F> out;
    if (!compares_) return out;
    out = take<std::invoke_result_t<F>>(left);
    if (std::ssize(out) != ranks) throw NoAnswer();
    return out;
  }
  // Calls f, which may throw Wrong, where answers are compared.
  template <class F>
  void check(const F& f) {
    try {
      if (compares_) f();
    } catch (const Failure& wrong) {
      tell(wrong);
    }
  }
  // Keeps what is wrong, so that bounds before it can still be checked. Throws Enough where there are none.
  void tell(const Failure& wrong);
  struct Enough {};

  const std::vector<Failure>& wrong() const { return wrong_; }
  uint64_t seed() const { return seed_; }  // drawn for each grading, so that nobody knows the numbers before
  bool compares() const { return compares_; }

 private:
  const Exercise& exercise_;
  Ask ask_;
  std::vector<Failure> wrong_ = {};
  uint64_t seed_;
  bool compares_;
};

// Numbers by which solutions may be compared: bubble_percent, bytes_sent.
using Scores = std::vector<std::pair<std::string, double>>;

struct Verdict {
  bool solved = false;
  std::string text;                     // several lines
  Failure wrong = {};                   // of one that is not solved
  size_t kept = 0;                      // bounds that are kept, from the first one
  std::vector<std::string> notes = {};  // for a lecturer; they decide nothing
  Scores score = {};                    // of one that is solved
  std::optional<uint64_t> seed = {};    // of a puzzle
};

// Asks and compares.
Verdict grade(const Exercise& exercise, const Ask& ask, uint64_t seed);
// Grades what this program was built with.
Verdict grade(const Exercise& exercise);
// The first bounds of a list, up to the one that broke; none, where that is no bound.
size_t kept_bounds(const std::vector<Bound>& bounds, const Failure& wrong);
// The verdict on one that is not solved.
Verdict refused(const Exercise& exercise, const Failure& wrong, size_t kept = 0);
// Points of the first `kept` bounds.
int points(const std::vector<Bound>& bounds, size_t kept);
// A verdict for other programs: a line with an object, whose it is in it if that is said.
std::string json(const Exercise& exercise, const Verdict& verdict, const std::string& learner = "");
std::string json(const char* kind, std::string_view name, int number, const std::vector<Bound>& bounds,
                 const Verdict& verdict, const std::string& learner);

// One grader for each exercise; a file of lab/grade/ has one or two that are alike.

PassedChecks grade_messages(Grading& grading);
PassedChecks grade_ring(Grading& grading);
PassedChecks grade_ddp(Grading& grading);
PassedChecks grade_zero(Grading& grading);
PassedChecks grade_f_and_g(Grading& grading);
PassedChecks grade_vocabulary(Grading& grading);
PassedChecks grade_1f1b(Grading& grading);
PassedChecks grade_zb_h1(Grading& grading);
PassedChecks grade_ring_attention(Grading& grading);
PassedChecks grade_clipping(Grading& grading);
PassedChecks grade_experts(Grading& grading);

}  // namespace tessera::lab
