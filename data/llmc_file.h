// Token files of llm.c: a header of 256 little-endian int32 (magic, version, count, then zeros) and the tokens.
//
// Magic 20240520 with version 1 holds 16 bits a token (GPT-2), 20240801 with version 7 holds 32 (Llama 3). The format
// is llm.c's (dev/data/data_common.py); there is no tokenizer and no checksum in it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

namespace tessera {

// Whether a file begins as one of these does. False for what cannot be read.
bool is_llmc_file(const std::filesystem::path& file);

// What its header says: where the tokens begin is LlmcHeader::kBytes.
struct LlmcHeader {
  static constexpr int64_t kBytes = 1024;
  int64_t count = 0, width = 2;  // tokens, and the bytes of each
};
// Of a file of `size` bytes, of which `begin` are the first kBytes or all. `what` names it. Throws InputError: another
// magic or version, a header that is not zero behind its three numbers, or another length than the count says.
LlmcHeader parse_llmc_header(std::span<const std::byte> begin, int64_t size, const std::string& what);

// The tokens of such a file's bytes. `what` names it in messages. Throws InputError as parse_llmc_header() does,
// and for a token outside [0, vocab_size).
std::vector<int32_t> parse_llmc(std::span<const std::byte> bytes, int64_t vocab_size, const std::string& what);

}  // namespace tessera
