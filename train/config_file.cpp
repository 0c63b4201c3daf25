// Descriptors of a configuration's fields, and their values in config.toml.
#include "train/config_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "base/config_file.h"
#include "base/error.h"
#include "base/error_list.h"
#include "base/files.h"
#include "models/adapters/adapters.h"
#include "models/language_model.h"

namespace tessera {
namespace {

constexpr double kMaxInterval = 1e12;

void add_data(Settings& s, DataConfig& d) {
  s.add("Data",
        {{"data", &d.source,
          "training data: austen, tinyshakespeare, a text file (optionally .gz or .zst), an llm.c token file, a "
          "directory or 'pattern*' of these, a directory written by `tessera data`, or fine-tuning examples as "
          "FILE.jsonl, 'a*.jsonl,b.jsonl' or a directory of such files; or a mixture: A=0.7,B=0.3, or a .json or .toml "
          "file of names and weights"},
         {"val_data", &d.held.file, "text file or examples for validation; replaces `val_share`"},
         {"val_share", &d.held.fraction, "fraction of `data` held out for validation", Field{.range = {0, 1, true}}},
         {"tokenizer", &d.tokenizer,
          "char, bytes, bpe, bpe-N with at most N tokens (bpe: 50257), or a directory with tokenizer.json (or both "
          "vocab.json and merges.txt) [char for nano and mini models, bpe for others]"},
         {"add_tokens", &d.add_tokens,
          "special tokens to add to the tokenizer; if the embedding table of the `init` model is too small, rows are "
          "added to it",
          Field{.expected = "TOKEN,TOKEN"}},
         {"end", &d.end, "end-of-text token; overrides that of the tokenizer", Field{.expected = "TOKEN"}},
         {"shuffle", &d.shuffle,
          "shuffle the windows of a text and read each once per epoch, as for shards and mixtures; by default, windows "
          "start at random positions",
          Field{.same = IdentityRole::unless_default}}});
}

void add_tuning(Settings& s, TrainConfig& c) {
  s.add("Fine-tuning",
        {{"init", &c.run.init,
          "initial weights, sizes and tokenizer: a run, checkpoint, Hugging Face folder or llm.c model"},
         {"base", &c.run.base, kBaseHelp},
         {"adapter_base", &c.run.adapter_base, {}, Field{.in_words = false}},
         {"base_hash", &c.run.base_hash, {}, Field{.in_words = false}},
         {"template", &c.data.chat_template,
          "chat template of the examples; auto: chatml for messages, alpaca for instructions, otherwise none"},
         {"train_on", &c.data.train_on, "tokens of an example that contribute to the loss",
          Field{.choices = "responses|all"}},
         {"pack", &c.data.pack, "pack several examples into one sequence; attention does not cross example boundaries"},
         {"skip_bad", &c.data.skip_bad, "skip and count invalid examples and examples without target tokens"},
         {"map", &c.data.map, "keys of the example fields in the file, such as prompt=question,completion=answer",
          Field{.expected = "FIELD=KEY,FIELD=KEY"}},
         {"roles", &c.data.roles, "standard roles for role names in the file, such as developer=system,bot=assistant",
          Field{.expected = "NAME=ROLE,NAME=ROLE"}},
         {"no_bos", &c.data.no_bos, kNoBosHelp},
         {"special", &c.data.special, kSpecialHelp}});
}

void add_files(Settings& s, RunConfig& r) {
  s.add(
      "Files",
      {{"out", &r.out, "run directory (settings, metrics, TensorBoard events, checkpoints) [runs/DATE-TIME]",
        Field{.in_file = false}},
       {"save_every", &r.save_every, "steps between checkpoints, or epochs, such as 0.25e; 0: save only at the end",
        Field{.range = {0, kMaxInterval}, .fraction = &r.save_fraction, .unit_suffix = 'e'}},
       {"keep", &r.keep, "number of newest checkpoints to keep, in addition to the one with the best validation loss",
        Field{.range = {1, 1e6}}},
       {"check_replicas", &r.check_replicas,
        "steps between checks that replicas on different ranks are identical; every save also checks; 0: only saves",
        Field{.range = {0, kMaxInterval}}},
       {"eval_every", &r.eval_every, "steps between validations, or epochs, such as 0.25e; 0: validate only at the end",
        Field{.range = {0, kMaxInterval}, .fraction = &r.eval_fraction, .unit_suffix = 'e'}},
       {"patience", &r.patience, "stop the run after this number of validations without improvement; 0: never",
        Field{.range = {0, 1e6}}},
       {"no_save", &r.no_save,
        "write no checkpoint, not even at the end (for benchmarks); such a run cannot be resumed"},
       {"no_eval", &r.no_eval, "run no validation, not even at the end"},
       {"resume", &r.resume, "resume the run in `out` from its newest checkpoint", Field{.in_file = false}}});
  s.add("Output", {{"dump", &r.dump,
                    "step, counted from 1, in which every layer's full output and its gradient are written to "
                    "dump_STEP.safetensors, under any plan (`train`: in the run directory); 0: none",
                    Field{.range = {0, kMaxInterval}, .in_file = false}}});
}

// Keys of config.toml without a command-line option: the base model of a run's adapters.
constexpr std::array<std::string_view, 2> kFacts = {"adapter-base", "base-hash"};
bool is_in_files(const Setting& s) { return s.field.in_words || std::ranges::count(kFacts, s.word()) > 0; }

// Whether users may write the value: a derived field can also have internal values, such as 0 for a size that follows
// from others.
bool is_writable(const Setting& s) {
  try {
    s.read("", s.text());
    return true;
  } catch (const Error&) {
    return false;
  }
}

// Replaces expanded values by the shorter ones that the user typed.
void shorten(TrainConfig& c, const FieldNames* set) {
  if (!set) {
    c.preset = plain_preset(c.model.family);
    c.model = resolve_sizes(c.model);
    return;
  }
  if (c.data.pack && !set->contains("document_mask")) c.optim.document_mask = false;
  if (c.model.lora.rank == 0) return;
  std::vector<std::string> all;
  for (const LoraTarget& t : lora_targets(c.model)) all.emplace_back(t.name);
  if (c.model.lora.targets == all) c.model.lora.targets = {"all"};
}

}  // namespace

Settings field_descriptors(TrainConfig& c) {
  constexpr std::array<std::string_view, 8> groups = {"Model", "Data",         "Fine-tuning", "Plan",
                                                      "Place", "Optimization", "Files",       "Output"};
  Settings s;
  s.add("Model",
        {{"model", &c.preset, "preset for the architecture and sizes of the model", Field{.choices = preset_names()}}});
  add_data(s, c.data);
  add_tuning(s, c);
  s.add("Plan", {{"ranks", &c.ranks,
                  "world size; default: the size of the job under mpirun; otherwise 2 if `batch` is divisible by 2 x "
                  "`microbatches`, else 1",
                  Field{.range = {1, 1024}}}});
  s.append(field_descriptors(c.model)), s.append(field_descriptors(c.optim)), s.append(field_descriptors(c.plan));
  add_files(s, c.run);
  s.add("Optimization",
        {{"epochs", &c.run.epochs, "passes over `data`, in place of `steps`; fractions such as 0.5 are accepted",
          Field{.range = {0, 1e6}}}});
  s.sort(groups);
  s.move("epochs", "steps");
  s.move("microbatches", "batch");
  s.move("shuffle", "microbatches");
  return s;
}

Args values(const TrainConfig& config, const FieldNames* set, const Settings& all,
            bool (*chosen)(const Setting& setting)) {
  const auto is_unused = [&](std::string_view name) {
    return (name.starts_with("lora_") && config.model.lora.rank == 0) ||
           (name == "quantize_group" && config.model.quantize.codec != Codec::gptq);
  };
  const auto is_shown = [&](const Setting& s) {
    if (!s.field.open) return true;
    if (set) return set->contains(s.name);
    if (is_unused(s.name)) return false;
    return applies(s, all) && is_writable(s);
  };
  Args out;
  for (const Setting& s : all) {
    if (!is_in_files(s) || !chosen(s) || !is_shown(s)) continue;
    if (std::string value = s.written(); !value.empty()) out.emplace_back(s.word(), std::move(value));
  }
  return out;
}

Args config_values(TrainConfig config, const FieldNames* set) {
  shorten(config, set);
  return values(config, set, field_descriptors(config), [](const Setting& s) { return s.field.in_file; });
}

std::string to_toml(const TrainConfig& config, const FieldNames* set) {
  std::string out;
  for (const auto& [key, value] : config_values(config, set)) out += fmt::format("{} = {}\n", key, value);
  return out;
}

FieldNames apply_config_file(TrainConfig& config, const std::string& path) {
  return apply_config(config, read_file(path), path);
}

FieldNames apply_config(TrainConfig& c, std::string_view file, const std::string& path) {
  const Settings all = field_descriptors(c);
  std::vector<std::string> known;
  for (const Setting& s : all)
    if (s.field.in_file && is_in_files(s)) known.push_back(s.word());
  FieldNames out;
  ErrorList found;
  for (const ConfigEntry& entry : read_config(file, path))
    found.check([&] {
      const std::string where = fmt::format("{}: {}", entry.where, entry.key);
      if (std::ranges::find(known, entry.key) == known.end())
        throw Error(fmt::format("{}: unknown key{}", where, did_you_mean(entry.key, known)));
      const Setting& s = *std::ranges::find(all, entry.key, &Setting::word);
      if (s.is_text() && !entry.text) throw Error(fmt::format("{}: expected a string, got '{}'", where, entry.value));
      s.read(where, s.is_text() || (s.field.fraction && entry.text) ? *entry.text : entry.value);
      out.emplace(s.name);
    });
  found.raise();
  return out;
}

}  // namespace tessera
