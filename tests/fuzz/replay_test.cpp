// Replays the corpus of every fuzz target: files ok_* must be accepted and files bad_* rejected; all others, found by a
// fuzzer, may be either, but must have no other effect.
#include <gtest/gtest.h>

#include <filesystem>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "base/files.h"
#include "tests/fuzz/target.h"

namespace tessera::fuzz {
namespace {
namespace fs = std::filesystem;

constexpr size_t kLargest = 4096;
const fs::path kCorpus = fs::path(TESSERA_SOURCE_DIR) / "tests/fuzz/corpus";

std::vector<fs::path> entries(const fs::path& directory) {
  std::vector<fs::path> found;
  for (const auto& entry : fs::directory_iterator(directory)) found.push_back(entry.path());
  return found;
}

TEST(Fuzz, CorpusFilesAreAcceptedOrRejectedAsNamed) {
  for (const auto& [name, parse] : targets()) {
    int accepted = 0, refused = 0;
    for (const fs::path& file : entries(kCorpus / name)) {
      const std::string shown = name + "/" + file.filename().string(), bytes = read_file(file);
      EXPECT_LE(bytes.size(), kLargest) << shown;
      bool good = false;
      EXPECT_NO_THROW(good = accepts(parse, bytes)) << shown;
      ++(good ? accepted : refused);
      const bool must = shown.starts_with(name + "/ok_"), must_not = shown.starts_with(name + "/bad_");
      EXPECT_TRUE(good ? !must_not : !must) << shown << (good ? " is accepted" : " is refused");
    }
    EXPECT_GT(accepted, 0) << name << ": nothing in the corpus is accepted";
    EXPECT_GT(refused, 0) << name << ": nothing in the corpus is refused";
  }
}

TEST(Fuzz, EveryTargetHasCorpus) {
  std::set<std::string> named, stored;
  for (const auto& [name, parse] : targets()) named.insert(name);
  for (const fs::path& directory : entries(kCorpus)) stored.insert(directory.filename().string());
  EXPECT_EQ(named, stored);
  EXPECT_GE(named.size(), 10U);
}

TEST(Fuzz, DetectsViolatedInvariants) {
  EXPECT_TRUE(accepts([](std::string_view) {}, ""));
  EXPECT_FALSE(accepts([](std::string_view) { throw InputError("the input: bad"); }, ""));
  EXPECT_THROW(accepts([](std::string_view) { throw InputError("something is bad"); }, ""), std::logic_error);
  EXPECT_THROW(accepts([](std::string_view) { throw std::out_of_range("at()"); }, ""), std::out_of_range);
  EXPECT_THROW(accepts([](std::string_view) { require(false, "x"); }, ""), std::logic_error);
}

}  // namespace
}  // namespace tessera::fuzz
