// R's serialisation: what is read, what is refused, and that damage never crashes it.
#include "data/r_data.h"

#include <zlib.h>

#include "tensor/random.h"
#include "tests/data/support.h"

namespace tessera {
namespace {

std::string word(uint32_t v) {
  std::string out;
  for (int shift = 24; shift >= 0; shift -= 8) out += static_cast<char>(v >> shift & 0xFF);
  return out;
}
std::string chars(const std::string& s, uint32_t flags = 0x40009) {
  return word(flags) + word(static_cast<uint32_t>(s.size())) + s;
}
std::string header(uint32_t version) {
  return "X\n" + word(version) + word(0x040201) + word(0x030500) + (version == 3 ? word(5) + "UTF-8" : "");
}
std::string strings(uint32_t version, uint32_t flags = 16) {
  return header(version) + word(flags) + word(3) + chars("one") + chars("") + chars("na\xC3\xAFve", 0x8009);
}
// names = c("a"), dim = 3L, and a list of a real and a reference, as a pairlist of attributes.
std::string attributes() {
  return word(0x402) + word(1) + chars("names") + word(16) + word(1) + chars("a") +  //
         word(0x402) + word(1) + chars("dim") + word(13) + word(1) + word(3) +       //
         word(0x402) + word(0x1FF) + word(19) + word(2) + word(14) + word(1) + word(0) + word(0) + word(0xFE) +
         word(0xFE);
}
std::string packed(const std::string& data) {
  uLongf size = compressBound(data.size());
  std::string out(size, '\0');
  compress(reinterpret_cast<Bytef*>(out.data()), &size, reinterpret_cast<const Bytef*>(data.data()), data.size());
  out.resize(size);
  return word(static_cast<uint32_t>(data.size())) + out;
}

TEST(RData, ReadsStringsOfBothVersions) {
  const std::vector<std::string> expected{"one", "", "na\xC3\xAFve"};
  EXPECT_EQ(read_character_vector(strings(2), "t"), expected);
  EXPECT_EQ(read_character_vector(strings(3), "t"), expected);
  EXPECT_EQ(read_character_vector(strings(3, 0x210) + attributes(), "t"), expected);
}

TEST(RData, RefusesTheRest) {
  const auto refuse = [](const std::string& stream, const std::string& part) {
    expect_error(Status::input, {"book", part}, [&] { read_character_vector(stream, "book"); });
  };
  refuse("A\n" + strings(3).substr(2), "no XDR serialisation");
  refuse(header(4), "version");
  refuse(header(2) + word(13) + word(0), "type 13");
  refuse(strings(2) + "x", "left over");
  refuse(header(2) + word(16) + word(1u << 30), "does not fit");
  refuse(header(2) + word(16) + word(1) + word(9) + word(0xFFFFFFFF), "NA");
  refuse(header(2) + word(16) + word(1) + chars("\xE9", 0x4009), "Latin-1");
  refuse(strings(2, 0x210) + word(6), "type 6");
  std::string deep;
  for (int i = 0; i < 100'000; ++i) deep += word(19) + word(1);
  refuse(strings(2, 0x210) + deep, "too deep");
}

TEST(RData, UnpacksRecordsAndRefusesDamagedOnes) {
  const std::string a(5000, 'a'), b = strings(3);
  const std::string file = packed(a) + packed(b);
  EXPECT_EQ(unpack_rdb(file, "t"), (std::vector<std::string>{a, b}));
  expect_error(Status::input, {"lib", "record 1"}, [&] { unpack_rdb(file.substr(0, file.size() - 1), "lib"); });
  expect_error(Status::input, {"truncated"}, [&] { unpack_rdb(file + "ab", "lib"); });
  expect_error(Status::input, {"record 0", "4294967295"}, [&] { unpack_rdb(word(~0u) + file.substr(4), "lib"); });
  expect_error(Status::input, {"zlib stream of 4999"}, [&] { unpack_rdb(word(4999) + file.substr(4), "lib"); });
}

// A file of 300 KiB that would unpack to 300 MiB.
TEST(RData, RefusesMoreThanItsShareOfMemory) {
  std::string file;
  for (int i = 0; i < 300; ++i) file += packed(std::string(1 << 20, 'a'));
  expect_error(Status::input, {"lib", "record 256", "a length of 1048576"}, [&] { unpack_rdb(file, "lib"); });
}

// Every truncation, and thousands of random changes, end in strings or in an InputError.
TEST(RData, DamageNeverCrashesIt) {
  const std::string good = strings(3, 0x210) + attributes();
  int refused = 0;
  const auto attempt = [&](const std::string& stream) {
    try {
      read_character_vector(stream, "t");
    } catch (const InputError&) {
      ++refused;
    }
  };
  for (size_t n = 0; n < good.size(); ++n) attempt(good.substr(0, n));
  EXPECT_EQ(refused, static_cast<int>(good.size()));
  const Philox random(1);
  const std::string file = packed(good);
  for (uint64_t i = 0; i < 6000; ++i) {
    std::string bad = i % 3 == 0 ? file : good;
    for (uint64_t k = 0; k <= i % 4; ++k)
      bad[random.below(bad.size(), i, 2 * k)] = static_cast<char>(random.below(256, i, 2 * k + 1));
    if (i % 3 != 0) {
      attempt(bad);
      continue;
    }
    try {
      for (const std::string& record : unpack_rdb(bad, "t")) attempt(record);
    } catch (const InputError&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, static_cast<int>(good.size()) + 2000);
}

}  // namespace
}  // namespace tessera
