// Decompression of texts.
#include "data/compressed_text.h"

#include <zlib.h>
#include <zstd.h>

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/bad_input.h"
#include "base/files.h"

namespace tessera {

namespace {

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
