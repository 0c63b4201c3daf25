// The scalars of a TensorBoard event file, read byte by byte.
#pragma once
#include <cstring>
#include <map>

#include "data/files.h"

namespace tessera::test {

// By tag: steps and values.
using Scalars = std::map<std::string, std::vector<std::pair<int64_t, float>>>;

class ProtoReader {
 public:
  explicit ProtoReader(std::string_view bytes) : left_(bytes) {}
  bool done() const { return left_.empty(); }
  int field = 0;
  uint64_t number = 0;    // the value of a varint, or the bits of a float or double
  std::string_view part;  // the bytes of a string or message
  void next() {
    const uint64_t key = varint();
    field = static_cast<int>(key >> 3);
    if ((key & 7) == 0) {
      number = varint();
      return;
    }
    const size_t size = (key & 7) == 1 ? 8 : (key & 7) == 5 ? 4 : varint();
    part = left_.substr(0, size);
    left_.remove_prefix(size);
  }

 private:
  uint64_t varint() {
    uint64_t out = 0;
    for (int shift = 0;; shift += 7) {
      const auto byte = static_cast<unsigned char>(left_.front());
      left_.remove_prefix(1);
      out |= static_cast<uint64_t>(byte & 127) << shift;
      if (byte < 128) return out;
    }
  }
  std::string_view left_;
};

inline Scalars read_scalars(const std::filesystem::path& run) {
  constexpr int kStep = 2, kSummary = 5, kValue = 1, kTag = 1, kSimpleValue = 2;
  Scalars out;
  for (const auto& entry : std::filesystem::directory_iterator(run)) {
    if (!entry.path().filename().string().starts_with("events.out.tfevents.")) continue;
    const std::string file = read_file(entry.path());
    for (size_t at = 0; at < file.size();) {
      uint64_t size = 0;
      std::memcpy(&size, file.data() + at, sizeof size);
      int64_t step = 0;
      for (ProtoReader event(std::string_view(file).substr(at + 12, size)); !event.done();) {
        event.next();
        if (event.field == kStep) step = static_cast<int64_t>(event.number);
        if (event.field != kSummary) continue;
        for (ProtoReader values(event.part); !values.done();) {
          values.next();
          if (values.field != kValue) continue;
          std::string tag;
          float value = 0;
          for (ProtoReader one(values.part); !one.done();) {
            one.next();
            if (one.field == kTag) tag = one.part;
            if (one.field == kSimpleValue) std::memcpy(&value, one.part.data(), sizeof value);
          }
          out[tag].emplace_back(step, value);
        }
      }
      at += size + 16;
    }
  }
  return out;
}

}  // namespace tessera::test
