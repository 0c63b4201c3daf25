// Reading weights, and joining datasets.
#include "data/mixture.h"

#include <fmt/format.h>

#include <charconv>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "data/config_file.h"
#include "data/examples.h"
#include "data/files.h"
#include "data/json.h"
#include "data/mixture_order.h"
#include "tensor/error.h"

namespace tessera {
namespace fs = std::filesystem;
namespace {

constexpr size_t kMost = 256;

double number_in(std::string_view text) {
  double v = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), v);
  return error == std::errc() && end == text.data() + text.size() ? v : -1;
}

// Refuses what is no mixture, by `Refusal` (name of the source, why).
template <class Refusal>
void check(const std::vector<Weighted>& all, const std::string& what) {
  const auto refuse = [&](const std::string& why) { throw Refusal(fmt::format("{}: {}", what, why)); };
  if (all.size() < 2 || all.size() > kMost)
    refuse(fmt::format("{} dataset{} with a weight; expected 2 to {}", all.size(), all.size() == 1 ? "" : "s", kMost));
  std::set<std::string> names;
  for (const Weighted& w : all) {
    if (w.name.empty()) refuse("a dataset without a name; expected NAME=WEIGHT");
    if (!std::isfinite(w.weight) || w.weight <= 0)
      refuse(fmt::format("the weight of '{}': expected a positive number", w.name));
    if (!names.insert(fs::path(w.spec).lexically_normal().string()).second)
      refuse(fmt::format("'{}' is named twice; its weights can be added", w.name));
  }
}

bool is_weights_file(const std::string& name) { return name.ends_with(".json") || name.ends_with(".toml"); }

std::string described(const std::vector<Weighted>& weights) {
  std::string out;
  for (const Weighted& w : weights) out += fmt::format("{}{}={:.6g}", out.empty() ? "" : ",", w.name, w.weight);
  return out;
}

}  // namespace

std::vector<Weighted> parse_weights(std::string_view text, const std::string& what) {
  std::vector<Weighted> out;
  for (size_t at = 0; at <= text.size() && out.size() <= kMost;) {
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
    if (!all.is_object()) throw InputError(what + ": expected an object of names and weights");
    for (const auto& [name, weight] : all.items())
      out.push_back({.name = name, .weight = weight.is_number() ? weight.get<double>() : -1});
  }
  const fs::path folder = fs::path(what).parent_path();
  std::error_code error;
  for (Weighted& w : out)
    if (const fs::path beside = folder / w.name; !w.name.empty() && fs::exists(beside, error)) w.spec = beside.string();
  check<InputError>(out, what);
  return out;
}

std::optional<std::vector<Weighted>> mixture_in(const std::string& data) {
  std::error_code error;
  if (fs::is_regular_file(data, error)) {
    if (!is_weights_file(data)) return std::nullopt;
    return parse_weights_file(read_file(data), data);
  }
  if (data.find('=') == std::string::npos || fs::exists(data, error)) return std::nullopt;
  return parse_weights(data, "`data`");
}

Dataset mixed(const std::vector<Weighted>& weights, std::vector<Dataset> datasets) {
  Dataset out;
  out.source = described(weights);
  std::vector<double> numbers;
  for (const Weighted& w : weights) numbers.push_back(w.weight);
  const std::vector<int64_t> shares = whole_shares(numbers);
  for (size_t k = 0; k < datasets.size(); ++k) {
    const auto d = std::make_shared<const Dataset>(std::move(datasets[k]));
    const std::string& name = weights[k].name;
    if (k == 0) out.tokenizer = d->tokenizer;
    if (d->tokenizer->to_json() != out.tokenizer->to_json())
      throw Error(
          fmt::format("`data`: '{}' has another tokenizer ({}, {} tokens) than '{}' ({}, {} tokens); expected datasets "
                      "of one, which "
                      "`tokenizer` or `tessera data` gives them",
                      name, d->tokenizer->kind(), d->tokenizer->vocab_size(), weights[0].name, out.tokenizer->kind(),
                      out.tokenizer->vocab_size()));
    if (k > 0 && d->has_examples() != out.parts[0].dataset->has_examples())
      throw Error(fmt::format("`data`: '{}' and '{}': expected examples in both or in none", weights[0].name, name));
    out.train_bytes += d->train_bytes;
    out.val_bytes += d->val_bytes;
    for (const std::string& note : d->notes) out.notes.push_back(fmt::format("{}: {}", name, note));
    out.parts.push_back({name, shares[k], d});
  }
  return out;
}

}  // namespace tessera
