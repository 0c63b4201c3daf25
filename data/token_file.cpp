// The memory-mapped token file.
#include "data/token_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
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
  const int fd = ::open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) throw InputError(fmt::format("cannot open the token file {}: {}", file.string(), std::strerror(errno)));
  struct stat info {};
  const bool regular = ::fstat(fd, &info) == 0 && S_ISREG(info.st_mode);
  TokenFile out;
  void* map = MAP_FAILED;
  if (regular && info.st_size >= static_cast<off_t>(sizeof(Header)))
    map = ::mmap(nullptr, static_cast<size_t>(info.st_size), PROT_READ, MAP_PRIVATE, fd, 0);
  ::close(fd);
  if (!regular) throw InputError(fmt::format("the token file {} is not a regular file", file.string()));
  if (map == MAP_FAILED)
    throw InputError(fmt::format("the token file {} has {} bytes; a header of {} was expected", file.string(),
                                 info.st_size, sizeof(Header)));
  out.map_ = map;
  out.map_bytes_ = info.st_size;
  out.check(file);
  return out;
}

// Everything in the file is checked before anything of it is used.
void TokenFile::check(const std::filesystem::path& file) {
  const auto require = [&](bool ok, const std::string& why) {
    if (!ok) throw InputError(fmt::format("the token file {}: {}", file.string(), why));
  };
  Header h;
  std::memcpy(&h, map_, sizeof(h));
  require(h.magic == Header().magic, "it does not begin as a token file does");
  require(h.version == 1, fmt::format("version {}; expected 1", h.version));
  require(h.width == 2 || h.width == 4, fmt::format("{} bytes per token; expected 2 or 4", h.width));
  require(h.vocab >= 1 && h.vocab <= uint64_t{1} << 31, fmt::format("a vocabulary of {} tokens", h.vocab));
  require(h.zero == Header().zero, "the header's last 24 bytes must be zero");
  const uint64_t payload = static_cast<uint64_t>(map_bytes_) - sizeof(Header);
  require(h.count <= payload && h.count * h.width == payload,
          fmt::format("{} tokens of {} bytes were expected, {} bytes are there", h.count, h.width, payload));
  tokens_ = static_cast<const char*>(map_) + sizeof(Header);
  const uint64_t hash = XXH3_64bits(tokens_, payload);
  require(hash == h.hash, fmt::format("its checksum is {:016x}; expected {:016x}", hash, h.hash));
  const uint64_t top = h.width == 2 ? largest<uint16_t>(tokens_, h.count) : largest<uint32_t>(tokens_, h.count);
  require(top < h.vocab, fmt::format("token {} is outside the vocabulary of {}", top, h.vocab));
  count_ = static_cast<int64_t>(h.count);
  vocab_ = static_cast<int64_t>(h.vocab);
  checksum_ = hash;
  width_ = static_cast<int>(h.width);
}

TokenFile::~TokenFile() {
  if (map_ != nullptr) ::munmap(map_, static_cast<size_t>(map_bytes_));
}

void TokenFile::swap(TokenFile& other) noexcept {
  std::swap(map_, other.map_);
  std::swap(map_bytes_, other.map_bytes_);
  std::swap(tokens_, other.tokens_);
  std::swap(count_, other.count_);
  std::swap(vocab_, other.vocab_);
  std::swap(checksum_, other.checksum_);
  std::swap(width_, other.width_);
}

void TokenFile::copy(int64_t begin, int64_t count, int32_t* out) const {
  for (int64_t i = 0; i < count; ++i) out[i] = (*this)[begin + i];
}

}  // namespace tessera
