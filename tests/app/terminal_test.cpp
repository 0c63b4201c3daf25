// Terminal output: control sequences in generated text, files and names are escaped, but passed unchanged to pipes.

#include <string>
#include <string_view>

#include "tests/app/program.h"

namespace tessera {
namespace {

const std::string kClear = "\x1b[2J", kTitle = "\x1b]0;owned\x07",
                  kCsi =
                      "\xc2\x9b"
                      "1m";

class TerminalTest : public ProgramTest {
 protected:
  TerminalTest() {
    std::string text;
    for (int i = 0; i < 300; ++i) text += fmt::format("{}line {}{} {}\b\n", kClear, i % 7, kTitle, kCsi);
    write_file(path("escapes.txt"), text);
  }
  // Standard output and error as received by a terminal, without the rewriting of the progress line.
  std::string on_terminal(const std::string& arguments) const {
    std::string out =
        run_program("/usr/bin/script", fmt::format("-qec \"'{}' {}\" typescript", test::built_program(), arguments))
            .out;
    for (const std::string_view own : {"\r\x1b[K", "\x1b[36m", "\x1b[0m", "\r\n"})
      for (size_t at = 0; (at = out.find(own)) != out.npos;) out.erase(at, own.size());
    return out;
  }
  void expect_safe(const std::string& arguments, const std::string& shown) const {
    const std::string out = on_terminal(arguments);
    for (const char c : out) {
      const auto byte = static_cast<unsigned char>(c);
      EXPECT_TRUE(byte >= 0x20 ? byte != 0x7F : c == '\n' || c == '\t') << arguments << ": byte " << int{byte};
    }
    EXPECT_EQ(out.find("\xc2\x9b"), out.npos) << arguments << ": a C1 control";
    EXPECT_NE(out.find(shown), out.npos) << arguments << ": " << out;
  }
};

TEST_F(TerminalTest, EscapesControlCharacters) {
  const std::string train = "train " + kSmall + " --data escapes.txt --ranks 1 --out run";
  expect_safe(train, "Sample:");
  expect_safe("generate run --prompt '" + kClear + "' --tokens 30 --temperature 0", "\\x1b[2J");
  const Ran piped = must("generate run --prompt '" + kClear + "' --tokens 30 --temperature 0");
  EXPECT_TRUE(piped.out.starts_with(kClear)) << "a pipe gets the text unchanged";
  expect_safe("generate run --prompt '" + kTitle + "' --tokens 5 --ranks 2 --tp 1", "\\x1b]0;owned\\x07");
  expect_safe("checkpoint inspect 'no" + kClear + "'", "\\x1b[2J");
  fs::copy_file(path("escapes.txt"), path("a" + kTitle + ".txt"));
  expect_safe("data 'a" + kTitle + ".txt' --out set", "\\x1b]0;owned\\x07");
  expect_safe("evaluate run --data 'a" + kTitle + ".txt'", "loss");
  expect_safe("report run", "run");
}

}  // namespace
}  // namespace tessera
