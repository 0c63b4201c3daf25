// The memory-mapped token file.
#include "data/token_file.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <utility>
#include <vector>

#include "data/files.h"
#include "tensor/error.h"

namespace tessera {
namespace {

struct Header {
  std::array<char, 8> magic{'T', 'E', 'S', 'S', 'T', 'O', 'K', '\n'};
  uint32_t version = 1;
  uint32_t width = 2;
  uint64_t vocab = 0;
  uint64_t count = 0;
  uint64_t hash = 0;
  std::array<uint64_t, 3> zero{};
};
static_assert(sizeof(Header) == 64);
static_assert(std::endian::native == std::endian::little, "token files are mapped as they are");

template <class T>
std::vector<T> narrowed(std::span<const int32_t> tokens, int64_t vocab) {
  std::vector<T> out(tokens.size());
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] < 0 || tokens[i] >= vocab)
      throw Error(fmt::format("token {} at position {} is outside the vocabulary of {}", tokens[i], i, vocab));
    out[i] = static_cast<T>(tokens[i]);
  }
  return out;
}

template <class T>
void write_as(const std::filesystem::path& file, std::span<const int32_t> tokens, int64_t vocab) {
  const std::vector<T> payload = narrowed<T>(tokens, vocab);
  const std::string_view bytes(reinterpret_cast<const char*>(payload.data()), payload.size() * sizeof(T));
  Header header;
  header.width = sizeof(T);
  header.vocab = static_cast<uint64_t>(vocab);
  header.count = payload.size();
  header.hash = XXH3_64bits(bytes.data(), bytes.size());
  write_file(file, {reinterpret_cast<const char*>(&header), sizeof(header)}, bytes);
}

// The largest token of a payload, whose elements are at their natural alignment.
template <class T>
uint64_t largest(const void* tokens, uint64_t count) {
  const T* t = static_cast<const T*>(tokens);
  return count == 0 ? 0 : *std::max_element(t, t + count);
}

}  // namespace

void TokenFile::write(const std::filesystem::path& file, std::span<const int32_t> tokens, int64_t vocab) {
  if (vocab < 1 || vocab > int64_t{1} << 31)
    throw Error(fmt::format("a vocabulary of {} tokens; expected 1 to 2^31", vocab));
  vocab <= 65536 ? write_as<uint16_t>(file, tokens, vocab) : write_as<uint32_t>(file, tokens, vocab);
}

TokenFile TokenFile::open(const std::filesystem::path& file) {
  MappedFile map(file);
  TokenFile out = of_bytes(map.bytes(), file.string());
  out.map_ = std::move(map);
  return out;
}

// Everything in the file is checked before anything of it is used.
TokenFile TokenFile::of_bytes(std::span<const std::byte> bytes, const std::string& what) {
  const auto require = [&](bool ok, const auto& why) {
    if (!ok) throw InputError(fmt::format("the token file {}: {}", what, why()));
  };
  Header h;
  require(bytes.size() >= sizeof(h),
          [&] { return fmt::format("{} bytes; a header of {} was expected", bytes.size(), sizeof(h)); });
  std::memcpy(&h, bytes.data(), sizeof(h));
  require(h.magic == Header().magic, [] { return "it does not begin as a token file does"; });
  require(h.version == 1, [&] { return fmt::format("version {}; expected 1", h.version); });
  require(h.width == 2 || h.width == 4, [&] { return fmt::format("{} bytes per token; expected 2 or 4", h.width); });
  require(h.vocab >= 1 && h.vocab <= uint64_t{1} << 31,
          [&] { return fmt::format("a vocabulary of {} tokens; expected 1 to 2^31", h.vocab); });
  require(h.zero == Header().zero, [] { return "the header's last 24 bytes must be zero"; });
  const std::span<const std::byte> payload = bytes.subspan(sizeof(h));
  require(h.count <= payload.size() && h.count * h.width == payload.size(), [&] {
    return fmt::format("{} tokens of {} bytes were expected, {} bytes are there", h.count, h.width, payload.size());
  });
  const uint64_t hash = XXH3_64bits(payload.data(), payload.size());
  require(hash == h.hash, [&] { return fmt::format("its checksum is {:016x}; expected {:016x}", hash, h.hash); });
  const uint64_t top =
      h.width == 2 ? largest<uint16_t>(payload.data(), h.count) : largest<uint32_t>(payload.data(), h.count);
  require(top < h.vocab, [&] { return fmt::format("token {} is outside the vocabulary of {}", top, h.vocab); });
  TokenFile out;
  out.tokens_ = payload.data();
  out.count_ = static_cast<int64_t>(h.count);
  out.vocab_ = static_cast<int64_t>(h.vocab);
  out.checksum_ = hash;
  out.width_ = static_cast<int>(h.width);
  return out;
}

void TokenFile::copy(int64_t begin, int64_t count, int32_t* out) const {
  for (int64_t i = 0; i < count; ++i) out[i] = (*this)[begin + i];
}

}  // namespace tessera
