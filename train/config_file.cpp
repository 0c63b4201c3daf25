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
  s.group("Data");
  s.add(d.source,
        {"data",
         "training data: austen, tinyshakespeare, a text file (optionally .gz or .zst), an llm.c token file, a "
         "directory or 'pattern*' of these, a directory written by `tessera data`, or fine-tuning examples as "
         "FILE.jsonl, 'a*.jsonl,b.jsonl' or a directory of such files; or a mixture: A=0.7,B=0.3, or a .json or .toml "
         "file of names and weights"});
  s.add(d.held.file, {"val_data", "text file or examples for validation; replaces `val_share`"});
  s.add(d.held.fraction, {"val_share", "fraction of `data` held out for validation", {0, 1, true}});
  s.add(d.tokenizer,
        {"tokenizer",
         "char, bytes, bpe, bpe-N with at most N tokens (bpe: 50257), or a directory with tokenizer.json (or "
         "both vocab.json and merges.txt) [char for nano and mini models, bpe for others]"});
  s.add(d.add_tokens, {"add_tokens",
                       "special tokens to add to the tokenizer; if the embedding table of the `init` model is too "
                       "small, rows are added to it"})
      .a("TOKEN,TOKEN");
  s.add(d.end, {"end", "end-of-text token; overrides that of the tokenizer"}).a("TOKEN");
  s.add(d.shuffle,
        {"shuffle",
         "shuffle the windows of a text and read each once per epoch, as for shards and mixtures; by default, "
         "windows start at random positions"})
      .for_identity(IdentityRole::unless_default);
}

void add_tuning(Settings& s, TrainConfig& c) {
  s.group("Fine-tuning");
  s.add(c.run.init,
        {"init", "initial weights, sizes and tokenizer: a run, checkpoint, Hugging Face folder or llm.c model"});
  s.add(c.run.base, {"base", kBaseHelp});
  s.add(c.run.adapter_base, {"adapter_base"}).for_programs();
  s.add(c.run.base_hash, {"base_hash"}).for_programs();
  s.add(c.data.chat_template,
        {"template",
         "chat template of the examples; auto: chatml for messages, alpaca for instructions, otherwise none"});
  s.add(c.data.train_on, {"train_on", "tokens of an example that contribute to the loss"}).of("responses|all");
  s.add(c.data.pack, {"pack", "pack several examples into one sequence; attention does not cross example boundaries"});
  s.add(c.data.skip_bad, {"skip_bad", "skip and count invalid examples and examples without target tokens"});
  s.add(c.data.map, {"map", "keys of the example fields in the file, such as prompt=question,completion=answer"})
      .a("FIELD=KEY,FIELD=KEY");
  s.add(c.data.roles, {"roles", "standard roles for role names in the file, such as developer=system,bot=assistant"})
      .a("NAME=ROLE,NAME=ROLE");
  s.add(c.data.no_bos, {"no_bos", kNoBosHelp});
  s.add(c.data.special, {"special", kSpecialHelp});
}

void add_files(Settings& s, RunConfig& r) {
  s.group("Files");
  s.add(r.out, {"out", "run directory (settings, metrics, TensorBoard events, checkpoints) [runs/DATE-TIME]"})
      .not_in_file();
  s.add(r.save_every, {"save_every",
                       "steps between checkpoints, or epochs, such as 0.25e; 0: save only at the end",
                       {0, kMaxInterval}})
      .or_fraction(r.save_fraction, 'e');
  s.add(
      r.keep,
      {"keep", "number of newest checkpoints to keep, in addition to the one with the best validation loss", {1, 1e6}});
  s.add(r.check_replicas,
        {"check_replicas",
         "steps between checks that replicas on different ranks are identical; every save also checks; 0: only saves",
         {0, kMaxInterval}});
  s.add(r.eval_every, {"eval_every",
                       "steps between validations, or epochs, such as 0.25e; 0: validate only at the end",
                       {0, kMaxInterval}})
      .or_fraction(r.eval_fraction, 'e');
  s.add(r.patience,
        {"patience", "stop the run after this number of validations without improvement; 0: never", {0, 1e6}});
  s.add(r.no_save,
        {"no_save", "write no checkpoint, not even at the end (for benchmarks); such a run cannot be resumed"});
  s.add(r.no_eval, {"no_eval", "run no validation, not even at the end"});
  s.add(r.resume, {"resume", "resume the run in `out` from its newest checkpoint"}).not_in_file();
  s.group("Output");
  s.add(r.dump, {"dump",
                 "step, counted from 1, in which every layer's full output and its gradient are written to "
                 "dump_STEP.safetensors, under any plan (`train`: in the run directory); 0: none",
                 {0, kMaxInterval}})
      .not_in_file();
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
  s.group("Model").add(c.preset, {"model", "preset for the architecture and sizes of the model"}).of(preset_names());
  add_data(s, c.data);
  add_tuning(s, c);
  s.group("Plan").add(
      c.ranks, {"ranks",
                "world size; default: the size of the job under mpirun; otherwise 2 if `batch` is divisible by 2 x "
                "`microbatches`, else 1",
                {1, 1024}});
  s.add(field_descriptors(c.model)).add(field_descriptors(c.optim)).add(field_descriptors(c.plan));
  add_files(s, c.run);
  s.group("Optimization");
  s.add(c.run.epochs,
        {"epochs", "passes over `data`, in place of `steps`; fractions such as 0.5 are accepted", {0, 1e6}});
  s.sort(groups);
  s.move("epochs", "steps");
  s.move("microbatches", "batch");
  s.move("shuffle", "microbatches");
  return s;
}

Args values(const TrainConfig& config, const FieldNames* set, const Settings& all, bool (*chosen)(const Field& field)) {
  const auto is_unused = [&](std::string_view name) {
    return (name.starts_with("lora_") && config.model.lora.rank == 0) ||
           (name == "quantize_group" && config.model.quantize.codec != Codec::gptq);
  };
  const auto is_shown = [&](const Setting& s) {
    if (!s.field.open) return true;
    if (set) return set->contains(s.field.name);
    if (is_unused(s.field.name)) return false;
    return applies(s, all) && is_writable(s);
  };
  Args out;
  for (const Setting& s : all) {
    if (!is_in_files(s) || !chosen(s.field) || !is_shown(s)) continue;
    if (std::string value = s.written(); !value.empty()) out.emplace_back(s.word(), std::move(value));
  }
  return out;
}

Args config_values(TrainConfig config, const FieldNames* set) {
  shorten(config, set);
  return values(config, set, field_descriptors(config), [](const Field& f) { return f.in_file; });
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
      out.emplace(s.field.name);
    });
  found.raise();
  return out;
}

}  // namespace tessera
