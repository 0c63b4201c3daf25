// R's lazy-load database and serialisation, as far as a character vector needs them.
#include "data/r_data.h"

#include <fmt/format.h>
#include <zlib.h>

#include <algorithm>
#include <cstdint>
#include <span>

#include "tensor/error.h"

namespace tessera {
namespace {

constexpr uint64_t kMaxUnpacked = 256u << 20;  // of all records of a database
constexpr int kMaxDepth = 64;                  // of nested attributes

// The types of R values that can stand in the attributes of a vector.
enum Type : uint32_t {
  kSymbol = 1,
  kPairList = 2,
  kChars = 9,
  kLogical = 10,
  kInteger = 13,
  kReal = 14,
  kStrings = 16,
  kList = 19,
  kRaw = 24,
  kGlobalEnvironment = 253,
  kNil = 254,
  kReference = 255,
};
constexpr uint32_t kHasAttributes = 0x200, kHasTag = 0x400, kLatin1 = 4u << 12;

class Reader {
 public:
  Reader(std::string_view bytes, const std::string& what) : bytes_(bytes), what_(what) {}

  [[noreturn]] void fail(const std::string& why) const {
    throw InputError(fmt::format("{}: {} at byte {} of R's serialised data", what_, why, position_));
  }
  std::string_view take(uint64_t n) {
    if (n > bytes_.size() - position_) fail(fmt::format("{} bytes expected, {} left", n, bytes_.size() - position_));
    const std::string_view part = bytes_.substr(position_, n);
    position_ += n;
    return part;
  }
  uint32_t word() {
    uint32_t value = 0;
    for (const char c : take(4)) value = value << 8 | static_cast<uint8_t>(c);
    return value;
  }
  // The length of a vector whose elements take at least `least` bytes each.
  uint32_t length(uint32_t least) {
    const uint32_t n = word();
    if (n > (bytes_.size() - position_) / least) fail(fmt::format("a vector of {} elements does not fit", n));
    return n;
  }
  bool at_end() const { return position_ == bytes_.size(); }

  void header();
  std::string characters();
  void skip(int depth);

 private:
  void skip_vector(uint32_t flags, int depth);

  std::string_view bytes_;
  size_t position_ = 0;
  const std::string& what_;
};

void Reader::header() {
  if (take(2) != "X\n") fail("no XDR serialisation ('X' and a newline expected)");
  const uint32_t version = word();
  if (version != 2 && version != 3) fail(fmt::format("version {} (2 or 3 expected)", version));
  take(8);                         // the version of R that wrote it, and the oldest that reads it
  if (version == 3) take(word());  // the native encoding's name
}

std::string Reader::characters() {
  const uint32_t flags = word();
  if ((flags & 0xFF) != kChars) fail(fmt::format("an element of type {} (a string expected)", flags & 0xFF));
  const uint32_t n = word();
  if (n == 0xFFFFFFFFu) fail("a missing value (NA) among the strings");
  if ((flags & kLatin1) != 0) fail("a string in Latin-1 (UTF-8 expected)");
  return std::string(take(n));
}

// Everything after the flags of a vector.
void Reader::skip_vector(uint32_t flags, int depth) {
  switch (flags & 0xFF) {
    case kChars: {
      const uint32_t n = word();
      if (n != 0xFFFFFFFFu) take(n);  // that is NA
      break;
    }
    case kLogical:
    case kInteger:
      take(uint64_t{4} * length(4));
      break;
    case kReal:
      take(uint64_t{8} * length(8));
      break;
    case kRaw:
      take(length(1));
      break;
    case kStrings:
    case kList:
      for (uint32_t n = length(4); n > 0; --n) skip(depth + 1);
      break;
    default:
      fail(fmt::format("an attribute of type {}, which is not understood", flags & 0xFF));
  }
  if ((flags & kHasAttributes) != 0) skip(depth + 1);
}

// One item of any type that attributes are made of. A pairlist is followed along, not recursed into.
void Reader::skip(int depth) {
  if (depth > kMaxDepth) fail("attributes nested too deep");
  while (true) {
    const uint32_t flags = word();
    switch (flags & 0xFF) {
      case kNil:
      case kGlobalEnvironment:
        return;
      case kReference:
        if (flags >> 8 == 0) take(4);
        return;
      case kSymbol:
        skip(depth + 1);
        return;
      case kPairList:
        if ((flags & kHasAttributes) != 0) skip(depth + 1);
        if ((flags & kHasTag) != 0) skip(depth + 1);
        skip(depth + 1);
        break;  // and on with the rest of the list
      default:
        skip_vector(flags, depth);
        return;
    }
  }
}

// The state of zlib, freed at the end of the scope.
class Inflater {
 public:
  explicit Inflater(std::string_view packed) {
    zip_.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(packed.data()));
    zip_.avail_in = static_cast<uInt>(std::min<size_t>(packed.size(), UINT32_MAX));
    if (inflateInit(&zip_) != Z_OK) throw InputError("zlib cannot start");
  }
  ~Inflater() { inflateEnd(&zip_); }
  Inflater(const Inflater&) = delete;
  Inflater& operator=(const Inflater&) = delete;
  // Fills `room` as far as the stream goes; zlib's word for how it ended.
  int fill(std::span<char> room) {
    zip_.next_out = reinterpret_cast<Bytef*>(room.data());
    zip_.avail_out = static_cast<uInt>(room.size());
    return inflate(&zip_, Z_NO_FLUSH);
  }
  uint64_t used() const { return zip_.total_in; }
  uint64_t made() const { return zip_.total_out; }

 private:
  z_stream zip_{};
};

struct Inflated {
  std::string bytes;
  uint64_t used = 0;   // of the packed bytes
  bool whole = false;  // the stream ended, checksum and all, at the length that was claimed
};

// Unpacks a stream that claims `length` bytes, into memory that doubles as it fills.
Inflated inflate_up_to(std::string_view packed, uint32_t length) {
  constexpr uint64_t first_room = 1024;
  Inflater zip(packed);
  std::string bytes;
  int result = Z_OK;
  while (result == Z_OK) {
    // Full and not at its end: one byte more than was claimed shows that the claim is false.
    const uint64_t made = zip.made(), most = uint64_t{length} + 1;
    if (made == most) break;
    bytes.resize(std::min(most, std::max(first_room, 2 * made)));
    result = zip.fill(std::span(bytes).subspan(made));
  }
  bytes.resize(zip.made());
  return {std::move(bytes), zip.used(), result == Z_STREAM_END && zip.made() == length};
}

}  // namespace

std::vector<std::string> read_character_vector(std::string_view stream, const std::string& what) {
  Reader in(stream, what);
  in.header();
  const uint32_t flags = in.word();
  if ((flags & 0xFF) != kStrings) in.fail(fmt::format("type {} (a character vector expected)", flags & 0xFF));
  std::vector<std::string> strings(in.length(8));
  for (std::string& s : strings) s = in.characters();
  if ((flags & kHasAttributes) != 0) in.skip(0);
  if (!in.at_end()) in.fail("bytes left over");
  return strings;
}

std::vector<std::string> unpack_rdb(std::string_view file, const std::string& what) {
  std::vector<std::string> records;
  uint64_t unpacked = 0;
  size_t position = 0;
  while (position < file.size()) {
    const auto fail = [&](const std::string& why) {
      throw InputError(fmt::format("{}: record {} at byte {}: {}", what, records.size(), position, why));
    };
    if (file.size() - position < 5) fail("truncated");
    uint32_t length = 0;
    for (size_t i = 0; i < 4; ++i) length = length << 8 | static_cast<uint8_t>(file[position + i]);
    const std::string_view packed = file.substr(position + 4);
    // Deflate packs at most 1032 to 1: a longer claim is false.
    if (length > kMaxUnpacked - unpacked || length / 1032 > packed.size())
      fail(fmt::format("a length of {} bytes", length));
    Inflated result = inflate_up_to(packed, length);
    if (!result.whole) fail(fmt::format("no whole zlib stream of {} bytes ({} unpacked)", length, result.bytes.size()));
    records.push_back(std::move(result.bytes));
    unpacked += length;
    position += 4 + result.used;
  }
  return records;
}

}  // namespace tessera
