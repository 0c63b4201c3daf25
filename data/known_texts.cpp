// Where the texts known by name come from.
#include "data/known_texts.h"

#include <fmt/format.h>

#include <array>
#include <filesystem>

#include "data/files.h"
#include "data/process.h"
#include "data/r_data.h"
#include "tensor/error.h"

namespace tessera {
namespace fs = std::filesystem;
namespace {

struct Source {
  std::string_view name;
  std::string_view sha256;
  int64_t bytes;
};
constexpr Source kAusten{"austen", "65b434d16a8755142bfa95ba19c5f9abd0d30cf3dffe3b6793e834f9f56dcc96", 4'025'029};
constexpr Source kShakespeare{"tinyshakespeare", "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
                              1'115'394};

constexpr std::string_view kPackage = "r-cran-janeaustenr";
constexpr std::string_view kDatabase = "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb";
constexpr std::string_view kShakespeareUrl =
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt";
// Emma, Mansfield Park, Northanger Abbey, Persuasion, Pride and Prejudice, Sense and Sensibility: bytes of each, every
// line with its newline. The checksum of the whole fixes them.
constexpr std::array<int64_t, 6> kBooks{883'028, 883'280, 433'411, 466'854, 684'768, 673'688};

bool is(const Source& source, const std::string& bytes) {
  return std::ssize(bytes) == source.bytes && sha256(bytes) == source.sha256;
}

fs::path cached_file(const Source& source) { return cache_directory() / fmt::format("{}.txt", source.name); }

// The cached copy; nothing when there is none or it is damaged (it is then fetched again).
std::optional<std::string> from_cache(const Source& source) {
  const fs::path file = cached_file(source);
  std::error_code error;
  if (!fs::is_regular_file(file, error)) return std::nullopt;
  std::string bytes = read_file(file);
  if (!is(source, bytes)) return std::nullopt;
  return bytes;
}

std::string keep(const Source& source, std::string bytes, const std::string& origin) {
  if (!is(source, bytes))
    throw InputError(fmt::format("`data` {}: {} has {} bytes with SHA-256 {}; expected {} bytes with {}", source.name,
                                 origin, bytes.size(), sha256(bytes), source.bytes, source.sha256));
  make_directories(cache_directory());
  write_file(cached_file(source), bytes);
  return bytes;
}

std::string unpack_novels(const fs::path& database) {
  std::string novels;
  for (const std::string& record : unpack_rdb(read_file(database), database.string()))
    for (const std::string& line : read_character_vector(record, database.string())) (novels += line) += '\n';
  return novels;
}

// Runs a command that a text needs, or says in one line which failed and what can be done.
void run_or_explain(const std::vector<std::string>& command, const fs::path& directory) {
  const ProgramResult result = run_program(command, directory, 120);
  if (result.status == 0) return;
  std::string line;
  for (const std::string& word : command) (line += line.empty() ? "" : " ") += word;
  throw InputError(
      fmt::format("`data` austen: `{}` failed with status {} ({}); install the package {} (after `apt-get update`) or "
                  "give a text with `data` FILE",
                  line, result.status, result.last_line, kPackage));
}

// Where something is downloaded to.
fs::path new_work_folder() {
  const fs::path folder = temporary_folder();
  remove_stale(folder, false);
  return folder / "tessera-download";
}

std::string fetch_austen() {
  const fs::path installed = fs::path("/") / kDatabase;
  std::error_code error;
  if (fs::is_regular_file(installed, error)) return keep(kAusten, unpack_novels(installed), installed.string());
  const TemporaryDirectory work(new_work_folder());
  run_or_explain({"apt-get", "download", std::string(kPackage)}, work.path());
  fs::path archive;
  for (const auto& entry : fs::directory_iterator(work.path()))
    if (entry.path().extension() == ".deb") archive = entry.path();
  if (archive.empty())
    throw InputError(
        fmt::format("`data` austen: `apt-get download {}` left no .deb file; give a text with `data` FILE", kPackage));
  run_or_explain({"dpkg-deb", "-x", archive.filename().string(), "unpacked"}, work.path());
  const std::string origin = fmt::format("the package {}", archive.filename().string());
  return keep(kAusten, unpack_novels(work.path() / "unpacked" / kDatabase), origin);
}

std::string fetch_shakespeare() {
  const TemporaryDirectory work(new_work_folder());
  const std::string url(kShakespeareUrl);
  ProgramResult result =
      run_program({"curl", "-fsSL", "--connect-timeout", "15", "-o", "input.txt", url}, work.path(), 120);
  std::string tried = fmt::format("curl: status {}, {}", result.status, result.last_line);
  if (result.status == 127) {
    result = run_program({"wget", "-q", "-T", "15", "-t", "1", "-O", "input.txt", url}, work.path(), 120);
    tried = fmt::format("curl: not found; wget: status {}, {}", result.status, result.last_line);
  }
  if (result.status != 0)
    throw InputError(
        fmt::format("`data` tinyshakespeare: cannot fetch {} ({}); it needs curl or wget and the internet; "
                    "without them give a text with `data` FILE",
                    url, tried));
  return keep(kShakespeare, read_file(work.path() / "input.txt"), url);
}

}  // namespace

std::optional<Text> known_text(std::string_view name) {
  if (name == kShakespeare.name) {
    std::optional<std::string> cached = from_cache(kShakespeare);
    return one_document(std::string(name), cached ? std::move(*cached) : fetch_shakespeare());
  }
  if (name != kAusten.name) return std::nullopt;
  std::optional<std::string> cached = from_cache(kAusten);
  Text text{std::string(name), cached ? std::move(*cached) : fetch_austen(), {}};
  int64_t begin = 0;
  for (const int64_t size : kBooks) {
    text.documents.push_back({begin, begin + size});
    begin += size;
  }
  return text;
}

}  // namespace tessera
