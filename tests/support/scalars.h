// Parses the scalars of a TensorBoard event file.
#pragma once
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "base/files.h"

namespace tessera::test {

// By tag: steps and values.
using Scalars = std::map<std::string, std::vector<std::pair<int64_t, float>>>;

// Calls f(field, number, part) for each field of a message: the value of a varint, or the bytes of other types.
template <class F>
void each_field(std::string_view left, const F& f) {
  const auto varint = [&] {
    uint64_t out = 0;
    for (int shift = 0;; shift += 7) {
      const auto byte = static_cast<unsigned char>(left.front());
      left.remove_prefix(1);
      out |= static_cast<uint64_t>(byte & 127) << shift;
      if (byte < 128) return out;
    }
  };
  while (!left.empty()) {
    const uint64_t key = varint(), kind = key & 7, number = kind == 1 ? 8 : kind == 5 ? 4 : varint();
    const std::string_view part = left.substr(0, kind == 0 ? 0 : number);
    left.remove_prefix(part.size());
    f(key >> 3, number, part);
  }
}

inline Scalars read_scalars(const std::filesystem::path& run) {
  constexpr int kStep = 2, kSummary = 5, kValue = 1, kTag = 1, kSimpleValue = 2;
  Scalars out;
  const auto read_event = [&](std::string_view event) {
    int64_t step = 0;
    each_field(event, [&](uint64_t field, uint64_t number, std::string_view summary) {
      if (field == kStep) step = static_cast<int64_t>(number);
      if (field != kSummary) return;
      each_field(summary, [&](uint64_t of_summary, uint64_t, std::string_view scalar) {
        if (of_summary != kValue) return;
        std::string tag;
        float value = 0;
        each_field(scalar, [&](uint64_t of_scalar, uint64_t, std::string_view part) {
          if (of_scalar == kTag) tag = part;
          if (of_scalar == kSimpleValue) std::memcpy(&value, part.data(), sizeof value);
        });
        out[tag].emplace_back(step, value);
      });
    });
  };
  for (const auto& entry : std::filesystem::directory_iterator(run)) {
    if (!entry.path().filename().string().starts_with("events.out.tfevents.")) continue;
    const std::string file = read_file(entry.path());
    uint64_t size = 0;
    for (size_t at = 0; at < file.size(); at += size + 16) {
      std::memcpy(&size, file.data() + at, sizeof size);
      read_event(std::string_view(file).substr(at + 12, size));
    }
  }
  return out;
}

}  // namespace tessera::test
