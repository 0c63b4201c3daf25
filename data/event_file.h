// TensorBoard event files: scalars by step, in `events.out.tfevents.<seconds>.<hostname>`.
//
//   record   length (8 bytes), masked CRC-32C of the length, an Event, masked CRC-32C of the Event; little-endian
//   Event    a protobuf message: wall time, step, and one of: version (first record), session start, summary of scalars
//
// Readers concatenate the files of a directory in the order of their names. At a session start at step N they discard
// earlier records from step N on, because a resumed run repeats those steps.
#pragma once
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace tessera {

struct Scalar {
  std::string_view tag;
  double value = 0;  // stored as fp32, as the format requires
};

std::string version_event(double wall_time);
std::string session_start_event(double wall_time, int64_t step);
std::string scalars_event(double wall_time, int64_t step, std::span<const Scalar> scalars);
std::string framed(std::string_view event);

class EventFile {
 public:
  // The file's name sorts after all event files in `directory`; `first_step` is the first step that it may contain.
  // Throws OutputError.
  EventFile(const std::filesystem::path& directory, int64_t first_step);

  const std::filesystem::path& path() const { return path_; }
  // Writes in one call, so that a killed run leaves complete records. Throws OutputError.
  void write(int64_t step, std::span<const Scalar> scalars);

 private:
  void append(const std::string& event);
  std::filesystem::path path_;
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file_;
};

// CRC-32C (Castagnoli) of TFRecord frames: polynomial 0x1EDC6F41, reflected; RFC 3720, appendix B.4.

uint32_t crc32c(std::string_view bytes);

}  // namespace tessera
