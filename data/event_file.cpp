// Events in protobuf. Field numbers are those of TensorFlow's event.proto and summary.proto.
#include "data/event_file.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <charconv>
#include <chrono>

#include "base/write_file.h"

namespace tessera {

namespace fs = std::filesystem;
namespace {

constexpr std::string_view kPrefix = "events.out.tfevents.", kVersion = "brain.Event:2";
enum EventField : uint32_t { kWallTime = 1, kStepNumber = 2, kFileVersion = 3, kSummary = 5, kSessionLog = 7 };
enum SummaryField : uint32_t { kValue = 1 };
enum ValueField : uint32_t { kTag = 1, kSimpleValue = 2 };
enum SessionLogField : uint32_t { kStatus = 1 };
constexpr uint64_t kStatusStart = 1;
enum WireType : uint32_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

template <class T>
std::string little_endian(T bits) {
  std::string out;
  for (size_t byte = 0; byte < sizeof(T); ++byte) out += static_cast<char>(bits >> (8 * byte) & 0xFF);
  return out;
}

// Seven bits per byte, lowest first; the top bit marks a continuation.
std::string varint(uint64_t v) {
  std::string out;
  for (; v >= 0x80; v >>= 7) out += static_cast<char>((v & 0x7F) | 0x80);
  return out += static_cast<char>(v);
}

std::string field_key(uint32_t field, WireType type) { return varint(field << 3 | type); }

std::string integer_field(uint32_t field, uint64_t v) { return field_key(field, kVarint) + varint(v); }

std::string bytes_field(uint32_t field, std::string_view bytes) {
  return (field_key(field, kBytes) + varint(bytes.size())).append(bytes);
}

std::string at_time(double wall_time) {
  return field_key(kWallTime, kFixed64) + little_endian(std::bit_cast<uint64_t>(wall_time));
}

double now() { return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count(); }

// A CRC over data that contains CRCs is weak, so the format stores CRCs rotated and offset.
uint32_t masked_crc(std::string_view bytes) { return std::rotr(crc32c(bytes), 15) + 0xA282EAD8U; }

std::string host_name() {
  std::array<char, 256> name{};
  if (::gethostname(name.data(), name.size() - 1) != 0 || name[0] == '\0') return "localhost";
  std::ranges::replace(name, '/', '_');
  return name.data();
}

// The current time or later: file names must sort in order even for two files in one second, or after the clock was set
// back.
int64_t seconds_after_all(const fs::path& directory) {
  auto seconds = static_cast<int64_t>(now());
  for (const fs::path& file : list_entries(directory)) {
    const std::string name = file.filename().string();
    int64_t taken = 0;
    if (!name.starts_with(kPrefix)) continue;
    std::from_chars(name.data() + kPrefix.size(), name.data() + name.size(), taken);
    seconds = std::max(seconds, taken + 1);
  }
  return seconds;
}

}  // namespace

std::string version_event(double wall_time) { return at_time(wall_time) + bytes_field(kFileVersion, kVersion); }

std::string session_start_event(double wall_time, int64_t step) {
  return at_time(wall_time) + integer_field(kStepNumber, static_cast<uint64_t>(step)) +
         bytes_field(kSessionLog, integer_field(kStatus, kStatusStart));
}

std::string scalars_event(double wall_time, int64_t step, std::span<const Scalar> scalars) {
  std::string summary;
  for (const Scalar& s : scalars) {
    const auto value = std::bit_cast<uint32_t>(static_cast<float>(s.value));
    summary += bytes_field(kValue, bytes_field(kTag, s.tag) + field_key(kSimpleValue, kFixed32) + little_endian(value));
  }
  return at_time(wall_time) + integer_field(kStepNumber, static_cast<uint64_t>(step)) + bytes_field(kSummary, summary);
}

std::string framed(std::string_view event) {
  const std::string length = little_endian(uint64_t{event.size()});
  return (length + little_endian(masked_crc(length))).append(event) + little_endian(masked_crc(event));
}

EventFile::EventFile(const fs::path& directory, int64_t first_step)
    : path_(directory / fmt::format("{}{:010}.{}", kPrefix, seconds_after_all(directory), host_name())),
      file_(std::fopen(path_.c_str(), "wbxe"), &std::fclose) {
  if (!file_) cannot_write(path_, errno);
  std::setvbuf(file_.get(), nullptr, _IONBF, 0);
  append(version_event(now()));
  append(session_start_event(now(), first_step));
}

void EventFile::write(int64_t step, std::span<const Scalar> scalars) { append(scalars_event(now(), step, scalars)); }

void EventFile::append(const std::string& event) {
  const std::string record = framed(event);
  if (std::fwrite(record.data(), 1, record.size(), file_.get()) != record.size()) cannot_write(path_, errno);
}

// A table lookup per byte suffices for records of about a hundred bytes.
uint32_t crc32c(std::string_view bytes) {
  constexpr uint32_t kPolynomial = 0x82F63B78;  // 0x1EDC6F41 bit-reversed
  static constexpr auto kTable = [] {
    std::array<uint32_t, 256> table{};
    for (uint32_t byte = 0; byte < table.size(); ++byte) {
      uint32_t rest = byte;
      for (int bit = 0; bit < 8; ++bit) rest = (rest >> 1) ^ ((rest & 1) != 0 ? kPolynomial : 0);
      table[byte] = rest;
    }
    return table;
  }();
  uint32_t crc = ~uint32_t{0};
  for (const char c : bytes) crc = (crc >> 8) ^ kTable[(crc ^ static_cast<unsigned char>(c)) & 0xFF];
  return ~crc;
}

}  // namespace tessera
