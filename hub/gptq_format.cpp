// Reading and writing GPTQ's tensors and what is said of them.
#include "hub/gptq_format.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

#include "data/json.h"
#include "tensor/error.h"

namespace tessera {
namespace {

using Json = nlohmann::json;

constexpr int64_t kPerWord = 8;
constexpr uint32_t kStoredZero = Int4Matrix::kZero - 1, kStoredZeros = kStoredZero * 0x11111111U;

// About how codes were made, and how other programs compute with them: the numbers are the same.
const std::set<std::string>& of_making() {
  static const std::set<std::string> keys{"true_sequential",
                                          "static_groups",
                                          "model_name_or_path",
                                          "model_file_base_name",
                                          "meta",
                                          "pack_impl",
                                          "act_group_aware",
                                          "dataset",
                                          "tokenizer",
                                          "batch_size",
                                          "pad_token_id",
                                          "backend",
                                          "use_exllama",
                                          "exllama_config",
                                          "disable_exllama",
                                          "use_cuda_fp16",
                                          "max_input_length",
                                          "model_seqlen",
                                          "cache_block_outputs",
                                          "block_name_to_quantize",
                                          "module_name_preceding_first_block",
                                          "modules_in_block_to_quantize"};
  return keys;
}

uint32_t word(const TensorBytes& from, int64_t i) {
  uint32_t out = 0;
  std::memcpy(&out, from.bytes.data() + i * static_cast<int64_t>(sizeof(out)), sizeof(out));
  return out;
}

template <class T>
std::span<const std::byte> bytes_of(const std::vector<T>& values) {
  return std::as_bytes(std::span(values));
}

}  // namespace

GptqConfig parse_gptq_config(std::string_view text, const std::string& what, bool needs_method) {
  const Json json = parse_json(text, what);
  if (!json.is_object()) throw InputError(what + ": expected an object");
  const auto refuse = [&](const char* key, const std::string& expected, const Json& found) {
    throw InputError(fmt::format("{}: {}: expected {}, found {}", what, key, expected, shown(found, 60)));
  };
  const auto must_be = [&](const char* key, const Json& wanted, const std::string& because = "") {
    if (const Json found = json.value(key, wanted); found != wanted) refuse(key, wanted.dump() + because, found);
  };
  if (needs_method && !json.contains("quant_method")) refuse("quant_method", "\"gptq\"", Json());
  must_be("quant_method", "gptq");
  if (json.value("bits", Json()) != 4) refuse("bits", "4", json.value("bits", Json()));
  must_be("checkpoint_format", "gptq");
  must_be("desc_act", false, " (no activation order)");
  must_be("sym", true, " (symmetric codes)");
  must_be("lm_head", false, " (a head that is not quantised)");
  must_be("pack_dtype", "int32");
  const std::set<std::string> read{"quant_method", "bits",       "checkpoint_format", "desc_act",    "sym",
                                   "lm_head",      "pack_dtype", "group_size",        "damp_percent"};
  for (const auto& [key, value] : json.items())
    if (!read.contains(key) && !of_making().contains(key) && !is_nothing(value))
      throw InputError(fmt::format("{}: {}: expected nothing, found {}; Tessera may not compute what it asks for", what,
                                   key.substr(0, 60), shown(value, 60)));
  GptqConfig out;
  const Json group = json.value("group_size", Json());
  const std::optional<int64_t> size = natural(group);
  if (group != -1 && (!size || *size < 1 || *size > int64_t{1} << 40))
    refuse("group_size", "a number of columns, or -1", group);
  out.group = group == -1 ? -1 : *size;
  if (const Json damping = json.value("damp_percent", Json()); damping.is_number()) out.damping = damping.get<double>();
  return out;
}

std::string gptq_config(const GptqConfig& config) {
  const nlohmann::ordered_json out{{"quant_method", "gptq"},
                                   {"checkpoint_format", "gptq"},
                                   {"bits", 4},
                                   {"group_size", config.group},
                                   {"sym", true},
                                   {"desc_act", false},
                                   {"static_groups", false},
                                   {"true_sequential", true},
                                   {"damp_percent", config.damping},
                                   {"lm_head", false},
                                   {"pack_dtype", "int32"}};
  return out.dump(2) + "\n";
}

GptqTensors pack_gptq(const Int4Matrix& m, int64_t first, int64_t rows) {
  if (rows % kPerWord != 0 || m.columns % kPerWord != 0)
    throw Error(fmt::format("[gptq] a matrix ({}, {}); expected multiples of {}", rows, m.columns, kPerWord));
  GptqTensors out;
  out.qweight.resize(static_cast<size_t>(m.columns / kPerWord * rows));
  out.qzeros.assign(static_cast<size_t>(m.groups() * rows / kPerWord), static_cast<int32_t>(kStoredZeros));
  out.scales.resize(static_cast<size_t>(m.groups() * rows));
  for (int64_t i = 0; i < m.columns / kPerWord; ++i)
    for (int64_t row = 0; row < rows; ++row) {
      uint32_t packed = 0;
      for (int64_t j = 0; j < kPerWord; ++j)
        packed |= static_cast<uint32_t>(m.code(first + row, kPerWord * i + j)) << (4 * j);
      out.qweight[static_cast<size_t>(i * rows + row)] = static_cast<int32_t>(packed);
    }
  for (int64_t g = 0; g < m.groups(); ++g)
    for (int64_t row = 0; row < rows; ++row) out.scales[static_cast<size_t>(g * rows + row)] = m.scale(first + row, g);
  for (int64_t c = 0; c < m.columns; ++c) out.g_idx.push_back(static_cast<int32_t>(c / m.group));
  return out;
}

std::vector<TensorBytes> listed_gptq(const GptqTensors& t, const std::string& layer, const Int4Matrix& m,
                                     int64_t rows) {
  return {{layer + ".g_idx", DType::int32, {m.columns}, bytes_of(t.g_idx)},
          {layer + ".qweight", DType::int32, {m.columns / kPerWord, rows}, bytes_of(t.qweight)},
          {layer + ".qzeros", DType::int32, {m.groups(), rows / kPerWord}, bytes_of(t.qzeros)},
          {layer + ".scales", DType::bfloat16, {m.groups(), rows}, bytes_of(t.scales), true}};
}

GptqLayer::GptqLayer(const Stored& stored, int64_t rows, int64_t columns, int64_t group, const std::string& what)
    : stored_(stored), rows_(rows), columns_(columns), group_(group) {
  const int64_t groups = (columns - 1) / group + 1;
  const auto refuse = [&](const TensorBytes& t, const std::string& expected, const std::string& found) {
    throw InputError(fmt::format("{}: tensor '{}': expected {}, found {}", what, t.name, expected, found));
  };
  const auto hold = [&](const TensorBytes* t, bool is_half, const std::vector<int64_t>& shape) {
    if (t && (t->is_half != is_half || (!is_half && t->dtype != DType::int32) || t->shape != shape))
      refuse(*t, fmt::format("{} ({})", is_half ? "float16" : "int32", fmt::join(shape, ", ")),
             fmt::format("{} ({})", t->is_half ? "float16" : name_of(t->dtype), fmt::join(t->shape, ", ")));
  };
  if (rows % kPerWord != 0 || columns % kPerWord != 0)
    refuse(*stored.qweight, fmt::format("a matrix whose sizes are multiples of {}", kPerWord),
           fmt::format("({}, {})", rows, columns));
  hold(stored.qweight, false, {columns / kPerWord, rows});
  hold(stored.qzeros, false, {groups, rows / kPerWord});
  hold(stored.scales, true, {groups, rows});
  hold(stored.g_idx, false, {columns});
  for (int64_t c = 0; stored.g_idx && c < columns; ++c)
    if (word(*stored.g_idx, c) != static_cast<uint32_t>(c / group))
      refuse(*stored.g_idx, fmt::format("column {} in group {} (no activation order)", c, c / group),
             fmt::format("{}", static_cast<int32_t>(word(*stored.g_idx, c))));
  for (int64_t i = 0; i < groups * rows / kPerWord; ++i)
    if (word(*stored.qzeros, i) != kStoredZeros)
      refuse(*stored.qzeros, fmt::format("{:#010x} (symmetric codes, version 1)", kStoredZeros),
             fmt::format("{:#010x}", word(*stored.qzeros, i)));
  for (size_t i = 0; i < stored.scales->bytes.size(); i += sizeof(Half)) {
    Half h;
    std::memcpy(&h, stored.scales->bytes.data() + i, sizeof(h));
    if ((h.bits & 0x7c00u) == 0x7c00u) refuse(*stored.scales, "finite numbers", fmt::format("{}", wide(h)));
  }
}

Int4Matrix GptqLayer::unpack(int64_t first, int64_t count) const {
  Int4Matrix out(count, columns_, group_);
  for (int64_t i = 0; i < columns_ / kPerWord; ++i)
    for (int64_t row = 0; row < count; ++row) {
      const uint32_t packed = word(*stored_.qweight, i * rows_ + first + row);
      for (int64_t j = 0; j < kPerWord; ++j)
        out.set_code(row, kPerWord * i + j, static_cast<int>(packed >> (4 * j) & 15U));
    }
  for (int64_t g = 0; g < out.groups(); ++g)
    for (int64_t row = 0; row < count; ++row)
      std::memcpy(&out.scale(row, g),
                  stored_.scales->bytes.data() + (g * rows_ + first + row) * static_cast<int64_t>(sizeof(Half)),
                  sizeof(Half));
  return out;
}

void GptqLayer::decode(int64_t begin, std::span<float> out) const {
  const int64_t first = begin / columns_, last = (begin + std::ssize(out) - 1) / columns_;
  if (!out.empty()) unpack(first, last - first + 1).decode(begin - first * columns_, out);
}

}  // namespace tessera
