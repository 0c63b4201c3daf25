// The choice of a tokenizer, and checks and descriptions of data.
#include "app/dataset.h"

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "app/output.h"
#include "base/bad_input.h"
#include "base/memory_limit.h"
#include "base/setting.h"
#include "data/jsonl.h"
#include "data/source.h"

namespace tessera {
namespace {

constexpr std::string_view kBpePrefix = "bpe-";  // followed by the maximum number of tokens
constexpr double kMinVocab = 256;

std::string describe_one(const Dataset& d) {
  const auto tokens = [](int64_t count) { return format_si(static_cast<double>(count)); };
  const std::string files = d.train.size() > 1 ? fmt::format(" in {} files", d.train.size()) : "";
  const auto* const text =
      d.train_bytes == 0 ? "{0} tokens of training text" : "{1} characters of training text as {0} tokens";
  if (!d.train_examples)
    return fmt::format("{}: {}{} ({}), {} tokens held out", d.source,
                       fmt::format(fmt::runtime(text), tokens(d.train_tokens()), tokens(d.train_bytes)), files,
                       d.tokenizer->kind(), tokens(d.val_tokens()));
  const ExampleRows& rows = *d.train_examples;
  return fmt::format(
      "{}: {} examples with {} tokens in total ({}), {} of them targets, in {} rows of {}; {} examples held out",
      d.source, rows.examples(), tokens(rows.tokens()), d.tokenizer->kind(), tokens(rows.targets()), rows.count(),
      rows.context(), d.val_examples->examples());
}

}  // namespace

TokenizerChoice tokenizer_choice(const std::optional<std::string>& name, const std::string& otherwise, bool quiet) {
  std::error_code error;
  const auto progress = std::make_shared<Progress>(Progress::for_stderr(0, quiet));
  TokenizerChoice out{.name = name.value_or(""),
                      .otherwise = otherwise,
                      .progress = [progress](const std::string& line) { progress->work(line); }};
  if (!quiet) out.note = [](const std::string& note) { std::fputs((one_line(note) + "\n").c_str(), stderr); };
  if (!name || *name == "char" || *name == "bytes" || *name == "bpe" || std::filesystem::is_directory(*name, error))
    return out;
  if (name->starts_with(kBpePrefix)) {
    out.name = "bpe";
    out.vocab_size = parse_integer("--tokenizer bpe-N", name->substr(kBpePrefix.size()), {kMinVocab, 1e9});
    return out;
  }
  bad_usage(
      "--tokenizer: expected char, bytes, bpe, bpe-N, or a directory with tokenizer.json (or both vocab.json and "
      "merges.txt), got '{}'{}",
      *name, did_you_mean(*name, {"char", "bytes", "bpe"}));
}

ExampleOptions example_options(const TrainConfig& config) {
  const DataConfig& d = config.data;
  return {.style = d.chat_template,
          .responses_only = d.train_on == "responses",
          .packed = d.pack,
          .skip_bad = d.skip_bad,
          .held = d.held,
          .ends = !d.no_bos,
          .special = d.special,
          .names = {parse_key_names(d.map), parse_role_names(d.roles)},
          .context = config.model.context,
          .vocab = config.model.vocab,
          .max_bytes = memory_limit().bytes / 16};
}

void check_example_options(const DataConfig& d) {
  const DataConfig defaults;
  const char* named = nullptr;
  if (d.chat_template != defaults.chat_template) named = "--template";
  if (d.train_on != defaults.train_on) named = "--train-on";
  if (d.pack) named = "--pack";
  if (d.skip_bad) named = "--skip-bad";
  if (!d.map.empty()) named = "--map";
  if (!d.roles.empty()) named = "--roles";
  if (!named) return;
  const DataKind found = data_kind(d.source);
  if (found.has_examples) return;
  bad_usage("{}: requires --data FILE.jsonl, got --data {}{}{}", named, d.source,
            found.format.empty() ? "" : ", which is ", found.format);
}

std::vector<std::string> describe_data(const Dataset& d) {
  if (d.parts.empty()) return {describe_one(d)};
  double ratios = 0;
  for (const MixturePart& p : d.parts) ratios += static_cast<double>(p.ratio);
  std::vector<std::string> lines{fmt::format("a mixture of {} datasets", d.parts.size())};
  for (const MixturePart& p : d.parts)
    lines.push_back(fmt::format("{:.4g}% {}", 100 * static_cast<double>(p.ratio) / ratios, describe_one(*p.dataset)));
  return lines;
}

}  // namespace tessera
