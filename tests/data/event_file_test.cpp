// Event files, compared bytewise with the messages and frames of TensorBoard 2.21's protobuf and TFRecord libraries.
#include "data/event_file.h"

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <string>
#include <string_view>
#include <vector>

#include "tests/data/support.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

std::string hex(std::string_view bytes) {
  std::string out;
  for (const char c : bytes) out += fmt::format("{:02x}", static_cast<unsigned char>(c));
  return out;
}

constexpr Scalar kTwo[] = {{"loss", 2.5}, {"lr", 0.1}};

TEST(TensorBoardEvents, MatchTensorBoardLibrary) {
  EXPECT_EQ(hex(version_event(1.5)), "09000000000000f83f1a0d627261696e2e4576656e743a32");
  EXPECT_EQ(hex(session_start_event(1.5, 6)), "09000000000000f83f10063a020801");
  EXPECT_EQ(hex(scalars_event(2.25, 300, kTwo)),
            "09000000000000024010ac022a180a0b0a046c6f737315000020400a090a026c7215cdcccc3d");
  EXPECT_EQ(hex(framed(scalars_event(2.25, 300, kTwo))),
            "2600000000000000734fe300"
            "09000000000000024010ac022a180a0b0a046c6f737315000020400a090a026c7215cdcccc3d"
            "3dbc0415");
}

// The events of a file without their times. Validates every length and checksum by framing the event again.
std::vector<std::string> read_events(const std::string& bytes) {
  constexpr size_t kBefore = 12, kAfter = 4, kTime = 9;
  std::vector<std::string> out;
  for (size_t at = 0; at < bytes.size();) {
    uint64_t size = 0;
    std::memcpy(&size, bytes.data() + at, sizeof size);
    const std::string event = bytes.substr(at + kBefore, size), frame = bytes.substr(at, kBefore + size + kAfter);
    EXPECT_EQ(hex(framed(event)), hex(frame));
    out.push_back(event.substr(kTime));
    at += frame.size();
  }
  return out;
}

class EventFileTest : public DataTest {
 protected:
  EventFileTest() { make_directories(path("run")); }
};

TEST_F(EventFileTest, FileIsCompleteAfterEveryWrite) {
  EventFile file(path("run"), 6);
  std::vector<std::string> expected{version_event(0).substr(9), session_start_event(0, 6).substr(9)};
  EXPECT_EQ(read_events(read_file(file.path())), expected);
  for (const int64_t step : {6, 7, 300}) {
    file.write(step, kTwo);
    expected.push_back(scalars_event(0, step, kTwo).substr(9));
    EXPECT_EQ(read_events(read_file(file.path())), expected);
  }
}

TEST_F(EventFileTest, FileNamesSortInSessionOrder) {
  std::ofstream(path("run/events.out.tfevents.x"));
  std::ofstream(path("run/events.out.tfevents.4000000000.another-machine"));  // from a clock that was set back
  for (int session = 1; session <= 3; ++session) {
    const std::string name = EventFile(path("run"), 1).path().filename().string();
    EXPECT_TRUE(name.starts_with("events.out.tfevents.400000000" + std::to_string(session) + ".")) << name;
  }
  EXPECT_EQ(names_in(path("run")).size(), 5U);
}

TEST_F(EventFileTest, ErrorsNameTheFile) {
  expect_error(Status::output, {"nowhere/events.out.tfevents."}, [&] { EventFile(path("nowhere"), 1); });
  EventFile file(path("run"), 1);
  expect_full_disk(200, "run/events.out.tfevents.", [&] {
    EXPECT_NO_THROW(file.write(1, kTwo)) << "one record fits";
    for (int step = 2; step < 10; ++step) file.write(step, kTwo);
  });
}

// CRC-32C against the examples of RFC 3720, appendix B.4, and the check value of the CRC catalogue.

TEST(Crc32c, MatchesPublishedValues) {
  std::string up(32, '\0');
  std::iota(up.begin(), up.end(), '\0');
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8A9136AAU);
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62A8AB43U);
  EXPECT_EQ(crc32c(up), 0x46DD794EU);
  EXPECT_EQ(crc32c(std::string(up.rbegin(), up.rend())), 0x113FDB5CU);
  EXPECT_EQ(crc32c("123456789"), 0xE3069283U);
  EXPECT_EQ(crc32c(""), 0U);
}

}  // namespace
}  // namespace tessera
