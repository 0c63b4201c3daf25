// Words to options.
#include "app/plan_options.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "app/option_values.h"
#include "tensor/error.h"

namespace tessera {
namespace {

constexpr double kMostRanks = 1 << 20, kMostBatch = 1e7;

std::optional<int64_t>* rank_field(PlanOptions& o, std::string_view name) {
  if (name == "ranks") return &o.ranks;
  if (name == "pp") return &o.pp;
  if (name == "dp") return &o.dp;
  if (name == "cp") return &o.cp;
  return name == "tp" ? &o.tp : nullptr;
}

}  // namespace

bool PlanOptions::gives(std::string_view option) const {
  return std::ranges::any_of(words, [&](const auto& w) { return w.first == option; });
}

bool is_searched(std::string_view option) {
  constexpr std::array<std::string_view, 12> layout = {
      "microbatches", "ranks", "dp", "tp", "sp", "cp", "cp-mode", "pp", "schedule", "chunks", "zero", "recompute"};
  return std::ranges::find(layout, option) != layout.end();
}

bool is_of_plan(std::string_view option) {
  if (option == "batch" || is_searched(option)) return true;
  bool of_model = false;
  for_each_option(TrainOptions{}, [&](const OptionInfo& info, const auto&) {
    of_model = of_model || (info.name == option && info.group == "Model");
  });
  return of_model;
}

namespace {

void set_word(PlanOptions& o, const std::string& name, const std::string& text) {
  const std::string shown = "--" + name;
  if (auto* ranks = rank_field(o, name)) {
    *ranks = parse_integer(shown, text, 1, kMostRanks);
  } else if (name == "batch") {
    o.run.batch = parse_integer(shown, text, 1, kMostBatch);
  } else if (name == "model" && text.ends_with(".json")) {
    o.model_file = text;
  } else {
    set_option(o.run, name, text);
    if (name == "model") o.model_file.reset();
  }
  std::erase_if(o.words, [&](const auto& w) { return w.first == name; });
  o.words.emplace_back(name, text);
}

}  // namespace

void set_words(PlanOptions& o, const Words& words, Findings& wrong) {
  for (const auto& [name, text] : words) wrong.check([&, &name = name, &text = text] { set_word(o, name, text); });
  wrong.raise();
  if (o.run.dtype != "bf16" && (o.hardware != "this" || o.run.dtype == "fp64"))
    throw Error(fmt::format(
        "--dtype: expected bf16, the one type that descriptions of hardware have rates for; found '{}'", o.run.dtype));
}

}  // namespace tessera
