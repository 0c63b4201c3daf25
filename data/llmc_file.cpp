// Reading llm.c's token files.
#include "data/llmc_file.h"

#include <fmt/format.h>

#include <array>
#include <cstring>
#include <fstream>

#include "tensor/error.h"

namespace tessera {
namespace {

struct Format {
  int32_t magic, version;
  int64_t width;  // bytes per token
};
constexpr std::array<Format, 2> kFormats{{{20240520, 1, 2}, {20240801, 7, 4}}};
constexpr size_t kHeader = 256;  // numbers

template <class T>
std::vector<int32_t> widened(const std::byte* data, size_t count, int64_t vocab, const std::string& what) {
  std::vector<int32_t> out(count);
  for (size_t i = 0; i < count; ++i) {
    T token;
    std::memcpy(&token, data + i * sizeof(T), sizeof(T));
    if (token >= vocab)
      throw InputError(fmt::format("{}: token {} at position {} is outside the tokenizer's vocabulary of {}", what,
                                   token, i, vocab));
    out[i] = static_cast<int32_t>(token);
  }
  return out;
}

}  // namespace

bool is_llmc_file(const std::filesystem::path& file) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(file, error)) return false;
  int32_t magic = 0;
  std::ifstream in(file, std::ios::binary);
  in.read(reinterpret_cast<char*>(&magic), sizeof(magic));
  return in && (magic == kFormats[0].magic || magic == kFormats[1].magic);
}

LlmcHeader parse_llmc_header(std::span<const std::byte> begin, int64_t size, const std::string& what) {
  std::array<int32_t, kHeader> header{};
  static_assert(sizeof(header) == LlmcHeader::kBytes);
  if (begin.size() < sizeof(header))
    throw InputError(fmt::format("{}: {} bytes; a header of {} was expected", what, begin.size(), sizeof(header)));
  std::memcpy(header.data(), begin.data(), sizeof(header));
  const Format* format = nullptr;
  for (const Format& f : kFormats)
    if (f.magic == header[0]) format = &f;
  if (format == nullptr)
    throw InputError(fmt::format("{}: begins with {}; llm.c's token files begin with {} or {}", what, header[0],
                                 kFormats[0].magic, kFormats[1].magic));
  if (header[1] != format->version)
    throw InputError(fmt::format("{}: version {}; expected {}", what, header[1], format->version));
  for (size_t i = 3; i < kHeader; ++i)
    if (header[i] != 0)
      throw InputError(fmt::format("{}: number {} of the header is {}; expected 0", what, i, header[i]));
  const int64_t payload = size - LlmcHeader::kBytes, width = format->width;
  if (header[2] < 0 || payload != header[2] * width)
    throw InputError(
        fmt::format("{}: {} tokens of {} bytes were expected, {} bytes are there", what, header[2], width, payload));
  return {.count = header[2], .width = width};
}

std::vector<int32_t> parse_llmc(std::span<const std::byte> bytes, int64_t vocab, const std::string& what) {
  const LlmcHeader header = parse_llmc_header(bytes, std::ssize(bytes), what);
  const auto count = static_cast<size_t>(header.count);
  const std::byte* const data = bytes.data() + LlmcHeader::kBytes;
  return header.width == 2 ? widened<uint16_t>(data, count, vocab, what) : widened<uint32_t>(data, count, vocab, what);
}

}  // namespace tessera
