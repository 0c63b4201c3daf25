// Token files. A 64-byte header precedes little-endian tokens of 16 or 32 bits.
//
//   bytes 0..7 "TESSTOK\n"   8..11 version (1)   12..15 bytes per token (2 or 4)   16..23 vocabulary
//   24..31 count             32..39 XXH3-64 of the tokens' bytes                   40..63 zero
#pragma once
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/files.h"

namespace tessera {

class TokenFile {
 public:
  // Validates header, length, checksum and token range. The file stays open. Throws InputError. Cost: two passes.
  static TokenFile open(const std::filesystem::path& file);
  // Reads in place and validates as open() does, except the checksum, which llm.c's format lacks.
  static TokenFile open_llmc(const std::filesystem::path& file, int64_t vocab_size);
  // The bytes must outlive the result.
  static TokenFile from_bytes(std::span<const std::byte> bytes, const std::string& what);
  static TokenFile from_llmc_bytes(std::span<const std::byte> bytes, int64_t vocab_size, const std::string& what);
  // Copies the tokens.
  static TokenFile from_tokens(std::span<const int32_t> tokens, int64_t vocab_size, const std::string& what);
  // Writes atomically. Throws OutputError; Error for a token outside [0, vocab_size).
  static void write(const std::filesystem::path& file, std::span<const int32_t> tokens, int64_t vocab_size);

  const std::string& name() const { return what_; }
  int64_t size() const { return count_; }
  int64_t vocab_size() const { return vocab_; }
  uint64_t checksum() const { return checksum_; }  // XXH3-64 of the tokens' bytes
  int32_t operator[](int64_t i) const;
  // Throws InputError if the file was modified and no longer contains valid tokens in this range.
  void copy(int64_t begin, int64_t count, int32_t* out) const;
  // Calls f with successive chunks. Throws like copy().
  using Each = std::function<void(std::span<const int32_t> tokens)>;
  void chunks(int64_t begin, int64_t end, const Each& f) const;

 private:
  static TokenFile checked(const std::string& what, std::shared_ptr<const OpenFile> file,
                           std::span<const std::byte> bytes, std::optional<int64_t> vocab_of_llmc = {});
  // Return the checksum, if the format has one.
  std::optional<uint64_t> read_header(int64_t size);
  std::optional<uint64_t> read_llmc_header(int64_t size);
  void read(int64_t at, std::span<std::byte> out) const;
  void widen(std::span<const std::byte> from, int64_t position, int32_t* out) const;
  template <class F>
  void for_each_chunk(int64_t begin, int64_t count, const F& f) const;

  std::string what_;
  std::shared_ptr<const OpenFile> file_;  // or `owned_`
  std::shared_ptr<const std::string> owned_;
  std::span<const std::byte> bytes_;
  int64_t count_ = 0;
  int64_t vocab_ = 0;
  uint64_t checksum_ = 0;
  int64_t begin_ = 0, width_ = 2;  // offset of the tokens and width of a token, in bytes
};

// Writes incrementally; the file is valid after finish().
class TokenWriter {
 public:
  // The file must not exist. All functions throw OutputError.
  TokenWriter(const std::filesystem::path& file, int64_t vocab_size);
  // Throws Error for a token outside [0, vocab_size).
  void add(std::span<const int32_t> tokens);
  int64_t count() const { return count_; }
  void finish();

 private:
  void write();

  int64_t vocab_, count_ = 0, end_ = 0;  // tokens and bytes written
  std::string waiting_ = {};
  Checksum sum_ = {};
  SharedFile file_;
};

// llm.c token files: 256 little-endian int32 (magic, version, count, zeros), then the tokens.
//
// Magic 20240520 with version 1 has 16 bits per token (GPT-2), 20240801 with version 7 has 32 (Llama 3). Source: llm.c,
// dev/data/data_common.py. The format contains neither a tokenizer nor a checksum.

// False also if the file cannot be read.
bool is_llmc_file(const std::filesystem::path& file);

}  // namespace tessera
