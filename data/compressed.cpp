// Unpacking, piece by piece.
#include "data/compressed.h"

#include <fmt/format.h>
#include <zlib.h>
#include <zstd.h>

#include <memory>
#include <vector>

#include "data/files.h"
#include "tensor/error.h"

namespace tessera {
namespace {

constexpr size_t kPiece = size_t{1} << 20;
constexpr uint64_t kFree = uint64_t{64} << 20, kMostGrowth = 256;

// What was read, and what came of it.
class Growth {
 public:
  explicit Growth(const std::string& what) : what_(what) {}
  void read(size_t bytes) { read_ += bytes; }
  void made(size_t bytes) {
    made_ += bytes;
    if (made_ > kFree && made_ / kMostGrowth > read_)
      throw InputError(fmt::format("{}: unpacks to more than {} times its size; expected a text", what_, kMostGrowth));
  }

 private:
  const std::string& what_;
  uint64_t read_ = 0, made_ = 0;
};

class Unpacker {
 public:
  virtual ~Unpacker() = default;
  virtual void add(std::string_view piece, const TextPiece& f) = 0;
  virtual void finish() = 0;
};

class Plain final : public Unpacker {
 public:
  void add(std::string_view piece, const TextPiece& f) override { f(piece); }
  void finish() override {}
};

// Members one after another, as gzip's own reader takes them.
class Gzip final : public Unpacker {
 public:
  explicit Gzip(const std::string& what) : what_(what), growth_(what), out_(kPiece) {
    if (inflateInit2(&stream_, 16 + MAX_WBITS) != Z_OK) throw Error("zlib cannot begin");
  }
  ~Gzip() override { inflateEnd(&stream_); }
  Gzip(const Gzip&) = delete;
  Gzip& operator=(const Gzip&) = delete;

  void add(std::string_view piece, const TextPiece& f) override {
    growth_.read(piece.size());
    stream_.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(piece.data()));  // zlib does not write there
    stream_.avail_in = static_cast<uInt>(piece.size());
    do {
      if (ended_ && stream_.avail_in > 0) {
        inflateReset(&stream_);
        ended_ = false;
      }
      stream_.next_out = reinterpret_cast<Bytef*>(out_.data());
      stream_.avail_out = static_cast<uInt>(out_.size());
      const int status = inflate(&stream_, Z_NO_FLUSH);
      if (status != Z_OK && status != Z_STREAM_END && status != Z_BUF_ERROR)
        throw InputError(fmt::format("{}: damaged gzip data ({})", what_, stream_.msg ? stream_.msg : "no details"));
      const size_t made = out_.size() - stream_.avail_out;
      growth_.made(made);
      if (made > 0) f({out_.data(), made});
      ended_ = status == Z_STREAM_END;
    } while (stream_.avail_in > 0 || stream_.avail_out == 0);
  }
  void finish() override {
    if (!ended_) throw InputError(what_ + ": the gzip data is cut short");
  }

 private:
  const std::string& what_;
  Growth growth_;
  std::vector<char> out_;
  z_stream stream_ = {};
  bool ended_ = false;
};

class Zstd final : public Unpacker {
 public:
  explicit Zstd(const std::string& what)
      : what_(what), growth_(what), out_(kPiece), stream_(ZSTD_createDStream(), ZSTD_freeDStream) {
    if (!stream_) throw Error("zstd cannot begin");
  }

  void add(std::string_view piece, const TextPiece& f) override {
    growth_.read(piece.size());
    ZSTD_inBuffer in{piece.data(), piece.size(), 0};
    bool full = false;
    while (in.pos < in.size || full) {
      ZSTD_outBuffer out{out_.data(), out_.size(), 0};
      const size_t left = ZSTD_decompressStream(stream_.get(), &out, &in);
      if (ZSTD_isError(left) != 0)
        throw InputError(fmt::format("{}: damaged zstd data ({})", what_, ZSTD_getErrorName(left)));
      ended_ = left == 0;
      full = out.pos == out.size && !ended_;
      growth_.made(out.pos);
      if (out.pos > 0) f({out_.data(), out.pos});
    }
  }
  void finish() override {
    if (!ended_) throw InputError(what_ + ": the zstd data is cut short");
  }

 private:
  const std::string& what_;
  Growth growth_;
  std::vector<char> out_;
  std::unique_ptr<ZSTD_DStream, size_t (*)(ZSTD_DStream*)> stream_;
  bool ended_ = false;
};

std::unique_ptr<Unpacker> unpacker_of(std::string_view first, const std::string& what) {
  if (first.starts_with("\x1f\x8b")) return std::make_unique<Gzip>(what);
  if (first.starts_with("\x28\xb5\x2f\xfd")) return std::make_unique<Zstd>(what);
  return std::make_unique<Plain>();
}

}  // namespace

void read_text_pieces(const std::filesystem::path& file, const TextPiece& f) {
  const std::string what = file.string();
  std::unique_ptr<Unpacker> unpacker;
  read_pieces(file, [&](std::span<const std::byte> piece) {
    const std::string_view bytes(reinterpret_cast<const char*>(piece.data()), piece.size());
    if (!unpacker) unpacker = unpacker_of(bytes, what);
    unpacker->add(bytes, f);
  });
  if (unpacker) unpacker->finish();
}

std::string read_text(const std::filesystem::path& file) {
  std::string all;
  read_text_pieces(file, [&](std::string_view piece) { all += piece; });
  return all;
}

void unpack_text(std::string_view bytes, const std::string& what, const TextPiece& f) {
  const std::unique_ptr<Unpacker> unpacker = unpacker_of(bytes, what);
  unpacker->add(bytes, f);
  unpacker->finish();
}

}  // namespace tessera
