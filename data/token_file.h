// A file of tokens: a 64-byte header and then the tokens as 16 or 32 bits each, little-endian.
//
//   bytes 0..7 "TESSTOK\n"   8..11 version (1)   12..15 bytes per token (2 or 4)   16..23 vocabulary
//   24..31 count             32..39 XXH3-64 of the tokens' bytes                   40..63 zero
#pragma once
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "data/files.h"

namespace tessera {

class TokenFile {
 public:
  // Checks all of the file: header, length, checksum, every token inside the vocabulary. It stays open. Throws
  // InputError. Cost: two passes over the file.
  static TokenFile open(const std::filesystem::path& file);
  // llm.c's token file (data/token_file.h), read where it lies. It holds no checksum, so only what open() says of
  // length and tokens is checked.
  static TokenFile open_llmc(const std::filesystem::path& file, int64_t vocab_size);
  // Checks bytes in memory as open() does a file; they must outlive the result, and `what` names them.
  static TokenFile of_bytes(std::span<const std::byte> bytes, const std::string& what);
  // Holds tokens that are in no file.
  static TokenFile of_tokens(std::span<const int32_t> tokens, int64_t vocab_size, const std::string& what);
  // Writes tokens, each in [0, vocab_size), beside `file` and renames. Throws OutputError; Error for a bad token.
  static void write(const std::filesystem::path& file, std::span<const int32_t> tokens, int64_t vocab_size);

  const std::string& name() const { return what_; }
  int64_t size() const { return count_; }
  int64_t vocab_size() const { return vocab_; }
  uint64_t checksum() const { return checksum_; }  // XXH3-64 of the tokens' bytes
  // Token i of [0, size()).
  int32_t operator[](int64_t i) const;
  // Tokens [begin, begin + count) to `out`. The caller keeps them inside [0, size()). Throws InputError when the file
  // was changed so that they are not there, or are outside the vocabulary.
  void copy(int64_t begin, int64_t count, int32_t* out) const;

 private:
  void check(int64_t size);
  uint64_t hashed() const;
  void check_tokens() const;  // against the vocabulary
  void read(int64_t at, std::span<std::byte> out) const;
  void widen(std::span<const std::byte> from, int64_t position, int32_t* out) const;
  template <class F>
  void for_each_piece(int64_t begin, int64_t count, const F& f) const;

  std::string what_;
  std::shared_ptr<const OpenFile> file_;  // or
  std::shared_ptr<const std::string> owned_;
  std::span<const std::byte> bytes_;
  int64_t count_ = 0;
  int64_t vocab_ = 0;
  uint64_t checksum_ = 0;
  int64_t begin_ = 0, width_ = 2;  // bytes: where the tokens begin, and of each
};

// Token files of llm.c: a header of 256 little-endian int32 (magic, version, count, then zeros) and the tokens.
//
// Magic 20240520 with version 1 holds 16 bits a token (GPT-2), 20240801 with version 7 holds 32 (Llama 3). The format
// is llm.c's (dev/data/data_common.py); there is no tokenizer and no checksum in it.

// Whether a file begins as one of these does. False for what cannot be read.
bool is_llmc_file(const std::filesystem::path& file);

// Numbers in the header of llm.c's token file: where the tokens begin is LlmcHeader::kBytes.
struct LlmcHeader {
  static constexpr int64_t kBytes = 1024;
  int64_t count = 0, width = 2;  // tokens, and the bytes of each
};
// Parses the header of a file of `size` bytes, of which `begin` are the first kBytes or all. `what` names it. Throws
// InputError: another magic or version, a header that is not zero behind its three numbers, or another length than the
// count says.
LlmcHeader parse_llmc_header(std::span<const std::byte> begin, int64_t size, const std::string& what);

// The tokens of such a file's bytes. `what` names it in messages. Throws InputError as parse_llmc_header() does,
// and for a token outside [0, vocab_size).
std::vector<int32_t> parse_llmc(std::span<const std::byte> bytes, int64_t vocab_size, const std::string& what);

}  // namespace tessera
