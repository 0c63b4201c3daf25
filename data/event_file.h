// Event files, which TensorBoard shows: scalars by step, in `events.out.tfevents.<seconds>.<hostname>`.
//
//   record   length (8 bytes), masked CRC-32C of the length, an Event, masked CRC-32C of the Event; little-endian
//   Event    a protobuf message: wall time, step, and one of: the version (first record of a file), a session's start,
//            a summary of scalars
//
// Readers take the files of a folder in the order of their names, as one run. A session's start at step N tells them to
// forget what earlier files say of steps from N on: a resumed run makes those steps again.
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
  double value = 0;  // stored as fp32, which is what the format has
};

std::string version_event(double wall_time);
std::string session_start_event(double wall_time, int64_t step);
std::string scalars_event(double wall_time, int64_t step, std::span<const Scalar> scalars);
// An event with its length and checksums.
std::string framed(std::string_view event);

class EventFile {
 public:
  // Begins a file in `directory`, named to be read after the event files that are there; `first_step` is the first
  // that it may hold. Throws OutputError.
  EventFile(const std::filesystem::path& directory, int64_t first_step);

  const std::filesystem::path& path() const { return path_; }
  // Handed to the system at once and in one piece, so that a killed run leaves whole records. Throws OutputError.
  void write(int64_t step, std::span<const Scalar> scalars);

 private:
  void append(const std::string& event);
  std::filesystem::path path_;
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file_;
};

// CRC-32C (Castagnoli), the checksum of TFRecord frames: polynomial 0x1EDC6F41, reflected, as in RFC 3720, appendix
// B.4.

uint32_t crc32c(std::string_view bytes);

}  // namespace tessera
