// Weights, and combined datasets.
#include "data/mixture.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "base/config_file.h"
#include "base/error.h"
#include "base/json.h"
#include "data/examples.h"
#include "data/json_rows.h"

namespace tessera {

namespace fs = std::filesystem;
namespace {

constexpr size_t kMax = 256;

double number_in(std::string_view text) {
  double v = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), v);
  return error == std::errc() && end == text.data() + text.size() ? v : -1;
}

template <class Refusal>
void check(const std::vector<Weighted>& all, const std::string& what) {
  const auto refuse = [&](const std::string& why) { throw Refusal(fmt::format("{}: {}", what, why)); };
  if (all.size() < 2 || all.size() > kMax)
    refuse(fmt::format("{} weighted dataset{}; expected 2 to {}", all.size(), all.size() == 1 ? "" : "s", kMax));
  std::set<std::string> names;
  for (const Weighted& w : all) {
    if (w.name.empty()) refuse("a dataset has no name; expected NAME=WEIGHT");
    if (!std::isfinite(w.weight) || w.weight <= 0)
      refuse(fmt::format("the weight of '{}': expected a positive number", w.name));
    if (!names.insert(fs::path(w.spec).lexically_normal().string()).second)
      refuse(fmt::format("'{}' is a duplicate; add its weights", w.name));
  }
}

// A .json file must be one object with only numeric values, or contain no examples.
bool is_weights_file(const std::string& name) {
  if (!name.ends_with(".json") || !holds_examples(name)) return name.ends_with(".json") || name.ends_with(".toml");
  constexpr uintmax_t kMaxBytes = 1 << 20;
  if (fs::file_size(name) > kMaxBytes) return false;
  const std::string text = read_file(name);
  const nlohmann::json all = nlohmann::json::parse(text, nullptr, false);
  return all.is_object() && std::ranges::all_of(all, [](const nlohmann::json& value) { return value.is_number(); });
}

constexpr int64_t kMillion = 1'000'000;

int64_t total(std::span<const int64_t> ratios) { return std::reduce(ratios.begin(), ratios.end(), int64_t{0}); }

void divide_by_common(std::vector<int64_t>& ratios) {
  int64_t common = 0;
  for (const int64_t s : ratios) common = std::gcd(common, s);
  for (int64_t& s : ratios) s /= common;
}

}  // namespace

std::vector<Weighted> parse_weights(std::string_view text, const std::string& what) {
  std::vector<Weighted> out;
  for (size_t at = 0; at <= text.size() && out.size() <= kMax;) {
    const size_t end = std::min(text.find(',', at), text.size());
    const std::string_view one = text.substr(at, end - at);
    const size_t equals = one.rfind('=');
    if (equals == std::string_view::npos)
      throw Error(fmt::format("{}: '{}' has no weight; expected NAME=WEIGHT,NAME=WEIGHT", what, one));
    out.push_back({.name = std::string(one.substr(0, equals)), .weight = number_in(one.substr(equals + 1))});
    at = end + 1;
  }
  check<Error>(out, what);
  return out;
}

std::vector<Weighted> parse_weights_file(std::string_view bytes, const std::string& what) {
  std::vector<Weighted> out;
  if (what.ends_with(".toml")) {
    for (const ConfigEntry& e : read_config(bytes, what)) out.push_back({.name = e.key, .weight = number_in(e.value)});
  } else {
    const nlohmann::json all = parse_json(bytes, what);
    if (!all.is_object())
      throw InputError(what + ": expected rows that are objects or strings, or an object that maps names to weights");
    for (const auto& [name, weight] : all.items())
      out.push_back({.name = name, .weight = weight.is_number() ? weight.get<double>() : -1});
  }
  const fs::path folder = fs::path(what).parent_path();
  for (Weighted& w : out)
    if (const fs::path path = folder / w.name; !w.name.empty() && is_there(path)) w.spec = path.string();
  check<InputError>(out, what);
  return out;
}

std::optional<std::vector<Weighted>> mixture_in(const std::string& data) {
  if (is_plain_file(data)) {
    if (!is_weights_file(data)) return std::nullopt;
    return parse_weights_file(read_file(data), data);
  }
  if (data.find('=') == std::string::npos || is_there(data)) return std::nullopt;
  return parse_weights(data, "`data`");
}

Dataset mixed(const std::vector<Weighted>& weights, std::vector<Dataset> datasets) {
  Dataset out;
  std::vector<double> given;
  for (const Weighted& w : weights) {
    given.push_back(w.weight);
    out.source += fmt::format("{}{}={:.6g}", out.source.empty() ? "" : ",", w.name, w.weight);
  }
  const std::vector<int64_t> ratios = integer_ratios(given);
  for (size_t k = 0; k < datasets.size(); ++k) {
    const auto d = std::make_shared<const Dataset>(std::move(datasets[k]));
    const std::string& name = weights[k].name;
    if (k == 0) out.tokenizer = d->tokenizer;
    if (d->tokenizer->identity() != out.tokenizer->identity())
      throw Error(fmt::format(
          "`data`: '{}' has a different tokenizer ({}, {} tokens) from '{}' ({}, {} tokens); expected one for all, "
          "which "
          "`tokenizer` or `tessera data` sets",
          name, d->tokenizer->kind(), d->tokenizer->vocab_size(), weights[0].name, out.tokenizer->kind(),
          out.tokenizer->vocab_size()));
    if (k > 0 && d->has_examples() != out.parts[0].dataset->has_examples())
      throw Error(fmt::format("`data`: '{}' and '{}': expected examples in both or in neither", weights[0].name, name));
    out.train_bytes += d->train_bytes;
    out.val_bytes += d->val_bytes;
    for (const std::string& note : d->notes) out.notes.push_back(fmt::format("{}: {}", name, note));
    out.parts.push_back({name, ratios[k], d});
  }
  return out;
}

std::vector<int64_t> integer_ratios(std::span<const double> weights) {
  constexpr double kLargest = 3e16;  // the sum of 256 such values fits in int64
  std::vector<int64_t> ratios;
  for (const double scale : {1.0, 1.0 * kMillion}) {
    ratios.clear();
    for (const double w : weights) {
      const double scaled = w * scale;
      const bool is_integer = scaled < kLargest && std::abs(scaled - std::round(scaled)) <= 1e-9 * scaled;
      ratios.push_back(is_integer ? std::llround(scaled) : 0);
    }
    if (std::ranges::find(ratios, 0) != ratios.end()) continue;
    divide_by_common(ratios);
    if (total(ratios) <= kMillion) return ratios;
  }
  const double largest =
      *std::ranges::max_element(weights);  // a sum could overflow a double, so divide by the maximum first
  double sum = 0;
  for (const double w : weights) sum += w / largest;
  ratios.clear();
  for (const double w : weights) ratios.push_back(std::max<int64_t>(std::llround(w / largest / sum * kMillion), 1));
  *std::ranges::max_element(ratios) += kMillion - total(ratios);  // the rounding remainder
  divide_by_common(ratios);
  return ratios;
}

MixtureOrder::MixtureOrder(std::vector<int64_t> ratios) : ratios_(std::move(ratios)) {
  const auto count = std::ssize(ratios_);
  if (count < 1 || std::cmp_greater(count, kMax) || *std::ranges::min_element(ratios_) < 1 ||
      *std::ranges::max_element(ratios_) > kMillion || total(ratios_) > kMillion)
    throw Error(fmt::format("[mixture] {} weights; expected 1 to {}, each at least 1, with a sum of at most {}", count,
                            kMax, kMillion));
  const int64_t period = total(ratios_), slack = std::max<int64_t>(2 * count - 2, 1);
  std::vector<int64_t> taken(ratios_.size());
  period_.reserve(static_cast<size_t>(period));
  for (int64_t n = 1; n <= period; ++n) {
    // Among the eligible datasets (behind by at least 1 / slack), choose the one with the earliest deadline.
    size_t best = 0;
    int64_t best_deadline = 0, best_ratio = 0;
    for (size_t k = 0; k < ratios_.size(); ++k) {
      const int64_t behind = ratios_[k] * n - taken[k] * period;  // in units of 1 / period sequences
      if (behind * slack < period) continue;
      const int64_t deadline = period * (slack - 1) - behind * slack;
      if (best_ratio == 0 || deadline * best_ratio < best_deadline * ratios_[k]) {
        best = k;
        best_deadline = deadline;
        best_ratio = ratios_[k];
      }
    }
    period_.push_back({static_cast<int32_t>(best), static_cast<int32_t>(taken[best]++)});
  }
}

MixtureOrder::Place MixtureOrder::at(int64_t sequence) const {
  const auto period = std::ssize(period_);
  const Entry& e = period_[static_cast<size_t>(sequence % period)];
  const auto dataset = static_cast<size_t>(e.dataset);
  return {dataset, sequence / period * ratios_[dataset] + e.nth};
}

}  // namespace tessera
