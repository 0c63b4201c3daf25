// Reads and writes GPTQ layers and their configuration.
#include "hub/gptq_format.h"

#include <fmt/ranges.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/bad_input.h"
#include "hub/folder.h"
#include "hub/keys.h"

namespace tessera {
namespace {

using Json = nlohmann::json;

constexpr int64_t kPerWord = 8;
constexpr uint32_t kStoredZero = Int4Matrix::kZero - 1, kStoredZeros = kStoredZero * 0x11111111U;

// Keys without effect on the values. The tensors themselves define which layers are quantized, their group order and
// zero points.
constexpr std::string_view kIgnoredGptqKeys =
    "sym lm_head true_sequential static_groups model_name_or_path model_file_base_name meta pack_impl "
    "act_group_aware hyb_act mse dataset tokenizer batch_size pad_token_id backend use_exllama exllama_config "
    "disable_exllama use_cuda_fp16 max_input_length model_seqlen cache_block_outputs offload_to_disk "
    "offload_to_disk_path block_name_to_quantize module_name_preceding_first_block modules_in_block_to_quantize "
    "modules_to_not_convert";

const std::vector<RestrictedKeys>& restricted_keys_of_gptq() {
  static const std::vector<RestrictedKeys> all{{"quant_method method", {"gptq"}},
                                               {"bits", {4}},
                                               {"pack_dtype", {"int32"}},
                                               {"is_marlin_format", {false}},
                                               {"rotation adapter"}};
  return all;
}

uint32_t word(const TensorBytes& from, int64_t i) {
  uint32_t out = 0;
  std::memcpy(&out, from.bytes.data() + i * static_cast<int64_t>(sizeof(out)), sizeof(out));
  return out;
}

int code_in(const TensorBytes& from, int64_t i, int64_t j) { return static_cast<int>(word(from, i) >> (4 * j) & 15U); }

template <class T>
std::span<const std::byte> as_bytes(const std::vector<T>& values) {
  return std::as_bytes(std::span(values));
}

}  // namespace

GptqConfig parse_gptq_config(HubKeys& keys, bool needs_method, std::vector<std::string>* notes) {
  if (needs_method && !keys.find("quant_method")) keys.refuse("quant_method", "\"gptq\"", Json());
  keys.check(restricted_keys_of_gptq());
  if (!keys.find("bits")) keys.refuse("bits", "4", Json());
  GptqConfig out;
  // Synonyms; if both are present, both must be valid.
  for (const char* key : {"checkpoint_format", "format"}) {
    const std::string format = keys.text(key, out.second ? "gptq_v2" : "gptq");
    if (format != "gptq" && format != "gptq_v2") keys.refuse(key, "\"gptq\" or \"gptq_v2\"", format);
    if (key[0] == 'f' && out.second != (format == "gptq_v2") && keys.find("checkpoint_format"))
      keys.refuse(key, "that of checkpoint_format", format);
    out.second = format == "gptq_v2";
  }
  const Json* const group = keys.find("group_size");
  if (!group) keys.refuse("group_size", "a number of columns, or -1", Json());
  out.group = *group == -1 ? -1 : keys.size("group_size");
  out.ordered = !keys.flag("desc_act", false) || out.group == -1;
  // Per-layer overrides: a pattern that begins with "-:" selects layers that are not quantized.
  if (const Json* const dynamic = keys.find("dynamic"); dynamic && dynamic->is_object())
    for (const auto& [pattern, rule] : dynamic->items())
      if (!pattern.starts_with("-:") &&
          (!rule.is_object() || rule.value("bits", Json(4)) != 4 || rule.value("group_size", *group) != *group))
        keys.refuse("dynamic", "layers of the same bits and groups", *dynamic);
  if (const Json* const damping = keys.find("damp_percent"); damping && damping->is_number())
    out.damping = damping->get<double>();
  if (const std::string unread = keys.unread(kIgnoredGptqKeys); notes && !unread.empty()) notes->push_back(unread);
  return out;
}

GptqConfig parse_gptq_config(std::string_view text, const std::string& what, bool needs_method,
                             std::vector<std::string>* notes) {
  HubKeys keys(text, what);
  return parse_gptq_config(keys, needs_method, notes);
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
    throw Error(fmt::format("[gptq] a matrix of shape ({}, {}); expected multiples of {}", rows, m.columns, kPerWord));
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
  return {{layer + ".g_idx", DType::int32, {m.columns}, as_bytes(t.g_idx)},
          {layer + ".qweight", DType::int32, {m.columns / kPerWord, rows}, as_bytes(t.qweight)},
          {layer + ".qzeros", DType::int32, {m.groups(), rows / kPerWord}, as_bytes(t.qzeros)},
          {layer + ".scales", DType::bfloat16, {m.groups(), rows}, as_bytes(t.scales), true}};
}

GptqLayer::GptqLayer(const Stored& stored, int64_t rows, int64_t columns, const GptqConfig& config,
                     const std::string& what)
    : stored_(stored),
      rows_(rows),
      columns_(columns),
      group_(config.group_size(columns)),
      less_(config.second ? 0 : 1) {
  const int64_t groups = (columns - 1) / group_ + 1;
  const auto refuse = [&](const TensorBytes& t, const std::string& expected, const std::string& found) {
    bad_input("{}: tensor '{}': expected {}, got {}", what, t.name, expected, found);
  };
  const auto check = [&](const TensorBytes* t, bool is_floating_one, const std::vector<int64_t>& shape) {
    if (t && ((is_floating_one ? !is_floating(t->dtype) : t->dtype != DType::int32) || t->shape != shape))
      refuse(*t, fmt::format("{} ({})", is_floating_one ? "float16" : "int32", fmt::join(shape, ", ")),
             fmt::format("{} ({})", stored_name(*t), fmt::join(t->shape, ", ")));
  };
  if (rows % kPerWord != 0 || columns % kPerWord != 0)
    refuse(*stored.qweight, fmt::format("a matrix whose sizes are multiples of {}", kPerWord),
           fmt::format("({}, {})", rows, columns));
  check(stored.qweight, false, {columns / kPerWord, rows});
  check(stored.qzeros, false, {groups, rows / kPerWord});
  check(stored.scales, true, {groups, rows});
  check(stored.g_idx, false, {columns});
  plain_ = stored.scales->is_half;
  for (int64_t c = 0; stored.g_idx && c < columns; ++c) {
    const uint32_t group = word(*stored.g_idx, c);
    if (group >= groups)
      refuse(*stored.g_idx, fmt::format("the group of column {}, below {}", c, groups),
             fmt::format("{}", static_cast<int32_t>(group)));
    plain_ = plain_ && group == c / group_;
  }
  const uint32_t eights = 0x11111111U * static_cast<uint32_t>(Int4Matrix::kZero - less_);
  for (int64_t i = 0; i < groups * rows / kPerWord; ++i) {
    if (word(*stored.qzeros, i) == eights) continue;
    plain_ = false;
    for (int64_t j = 0; j < kPerWord; ++j)
      if (code_in(*stored.qzeros, i, j) + less_ > 15)  // programs differ in their interpretation
        refuse(*stored.qzeros, "a zero point in [1, 15], as version 1 can store", "16");
  }
  std::vector<float> scales(static_cast<size_t>(groups * rows));
  convert(*stored.scales, 0, DType::float32, std::as_writable_bytes(std::span(scales)));
  for (const float scale : scales)
    if (!(std::abs(scale) <= std::numeric_limits<float>::max() / 16))  // 15 times the scale must be finite too
      refuse(*stored.scales, std::isfinite(scale) ? "values below 2e37" : "finite values", fmt::format("{}", scale));
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
  if (out.empty()) return;
  const int64_t first = begin / columns_, last = (begin + std::ssize(out) - 1) / columns_;
  if (plain_) return unpack(first, last - first + 1).decode(begin - first * columns_, out);
  std::vector<float> scales(static_cast<size_t>((columns_ - 1) / group_ + 1));
  std::vector<int> zeros(scales.size());
  int64_t current = -1;
  for (size_t i = 0; i < out.size(); ++i) {
    const int64_t at = begin + static_cast<int64_t>(i), row = at / columns_, column = at % columns_;
    for (size_t g = 0; row != current && g < scales.size(); ++g) {
      const int64_t from = static_cast<int64_t>(g) * rows_ + row;
      convert(*stored_.scales, from, DType::float32, std::as_writable_bytes(std::span(scales).subspan(g, 1)));
      zeros[g] = code_in(*stored_.qzeros, from / kPerWord, row % kPerWord) + less_;
    }
    current = row;
    const size_t g = stored_.g_idx ? word(*stored_.g_idx, column) : static_cast<size_t>(column / group_);
    const int code = code_in(*stored_.qweight, column / kPerWord * rows_ + row, column % kPerWord);
    out[i] = scales[g] * static_cast<float>(code - zeros[g]);
  }
}

}  // namespace tessera
