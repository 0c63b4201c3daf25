// The command `checkpoint`.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>

#include "app/checkpoint/reshard.h"
#include "app/commands.h"
#include "app/job_of.h"
#include "app/options.h"
#include "app/output.h"
#include "app/progress.h"
#include "app/run/directory.h"
#include "app/run/pretrained.h"
#include "data/files.h"
#include "data/tokenizer.h"
#include "hub/folder.h"
#include "hub/peft.h"
#include "models/layout.h"
#include "tensor/error.h"
#include "tensor/write_file.h"
#include "train/job.h"

namespace tessera {

namespace fs = std::filesystem;
namespace {

DType stored_in(const CheckpointOptions& o, DType found) {
  if (o.dtype) return *o.dtype == "bf16" ? DType::bfloat16 : DType::float32;
  return found == DType::bfloat16 ? found : DType::float32;
}

std::unique_ptr<Tokenizer> tokenizer_for(const CheckpointOptions& o, const Pretrained& from) {
  std::unique_ptr<Tokenizer> made =
      o.tokenizer ? make_tokenizer({.name = *o.tokenizer}, "", "", o.from) : Tokenizer::open_folder(from.path);
  if (made->vocab_size() > from.config.vocab)
    throw InputError(fmt::format("{}: the tokenizer has {} tokens, and the model's vocabulary {}", o.from,
                                 made->vocab_size(), from.config.vocab));
  return made;
}

// One tensor is in memory at a time.
void write_model(const fs::path& file, const Pretrained& from, DType dtype) {
  const std::unique_ptr<LanguageModel> model = make_model(from.config);
  std::vector<const Parameter*> all;
  for (const Module::Unit& unit : model->layout())
    for (const Slot& slot : unit.slots) all.push_back(slot.parameter);
  std::vector<TensorBytes> listed;
  for (const Parameter* p : all) {
    const Shape shape = p->stored();
    listed.push_back({p->name, p->stored_dtype(dtype), {shape.begin(), shape.end()}, {}});
  }
  std::vector<std::byte> bytes;
  stream_safetensors(file, listed, [&](size_t i) {
    const Shape shape = all[i]->stored();
    bytes.resize(static_cast<size_t>(shape.numel() * size_of(listed[i].dtype)));
    from.tensors(all[i]->name, listed[i].dtype, shape)(0, bytes);
    return std::span<const std::byte>(bytes);
  });
}

void import_model(const CheckpointOptions& o) {
  if (!is_hub_folder(o.from) && !is_peft_folder(o.from))
    throw InputError(fmt::format("{}: no config.json; expected the folder of a model", o.from));
  const Pretrained from = open_pretrained(o.from);
  const std::unique_ptr<Tokenizer> tokenizer = tokenizer_for(o, from);
  const DType dtype = stored_in(o, from.dtype);
  TrainOptions run;
  take_model(run, from.config);
  run.optim.dtype = dtype == DType::bfloat16 ? DType::bfloat16 : DType::float32;
  run.out = o.out;
  if (!from.base.empty()) run.init = from.base;
  const RunDirectory directory(run);
  NewCheckpoint made(directory.checkpoints(), 0);
  write_file(made.path() / "config.toml", to_toml(run));
  write_file(made.path() / "tokenizer.json", tokenizer->to_json());
  write_model(made.path() / "model.safetensors", from, dtype);
  directory.write_config(run);
  made.finish(nlohmann::json{{"run", {{"imported_from", one_line(o.from)}}}}.dump(), 1);
  print(fmt::format("{} is in {}; tessera generate {} writes with it, train --init {} goes on from it\n",
                    one_line(o.from), one_line(o.out), one_line(o.out), one_line(o.out)));
}

// A whole model, adapters alone, or a whole model that has them in its weights.
void write_folder(const fs::path& folder, const CheckpointOptions& o, const Pretrained& from, DType dtype) {
  const bool adapted = from.config.lora.rank > 0;
  if (adapted && o.merge)
    write_hub_folder(folder, merged(from.config), {dtype, merged(from.config, from.tensors), DType::float32});
  else if (adapted)
    write_peft_folder(folder, from.config, dtype, from.tensors, fs::absolute(from.base).lexically_normal().string());
  else
    write_hub_folder(folder, from.config, {dtype, from.tensors, from.dtype});
}

void export_model(const CheckpointOptions& o) {
  const Pretrained from = open_pretrained(o.from);
  if (o.merge && from.config.lora.rank == 0)
    throw Error(fmt::format("--merge: expected a model with adapters, and {} has none", one_line(o.from)));
  const std::unique_ptr<Tokenizer> tokenizer = Tokenizer::open_folder(from.path);
  const DType dtype = stored_in(o, from.dtype);
  make_model_folder(o.out, [&](const fs::path& made) {
    write_folder(made, o, from, dtype);
    write_tokenizer(made, *tokenizer);
  });
  const bool numbers_again = from.config.quantize.codec != Codec::none && o.merge;
  print(fmt::format(
      "{} is in {}, in {}{}\n", one_line(o.from), one_line(o.out), name_of(dtype),
      numbers_again ? "; weights that were held in 4 bits are numbers again, with what the adapters learnt" : ""));
}

void inspect(const CheckpointOptions& o) {
  const Pretrained from = open_pretrained(o.from);
  const ModelConfig& c = from.config;
  std::vector<HubTensor> all = hub_tensors(c);
  if (c.lora.rank > 0)
    for (const PeftTensor& t : peft_tensors(c))
      all.push_back({.name = t.ours, .shape = t.shape, .pieces = {{t.theirs, t.shape[0]}}});
  int64_t parameters = 0;
  size_t width = 0;
  for (const HubTensor& t : all) {
    parameters += t.shape.numel();
    width = std::max(width, t.name.size());
  }
  std::string out = fmt::format(
      "{}\n{}: {} layers, {} heads on {} of keys and values of {} numbers, {} channels, {}{} hidden, context {}, "
      "vocabulary {}{}\n{} parameters in {}{}\n\n",
      one_line(from.path.string()), text_of(c.family), c.layers, c.heads, c.all_heads().key, c.head_size(), c.channels,
      c.experts.count > 0 ? fmt::format("{} experts of ", c.experts.count) : "", c.hidden(), c.context, c.vocab,
      c.tied ? ", head tied" : "", short_number(static_cast<double>(parameters)), name_of(from.dtype),
      from.gptq ? fmt::format(", of these the layers' in 4 bits in {} (GPTQ)",
                              from.gptq->group > 0 ? fmt::format("groups of {}", from.gptq->group) : "rows")
                : "");
  for (const HubTensor& t : all) {
    std::vector<std::string> theirs;
    for (const HubTensor::Piece& piece : t.pieces) theirs.push_back(piece.name);
    out += fmt::format("  {:<{}}  {:<14}  {}{}\n", t.name, width, t.shape.str(), fmt::join(theirs, " | "),
                       t.transposed ? ", transposed" : "");
  }
  print(out);
}

}  // namespace

int run_checkpoint(const CheckpointOptions& o) {
  using Way = CheckpointOptions::Way;
  if (o.way == Way::import) import_model(o);
  if (o.way == Way::write) export_model(o);
  if (o.way == Way::inspect) inspect(o);
  if (o.way == Way::reshard) reshard(o);
  if (o.way == Way::quantize) quantize(o);
  return 0;
}

// Making folders, and tokenizers in them.

namespace fs = std::filesystem;

void make_model_folder(const std::string& out, const std::function<void(const fs::path& made)>& fill) {
  fs::path folder = fs::absolute(out).lexically_normal();
  if (!folder.has_filename()) folder = folder.parent_path();
  const auto refuse = [&] {
    throw OutputError(fmt::format("--out: {} exists already; expected a new name", folder.string()));
  };
  std::error_code error;
  if (fs::exists(folder, error)) refuse();
  make_directories(folder.parent_path());
  const TemporaryDirectory beside(folder);
  const fs::path made = beside.path() / "model";
  make_directories(made);
  fill(made);
  fs::rename(made, folder, error);
  if (error && fs::exists(folder)) refuse();
  if (error) throw OutputError(fmt::format("cannot make {}: {}", folder.string(), error.message()));
}

void write_tokenizer(const fs::path& folder, const Tokenizer& tokenizer) {
  const std::map<std::string, std::string> files = tokenizer.files();
  for (const auto& [name, text] : files) write_file(folder / name, text);
  if (files.empty()) write_file(folder / "tokenizer.json", tokenizer.to_json());
}

}  // namespace tessera
