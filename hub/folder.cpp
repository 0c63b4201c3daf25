// Reads, writes and converts model directories.
#include "hub/folder.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <tuple>
#include <type_traits>
#include <vector>

#include "base/bad_input.h"
#include "base/json.h"
#include "models/families.h"

namespace tessera {
namespace fs = std::filesystem;
namespace {

constexpr const char* kModelConfig = "config.json";
constexpr const char* kOneFile = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";
constexpr const char* kQuantised = "quantize_config.json";  // instead of config.json, in older directories
constexpr std::string_view kHead = "lm_head.weight", kWeight = ".weight", kBias = ".bias";
constexpr size_t kMaxShards = 10000;

std::string common_name(const std::string& name, const FamilyRow& family) {
  if (name.starts_with(family.optional_prefix) || name.starts_with("lm_head.")) return name;
  return std::string(family.optional_prefix) + name;
}
bool is_derived(const std::string& name, const FamilyRow& family) {
  return std::ranges::any_of(family.derived, [&](std::string_view end) { return name.ends_with(end); });
}

bool is_code(const std::string& name) {
  return name.ends_with(".qweight") || name.ends_with(".qzeros") || name.ends_with(".g_idx");
}

std::string layer_name(const std::string& name) { return name.substr(0, name.size() - kWeight.size()); }

std::string shape_text(const std::vector<int64_t>& shape) { return fmt::format("({})", fmt::join(shape, ", ")); }

template <class F>
void with_stored(const TensorBytes& from, const F& f) {
  if (from.is_half) return f(Half());
  with_floating(from.dtype, "hub", f);
}

// Element i of the result is element place(i) of `from`. Bytes of a mapped file may be unaligned.
template <class Place>
void copy(const TensorBytes& from, DType dtype, std::span<std::byte> to, const Place& place) {
  with_stored(from, [&]<class From>(From) {
    with_floating(dtype, "hub", [&]<class To>(To) {
      const int64_t count = std::ssize(to) / static_cast<int64_t>(sizeof(To));
      for (int64_t i = 0; i < count; ++i) {
        From x;
        std::memcpy(&x, from.bytes.data() + place(i) * static_cast<int64_t>(sizeof(From)), sizeof(From));
        To y;
        if constexpr (std::is_same_v<From, Half>)
          y = converted<To>(wide(x));
        else
          y = converted<To>(x);
        std::memcpy(to.data() + i * static_cast<int64_t>(sizeof(To)), &y, sizeof(To));
      }
    });
  });
}

}  // namespace

void convert(const TensorBytes& from, int64_t begin, DType dtype, std::span<std::byte> to) {
  if (from.dtype == dtype && !from.is_half) {
    std::memcpy(to.data(), from.bytes.data() + begin * element_size(dtype), to.size());
    return;
  }
  copy(from, dtype, to, [=](int64_t i) { return begin + i; });
}

void convert_transposed(const TensorBytes& from, int64_t begin, DType dtype, std::span<std::byte> to) {
  const int64_t rows = from.shape.at(0), columns = from.shape.at(1);  // the result has `columns` rows
  copy(from, dtype, to, [=](int64_t i) { return (begin + i) % rows * columns + (begin + i) / rows; });
}

std::string wrapped_note(const fs::path& from, const std::string& name, const std::string& plain) {
  return fmt::format("{}: tensor names contain the prefixes of training wrappers, such as '{}', which is read as '{}'",
                     from.string(), name, plain);
}

bool is_hub_folder(const fs::path& folder) {
  return is_plain_file(folder / kModelConfig) && !is_there(folder / "config.toml");
}

std::string unwrapped(std::string name) {
  for (const std::string_view left : {"_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module."})
    for (size_t at = name.find(left); at != std::string::npos; at = name.find(left)) name.erase(at, left.size());
  while (name.starts_with("module.")) name.erase(0, std::string_view("module.").size());
  return name;
}

std::string foreign_in(const fs::path& path) {
  const std::string pickle =
      "from_pretrained(FOLDER).save_pretrained(NEW) of transformers or peft converts it to safetensors";
  const std::string source = "use the original model";
  // By file name or suffix; checkpoints of trainers precede the files in them.
  static const std::vector<std::tuple<std::vector<std::string_view>, const char*, std::string>> kinds{
      {{"zero_to_fp32.py", "_model_states.pt", "_optim_states.pt"},
       "a DeepSpeed checkpoint",
       "python zero_to_fp32.py FOLDER NEW --safe_serialization, in the run's directory, converts it to safetensors"},
      {{".metadata", ".distcp", "pytorch_model_fsdp_0"},
       "a distributed PyTorch checkpoint (DCP, FSDP)",
       "accelerate merge-weights FOLDER NEW converts it to safetensors"},
      {{"latest_checkpointed_iteration.txt", "model_optim_rng.pt"},
       "a Megatron-LM checkpoint",
       "Megatron Bridge converts it to a Hugging Face directory"},
      {{"_CHECKPOINT_METADATA", "_METADATA"}, "an Orbax checkpoint (JAX)", source},
      {{".gguf"},
       "a GGUF model (llama.cpp)",
       "from_pretrained(FOLDER, gguf_file=NAME).save_pretrained(NEW) of transformers converts it to safetensors"},
      {{".bin", ".pt", ".pth", ".ckpt"}, "a PyTorch pickle", pickle},
      {{".h5", ".keras", "saved_model.pb"},
       "a Keras or TensorFlow model",
       "from_pretrained(FOLDER, from_tf=True).save_pretrained(NEW) of transformers 4 converts it to safetensors"},
      {{".msgpack"},
       "a Flax model",
       "from_pretrained(FOLDER, from_flax=True).save_pretrained(NEW) of transformers 4 converts it to safetensors"},
      {{".npz", ".npy"}, "NumPy arrays, as used by older MLX", source},
      {{".onnx"}, "an ONNX model", source},
      {{".engine", ".plan"}, "a TensorRT engine", source},
      {{".tflite"}, "a LiteRT model", source},
      {{".mlpackage", ".mlmodel", ".mlmodelc"}, "a Core ML model", source},
      {{".safetensors"},
       "tensors without a configuration",
       "expected a directory with config.json and model.safetensors, or shards and their index"}};
  std::vector<fs::path> names{path.has_filename() ? path.filename() : path.parent_path().filename()};
  std::error_code error;
  for (fs::directory_iterator it(path, error), end; !error && it != end; it.increment(error))
    names.push_back(it->path().filename());
  std::ranges::sort(names);
  for (const auto& [ends, kind, reason] : kinds)
    for (const fs::path& name : names)
      if (std::ranges::any_of(ends, [&](std::string_view end) { return name.string().ends_with(end); }))
        return fmt::format("; {} is {}, which is not supported: {}", one_line(name.string()), kind, reason);
  return "";
}

void refuse_without(const fs::path& folder, const std::string& missing) {
  const std::string foreign = foreign_in(folder);
  bad_input("{}: {}{}", folder.string(), missing, foreign.empty() ? "; other formats are not supported" : foreign);
}

std::map<std::string, std::string> parse_hub_index(std::string_view text, const std::string& what) {
  const nlohmann::json json = parse_json(text, what, JsonFile::others);
  const nlohmann::json& map = value_at(json, "weight_map");
  if (!map.is_object() || map.empty())
    throw InputError(what + ": expected an object 'weight_map' that maps tensors to files");
  std::map<std::string, std::string> out;
  std::set<std::string> files;
  for (const auto& [tensor, file] : map.items()) {
    if (!file.is_string()) bad_input("{}: '{}' names no file", what, tensor);
    const std::string name = file.get<std::string>();
    if (name != fs::path(name).filename().string() || !name.ends_with(".safetensors") || name.find('\0') != name.npos)
      bad_input("{}: '{}' is in '{}'; expected a .safetensors file in the same directory", what, tensor,
                name.substr(0, 200));
    files.insert(name);
    if (files.size() > kMaxShards) bad_input("{}: more than {} files", what, kMaxShards);
    out.emplace(tensor, name);
  }
  return out;
}

HubFolder::HubFolder(const fs::path& folder)
    : path_(folder),
      config_(parse_hub_config(read_file(folder / kModelConfig), (folder / kModelConfig).string(), &gptq_, &notes_)) {
  if (!gptq_ && is_there(folder / kQuantised))
    gptq_ = parse_gptq_config(read_file(folder / kQuantised), (folder / kQuantised).string(), false, &notes_);
  open_files();
  const auto is_bias = [](const auto& tensor) { return tensor.first.ends_with(kBias); };
  if (config_.qkv_bias && !config_.proj_bias && std::ranges::none_of(tensors_, is_bias)) {
    config_.qkv_bias = false;
    notes_.push_back(path_.string() + ": no layer has the biases of qwen2; using zeros, as in transformers");
  }
  table_ = hub_tensors(config_);
  for (const HubTensor& t : table_) by_name_[t.name] = &t;
  check_names();
}

// The index provides only file names; the headers of these files list the tensors.
void HubFolder::open_files() {
  std::set<std::string> names;
  if (is_there(path_ / kOneFile)) {
    names.emplace(kOneFile);
  } else if (is_there(path_ / kIndex)) {
    for (const auto& [tensor, file] : parse_hub_index(read_file(path_ / kIndex), (path_ / kIndex).string()))
      names.insert(file);
  } else {
    refuse_without(path_, fmt::format("no {} and no {}", kOneFile, kIndex));
  }
  std::string wrapped;
  for (const std::string& name : names) {
    const fs::path file = path_ / name;
    if (!is_there(file)) bad_input("{}: the shard {} is missing", path_.string(), name);
    files_.push_back(std::make_unique<Safetensors>(file, true));
    for (const TensorBytes& t : files_.back()->tensors()) {
      const std::string plain = common_name(unwrapped(t.name), find_row(config_.family));
      if (is_derived(plain, find_row(config_.family))) continue;
      if (unwrapped(t.name) != t.name) wrapped = t.name;
      if (!is_floating(t.dtype) && !(gptq_ && is_code(plain)))
        bad_input("{}: tensor '{}' is {}; expected floating-point values", file.string(), t.name, stored_name(t));
      if (!tensors_.emplace(plain, &t).second) bad_input("{}: duplicate tensor '{}'", path_.string(), t.name);
    }
  }
  if (!wrapped.empty()) notes_.push_back(wrapped_note(path_, wrapped, unwrapped(wrapped)));
}

void HubFolder::check_names() {
  std::map<std::pair<DType, bool>, uint64_t> bytes;
  std::set<std::string> known;
  for (const HubTensor& ours : table_)
    for (const HubTensor::Slice& slice : ours.slices) {
      if (open_codes(ours, slice)) {
        for (const char* suffix : {".qweight", ".qzeros", ".scales", ".g_idx"})
          known.insert(layer_name(slice.name) + suffix);
        continue;
      }
      const TensorBytes& found = stored(slice.name);
      if (found.shape != ours.slice_shape(slice))
        bad_input("{}: tensor '{}' is {}; expected {} according to {}", path_.string(), slice.name,
                  shape_text(found.shape), shape_text(ours.slice_shape(slice)), kModelConfig);
      known.insert(slice.name);
      bytes[{found.dtype, found.is_half}] += found.bytes.size();
    }
  for (const auto& [name, found] : tensors_) {
    if (known.contains(name)) continue;
    // AutoGPTQ gives every layer a bias; an all-zero bias is ignored.
    if (name.ends_with(kBias) && codes_.contains(name.substr(0, name.size() - kBias.size()).append(kWeight)) &&
        std::ranges::all_of(found->bytes, [](std::byte b) { return b == std::byte{0}; }))
      continue;
    // The file of a tied model may also contain the head, which must equal the embedding.
    if (name == kHead && config_.tied) {
      const TensorBytes& table = stored(table_[0].slices[0].name);
      if (found->shape == table.shape && found->dtype == table.dtype &&
          std::memcmp(found->bytes.data(), table.bytes.data(), table.bytes.size()) == 0)
        continue;
      bad_input("{}: tensor '{}' differs from the embedding that {} ties it to", path_.string(), name, kModelConfig);
    }
    bad_input("{}: tensor '{}' does not belong to this model", path_.string(), name);
  }
  const int64_t loose = std::ranges::count_if(codes_, [](const auto& layer) { return !layer.second.plain(); });
  if (loose > 0)
    notes_.push_back(
        fmt::format("{}: {} of {} 4-bit layers have groups in a different order, zero points other than 8, or scales "
                    "other than float16; these layers are dequantized",
                    path_.string(), loose, codes_.size()));
  const auto largest = std::ranges::max_element(bytes, {}, [](const auto& b) { return b.second; });
  dtype_ = largest->first.second ? DType::float32 : largest->first.first;
}

const TensorBytes& HubFolder::stored(const std::string& name) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) bad_input("{}: tensor '{}' is missing", path_.string(), name);
  return *found->second;
}

// If a hub tensor is 4-bit, validates its tensors and returns true.
bool HubFolder::open_codes(const HubTensor& ours, const HubTensor::Slice& slice) {
  if (!gptq_ || ours.shape.ndim() != 2 || !slice.name.ends_with(kWeight)) return false;
  const std::string layer = layer_name(slice.name);
  if (!tensors_.contains(layer + ".qweight")) return false;
  const auto order = tensors_.find(layer + ".g_idx");
  const GptqLayer::Stored layer_tensors{
      .qweight = &stored(layer + ".qweight"),
      .qzeros = &stored(layer + ".qzeros"),
      .scales = &stored(layer + ".scales"),
      .g_idx = order == tensors_.end() && gptq_->ordered ? nullptr : &stored(layer + ".g_idx")};
  const int64_t columns = ours.shape[1];
  codes_.emplace(slice.name, GptqLayer(layer_tensors, slice.rows, columns, *gptq_, path_.string()));
  return true;
}

bool HubFolder::has_codes(const std::string& name) const {
  const auto tensor = by_name_.find(name);
  return tensor != by_name_.end() && std::ranges::all_of(tensor->second->slices, [&](const HubTensor::Slice& slice) {
           const auto found = codes_.find(slice.name);
           return found != codes_.end() && found->second.plain();
         });
}

std::optional<Int4Matrix> HubFolder::codes(const std::string& name) const {
  std::optional<Int4Matrix> out;
  if (!has_codes(name)) return out;
  for (const HubTensor::Slice& slice : by_name_.at(name)->slices)
    if (const GptqLayer& layer = codes_.at(slice.name); out)
      out->append(layer.unpack());
    else
      out = layer.unpack();
  return out;
}

TensorReader HubFolder::slice_reader(const HubTensor::Slice& slice, DType dtype) const {
  if (const auto found = codes_.find(slice.name); found != codes_.end())
    return [&layer = found->second, dtype](int64_t begin, std::span<std::byte> to) {
      std::vector<float> values(to.size() / static_cast<size_t>(element_size(dtype)));
      layer.decode(begin, values);
      convert({"", DType::float32, {std::ssize(values)}, std::as_bytes(std::span(values))}, 0, dtype, to);
    };
  return
      [&from = stored(slice.name), dtype](int64_t begin, std::span<std::byte> to) { convert(from, begin, dtype, to); };
}

FullTensors HubFolder::tensors() const {
  return [this](const std::string& name, DType dtype, const Shape& shape) -> TensorReader {
    const auto found = by_name_.find(name);
    if (found == by_name_.end() || found->second->shape != shape)
      bad_input("{}: the model of this {} has no tensor '{}' of shape {}", path_.string(), kModelConfig, name,
                shape.str());
    const HubTensor& tensor = *found->second;
    if (tensor.transposed && !codes_.contains(tensor.slices[0].name))
      return [&from = stored(tensor.slices[0].name), dtype](int64_t begin, std::span<std::byte> to) {
        convert_transposed(from, begin, dtype, to);
      };
    std::vector<std::pair<int64_t, TensorReader>> readers;  // and their sizes in elements
    for (const HubTensor::Slice& slice : tensor.slices)
      readers.emplace_back(slice.rows * (shape.numel() / shape[0]), slice_reader(slice, dtype));
    return [readers, element = element_size(dtype)](int64_t begin, std::span<std::byte> to) {
      for (const auto& [size, read] : readers) {
        const int64_t count = std::clamp(size - begin, int64_t{0}, std::ssize(to) / element);
        if (count > 0) read(begin, to.first(static_cast<size_t>(count * element)));
        to = to.subspan(static_cast<size_t>(count * element));
        begin = std::max<int64_t>(begin - size, 0);
      }
    };
  };
}

void write_hub_folder(const fs::path& folder, const ModelConfig& config, const HubWeights& w) {
  const std::string description = hub_config(config, w.dtype, w.codes.empty() ? nullptr : &w.gptq);
  const std::vector<HubTensor> all = hub_tensors(config);
  std::vector<TensorBytes> listed;
  std::vector<std::function<std::span<const std::byte>()>> makers;  // one per tensor
  std::vector<std::byte> rows, converted;
  GptqTensors packed;
  for (const HubTensor& ours : all)
    for (int64_t first = 0; const HubTensor::Slice& slice : ours.slices) {
      if (const auto found = w.codes.find(ours.name); found != w.codes.end()) {
        const Int4Matrix& codes = found->second;
        for (size_t which = 0; TensorBytes & t : listed_gptq({}, layer_name(slice.name), codes, slice.rows)) {
          listed.push_back(std::move(t));
          makers.emplace_back([&packed, &codes, &slice, first, i = which++] {
            if (i == 0) packed = pack_gptq(codes, first, slice.rows);
            return listed_gptq(packed, "", codes, slice.rows)[i].bytes;
          });
        }
      } else {
        listed.push_back({slice.name, w.dtype, ours.slice_shape(slice), {}});
        makers.emplace_back([&w, &rows, &converted, &ours, &slice, first] {
          const int64_t width = ours.shape.numel() / ours.shape[0];
          rows.resize(static_cast<size_t>(slice.rows * width * element_size(w.stored)));
          w.tensors(ours.name, w.stored, ours.shape)(first * width, rows);
          converted.resize(static_cast<size_t>(slice.rows * width * element_size(w.dtype)));
          (ours.transposed ? convert_transposed : convert)({slice.name, w.stored, {slice.rows, width}, rows}, 0,
                                                           w.dtype, converted);
          return std::span<const std::byte>(converted);
        });
      }
      first += slice.rows;
    }
  stream_safetensors(folder / kOneFile, listed, [&](size_t i) { return makers[i](); });
  if (!w.codes.empty()) write_file(folder / kQuantised, gptq_config(w.gptq));
  write_file(folder / kModelConfig, description);
}

}  // namespace tessera
