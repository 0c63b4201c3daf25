// Token files: writing, validation, reading.
#include "data/token_file.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/bad_input.h"

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
static_assert(std::endian::native == std::endian::little, "token files are little-endian");

// `position`: index of the first token in the file.
template <class T>
void append_as(std::string& out, std::span<const int32_t> tokens, int64_t position, int64_t vocab) {
  const size_t begin = out.size();
  out.resize(begin + tokens.size() * sizeof(T));
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] < 0 || tokens[i] >= vocab)
      throw Error(fmt::format("token {} at position {} is outside the vocabulary of {}", tokens[i],
                              position + static_cast<int64_t>(i), vocab));
    const auto token = static_cast<T>(tokens[i]);
    std::memcpy(out.data() + begin + i * sizeof(T), &token, sizeof(T));
  }
}
void append(std::string& out, std::span<const int32_t> tokens, int64_t position, int64_t vocab) {
  if (vocab < 1 || vocab > int64_t{1} << 31)
    throw Error(fmt::format("a vocabulary of {} tokens; expected 1 to 2^31", vocab));
  vocab <= 65536 ? append_as<uint16_t>(out, tokens, position, vocab)
                 : append_as<uint32_t>(out, tokens, position, vocab);
}

std::string make_header(int64_t vocab, int64_t count, uint64_t hash) {
  Header header;
  header.width = vocab <= 65536 ? sizeof(uint16_t) : sizeof(uint32_t);
  header.vocab = static_cast<uint64_t>(vocab);
  header.count = static_cast<uint64_t>(count);
  header.hash = hash;
  std::string out(sizeof(header), '\0');
  std::memcpy(out.data(), &header, sizeof(header));
  return out;
}

std::string token_bytes(std::span<const int32_t> tokens, int64_t vocab) {
  std::string all;
  append(all, tokens, 0, vocab);
  return make_header(vocab, std::ssize(tokens), checksum(all)) + all;
}

}  // namespace

void TokenFile::write(const std::filesystem::path& file, std::span<const int32_t> tokens, int64_t vocab) {
  write_file(file, token_bytes(tokens, vocab));
}

TokenFile TokenFile::from_tokens(std::span<const int32_t> tokens, int64_t vocab, const std::string& what) {
  const auto owned = std::make_shared<const std::string>(token_bytes(tokens, vocab));
  TokenFile out = from_bytes(std::as_bytes(std::span(*owned)), what);
  out.owned_ = owned;
  return out;
}

TokenWriter::TokenWriter(const std::filesystem::path& file, int64_t vocab)
    : vocab_(vocab), file_([&] {
        SharedFile::create(file, std::string(sizeof(Header), '\0'), sizeof(Header));
        return SharedFile(file);
      }()) {}

void TokenWriter::add(std::span<const int32_t> tokens) {
  append(waiting_, tokens, count_, vocab_);
  count_ += std::ssize(tokens);
  if (waiting_.size() >= size_t{1} << 20) write();
}

void TokenWriter::write() {
  const std::span<const std::byte> bytes = std::as_bytes(std::span(waiting_));
  file_.write(end_ + int64_t{sizeof(Header)}, bytes);
  sum_.add(bytes);
  end_ += std::ssize(bytes);
  waiting_.clear();
}

void TokenWriter::finish() {
  write();
  const std::string header = make_header(vocab_, count_, sum_.value());
  file_.write(0, std::as_bytes(std::span(header)));
  file_.flush();
}

TokenFile TokenFile::checked(const std::string& what, std::shared_ptr<const OpenFile> file,
                             std::span<const std::byte> bytes, std::optional<int64_t> vocab_of_llmc) {
  TokenFile out;
  out.what_ = what;
  out.file_ = std::move(file);
  out.bytes_ = bytes;
  out.vocab_ = vocab_of_llmc.value_or(0);
  const int64_t size = out.file_ ? out.file_->size() : std::ssize(bytes);
  const std::optional<uint64_t> hash = vocab_of_llmc ? out.read_llmc_header(size) : out.read_header(size);
  out.checksum_ = checksum_of_chunks([&](const ChunkFunction& add) {
    out.for_each_chunk(0, out.count_, [&](std::span<const std::byte> chunk, int64_t) { add(chunk); });
  });
  if (hash && *hash != out.checksum_)
    bad_input("the token file {}: its checksum is {:016x}; expected {:016x}", what, out.checksum_, *hash);
  std::vector<int32_t> tokens;
  out.for_each_chunk(0, out.count_, [&](std::span<const std::byte> chunk, int64_t position) {
    tokens.resize(chunk.size() / static_cast<size_t>(out.width_));
    out.widen(chunk, position, tokens.data());
  });
  return out;
}
TokenFile TokenFile::open(const std::filesystem::path& file) {
  return checked(file.string(), std::make_shared<OpenFile>(file), {});
}
TokenFile TokenFile::open_llmc(const std::filesystem::path& file, int64_t vocab) {
  return checked(file.string(), std::make_shared<OpenFile>(file), {}, vocab);
}
TokenFile TokenFile::from_bytes(std::span<const std::byte> bytes, const std::string& what) {
  return checked(what, nullptr, bytes);
}
TokenFile TokenFile::from_llmc_bytes(std::span<const std::byte> bytes, int64_t vocab, const std::string& what) {
  return checked(what, nullptr, bytes, vocab);
}

std::optional<uint64_t> TokenFile::read_header(int64_t size) {
  const auto refuse = [&](const std::string& why) { bad_input("the token file {}: {}", what_, why); };
  Header h;
  if (size < int64_t{sizeof(h)}) refuse(fmt::format("{} bytes; expected a header of {}", size, sizeof(h)));
  read(0, std::as_writable_bytes(std::span(&h, 1)));
  if (h.magic != Header().magic) refuse("it does not begin with the signature of a token file");
  if (h.version != 1) refuse(fmt::format("version {}; expected 1", h.version));
  if (h.width != 2 && h.width != 4) refuse(fmt::format("{} bytes per token; expected 2 or 4", h.width));
  if (h.vocab < 1 || h.vocab > uint64_t{1} << 31)
    refuse(fmt::format("a vocabulary of {} tokens; expected 1 to 2^31", h.vocab));
  if (h.zero != Header().zero) refuse("the header's last 24 bytes must be zero");
  const uint64_t payload = static_cast<uint64_t>(size) - sizeof(h);
  if (h.count > payload || h.count * h.width != payload)
    refuse(fmt::format("expected {} tokens of {} bytes, got {} bytes", h.count, h.width, payload));
  count_ = static_cast<int64_t>(h.count);
  vocab_ = static_cast<int64_t>(h.vocab);
  begin_ = int64_t{sizeof(h)};
  width_ = h.width;
  return h.hash;
}

// Calls f with tokens that fit into a small buffer, and the position of the first.
template <class F>
void TokenFile::for_each_chunk(int64_t begin, int64_t count, const F& f) const {
  constexpr int64_t kChunk = 8192;
  std::array<std::byte, kChunk> buffer;
  for (const int64_t end = begin + count; begin < end;) {
    const int64_t here = std::min(end - begin, kChunk / width_);
    const std::span chunk(buffer.data(), static_cast<size_t>(here * width_));
    read(begin_ + begin * width_, chunk);
    f(std::span<const std::byte>(chunk), begin);
    begin += here;
  }
}

void TokenFile::read(int64_t at, std::span<std::byte> out) const {
  if (file_) return file_->read(at, out);
  std::ranges::copy(bytes_.subspan(static_cast<size_t>(at), out.size()), out.begin());
}

void TokenFile::widen(std::span<const std::byte> from, int64_t position, int32_t* out) const {
  const auto each = [&]<class T>(T token) {
    for (size_t i = 0; i * sizeof(T) < from.size(); ++i) {
      std::memcpy(&token, from.data() + i * sizeof(T), sizeof(T));
      if (int64_t{token} >= vocab_)
        bad_input("the token file {}: token {} at position {} is outside the vocabulary of {}", what_, token,
                  position + static_cast<int64_t>(i), vocab_);
      out[i] = static_cast<int32_t>(token);
    }
  };
  width_ == 2 ? each(uint16_t{0}) : each(uint32_t{0});
}

int32_t TokenFile::operator[](int64_t i) const {
  int32_t token = 0;
  copy(i, 1, &token);
  return token;
}

void TokenFile::chunks(int64_t begin, int64_t end, const Each& f) const {
  std::vector<int32_t> tokens;
  for (; begin < end; begin += std::ssize(tokens)) {
    tokens.resize(static_cast<size_t>(std::min(end - begin, int64_t{1} << 20)));
    copy(begin, std::ssize(tokens), tokens.data());
    f(tokens);
  }
}

void TokenFile::copy(int64_t begin, int64_t count, int32_t* out) const {
  if (begin < 0 || count < 0 || begin > count_ - count)
    throw Error(fmt::format("tokens {} to {} are outside of the {} tokens of {}", begin, begin + count, count_, what_));
  for_each_chunk(begin, count, [&](std::span<const std::byte> chunk, int64_t position) {
    widen(chunk, position, out + (position - begin));
  });
}

namespace {

struct Format {
  int32_t magic, version;
  int64_t width;  // bytes per token
};
constexpr std::array<Format, 2> kFormats{{{20240520, 1, 2}, {20240801, 7, 4}}};
constexpr size_t kHeader = 256;  // int32 values

}  // namespace

bool is_llmc_file(const std::filesystem::path& file) {
  return std::ranges::count(kFormats, first_number(file), &Format::magic) > 0;
}

std::optional<uint64_t> TokenFile::read_llmc_header(int64_t size) {
  const auto refuse = [&](const std::string& why) { bad_input("{}: {}", what_, why); };
  std::array<int32_t, kHeader> header{};
  constexpr int64_t kBytes = sizeof(header);
  if (size < kBytes) refuse(fmt::format("{} bytes; expected a header of {}", size, kBytes));
  read(0, std::as_writable_bytes(std::span(header)));
  const auto format = std::ranges::find(kFormats, header[0], &Format::magic);
  if (format == kFormats.end())
    refuse(fmt::format("begins with {}; expected {} or {}, as in llm.c's token files", header[0], kFormats[0].magic,
                       kFormats[1].magic));
  if (header[1] != format->version) refuse(fmt::format("version {}; expected {}", header[1], format->version));
  for (size_t i = 3; i < kHeader; ++i)
    if (header[i] != 0) refuse(fmt::format("header value {} is {}; expected 0", i, header[i]));
  const int64_t payload = size - kBytes;
  if (header[2] < 0 || payload != header[2] * format->width)
    refuse(fmt::format("expected {} tokens of {} bytes, got {} bytes", header[2], format->width, payload));
  count_ = header[2];
  begin_ = kBytes;
  width_ = format->width;
  return {};
}

}  // namespace tessera
