// Protocol of checkpoint directories.
#include "train/checkpoint/directory.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "base/bad_input.h"
#include "base/files.h"
#include "base/json.h"

namespace tessera {
namespace fs = std::filesystem;
namespace {

using Json = nlohmann::json;
constexpr std::string_view kFormat = "tessera checkpoint", kStep = "step-", kReplaced = ".replaced";

std::string hex(uint64_t checksum) { return fmt::format("{:016x}", checksum); }

// Rejects paths that leave the checkpoint's directory, and names that the system would truncate (NUL).
bool is_plain_name(std::string_view name) {
  return !name.empty() && name != "." && name != ".." && name.find('/') == std::string_view::npos &&
         name.find('\0') == std::string_view::npos;
}

fs::path to_string(const fs::path& directory, int64_t step) { return directory / fmt::format("{}{}", kStep, step); }
fs::path aside(fs::path name) { return name += kReplaced; }
bool is_aside(const fs::path& path) { return path.extension() == kReplaced; }

// The N of a directory named exactly "step-N" or "step-N.replaced".
std::optional<int64_t> step_number(const fs::path& path) {
  const std::string name = (is_aside(path) ? path.stem() : path.filename()).string();
  int64_t step = 0;
  if (!name.starts_with(kStep)) return std::nullopt;
  const char *const begin = name.data() + kStep.size(), *const end = name.data() + name.size();
  const auto [stop, error] = std::from_chars(begin, end, step);
  return error == std::errc() && stop == end && step >= 0 ? std::optional(step) : std::nullopt;
}

std::vector<fs::path> newest_first(const fs::path& directory) {
  std::vector<fs::path> found;
  std::error_code error;
  for (const fs::path& p : list_entries(directory))
    if (const auto step = step_number(p); step && !(is_aside(p) && fs::exists(to_string(directory, *step), error)))
      found.push_back(p);
  std::ranges::sort(found, [](const fs::path& a, const fs::path& b) { return *step_number(a) > *step_number(b); });
  return found;
}

// Best effort: the next save or start retries.
void remove_checkpoint(const fs::path& path) {
  const TemporaryName nameless(path);
  std::error_code error;
  fs::rename(path, nameless.path(), error);
  if (error) fs::remove_all(path, error);
}

Json make_manifest(const fs::path& attempt, int64_t step, const std::string& about) {
  Json listed = Json::object();
  for (const fs::path& file : list_entries(attempt))
    listed[file.filename().string()] = {{"bytes", fs::file_size(file)}, {"xxh3", hex(file_checksum(file))}};
  return {{"format", kFormat}, {"version", 1}, {"step", step}, {"about", Json::parse(about)}, {"files", listed}};
}

// Renames `attempt` to `name`, or atomically exchanges it with an existing checkpoint, which is then removed as an
// attempt. If the file system cannot exchange names, renames the existing checkpoint first.
void move_to(const fs::path& attempt, const fs::path& name) {
  std::error_code unknown;
  const bool taken = fs::is_directory(name, unknown);
  const auto done = [&](int result) {
    if (result != 0)
      throw OutputError(fmt::format("cannot create the checkpoint {}: {}", name.string(), std::strerror(errno)));
  };
  const int at_once =
      ::renameat2(AT_FDCWD, attempt.c_str(), AT_FDCWD, name.c_str(), taken ? RENAME_EXCHANGE : RENAME_NOREPLACE);
  if (at_once == 0 || !is_unknown_operation(errno)) return done(at_once);
  if (taken) {
    remove_checkpoint(aside(name));
    done(::rename(name.c_str(), aside(name).c_str()));
    sync_directory(name.parent_path());
  }
  done(::rename(attempt.c_str(), name.c_str()));  // the name is new or an empty directory
}

}  // namespace

NewCheckpoint::NewCheckpoint(fs::path directory, int64_t step)
    : directory_(std::move(directory)), name_(to_string(directory_, step)), step_(step) {
  make_directories(directory_);
  if (::mkdir(path().c_str(), 0777) != 0)
    throw OutputError(fmt::format("cannot create the directory {}: {}", path().string(), std::strerror(errno)));
}

Checkpoint NewCheckpoint::finish(const std::string& about, size_t keep) {
  write_file(path() / "manifest.json", make_manifest(path(), step_, about).dump(2) + "\n");
  sync_directory(path());
  const fs::path name = to_string(directory_, step_);
  move_to(path(), name);
  sync_directory(directory_);
  for (const fs::path& old : list_entries(directory_))
    if (is_aside(old) && fs::is_directory(to_string(directory_, step_number(old).value_or(-1)))) remove_checkpoint(old);
  write_file(directory_ / "latest", name.filename().string() + "\n");
  const std::optional<BestCheckpoint> best = best_checkpoint(directory_);
  const std::vector<fs::path> all = newest_first(directory_);
  for (size_t i = keep; i < all.size(); ++i)
    if (const int64_t step = *step_number(all[i]); step != step_ && !(best && best->step == step))
      remove_checkpoint(all[i]);
  return {name, step_, about};
}

std::optional<BestCheckpoint> best_checkpoint(const fs::path& directory) {
  std::error_code error;
  if (!fs::is_regular_file(directory / "best", error)) return {};
  std::istringstream fields(read_file(directory / "best"));
  std::string name;
  BestCheckpoint best;
  fields >> name >> best.val_loss;
  const std::optional<int64_t> step = step_number(name);
  if (!fields || !step) return {};
  const fs::path named = to_string(directory, *step);
  if (!fs::is_directory(named, error) && !fs::is_directory(aside(named), error)) return {};
  best.step = *step;
  return best;
}

void write_best(const fs::path& directory, const BestCheckpoint& best) {
  write_file(directory / "best", fmt::format("{} {}\n", to_string({}, best.step).string(), best.val_loss));
}

Manifest parse_manifest(std::string_view json, const std::string& what) {
  const Json manifest = parse_json(json, what);
  const auto refuse = [&](const std::string& why) { bad_input("{}: {}", what, why); };
  const auto at = [&](const char* key) -> const Json& { return value_at(manifest, key); };
  if (at("format") != kFormat) refuse("not a checkpoint's manifest");
  if (at("version") != 1) refuse(fmt::format("version: expected 1, got {}", at("version").dump()));
  const Json &files = at("files"), &about = at("about");
  const std::optional<int64_t> step = natural(at("step"));
  if (!step) refuse(fmt::format("step: expected an integer, got {}", at("step").dump()));
  if (!files.is_object() || !about.is_object()) refuse("expected two objects, files and about");
  if (files.empty()) refuse("files: no checkpoint files are listed");
  Manifest out{*step, about.dump(), {}};
  for (const auto& [name, listed] : files.items()) {
    if (!is_plain_name(name)) refuse(fmt::format("expected names of files in the same directory, got '{}'", name));
    const std::optional<int64_t> bytes = natural(value_at(listed, "bytes"));
    if (!bytes || !value_at(listed, "xxh3").is_string())
      refuse(fmt::format("'{}': expected bytes and xxh3, got {}", name, listed.dump()));
    out.files.push_back({name, static_cast<uint64_t>(*bytes), listed["xxh3"].get<std::string>()});
  }
  return out;
}

Checkpoint open_checkpoint(const fs::path& path) {
  std::error_code error;
  if (!fs::is_directory(path, error)) bad_input("{}: no such checkpoint", path.string());
  const fs::path manifest_path = path / "manifest.json";
  if (!fs::exists(manifest_path, error)) bad_input("{}: not a checkpoint (no manifest.json)", path.string());
  const Manifest manifest = parse_manifest(read_file(manifest_path), manifest_path.string());
  for (const ListedFile& listed : manifest.files) {
    const fs::path file = path / listed.name;
    if (listed.name.find(".rank-") != std::string::npos && !fs::exists(file, error)) continue;
    const uintmax_t size = fs::file_size(file, error);
    if (error) bad_input("{}: {}; the file is listed in the manifest", file.string(), error.message());
    if (listed.bytes != size)
      bad_input("{}: size is {} bytes; the manifest specifies {}", file.string(), size, listed.bytes);
    if (const std::string found = hex(file_checksum(file)); listed.xxh3 != found)
      bad_input("{}: checksum is {}; the manifest specifies {}", file.string(), found, listed.xxh3);
  }
  return {path, manifest.step, manifest.about};
}

std::optional<Checkpoint> newest_checkpoint(const fs::path& directory, std::vector<std::string>& passed_over,
                                            const std::function<void(const Checkpoint&)>& check) {
  for (const fs::path& path : newest_first(directory)) {
    try {
      Checkpoint found = open_checkpoint(path);
      check(found);
      return found;
    } catch (const Error& e) {
      passed_over.emplace_back(e.what());
    }
  }
  return std::nullopt;
}

}  // namespace tessera
