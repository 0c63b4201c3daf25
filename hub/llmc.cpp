// Reads the header and locates the tensors after it.
#include "hub/llmc.h"

#include <array>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <tuple>

#include "base/bad_input.h"
#include "hub/folder.h"

namespace tessera {

namespace {

constexpr int32_t kModelMagic = 20240326;
using ModelHeader = std::array<int32_t, 256>;
constexpr std::array kOfLayers{"norm1.weight",     "norm1.bias",     "attn.qkv.weight", "attn.qkv.bias",
                               "attn.proj.weight", "attn.proj.bias", "norm2.weight",    "norm2.bias",
                               "mlp.up.weight",    "mlp.up.bias",    "mlp.down.weight", "mlp.down.bias"};

}  // namespace

bool is_llmc_model(const std::filesystem::path& file) { return first_number(file) == kModelMagic; }

LlmcModel::LlmcModel(const std::filesystem::path& file) : what_(file.string()), file_(file) {
  const auto refuse = [&](const std::string& why) { throw InputError(what_ + ": " + why); };
  ModelHeader header{};
  const size_t size = file_.bytes().size();
  if (size < sizeof(header)) refuse(fmt::format("{} bytes; expected a header of {}", size, sizeof(header)));
  std::memcpy(header.data(), file_.bytes().data(), sizeof(header));
  const auto [magic, version, context, vocab, layers, heads, channels, padded] =
      std::tuple(header[0], header[1], header[2], header[3], header[4], header[5], header[6], header[7]);
  if (magic != kModelMagic || (version != 1 && version != 3 && version != 5))
    refuse(fmt::format("an llm.c model of version {}; expected 1, 3 or 5", version));
  constexpr int32_t kMax = 1 << 20;
  for (const int32_t n : {context, vocab, layers, heads, channels})
    if (n < 1 || n > kMax) refuse(fmt::format("a size of {}; expected 1 to {}", n, kMax));
  const int64_t rows = version == 1 ? vocab : padded;
  if (channels % heads != 0 || rows < vocab || rows > kMax || layers > 10'000)
    refuse(fmt::format(
        "invalid sizes: {} layers, {} heads, {} channels, {} embedding rows (padded vocabulary) for a vocabulary of {}",
        layers, heads, channels, rows, vocab));
  config_ = {.layers = layers, .heads = heads, .channels = channels, .context = context, .vocab = vocab};
  dtype_ = version == 5 ? DType::bfloat16 : DType::float32;
  std::map<std::string, Shape> shapes;
  for (const std::unique_ptr<LanguageModel> model = make_model(config_); const Parameter* p : model->parameters())
    shapes[p->name] = p->full_shape;
  auto at = static_cast<int64_t>(sizeof(header));
  const auto add = [&](const std::string& name, int64_t more = 0) {
    const Shape& shape = shapes.at(name);
    places_[name] = {shape, static_cast<size_t>(at)};
    at += (shape.numel() + more) * element_size(dtype_);
  };
  add("tokens.weight", (rows - vocab) * channels), add("positions.weight");
  for (const char* kind : kOfLayers)
    for (int64_t layer = 0; layer < layers; ++layer) add(fmt::format("blocks.{}.{}", layer, kind));
  add("norm.weight"), add("norm.bias");
  if (std::cmp_not_equal(at, size)) refuse(fmt::format("{} bytes; expected {} according to its header", size, at));
}

FullTensors LlmcModel::tensors() const {
  return [this](const std::string& name, DType dtype, const Shape& shape) -> TensorReader {
    const auto found = places_.find(name);
    if (found == places_.end() || found->second.first != shape)
      bad_input("{}: the GPT-2 model in this file has no tensor '{}' of shape {}", what_, name, shape.str());
    const size_t bytes = static_cast<size_t>(shape.numel() * element_size(dtype_));
    const TensorBytes from{name, dtype_, {shape.numel()}, file_.bytes().subspan(found->second.second, bytes)};
    return [from, dtype](int64_t begin, std::span<std::byte> to) { convert(from, begin, dtype, to); };
  };
}

}  // namespace tessera
