// Texts: splits, files, decompression.
#include "data/text.h"

#include <xxhash.h>
#include <zlib.h>
#include <zstd.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <iostream>
#include <memory>
#include <span>
#include <utility>

#include "base/bad_input.h"
#include "base/files.h"

namespace tessera {

int64_t HeldOut::of(int64_t n) const {
  constexpr double kRounding = 1e-12;
  return std::min(std::llround(std::ceil(static_cast<double>(n) * share * (1 - kRounding))), static_cast<long long>(n));
}

void HeldOut::refuse(const std::string& data) const {
  if (!file.empty() || share != HeldOut{}.share)
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
              text.name, at, held.share == HeldOut{}.share ? "its last tenth" : fmt::format("{:g} of it", held.share));
}

namespace {

// Identifies token files of other trainers by name.
std::string_view raw_tokens(const std::filesystem::path& file) {
  if (file.extension() != ".bin") return "";
  if (is_there(std::filesystem::path(file).replace_extension(".idx")))
    return ", with an index next to it: Megatron-LM tokens, which are not supported";
  return ": token files without a header (nanoGPT) do not specify width and count; llm.c token files have a header";
}

constexpr size_t kChunk = size_t{1} << 20;
constexpr uint64_t kFree = uint64_t{64} << 20, kMaxGrowth = 256;

class Unpacker : NotCopied {
 public:
  explicit Unpacker(const std::string& what, const char* format = nullptr) : what_(what), format_(format) {}
  virtual ~Unpacker() = default;

  virtual void add(std::string_view chunk, const TextChunk& f) { f(chunk); }
  void finish() const {
    if (format_ && !ended_) bad_input("{}: the {} data is truncated", what_, format_);
  }

 protected:
  [[noreturn]] void damaged(std::string_view why) const { bad_input("{}: corrupt {} data ({})", what_, format_, why); }
  // Passes on the first `made` bytes of `out_`.
  void pass_on(size_t made, const TextChunk& f) {
    made_ += made;
    if (made_ > kFree && made_ / kMaxGrowth > read_)
      bad_input("{}: decompresses to more than {} times its size; expected text", what_, kMaxGrowth);
    if (made > 0) f({out_.data(), made});
  }

  const std::string& what_;
  const char* format_;
  std::vector<char> out_ = std::vector<char>(format_ ? kChunk : 0);
  uint64_t read_ = 0, made_ = 0;  // compressed and decompressed bytes
  bool ended_ = false;
};

// Accepts concatenated members, as gzip does.
class Gzip final : public Unpacker {
 public:
  explicit Gzip(const std::string& what) : Unpacker(what, "gzip") {
    if (inflateInit2(&stream_, 16 + MAX_WBITS) != Z_OK) throw Error("cannot initialize zlib");
  }
  ~Gzip() override { inflateEnd(&stream_); }

  void add(std::string_view chunk, const TextChunk& f) override {
    read_ += chunk.size();
    stream_.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(chunk.data()));  // zlib does not write to its input
    stream_.avail_in = static_cast<uInt>(chunk.size());
    do {
      if (ended_ && stream_.avail_in > 0) {
        inflateReset(&stream_);
        ended_ = false;
      }
      stream_.next_out = reinterpret_cast<Bytef*>(out_.data());
      stream_.avail_out = static_cast<uInt>(out_.size());
      const int status = inflate(&stream_, Z_NO_FLUSH);
      if (status != Z_OK && status != Z_STREAM_END && status != Z_BUF_ERROR)
        damaged(stream_.msg ? stream_.msg : "no details");
      pass_on(out_.size() - stream_.avail_out, f);
      ended_ = status == Z_STREAM_END;
    } while (stream_.avail_in > 0 || stream_.avail_out == 0);
  }

 private:
  z_stream stream_ = {};
};

class Zstd final : public Unpacker {
 public:
  explicit Zstd(const std::string& what) : Unpacker(what, "zstd"), stream_(ZSTD_createDStream(), ZSTD_freeDStream) {
    if (!stream_) throw Error("cannot initialize zstd");
  }

  void add(std::string_view chunk, const TextChunk& f) override {
    read_ += chunk.size();
    ZSTD_inBuffer in{chunk.data(), chunk.size(), 0};
    bool full = false;
    while (in.pos < in.size || full) {
      ZSTD_outBuffer out{out_.data(), out_.size(), 0};
      const size_t left = ZSTD_decompressStream(stream_.get(), &out, &in);
      if (ZSTD_isError(left) != 0) damaged(ZSTD_getErrorName(left));
      ended_ = left == 0;
      full = out.pos == out.size && !ended_;
      pass_on(out.pos, f);
    }
  }

 private:
  std::unique_ptr<ZSTD_DStream, size_t (*)(ZSTD_DStream*)> stream_;
};

// Rejects other known formats by their first bytes.
TextChunk checked(const std::string& what, const TextChunk& f) {
  return [&what, &f, first = true](std::string_view chunk) mutable {
    if (const std::string_view kind = std::exchange(first, false) ? known_kind(chunk, true) : ""; !kind.empty())
      bad_input("{} is {}; expected UTF-8 text, plain or compressed with gzip or zstd", what, kind);
    f(chunk);
  };
}

std::unique_ptr<Unpacker> make_unpacker(std::string_view first, const std::string& what) {
  if (first.starts_with("\x1f\x8b")) return std::make_unique<Gzip>(what);
  if (first.starts_with("\x28\xb5\x2f\xfd")) return std::make_unique<Zstd>(what);
  return std::make_unique<Unpacker>(what);
}

}  // namespace

namespace {

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

void read_text_chunks(const std::filesystem::path& file, const TextChunk& f) {
  const std::string what = file.string();
  std::unique_ptr<Unpacker> unpacker;
  const TextChunk text = checked(what, f);
  read_chunks(file, [&](std::span<const std::byte> chunk) {
    const std::string_view bytes(reinterpret_cast<const char*>(chunk.data()), chunk.size());
    if (!unpacker) unpacker = make_unpacker(bytes, what);
    unpacker->add(bytes, text);
  });
  if (unpacker) unpacker->finish();
}

std::string read_text(const std::filesystem::path& file) {
  std::string all;
  read_text_chunks(file, [&](std::string_view chunk) {
    require_memory(file.string(), std::ssize(all) + std::ssize(chunk), 2 * kParsedGrowth);
    all += chunk;
  });
  return all;
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

std::string text_start(const std::filesystem::path& file) {
  struct Enough {};
  constexpr size_t kEnough = 4096;
  std::string start;
  try {
    read_text_chunks(file, [&](std::string_view chunk) {
      start += chunk;
      if (start.size() >= kEnough) throw Enough();
    });
  } catch (const Enough&) {
  } catch (const InputError&) {  // reported when the file is read
  }
  return start;
}

void unpack_text(std::string_view bytes, const std::string& what, const TextChunk& f) {
  const std::unique_ptr<Unpacker> unpacker = make_unpacker(bytes, what);
  unpacker->add(bytes, checked(what, f));
  unpacker->finish();
}

}  // namespace tessera
