// Exercises on parallel training: blanked functions of Tessera's sources and their graders.
//
// The learner receives one source file with blanked bodies (lab/check.h) and a page of theory (lab/pages/NAME.md). The
// learner's file is compiled and linked into a separate Tessera in place of the original, so the original file is the
// solution, and a solved exercise trains.
//
//   tessera lab check: never loads the learner's code           DIR/build/tessera lab answer: contains it, sandboxed
//
//     samples a seed            ------ seed ------------------->    generates the same inputs
//     ask(): waits              ------ number of an answer ---->    ask(): runs the learner's function, on ranks that
//     check(): computes the     <----- number, ranks' results ----     are threads
//     reference and compares                                        check(): does nothing
//     prints the verdict
//
// Both processes run the same grader function (lab/grade/). `lab grade` does both in one process for the original code.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <vector>

#include "base/embedded_file.h"
#include "base/error.h"

namespace tessera::lab {

struct Blank {
  std::string_view function;   // prefix of the definition, at least up to the parenthesis
  std::string_view from = {};  // prefix of the first blanked line; empty: full body
};

// Verified properties of a solved exercise, one per line.
using PassedChecks = std::vector<std::string>;

struct Failure {
  std::string bound;      // failed check: "values", "bytes", "deadlock"
  std::string found;      // location, actual and expected
  std::string cause;      // likely cause, or empty
  std::string more = {};  // trailing lines, such as a diagram
};

// Returns a packed answer, computed by `local` or received from another process. Throws Failure if the process sends
// none, and rethrows its exceptions as Error.
using Ask = std::function<std::string(const std::function<std::string()>& local)>;

// A check of a grader and its points. Checks are ordered by dependency; no points after a failed check.
struct Bound {
  std::string_view name;
  int points = 0;
};

class Grading;

const std::vector<EmbeddedFile>& pages_files();

// What exercises and puzzles have in common.
struct Assignment {
  std::string_view name;
  std::string_view file;  // of an exercise, relative to the repository root; of a puzzle, in the learner's directory
  std::vector<Bound> bounds;
  const char* kind = "exercise";
  int number = 0;              // index in its list, from 1
  std::string_view page = {};  // lab/pages/NAME.md

  // "1", or "p1" for a puzzle.
  std::string label() const { return (kind[0] == 'p' ? "p" : "") + std::to_string(number); }
  // "An all-reduce around a ring" for "# 2. An all-reduce around a ring".
  std::string_view title() const;
};
// Sets the numbers and pages of a list.
template <class T>
std::vector<T> numbered(std::vector<T> all, const std::vector<EmbeddedFile>& pages) {
  for (size_t i = 0; i < all.size(); ++i) {
    all[i].number = static_cast<int>(i) + 1;
    all[i].page = std::ranges::find(pages, all[i].name, &EmbeddedFile::name)->text;
  }
  return all;
}

struct Exercise : Assignment {
  std::vector<Blank> blanks;
  // Throws Failure, or records it in the grading.
  PassedChecks (*grade)(Grading& grading) = nullptr;
  std::vector<std::string_view> without = {};  // forbidden Tessera functions with the same effect
};

const std::vector<Exercise>& exercises();

// By number or name. Throws Error (usage) listing all.
const Exercise& exercise(std::string_view number_or_name);

// Serialization of answers from the learner's process: trivially copyable types as bytes, lists as length and elements,
// other structs field by field (fields()).

struct NoAnswer : Error {
  NoAnswer() : Error("the reply does not match the request") {}
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

// Removes an object from the front of `from`. Throws NoAnswer if it is truncated.
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

// One run of a grader: source of answers and recorded failures.
class Grading {
 public:
  // `compares`: false in the learner's process.
  Grading(const Exercise& exercise, Ask ask, uint64_t seed, bool compares = true)
      : exercise_(exercise), ask_(std::move(ask)), seed_(seed), compares_(compares) {}

  // The results of `ranks` ranks, computed by f with the learner's function. Empty in the learner's process.
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
  // Calls f, which may throw Failure, in the comparing process.
  template <class F>
  void check(const F& f) {
    try {
      if (compares_) f();
    } catch (const Failure& wrong) {
      tell(wrong);
    }
  }
  // Records a failure, so that preceding checks still run. Throws Enough if there are no preceding checks.
  void tell(const Failure& wrong);
  struct Enough {};

  const std::vector<Failure>& wrong() const { return wrong_; }
  uint64_t seed() const { return seed_; }  // random per grading, so answers cannot be prepared
  bool compares() const { return compares_; }

 private:
  const Exercise& exercise_;
  Ask ask_;
  std::vector<Failure> wrong_ = {};
  uint64_t seed_;
  bool compares_;
};

// Metrics to compare solutions: bubble_percent, bytes_sent.
using Scores = std::vector<std::pair<std::string, double>>;

struct Verdict {
  bool solved = false;
  std::string text;                     // several lines
  Failure wrong = {};                   // if not solved
  size_t passed = 0;                    // number of leading checks that passed
  std::vector<std::string> notes = {};  // for the lecturer, without effect on the result
  Scores score = {};                    // if solved
  std::optional<uint64_t> seed = {};    // of a puzzle
};

Verdict grade(const Exercise& exercise, const Ask& ask, uint64_t seed);
// Grades this program's code.
Verdict grade(const Exercise& exercise);
// 0 if the failure is not in the list.
size_t passed_bounds(const std::vector<Bound>& bounds, const Failure& wrong);
std::string failure_lines(const Failure& wrong);
Verdict refused(const Exercise& exercise, const Failure& wrong, size_t passed = 0);
int points(const std::vector<Bound>& bounds, size_t passed);
// One line of JSON, with the learner if not empty.
std::string json(const Assignment& assignment, const Verdict& verdict, const std::string& learner = "");

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
