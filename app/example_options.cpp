// Options of fine-tuning.
#include "app/example_options.h"

#include <fmt/format.h>

#include <algorithm>

#include "app/job_of.h"
#include "app/progress.h"
#include "data/mixture.h"
#include "tensor/error.h"

namespace tessera {
namespace {

std::string describe_one(const Dataset& d) {
  const auto tokens = [](int64_t count) { return short_number(static_cast<double>(count)); };
  const std::string files = d.train.size() > 1 ? fmt::format(" in {} files", d.train.size()) : "";
  if (!d.train_examples && d.train_bytes == 0)
    return fmt::format("{}: {} tokens of training text{} ({}), {} tokens held out", d.source, tokens(d.train_tokens()),
                       files, d.tokenizer->kind(), tokens(d.val_tokens()));
  if (!d.train_examples)
    return fmt::format("{}: {} characters of training text as {} tokens{} ({}), {} tokens held out", d.source,
                       tokens(d.train_bytes), tokens(d.train_tokens()), files, d.tokenizer->kind(),
                       tokens(d.val_tokens()));
  const ExampleRows& rows = *d.train_examples;
  return fmt::format(
      "{}: {} examples of {} tokens ({}), {} of them to be learnt, in {} rows of {}; {} examples held out", d.source,
      rows.examples(), tokens(rows.tokens()), d.tokenizer->kind(), tokens(rows.targets()), rows.count(), rows.context(),
      d.val_examples->examples());
}

}  // namespace

ExampleOptions example_options(const TrainOptions& o) {
  return {.style = o.chat_template,
          .responses_only = o.train_on == "responses",
          .packed = o.pack,
          .skip_bad = o.skip_bad,
          .context = job_of(o).model.context};
}

Dataset open_data(const TrainOptions& o, const TokenizerChoice& tokenizer) {
  const auto one = [&](const std::string& spec) {
    return is_jsonl_name(spec) ? load_examples(spec, tokenizer, example_options(o)) : dataset_for(spec, tokenizer);
  };
  const std::optional<std::vector<Weighted>> mixture = mixture_in(o.data);
  if (!mixture) return one(o.data);
  std::vector<Dataset> all;
  for (const Weighted& w : *mixture) all.push_back(one(w.spec));
  return mixed(*mixture, std::move(all));
}

void check_example_options(const TrainOptions& o) {
  if (is_jsonl_name(o.data)) return;
  if (const auto mixture = mixture_in(o.data))
    if (std::ranges::any_of(*mixture, [](const Weighted& w) { return is_jsonl_name(w.spec); })) return;
  const TrainOptions usual;
  const char* named = nullptr;
  if (o.chat_template != usual.chat_template) named = "--template";
  if (o.train_on != usual.train_on) named = "--train-on";
  if (o.pack) named = "--pack";
  if (o.skip_bad) named = "--skip-bad";
  if (named) throw Error(fmt::format("{}: goes with --data FILE.jsonl, found --data {}", named, o.data));
}

std::vector<std::string> describe_data(const Dataset& d) {
  if (d.parts.empty()) return {describe_one(d)};
  double shares = 0;
  for (const MixturePart& p : d.parts) shares += static_cast<double>(p.share);
  std::vector<std::string> lines{fmt::format("a mixture of {} datasets", d.parts.size())};
  for (const MixturePart& p : d.parts)
    lines.push_back(fmt::format("{:.4g}% {}", 100 * static_cast<double>(p.share) / shares, describe_one(*p.dataset)));
  return lines;
}

}  // namespace tessera
