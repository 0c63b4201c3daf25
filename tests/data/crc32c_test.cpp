// CRC-32C against the examples of RFC 3720, appendix B.4, and the check value of the catalogue of CRCs.
#include <gtest/gtest.h>

#include "data/event_file.h"

namespace tessera {
namespace {

TEST(Crc32c, HasThePublishedValues) {
  std::string up, down;
  for (int i = 0; i < 32; ++i) {
    up += static_cast<char>(i);
    down += static_cast<char>(31 - i);
  }
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8A9136AAU);
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62A8AB43U);
  EXPECT_EQ(crc32c(up), 0x46DD794EU);
  EXPECT_EQ(crc32c(down), 0x113FDB5CU);
  EXPECT_EQ(crc32c("123456789"), 0xE3069283U);
  EXPECT_EQ(crc32c(""), 0U);
}

}  // namespace
}  // namespace tessera
