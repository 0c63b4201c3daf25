// Lines, and what stands on them.
#include "data/jsonl.h"

#include <fmt/format.h>
#include <zlib.h>
#include <zstd.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "data/files.h"
#include "data/json.h"
#include "tensor/error.h"

namespace tessera {

namespace {

using Json = nlohmann::json;
constexpr size_t kLongest = size_t{64} << 20;

// Pieces of a file in, whole lines out.
class Lines {
 public:
  Lines(const std::string& what, const LineFunction& f) : what_(what), f_(f) {}

  void add(std::string_view piece) {
    for (size_t end = piece.find('\n'); end != std::string_view::npos; end = piece.find('\n')) {
      keep(piece.substr(0, end));
      finish();
      piece.remove_prefix(end + 1);
    }
    keep(piece);
  }
  void finish() {
    std::string_view line = line_;
    if (++number_ == 1 && line.starts_with("\xEF\xBB\xBF")) line.remove_prefix(3);
    if (line.find_first_not_of(" \t\r") != std::string_view::npos) f_(line, number_);
    line_.clear();
  }

 private:
  void keep(std::string_view part) {
    if (line_.size() + part.size() > kLongest)
      throw InputError(fmt::format("{}:{}: a line of more than {} MiB", what_, number_ + 1, kLongest >> 20));
    line_ += part;
  }

  const std::string& what_;
  const LineFunction& f_;
  std::string line_ = {};
  int64_t number_ = 0;
};

std::string text_of(const Json& object, const char* key, const std::string& what) {
  const auto found = object.find(key);
  if (found == object.end()) throw InputError(fmt::format("{}: the key '{}' is missing", what, key));
  if (found->is_discarded())
    throw InputError(
        fmt::format("{}: the key '{}' stands twice in one object, or is too large or too deep", what, key));
  if (!found->is_string())
    throw InputError(fmt::format("{}: the key '{}' is a {}; expected a string", what, key, found->type_name()));
  return found->get<std::string>();
}

Role role_of(const std::string& name, const std::string& what) {
  if (name == "system") return Role::system;
  if (name == "user") return Role::user;
  if (name == "assistant") return Role::assistant;
  throw InputError(fmt::format("{}: the role '{}'; expected system, user or assistant", what, name.substr(0, 40)));
}

std::vector<Message> turns_of(const Json& messages, const std::string& what) {
  if (!messages.is_array() || messages.empty())
    throw InputError(fmt::format("{}: the key 'messages' must be a list of messages that is not empty", what));
  std::vector<Message> turns;
  for (const Json& message : messages) {
    const std::string where = fmt::format("{}: message {}", what, turns.size() + 1);
    if (!message.is_object()) throw InputError(where + " is no object");
    for (const auto& [key, value] : message.items())
      if (key != "role" && key != "content")
        throw InputError(fmt::format("{} has the key '{}'; expected role and content alone", where, key.substr(0, 40)));
    turns.push_back({role_of(text_of(message, "role", where), where), text_of(message, "content", where)});
  }
  return turns;
}

}  // namespace

Example parse_example(std::string_view line, const std::string& what) {
  const Json object = parse_json(line, what, JsonFile::others);
  if (!object.is_object()) throw InputError(what + ": expected an object");
  const auto text = [&](const char* key) { return text_of(object, key, what); };
  using Shape = Example::Shape;
  if (object.contains("messages")) return {Shape::messages, turns_of(object["messages"], what)};
  if (object.contains("prompt") && object.contains("completion"))
    return {Shape::completion, {{Role::user, text("prompt")}, {Role::assistant, text("completion")}}};
  if (object.contains("instruction"))
    return {Shape::instruction,
            {{Role::user, text("instruction")}, {Role::assistant, text("output")}},
            object.contains("input") ? text("input") : ""};
  if (object.contains("text")) return {Shape::text, {{Role::assistant, text("text")}}};
  throw InputError(fmt::format(
      "{}: expected messages, prompt and completion, instruction and output, or text among its keys", what));
}

void for_each_line(const std::filesystem::path& file, const LineFunction& f) {
  const std::string what = file.string();
  Lines lines(what, f);
  read_text_pieces(file, [&](std::string_view piece) { lines.add(piece); });
  lines.finish();
}

void for_each_line_of(std::string_view bytes, const std::string& what, const LineFunction& f) {
  Lines lines(what, f);
  lines.add(bytes);
  lines.finish();
}

bool is_jsonl_name(const std::filesystem::path& file) {
  const std::string extension = file.extension().string();
  if (extension == ".gz" || extension == ".zst") return file.stem().extension() == ".jsonl";
  return extension == ".jsonl";
}

// Unpacking, piece by piece.

namespace {

constexpr size_t kPiece = size_t{1} << 20;
constexpr uint64_t kFree = uint64_t{64} << 20, kMostGrowth = 256;

// Bytes that were read, and bytes that came of them.
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
