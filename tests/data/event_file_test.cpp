// Event files, byte by byte: messages and frames as the protobuf and TFRecord libraries of TensorBoard 2.21 write them.
#include "data/event_file.h"

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstring>

#include "tests/data/support.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

std::string hex(std::string_view bytes) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string out;
  for (const char c : bytes) {
    out += kDigits[static_cast<unsigned char>(c) >> 4];
    out += kDigits[c & 15];
  }
  return out;
}

constexpr Scalar kTwo[] = {{"loss", 2.5}, {"lr", 0.1}};

TEST(Events, AreTheBytesOfTheReferenceLibrary) {
  EXPECT_EQ(hex(version_event(1.5)), "09000000000000f83f1a0d627261696e2e4576656e743a32");
  EXPECT_EQ(hex(session_start_event(1.5, 6)), "09000000000000f83f10063a020801");
  EXPECT_EQ(hex(scalars_event(2.25, 300, kTwo)),
            "09000000000000024010ac022a180a0b0a046c6f737315000020400a090a026c7215cdcccc3d");
  EXPECT_EQ(hex(framed(scalars_event(2.25, 300, kTwo))),
            "2600000000000000734fe300"
            "09000000000000024010ac022a180a0b0a046c6f737315000020400a090a026c7215cdcccc3d"
            "3dbc0415");
}

// The events of a file, without their times. Every length and checksum is checked by framing the event again.
std::vector<std::string> events_of(const std::string& bytes) {
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
  std::vector<std::string> names() const {
    std::vector<std::string> out;
    for (const auto& e : fs::directory_iterator(path("run"))) out.push_back(e.path().filename().string());
    std::sort(out.begin(), out.end());
    return out;
  }
};

TEST_F(EventFileTest, BeginsWithItsVersionAndItsSessionAndIsWholeAfterEveryWrite) {
  EventFile file(path("run"), 6);
  std::vector<std::string> expected{version_event(0).substr(9), session_start_event(0, 6).substr(9)};
  EXPECT_EQ(events_of(read_file(file.path())), expected);
  for (const int64_t step : {6, 7, 300}) {
    file.write(step, kTwo);
    expected.push_back(scalars_event(0, step, kTwo).substr(9));
    EXPECT_EQ(events_of(read_file(file.path())), expected);
  }
}

TEST_F(EventFileTest, NamesAreInTheOrderOfTheSessions) {
  std::ofstream(path("run/events.out.tfevents.x"));
  std::ofstream(path("run/events.out.tfevents.4000000000.another-machine"));  // a clock that was put back
  for (int session = 1; session <= 3; ++session) {
    const std::string name = EventFile(path("run"), 1).path().filename().string();
    EXPECT_TRUE(name.starts_with("events.out.tfevents.400000000" + std::to_string(session) + ".")) << name;
  }
  EXPECT_EQ(names().size(), 5U);
}

TEST_F(EventFileTest, AFolderThatIsMissingAndAFullDiskAreErrorsThatNameTheFile) {
  expect_error(Status::output, {"nowhere/events.out.tfevents."}, [&] { EventFile(path("nowhere"), 1); });
  const pid_t child = fork();
  if (child == 0) {
    signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{200, 200};
    setrlimit(RLIMIT_FSIZE, &limit);
    int written = 0;
    try {
      EventFile file(path("run"), 1);
      for (; written < 9; ++written) file.write(written + 1, kTwo);
    } catch (const OutputError& e) {
      _exit(written > 0 && std::string(e.what()).find("run/events.out.tfevents.") != std::string::npos ? 0 : 1);
    }
    _exit(2);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
}

// CRC-32C against the examples of RFC 3720, appendix B.4, and the check value of the catalogue of CRCs.

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
