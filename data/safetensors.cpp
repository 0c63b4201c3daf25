// Safetensors files.
#include "data/safetensors.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/bad_input.h"
#include "base/json.h"

namespace tessera {
namespace {

using Json = nlohmann::json;
constexpr uint64_t kMaxHeader = 100'000'000;
constexpr size_t kLengthBytes = 8, kAlignment = 64;

// Tensor's dtypes come first, then those that only other programs write.
struct StoredKind {
  std::string_view name;
  DType dtype;
  int64_t bytes;
};
constexpr size_t kOurs = 6, kReadable = 7;  // later kinds are not readable
constexpr StoredKind kKinds[] = {
    {"F64", DType::float64, 8},   {"F32", DType::float32, 4},   {"BF16", DType::bfloat16, 2},
    {"I32", DType::int32, 4},     {"I64", DType::int64, 8},     {"U8", DType::uint8, 1},
    {"F16", DType::bfloat16, 2},  {"BOOL", DType::uint8, 1},    {"I8", DType::uint8, 1},
    {"F8_E4M3", DType::uint8, 1}, {"F8_E5M2", DType::uint8, 1}, {"F8_E8M0", DType::uint8, 1},
    {"I16", DType::uint8, 2},     {"U16", DType::uint8, 2},     {"U32", DType::uint8, 4},
    {"U64", DType::uint8, 8}};

std::string_view format_name(const TensorBytes& t) {
  return t.is_half ? "F16" : std::ranges::find(kKinds, t.dtype, &StoredKind::dtype)->name;
}

// nullopt beyond 2^62.
std::optional<int64_t> product(const std::vector<int64_t>& shape, int64_t start) {
  int64_t n = start;
  for (const int64_t d : shape)
    if (__builtin_mul_overflow(n, d, &n) || n > int64_t{1} << 62) return std::nullopt;
  return n;
}

// nullopt unless it is an array of non-negative integers.
std::optional<std::vector<int64_t>> naturals(const Json& j) {
  if (!j.is_array()) return std::nullopt;
  std::vector<int64_t> out;
  for (const Json& item : j) {
    const std::optional<int64_t> v = natural(item);
    if (!v) return std::nullopt;
    out.push_back(*v);
  }
  return out;
}

std::string_view view(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

TensorBytes described(const std::string& name, const Json& j, std::span<const std::byte> data, const std::string& what,
                      bool may_be_half) {
  const auto refuse = [&](const std::string& why) { bad_input("{}: tensor '{}': {}", what, name, why); };
  if (!j.is_object() || j.size() != 3 || !j.contains("dtype") || !j.contains("shape") || !j.contains("data_offsets"))
    refuse("expected exactly dtype, shape and data_offsets");
  const auto* const end = may_be_half ? std::end(kKinds) : kKinds + kOurs;
  const auto* const kind = std::find_if(kKinds, end, [&](const StoredKind& k) { return j["dtype"] == k.name; });
  if (kind == end)
    refuse(fmt::format("dtype is {}; expected F64, F32, {}BF16, I32, I64 or U8", j["dtype"].dump(),
                       may_be_half ? "F16, " : ""));
  const auto shape = naturals(j["shape"]), span = naturals(j["data_offsets"]);
  if (!shape) refuse(fmt::format("shape is {}; expected integers", j["shape"].dump()));
  if (!span || span->size() != 2 || (*span)[0] > (*span)[1] || (*span)[1] > std::ssize(data))
    refuse(fmt::format("data_offsets are {}; expected two ascending integers of at most {}", j["data_offsets"].dump(),
                       data.size()));
  const std::optional<int64_t> expected = product(*shape, kind->bytes);
  const int64_t found = (*span)[1] - (*span)[0];
  if (!expected || *expected != found)
    refuse(fmt::format("shape ({}) of {} does not fit its {} bytes", fmt::join(*shape, ", "), kind->name, found));
  return {name,
          kind->dtype,
          *shape,
          data.subspan(static_cast<size_t>((*span)[0]), static_cast<size_t>(found)),
          kind == kKinds + kOurs,
          kind < kKinds + kReadable ? "" : kind->name};
}

}  // namespace

std::string_view stored_name(const TensorBytes& t) {
  return t.is_half ? "float16" : t.other.empty() ? std::string_view(to_string(t.dtype)) : t.other;
}

TensorBytes as_bytes(const std::string& name, const Tensor& tensor) {
  if (!tensor.is_contiguous()) throw Error("[safetensors] tensor '" + name + "' is not contiguous");
  return {name,
          tensor.dtype(),
          {tensor.shape().begin(), tensor.shape().end()},
          {tensor.raw(), static_cast<size_t>(tensor.nbytes())},
          false};
}

SafetensorsLayout safetensors_layout(std::span<const TensorBytes> tensors,
                                     const std::map<std::string, std::string>& metadata) {
  Json header = Json::object();
  header["__metadata__"] = metadata;
  header["__metadata__"]["format"] = "pt";
  SafetensorsLayout out;
  int64_t at = 0;
  for (const TensorBytes& t : tensors) {
    const int64_t end = at + product(t.shape, element_size(t.dtype)).value();
    if (!out.begins.emplace(t.name, at).second) throw Error(fmt::format("duplicate tensor name '{}'", t.name));
    header[t.name] = {{"dtype", format_name(t)}, {"shape", t.shape}, {"data_offsets", {at, end}}};
    at = end;
  }
  std::string text = header.dump();
  text.append((kAlignment - (kLengthBytes + text.size()) % kAlignment) % kAlignment, ' ');
  const uint64_t length = text.size();
  text.insert(0, reinterpret_cast<const char*>(&length), kLengthBytes);
  for (auto& [name, begin] : out.begins) begin += std::ssize(text);
  out.size = at + std::ssize(text);
  out.header = std::move(text);
  return out;
}

void write_safetensors(const std::filesystem::path& file, std::span<const TensorBytes> tensors,
                       const std::map<std::string, std::string>& metadata) {
  const SafetensorsLayout layout = safetensors_layout(tensors, metadata);
  std::vector<std::string_view> chunks = {layout.header};
  for (const TensorBytes& t : tensors) chunks.push_back(view(t.bytes));
  write_file(file, chunks);
}

void stream_safetensors(const std::filesystem::path& file, std::span<const TensorBytes> tensors,
                        const std::function<std::span<const std::byte>(size_t i)>& bytes,
                        const std::map<std::string, std::string>& metadata) {
  std::ofstream out(file, std::ios::binary);
  const auto append = [&](std::string_view chunk) {
    if (!out.write(chunk.data(), std::ssize(chunk))) cannot_write(file, errno);
  };
  append(safetensors_layout(tensors, metadata).header);
  for (size_t i = 0; i < tensors.size(); ++i) append(view(bytes(i)));
  out.close();
  append("");
}

Safetensors::Safetensors(const std::filesystem::path& file, bool may_be_half) : what_(file.string()), map_(file) {
  parse(map_.bytes(), may_be_half);
}

Safetensors::Safetensors(std::span<const std::byte> bytes, const std::string& what, bool may_be_half) : what_(what) {
  parse(bytes, may_be_half);
}

void Safetensors::parse(std::span<const std::byte> all, bool may_be_half) {
  uint64_t length = 0;
  if (all.size() >= kLengthBytes) std::memcpy(&length, all.data(), kLengthBytes);
  if (all.size() < kLengthBytes || length > kMaxHeader || length > all.size() - kLengthBytes)
    throw InputError(
        known_kind(view(all)).empty()
            ? fmt::format("{}: not safetensors: header of {} bytes in a file of {}", what_, length, all.size())
            : fmt::format("{}: not safetensors, but {}", what_, known_kind(view(all))));
  const Json header = parse_json(view(all.subspan(kLengthBytes, length)), what_);
  if (!header.is_object()) bad_input("{}: the header is not a JSON object", what_);
  const std::span<const std::byte> data = all.subspan(kLengthBytes + length);
  for (const auto& [name, value] : header.items()) {
    if (name != "__metadata__") {
      tensors_.push_back(described(name, value, data, what_, may_be_half));
      continue;
    }
    if (!value.is_object()) bad_input("{}: __metadata__ is not an object", what_);
    for (const auto& [key, text] : value.items()) {
      if (!text.is_string()) bad_input("{}: __metadata__ '{}' is not a string", what_, key);
      metadata_[key] = text.get<std::string>();
    }
  }
  order_and_check(data);
}

void Safetensors::order_and_check(std::span<const std::byte> data) {
  std::ranges::stable_sort(tensors_, [](const TensorBytes& a, const TensorBytes& b) {
    return std::pair(a.bytes.data(), a.bytes.size()) < std::pair(b.bytes.data(), b.bytes.size());
  });
  const std::byte* at = data.data();
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const TensorBytes& t = tensors_[i];
    index_[t.name] = i;
    if (t.bytes.data() != at)
      bad_input("{}: tensor '{}' begins at byte {} of the data; expected {} (no holes, no overlaps)", what_, t.name,
                t.bytes.data() - data.data(), at - data.data());
    at += t.bytes.size();
  }
  if (at != data.data() + data.size())
    bad_input("{}: {} bytes follow the last tensor", what_, data.data() + data.size() - at);
}

const TensorBytes& Safetensors::at(const std::string& name) const {
  const auto found = index_.find(name);
  if (found == index_.end()) bad_input("{}: there is no tensor '{}'", what_, name);
  return tensors_[found->second];
}

void Safetensors::expect_no_others(const std::set<std::string>& names) const {
  for (const TensorBytes& t : tensors_)
    if (!names.contains(t.name))
      bad_input("{}: the model has no tensor '{}'; expected those of {} parameters", what_, t.name, names.size());
}

}  // namespace tessera
