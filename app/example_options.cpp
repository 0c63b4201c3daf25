// Options of fine-tuning.
#include "app/example_options.h"

#include <fmt/format.h>

#include "app/job_of.h"
#include "app/progress.h"
#include "tensor/error.h"

namespace tessera {
namespace {

ChatTemplate template_of(const std::string& name) {
  if (name == "chatml") return ChatTemplate::chatml;
  if (name == "llama3") return ChatTemplate::llama3;
  if (name == "alpaca") return ChatTemplate::alpaca;
  return name == "none" ? ChatTemplate::none : ChatTemplate::automatic;
}

}  // namespace

ExampleOptions example_options(const TrainOptions& o) {
  return {.style = template_of(o.chat_template),
          .responses_only = o.train_on == "responses",
          .packed = o.pack,
          .skip_bad = o.skip_bad,
          .context = job_of(o).model.context};
}

void check_example_options(const TrainOptions& o) {
  if (is_jsonl_name(o.data)) return;
  const TrainOptions usual;
  const char* named = nullptr;
  if (o.chat_template != usual.chat_template) named = "--template";
  if (o.train_on != usual.train_on) named = "--train-on";
  if (o.pack) named = "--pack";
  if (o.skip_bad) named = "--skip-bad";
  if (named) throw Error(fmt::format("{}: goes with --data FILE.jsonl, found --data {}", named, o.data));
}

std::string describe_data(const Dataset& d) {
  const auto tokens = [](int64_t count) { return short_number(static_cast<double>(count)); };
  if (!d.train_examples)
    return fmt::format("{}: {} characters of training text as {} tokens ({}), {} tokens held out", d.source,
                       tokens(d.train_bytes), tokens(d.train_tokens()), d.tokenizer->kind(), tokens(d.val_tokens()));
  const ExampleRows& rows = *d.train_examples;
  return fmt::format(
      "{}: {} examples of {} tokens ({}), {} of them to be learnt, in {} rows of {}; {} examples held out", d.source,
      rows.examples(), tokens(rows.tokens()), d.tokenizer->kind(), tokens(rows.targets()), rows.count(), rows.context(),
      d.val_examples->examples());
}

}  // namespace tessera
