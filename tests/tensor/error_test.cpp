// The message of an error: one line of limited length, whatever it quotes.
#include "tensor/error.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

TEST(Error, IsOneLine) {
  EXPECT_STREQ(Error("a\nb\x1b[2J\t\x7f").what(), "a\\x0ab\\x1b[2J\\x09\\x7f");
  EXPECT_STREQ(Error("\u009b2J\u0085 \u00e9").what(), "\\x9b2J\\x85 \u00e9");  // commands above ASCII
  EXPECT_STREQ(Error("caf\xe9 \xe2\x82 \xf0\x9f\x98\x80").what(), "caf\\xe9 \\xe2\\x82 \xf0\x9f\x98\x80");  // no UTF-8
  EXPECT_STREQ(InputError("caf\u00e9 \\x0a 'x'").what(), "caf\u00e9 \\x0a 'x'");  // as it is, and shown twice the same
}

TEST(Error, LeavesOutTheMiddleOfALongMessage) {
  std::string text = "begin ";
  while (text.size() < 100'000) text += "\u20ac";
  const std::string shown = Error(text + " end").what();
  EXPECT_LE(shown.size(), 1000U);
  EXPECT_GT(shown.size(), 900U);
  EXPECT_TRUE(shown.starts_with("begin \u20ac") && shown.ends_with("\u20ac end")) << shown.substr(0, 20);
  const size_t cut = shown.find(" [...] ");
  ASSERT_NE(cut, std::string::npos);
  EXPECT_EQ((cut - 6) % 3, 0U);  // between characters, on both sides
  EXPECT_EQ((shown.size() - 4 - (cut + 7)) % 3, 0U);
  EXPECT_EQ(Error(std::string(1000, 'a')).what(), std::string(1000, 'a'));
}

}  // namespace
}  // namespace tessera
