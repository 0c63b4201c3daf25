// Models from runs and folders.
#include "app/run/pretrained.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "app/output.h"
#include "app/resolve.h"
#include "hub/folder.h"
#include "hub/llmc.h"
#include "hub/peft.h"
#include "models/adapters/adapters.h"
#include "models/families.h"
#include "tensor/cpu/vectorize.h"
#include "train/quantize/layers.h"
#include "verify/verify.h"

namespace tessera {

namespace fs = std::filesystem;
namespace {

TrainConfig saved_config(const fs::path& checkpoint) {
  TypedOptions o;
  apply_config_file(o, (checkpoint / "config.toml").string());
  return resolve(o);
}

// The checkpoint's model for inference.
ModelConfig model_in(const fs::path& checkpoint, const TrainConfig& saved) {
  ModelConfig model = saved.model;
  model.dropout = model.lora.dropout = 0;
  model.recompute = Recompute::none;
  if (model.vocab == 0) model.vocab = Tokenizer::open_folder(checkpoint)->vocab_size();
  return model;
}

// Converts to the requested dtype.
FullTensors tensors_in(const std::shared_ptr<const SavedTensors>& saved) {
  return [saved](const std::string& name, DType dtype, const Shape& shape) -> TensorReader {
    const SavedTensors::Stored& tensor = saved->at(name);
    const bool bytes = dtype == DType::uint8;  // a 4-bit weight
    if (bytes != (tensor.dtype == DType::uint8) || !(bytes || is_floating(tensor.dtype)) ||
        tensor.shape != std::vector<int64_t>(shape.begin(), shape.end()))
      bad_input("the checkpoint's tensor '{}' does not match: expected {} of shape {}", name,
                bytes ? "bytes" : "floating-point values", shape.str());
    return [saved, read = saved->reader(name), stored = tensor.dtype, dtype](int64_t begin, std::span<std::byte> to) {
      if (stored == dtype) return read(begin, to);
      const int64_t count = std::ssize(to) / element_size(dtype);
      std::vector<std::byte> from(static_cast<size_t>(count * element_size(stored)));
      read(begin, from);
      convert({"", stored, {count}, from}, 0, dtype, to);
    };
  };
}

// Uses GPTQ codes without conversion if all layers have them in a supported group size; otherwise dequantizes them.
ModelConfig to_model_config(const HubFolder& folder) {
  ModelConfig config = folder.config();
  if (!folder.gptq()) return config;
  config.quantize = {Codec::gptq, folder.gptq()->group};
  try {
    for (const auto& [name, packing] : weight_packings(config))
      if (!folder.has_codes(name)) return folder.config();
  } catch (const Error&) {
    return folder.config();
  }
  return config;
}

// Includes the bytes of 4-bit codes.
FullTensors full_tensors(const std::shared_ptr<const HubFolder>& folder) {
  return [folder, of = folder->tensors()](const std::string& name, DType dtype, const Shape& shape) -> TensorReader {
    if (dtype != DType::uint8) return of(name, dtype, shape);
    const auto codes = folder->codes(name);
    if (!codes) bad_input("{}: tensor '{}' is not quantized to 4 bits", folder->path().string(), name);
    const auto bytes = std::make_shared<const std::vector<std::byte>>(codes->packed());
    return
        [bytes, read = make_reader(*bytes, DType::uint8)](int64_t begin, std::span<std::byte> to) { read(begin, to); };
  };
}

bool has_tokenizer(const fs::path& folder) {
  return is_there(folder / "tokenizer.json") || is_there(folder / "vocab.json");
}

Pretrained open_adapted(const fs::path& from, const Base& given) {
  const PeftFolder adapters(from);
  const fs::path base = fs::weakly_canonical(adapters.base(given));
  Pretrained out = open_pretrained(base);
  if (out.config.lora.rank > 0)
    bad_input("{}: expected a base model without adapters, got adapters in {}", from.string(), base.string());
  Adapted adapted = adapters.apply_to(out.config, std::move(out.tensors));
  out.config = std::move(adapted.config), out.tensors = std::move(adapted.tensors), out.merged = adapted.merged;
  if (!out.merged.empty()) {
    out.gptq.reset(), out.codes = {};
    out.notes.push_back(out.merged + ": the adapters are merged into the base weights");
  }
  out.base = base.string();
  out.base_hash = adapters.base_hash();
  if (has_tokenizer(from))
    out.own_tokenizer = from, out.chat_template = ChatTemplate::automatic;
  else if (is_there(from / "tokenizer.model") || is_there(from / "chat_template.jinja"))
    out.notes.push_back(from.string() + ": no tokenizer.json; using the tokenizer and chat template of the base model");
  out.notes.insert(out.notes.end(), adapters.notes().begin(), adapters.notes().end());
  return out;
}

std::string model_hash(const Pretrained& base) {
  constexpr int64_t kAtOnce = int64_t{1} << 20;
  ModelConfig config = base.config;
  config.quantize = {};
  Checksum sum;
  std::vector<float> values;
  const std::unique_ptr<LanguageModel> model = make_model(config);
  for (const Parameter* p : model->parameters()) {
    const std::string about = fmt::format("{} {}\n", p->name, p->full_shape.str());
    sum.add(std::as_bytes(std::span(about)));
    const TensorReader read = base.tensors(p->name, DType::float32, p->full_shape);
    for (int64_t at = 0; at < p->full_shape.numel(); at += kAtOnce) {
      values.resize(static_cast<size_t>(std::min(kAtOnce, p->full_shape.numel() - at)));
      read(at, std::as_writable_bytes(std::span(values)));
      sum.add(std::as_bytes(std::span(values)));
    }
  }
  return fmt::format("{:016x}", sum.value());
}

// Extends tables with the mean of the existing rows, accumulated in row order in double. transformers'
// resize_token_embeddings() samples around this mean, with 1e-9 of the rows' variance.
FullTensors with_rows(const ModelConfig& from, FullTensors tensors) {
  std::map<std::string, Shape> shapes;
  const std::unique_ptr<LanguageModel> model = make_model(from);
  for (const Parameter* p : model->parameters()) shapes.emplace(p->name, p->full_shape);
  return
      [shapes, tensors = std::move(tensors)](const std::string& name, DType dtype, const Shape& shape) -> TensorReader {
        const auto found = shapes.find(name);
        if (found == shapes.end() || found->second == shape) return tensors(name, dtype, shape);
        const int64_t own = found->second[0], columns = shape[1], end = own * columns, element = element_size(dtype);
        std::vector<double> sums(static_cast<size_t>(columns));
        std::vector<float> mean(static_cast<size_t>(columns));
        const TensorReader values = tensors(name, DType::float32, {own, columns});
        for (int64_t row = 0; row < own; ++row) {
          values(row * columns, std::as_writable_bytes(std::span(mean)));
          for (size_t c = 0; c < mean.size(); ++c) sums[c] += static_cast<double>(mean[c]);
        }
        for (size_t c = 0; c < mean.size(); ++c) mean[c] = static_cast<float>(sums[c] / static_cast<double>(own));
        return [=, read = tensors(name, dtype, {own, columns})](int64_t begin, std::span<std::byte> to) {
          const int64_t count = std::ssize(to) / element, existing = std::clamp<int64_t>(end - begin, 0, count);
          if (existing > 0) read(begin, to.first(static_cast<size_t>(existing * element)));
          std::vector<float> rest(static_cast<size_t>(count - existing));
          for (size_t i = 0; i < rest.size(); ++i)
            rest[i] = mean[static_cast<size_t>((begin + existing + static_cast<int64_t>(i)) % columns)];
          convert({"", DType::float32, {std::ssize(rest)}, std::as_bytes(std::span(rest))}, 0, dtype,
                  to.subspan(static_cast<size_t>(existing * element)));
        };
      };
}

void refuse(const std::optional<MemoryRefusal>& refusal) {
  if (!refusal) return;
  std::fputs(for_terminal(with_options(refusal->table)).c_str(), stderr);
  throw Error(refusal->line);
}

constexpr double kFarOff = 16;  // smaller mismatches are reported elsewhere, naming the tensor or option

// Checks that the threads of all ranks can be created; subtracts their stacks from the memory limit.
MemoryLimit limit_without_threads(const TrainConfig& job, int64_t local_world_size) {
  if (has_processes(job.plan)) return memory_limit();
  const int64_t team = job.plan.threads_per_rank > 0 ? job.plan.threads_per_rank
                                                     : std::max<int64_t>(1, cpu::threads() / local_world_size);
  const int64_t threads =
      local_world_size * (team + (local_world_size > 1 ? 1 : 0)) - 1;  // one background thread per rank
  check_threads(threads);
  return memory_limit(threads);
}

}  // namespace

Checkpoint find_checkpoint(const fs::path& from, std::vector<std::string>& passed_over) {
  if (!is_there(from)) bad_input("{}: no such file or directory; expected a run or a checkpoint", from.string());
  if (!names_directory(from) && (from.filename() == "best" || from.filename() == "latest")) {
    const std::string text = read_file(from), name = text.substr(0, text.find_first_of(" \n"));
    if (!name.starts_with("step-")) bad_input("{}: expected the name of a checkpoint, got '{}'", from.string(), name);
    return find_checkpoint(from.parent_path() / name, passed_over);
  }
  if (is_there(from / "manifest.json") || from.filename().string().starts_with("step-")) {
    Checkpoint found = open_checkpoint(from);
    check_checkpoint_finite(found);
    return found;
  }
  const fs::path directory = names_directory(from / "checkpoints") ? from / "checkpoints" : from;
  if (std::optional<Checkpoint> found = newest_checkpoint(directory, passed_over, check_checkpoint_finite))
    return *found;
  bad_input("{}: no usable checkpoint: {}", from.string(),
            passed_over.empty() ? "none was saved" + foreign_in(from) : passed_over.front());
}

std::set<std::string> tensor_names(LanguageModel& model) {
  std::set<std::string> out;
  for (const Parameter* p : model.parameters()) out.insert(p->name);
  return out;
}

Pretrained open_pretrained(const fs::path& from, const Base& base) {
  if (is_peft_folder(from)) return open_adapted(from, base);
  if (base) bad_usage("--base: requires adapters, but {} has none", from.string());
  if (is_hub_folder(from)) {
    const auto folder = std::make_shared<const HubFolder>(from);
    return {.path = from,
            .config = to_model_config(*folder),
            .dtype = folder->dtype(),
            .tensors = full_tensors(folder),
            .gptq = folder->gptq(),
            .codes = [folder](const std::string& name) { return folder->codes(name); },
            .notes = folder->notes()};
  }
  if (is_llmc_model(from)) {
    const auto model = std::make_shared<const LlmcModel>(from);
    const FullTensors all = model->tensors();
    return {.path = tokenizer_path(from),
            .config = model->config(),
            .dtype = model->dtype(),
            .tensors = [model, all](const auto&... asked) { return all(asked...); }};
  }
  Pretrained out;
  std::vector<std::string> passed_over;
  out.path = find_checkpoint(from, passed_over).path;
  for (const std::string& why : passed_over) out.notes.push_back("skipped a checkpoint: " + why);
  const TrainConfig config = saved_config(out.path);
  out.config = model_in(out.path, config);
  out.dtype = config.optim.dtype;
  if (out.path.filename() != "step-0") out.chat_template = config.data.chat_template;
  if (out.config.lora.rank > 0) {
    out.base = config.run.adapter_base ? *config.run.adapter_base : config.run.init.value_or("");
    out.base_hash = config.run.base_hash.value_or("");
  }
  const auto saved = std::make_shared<const SavedTensors>(out.path, "model");
  saved->expect_no_others(tensor_names(*make_model(out.config)));
  out.tensors = tensors_in(saved);
  if (out.config.quantize.codec != Codec::none) out.tensors = dequantized(out.config, std::move(out.tensors));
  return out;
}

KnownBase known_base(const Pretrained& adapters, const fs::path& named) {
  fs::path path = adapters.base;
  if (path.is_relative())
    path = fs::weakly_canonical(find_base(path, named, named.string() + ": init"));  // a run by an older version
  if (!is_there(path)) return {path.string(), adapters.base_hash};
  const Pretrained base = open_pretrained(path);
  if (base.config.lora.rank > 0)
    bad_input("{}: the base model is not recorded; expected a model without adapters, got {}", named.string(),
              path.string());
  const std::string found = model_hash(base);
  if (!adapters.base_hash.empty() && found != adapters.base_hash)
    bad_input("{}: expected the base model with hash {}, got {} with hash {}", named.string(), adapters.base_hash,
              path.string(), found);
  return {path.string(), found};
}

void record_base(TrainConfig& config) {
  RunConfig& r = config.run;
  if (!r.resume) r.adapter_base.reset(), r.base_hash.reset();
  if (config.model.lora.rank == 0 || !r.init || (r.resume && !r.base_hash)) return;
  Pretrained from;
  if (r.resume)
    from.base = r.adapter_base.value_or(""), from.base_hash = *r.base_hash;
  else
    from = open_pretrained(*r.init, r.base);
  if (from.base.empty()) from.base = *r.init;
  const KnownBase known = known_base(from, r.resume ? *r.out : *r.init);
  r.adapter_base = known.path, r.base_hash = known.hash;
}

fs::path tokenizer_path(const fs::path& from, const Base& base) {
  std::vector<std::string> passed_over;
  if (is_peft_folder(from)) return has_tokenizer(from) ? from : tokenizer_path(PeftFolder(from).base(base));
  if (is_llmc_model(from)) return fs::absolute(from).parent_path();
  return is_hub_folder(from) ? from : find_checkpoint(from, passed_over).path;
}

ModelConfig pretrained_config(const fs::path& from, const Base& base, bool trains) {
  if (!is_peft_folder(from) && !is_hub_folder(from) && !is_llmc_model(from) && !base) {
    const fs::path checkpoint = tokenizer_path(from);
    return model_in(checkpoint, saved_config(checkpoint));
  }
  const Pretrained all = open_pretrained(from, base);
  if (trains && !all.merged.empty())
    bad_input(
        "{}: these adapters cannot be trained further; expected adapters of the same rank and alpha on the linear "
        "modules of every layer; tessera checkpoint import converts them to a full model",
        all.merged);
  say_notes(all.notes);
  return all.config;
}

bool speaks_for_all() {
  return std::ranges::none_of(std::array{"OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMI_RANK"},
                              [](const char* rank) {
                                const char* const value = std::getenv(rank);
                                return mpi_surroundings() && value && std::string_view(value) != "0";
                              });
}

void say_notes(const std::vector<std::string>& notes) {
  if (!speaks_for_all()) return;
  for (const std::string& note : notes) say(note);
}

ModelConfig first_config(const TrainConfig& o) {
  const DataConfig& d = o.data;
  ModelConfig config = pretrained_config(*o.run.init, o.run.base, true);
  if (d.add_tokens.empty()) return config;
  if (d.tokenizer && !names_directory(*d.tokenizer))
    bad_usage("--add-tokens: with --init, expected a tokenizer directory or no --tokenizer, got {}", *d.tokenizer);
  std::unique_ptr<Tokenizer> own =
      Tokenizer::open_folder(d.tokenizer ? fs::path(*d.tokenizer) : tokenizer_path(*o.run.init, o.run.base));
  const int64_t before = own->vocab_size();
  const int64_t tokens = with_tokens(std::move(own), {.added = split(d.add_tokens, ',')})->vocab_size();
  if (tokens == before) return config;
  if (config.lora.rank > 0 || o.model.lora.rank > 0)
    bad_usage(
        "--add-tokens: {} of the tokens are new, but adapter training does not update embedding rows; expected full "
        "fine-tuning, without --lora-rank",
        tokens - before);
  config.vocab = std::max(config.vocab, tokens);
  return config;
}

namespace {
std::set<std::string> adapter_names(const ModelConfig& config) {
  std::set<std::string> own;
  if (config.lora.rank > 0)
    for (const PeftTensor& t : peft_tensors(config)) own.insert(t.ours);
  return own;
}
}  // namespace

std::unique_ptr<LanguageModel> first_model(const ModelConfig& config) {
  std::unique_ptr<LanguageModel> model = make_model(config);
  const std::set<std::string> sampled = adapter_names(config);
  for (Parameter* p : model->parameters())
    if (!sampled.contains(p->name)) p->init = Init::zeros();
  return model;
}

FullTensors first_weights(const Pretrained& from, const ModelConfig& config) {
  FullTensors all = config.vocab > from.config.vocab ? with_rows(from.config, from.tensors) : from.tensors;
  const Codec wanted = config.quantize.codec, found = from.config.quantize.codec;
  if (wanted == Codec::nf4 && found != wanted) all = quantized(config, std::move(all));
  if (config.lora.rank == 0 || from.config.lora.rank > 0) return all;
  return
      [own = adapter_names(config), base = std::move(all)](const std::string& name, DType dtype, const Shape& shape) {
        return own.contains(name) ? TensorReader() : base(name, dtype, shape);
      };
}

void take_model(TypedOptions& o, const ModelConfig& c) {
  ModelConfig model = resolve_sizes(c);
  const Settings theirs = field_descriptors(model), ours = field_descriptors(o.model);
  const auto take = [&](std::string_view name) {
    const Setting &from = theirs.at(name), &to = ours.at(name);
    if (o.is_set(name) && to.text() != from.text())
      bad_usage("--{}: expected {}, the value of the model, got {}", to.word(), from.text(), to.text());
    to.assign(from);
    o.set.emplace(name);
  };
  const std::string default_model = TrainConfig().preset, plain(plain_preset(c.family));
  if (o.preset != default_model && o.preset != plain)
    bad_usage("--model: cannot be combined with --init, which specifies the model; got {}", o.preset);
  o.preset = plain;
  for (const Setting& s : theirs)
    if (s.field.of_weights && applies(s, theirs)) take(s.name);
  const bool learned = !find_row(c.family).rotary, shorter = o.is_set("context");
  const int64_t max_context = learned ? c.position_rows() : c.context;
  if (shorter) model.context = max_context;  // the maximum; the run may use a prefix
  if (!shorter || o.model.context > max_context) take("context");
  model.positions = learned ? max_context : 0;
  if (learned && (o.is_set("positions") || o.model.context != max_context)) take("positions");
  if (LoraConfig& lora = o.model.lora; c.lora.rank > 0) {
    if (lora.rank > 0 || o.is_set("lora_alpha") || o.is_set("lora_targets") || lora.rank_stabilised)
      throw Error(
          "--lora-rank: expected only --lora-dropout, because the adapters of the --init model are trained further");
    lora.rank = c.lora.rank, lora.rank_stabilised = c.lora.rank_stabilised;
    take("lora_alpha"), take("lora_targets");
  }
  const Codec held = c.quantize.codec, wanted = o.is_set("quantize") ? o.model.quantize.codec : held;
  if (wanted == Codec::gptq && held == Codec::none)
    throw Error(
        "--quantize: gptq requires a model quantized by tessera checkpoint quantize; this model is not quantized");
  if (held != Codec::none && wanted != Codec::none) take("quantize");
  if (wanted == Codec::gptq) take("quantize_group");
}

void check_minimum_memory(const TrainConfig& job) {
  if (job.plan.device == Device::cpu && !has_processes(job.plan))
    refuse(minimum_refusal(job, job.plan.ranks(), memory_limit()));
}

void check_memory_for_training(const TrainConfig& config, bool samples, int64_t vocab, HostMemory here) {
  if (config.plan.device != Device::cpu) return;
  TrainConfig job = config;
  const bool saves = !config.run.no_save;
  job.model = model_config(job, vocab);
  const Plan& p = job.plan;
  const MinimumMemory of = minimum_memory(job);
  const bool cut = p.tp > 1 || p.pp > 1 || p.zero != ZeroStage::none, asynchronous = p.dp_mode == DataMode::ps_async;
  if (saves && asynchronous) here.gathered = static_cast<int64_t>(of.state);
  if (saves && samples && p.ranks() == 1) {
    here.more = static_cast<int64_t>(of.values);
    here.more_is = "the model that generates the sample";
  }
  if (saves_in_background(config)) {  // if replicas are equal, only the first is copied
    const double fraction = static_cast<double>(here.ranks) / static_cast<double>(p.ranks());
    here.more = static_cast<int64_t>((cut ? fraction : here.first == 0 ? 1 : 0) * (of.values + of.state));
    here.more_is = "a copy for saving in the background (avoidable with `save_every` 0)";
  }
  refuse(memory_refusal(job, here, limit_without_threads(job, here.ranks)));
}

void check_described(const fs::path& config, const fs::path& folder, const TrainConfig& job, int64_t vocab) {
  TrainConfig sized = job;
  sized.model = model_config(job, vocab);
  const MinimumMemory of = minimum_memory(sized);
  std::vector<fs::path> files = {folder / "model.safetensors"};
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error))
    files.push_back(it->path() / "model.safetensors");
  const auto bytes_in = [](const fs::path& file) {
    std::error_code none;
    const uintmax_t bytes = fs::file_size(file, none);
    return none ? uintmax_t{0} : bytes;
  };
  const fs::path largest = *std::ranges::max_element(files, {}, bytes_in);
  const uintmax_t max_bytes = bytes_in(largest);
  if (max_bytes > 0 && of.values > kFarOff * static_cast<double>(max_bytes))
    bad_input("{}: describes a model of {:.4g} parameters, {:.4g} bytes; expected at most the {} bytes of {}",
              config.string(), of.parameters, of.values, max_bytes, largest.string());
}

void check_memory_for_inference(const TrainConfig& job) {
  if (job.plan.device != Device::cpu) return;
  int64_t needed = 0, max_rank = 0;  // total of all ranks, which may be threads of this process; maximum of a rank
  for (const MemoryByCategory& held : expected_memory(job)) {
    needed += held.parameters;
    max_rank = std::max(max_rank, held.parameters);
  }
  if (has_processes(job.plan)) needed = max_rank;
  const MemoryLimit limit = limit_without_threads(job, has_processes(job.plan) ? 1 : job.plan.ranks());
  if (needed > limit.bytes)
    bad_usage("out of memory before the first token: the model needs {:.3g} GB; expected at most {:.3g} GB, which {}",
              static_cast<double>(needed) / 1e9, static_cast<double>(limit.bytes) / 1e9, limit.of);
}

void check_memory_for_verifying(const TrainConfig& given) {
  const TrainConfig job = verifiable(given);
  if (job.plan.device != Device::cpu || has_processes(job.plan)) return;
  const MinimumMemory of = minimum_memory(job);
  const MemoryLimit limit = limit_without_threads(job, job.plan.ranks());
  refuse(minimum_refusal(job, job.plan.ranks(), limit));
  // The oracle is a separate model with one set of gradients per data rank; another set is gathered from the plan.
  const double gradients = of.trained * static_cast<double>(element_size(data_options(job).grad_dtype));
  HostMemory here{.ranks = job.plan.ranks(), .more_is = "the oracle"};
  here.more = static_cast<int64_t>(of.held + gradients * static_cast<double>(job.plan.dp * job.plan.cp + 1));
  refuse(memory_refusal(job, here, limit));
}

}  // namespace tessera
