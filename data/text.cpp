// Texts: splits, scans.
#include "data/text.h"

#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <iostream>
#include <memory>
#include <utility>

#include "base/bad_input.h"
#include "base/files.h"

namespace tessera {

int64_t HeldOut::of(int64_t n) const {
  constexpr double kRounding = 1e-12;
  return std::min(std::llround(std::ceil(static_cast<double>(n) * fraction * (1 - kRounding))),
                  static_cast<long long>(n));
}

void HeldOut::refuse(const std::string& data) const {
  if (!file.empty() || fraction != HeldOut{}.fraction)
    throw Error(fmt::format("`{}`: expected text or examples as `data`; {} has its own validation split",
                            file.empty() ? "val_share" : "val_data", data));
}

void split_text(const Text& text, const HeldOut& held, const SplitChunk& f) {
  auto document = text.documents.begin();
  int64_t at = 0, train = 0;
  bool held_out = false;
  text.read([&](std::string_view chunk) {
    while (!chunk.empty()) {
      const int64_t cut = document->end - held.of(document->end - document->begin);
      const bool inside = (static_cast<uint8_t>(chunk.front()) & 0xC0u) == 0x80u;  // within a character
      held_out = at >= cut && (held_out || !inside);
      const int64_t end = held_out ? document->end : at < cut ? cut : at + 1;
      const std::string_view slice = chunk.substr(0, static_cast<size_t>(end - at));
      f(slice, held_out);
      chunk.remove_prefix(slice.size());
      at += std::ssize(slice);
      if (!held_out) train += std::ssize(slice);
      if (at == document->end) ++document, held_out = false;
    }
  });
  if (train < 2 || at - train < 2)
    bad_input("data '{}': a text of {} bytes is too short; {}, held out for validation, needs at least 2 bytes",
              text.name, at,
              held.fraction == HeldOut{}.fraction ? "its last tenth" : fmt::format("{:g} of it", held.fraction));
}

namespace {

// Identifies token files of other trainers by name.
std::string_view raw_tokens(const std::filesystem::path& file) {
  if (file.extension() != ".bin") return "";
  if (is_there(std::filesystem::path(file).replace_extension(".idx")))
    return ", with an index next to it: Megatron-LM tokens, which are not supported";
  return ": token files without a header (nanoGPT) do not specify width and count; llm.c token files have a header";
}

Text scan_text(const std::string& name, const std::function<void(const TextChunk&)>& read) {
  const std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> hash(XXH3_createState(), XXH3_freeState);
  if (!hash) throw std::bad_alloc();
  XXH3_128bits_reset(hash.get());
  constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";
  int64_t size = 0, mark = 0;
  read([&](std::string_view chunk) {
    if (const size_t nul = chunk.find('\0'); nul != std::string_view::npos)
      bad_input("{} is binary (a NUL byte at offset {}){}; expected text", name, size + static_cast<int64_t>(nul),
                raw_tokens(name));
    if (size == 0 && chunk.starts_with(kByteOrderMark)) mark = std::ssize(kByteOrderMark);
    size += std::ssize(chunk);
    if (size == std::ssize(chunk)) chunk.remove_prefix(static_cast<size_t>(mark));
    XXH3_128bits_update(hash.get(), chunk.data(), chunk.size());
  });
  if (size == 0) bad_input("{} is empty; expected text", name);
  if (size == mark) bad_input("{} contains only a byte order mark; expected text", name);
  const auto [low, high] = XXH3_128bits_digest(hash.get());
  const auto reread = [name, read, size, mark](const TextChunk& f) {
    int64_t at = 0;
    const auto changed = [&] {
      bad_input("{} changed while it was in use: it had {} bytes and now has {}", name, size,
                at < size ? "fewer" : "more");
    };
    read([&](std::string_view chunk) {
      const bool first = at == 0;
      if ((at += std::ssize(chunk)) > size) changed();
      if (first) chunk.remove_prefix(static_cast<size_t>(std::min<int64_t>(mark, std::ssize(chunk))));
      f(chunk);
    });
    if (at < size) changed();
  };
  return {name, reread, {{0, size - mark}}, fmt::format("{:016x}{:016x}", high, low)};
}

}  // namespace

std::string Text::bytes() const {
  std::string all;
  read([&](std::string_view chunk) { all += chunk; });
  return all;
}

Text load_text_file(const std::filesystem::path& file) {
  return scan_text(file.string(), [file](const TextChunk& f) { read_text_chunks(file, f); });
}

Text text_of_bytes(std::string bytes, const std::string& name, std::vector<Span> documents) {
  const auto all = std::make_shared<const std::string>(std::move(bytes));
  Text text = scan_text(name, [all](const TextChunk& f) {
    if (!all->empty()) f(*all);
  });
  if (!documents.empty()) text.documents = std::move(documents);
  return text;
}

bool read_line(std::string& line) {
  line.clear();
  while (std::cin && std::cin.peek() != std::char_traits<char>::eof()) {
    const auto c = static_cast<char>(std::cin.get());
    if (c == '\n') return true;
    line += c;
    if (std::has_single_bit(line.size())) require_memory("standard input: a line", std::ssize(line), 2 * kParsedGrowth);
  }
  return !line.empty();
}

}  // namespace tessera
