// CRC-32C (Castagnoli), the checksum of TFRecord frames: polynomial 0x1EDC6F41, reflected, as in RFC 3720, appendix
// B.4.
#pragma once
#include <cstdint>
#include <string_view>

namespace tessera {

uint32_t crc32c(std::string_view bytes);

}  // namespace tessera
