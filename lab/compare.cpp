// First wrong element, constant factors, matching guesses.
#include "lab/compare.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace tessera::lab {
namespace {

constexpr double kPatience = 5;     // timeout of a rank, seconds
constexpr double kRounding = 1e-4;  // relative differences explained by summation order
constexpr double kMatches = 2e-6;   // relative error of a matching guess (summation order)
constexpr size_t kEnough = 3;       // minimum number of values that identify a factor

double largest(const std::vector<double>& x) {
  double maximum = 0;
  for (const double v : x)
    if (std::isfinite(v)) maximum = std::max(maximum, std::abs(v));
  return maximum;
}

bool close(const std::vector<double>& a, const std::vector<double>& b, double relative) {
  if (a.size() != b.size()) return false;
  const double limit = relative * std::max(largest(a), largest(b));
  for (size_t i = 0; i < a.size(); ++i)
    if (!(std::abs(a[i] - b[i]) <= limit)) return false;
  return true;
}

// k if a = k b.
std::optional<double> factor_between(const std::vector<double>& a, const std::vector<double>& b) {
  double dot = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    dot += a[i] * b[i];
    norm += b[i] * b[i];
  }
  if (a.size() < kEnough || norm == 0 || !std::isfinite(dot)) return {};
  const double k = dot / norm;
  if (k == 0 || !close(a, b * k, 10 * kMatches)) return {};
  return k;
}

bool about(double a, double b) { return std::abs(a - b) <= 1e-4 * std::abs(b); }

std::string factor_cause(double k, int n) {
  if (n > 1 && about(k, n))
    return fmt::format(
        "every value is {0} times too large with {0} ranks: a completed sum is reduced again, or each rank "
        "contributes values that only one rank should contribute",
        n);
  if (n > 1 && about(k, 1.0 / n))
    return fmt::format(
        "every value is {0} times too small with {0} ranks: you averaged; the loss is already divided by the "
        "number of tokens, so sum instead",
        n);
  if (about(k, -1)) return "every value has the wrong sign";
  if (about(k, 2)) return "every value is twice the expected one: something is added twice";
  if (about(k, 0.5)) return "every value is half of the expected one: one of two equal terms is missing";
  return "";
}

std::string cause_of_values(const std::vector<double>& found, const std::vector<double>& expected,
                            const std::vector<Guess>& guesses, int n, bool exact) {
  if (std::ranges::any_of(found, [](double x) { return !std::isfinite(x); }))
    return "a value is NaN or infinite: uninitialized memory, or a difference of infinities";
  for (const Guess& guess : guesses)
    if (close(found, guess.would_be, kMatches) && !close(guess.would_be, expected, kMatches)) return guess.cause;
  if (close(found, expected, kRounding))
    return exact ? "correct up to rounding: the summation order differs from the required one" : "";
  if (largest(found) == 0) return "all values are zero: nothing was written";
  if (const auto k = factor_between(found, expected)) return factor_cause(*k, n);
  return "";
}

}  // namespace

void expect_values(const std::string& where, const std::vector<double>& found, const std::vector<double>& expected,
                   const std::vector<Guess>& guesses, int ranks, double tolerance) {
  if (found.size() != expected.size())
    throw Failure{"values", fmt::format("{}: {} values; expected {}", where, found.size(), expected.size()),
                  found.empty() ? "no values: for a gradient, g.set(0, tensor) is missing in the backward pass" : ""};
  const double limit = tolerance * largest(expected);
  const auto wrong = [&](size_t i) { return !(std::abs(found[i] - expected[i]) <= limit); };
  size_t first = found.size(), count = 0;
  for (size_t i = found.size(); i-- > 0;)
    if (wrong(i)) {
      first = i;
      ++count;
    }
  if (count == 0) return;
  const bool near = std::abs(found[first] - expected[first]) < 1e-4 * std::abs(expected[first]);
  const std::string pair = near ? fmt::format("{}; expected {}", found[first], expected[first])
                                : fmt::format("{:.6g}; expected {:.6g}", found[first], expected[first]);
  throw Failure{"values",
                found.size() == 1
                    ? fmt::format("{}: {}", where, pair)
                    : fmt::format("{}: element {} is {} ({} of {} are wrong)", where, first, pair, count, found.size()),
                cause_of_values(found, expected, guesses, ranks, tolerance == 0)};
}

void expect_bytes(Grading& grading, const std::string& where, int64_t found, int64_t expected,
                  const std::string& formula, const std::vector<BytesGuess>& guesses) {
  if (found == expected) return;
  std::string cause;
  for (const BytesGuess& guess : guesses)
    if (cause.empty() && guess.would_be == found) cause = guess.cause;
  grading.tell({"bytes",
                fmt::format("{}: {} bytes; expected {} = {}: {} too {}", where, found, expected, formula,
                            std::abs(found - expected), found > expected ? "many" : "few"),
                cause});
}

void on_ranks(int ranks, const std::function<void(Communicator& world)>& body, Algorithm algorithm) {
  launch({.ranks = ranks, .threads_per_rank = 1, .timeout_s = kPatience, .algorithm = algorithm, .say = [](auto&) {}},
         body);
}

int64_t sent(const Communicator& world) {
  int64_t all = 0;
  for (const OpCount& c : world.counts()) all += c.sent;
  return all;
}

std::vector<double> to_doubles(const Tensor& t) { return t.contiguous().to(DType::float64).to_vector<double>(); }

std::vector<double> gradient_values(const Var& x) {
  return x.grad().defined() ? to_doubles(x.grad()) : std::vector<double>();
}

std::vector<double> operator+(std::vector<double> a, const std::vector<double>& b) {
  for (size_t i = 0; i < a.size(); ++i) a[i] += b.at(i);
  return a;
}

std::vector<double> operator*(std::vector<double> a, double factor) {
  for (double& x : a) x *= factor;
  return a;
}

}  // namespace tessera::lab
