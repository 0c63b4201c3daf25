// Patterns and directories of shards.
#include "data/shards.h"

#include <glob.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "base/bad_input.h"
#include "base/files.h"

namespace tessera {

namespace fs = std::filesystem;

namespace {

std::vector<fs::path> sorted(std::vector<fs::path> files) {
  std::ranges::sort(files, {}, [](const fs::path& f) { return f.string(); });
  return files;
}

std::vector<fs::path> matches(const std::string& pattern) {
  ::glob_t found{};
  const int status = ::glob(pattern.c_str(), 0, nullptr, &found);
  std::vector<fs::path> files;
  for (size_t i = 0; i < found.gl_pathc; ++i)
    if (is_plain_file(found.gl_pathv[i]) && !is_system_file(found.gl_pathv[i])) files.emplace_back(found.gl_pathv[i]);
  ::globfree(&found);
  if (status != 0 && status != GLOB_NOMATCH) bad_input("{}: cannot be searched", pattern);
  return sorted(std::move(files));
}

bool is_pattern(const std::string& spec) { return spec.find_first_of("*?[") != std::string::npos && !is_there(spec); }

std::vector<fs::path> files_in(const fs::path& folder) {
  std::vector<fs::path> files = list_entries(folder);
  std::erase_if(files, [](const fs::path& file) { return !is_llmc_file(file); });
  return sorted(std::move(files));
}

std::vector<fs::path> validation_files(std::string pattern) {
  const size_t at = pattern.rfind("train");
  if (at == std::string::npos || pattern.find('/', at) != std::string::npos) return {};
  return matches(pattern.replace(at, 5, "val"));
}

// The default limit may be too low for all shards. If it cannot be raised, opening a file reports the error.
void allow_open_files(size_t count) {
  ::rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  const rlim_t wanted = std::min<rlim_t>(limit.rlim_max, count + 256);
  if (limit.rlim_cur >= wanted) return;
  limit.rlim_cur = wanted;
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

}  // namespace

std::vector<fs::path> matching_files(const std::string& spec, std::string_view prefix) {
  if (!is_pattern(spec)) return {};
  std::vector<fs::path> files = matches(spec);
  if (files.empty()) bad_input("{}'{}': no file matches", prefix, spec);
  return files;
}

bool names_shards(const std::string& spec) {
  if (is_pattern(spec)) return true;
  return names_directory(spec) && !is_there(fs::path(spec) / "dataset.json") && !files_in(spec).empty();
}

ShardFiles find_shards(const std::string& spec) {
  const bool pattern = is_pattern(spec);
  const std::vector<fs::path> files = pattern ? matching_files(spec, "`data` ") : files_in(spec);
  ShardFiles out;
  std::vector<fs::path> val;
  for (const fs::path& f : files) {
    if (!is_llmc_file(f))
      bad_input("{}: expected an llm.c token file; `tessera data` makes a dataset of several texts or document lists",
                f.string());
    (f.filename().string().find("val") == std::string::npos ? out.train : val).push_back(f);
  }
  if (val.empty() && pattern) val = validation_files(spec);
  if (val.empty() && !out.train.empty()) {
    val.push_back(out.train.back());
    out.train.pop_back();
  }
  if (out.train.empty())
    bad_input("`data` '{}': {} file{}; expected at least one for training and one for validation", spec, files.size(),
              files.size() == 1 ? "" : "s");
  out.val = val.front();
  out.unused.assign(val.begin() + 1, val.end());
  return out;
}

Dataset open_shards(const std::string& spec, const TokenizerChoice& choice) {
  const ShardFiles files = find_shards(spec);
  require_folder(spec, choice);
  Dataset d;
  d.source = spec;
  d.tokenizer = make_tokenizer(choice, spec);
  const int64_t vocab = d.tokenizer->vocab_size();
  allow_open_files(files.train.size());
  for (const fs::path& f : files.train) d.train.push_back(TokenFile::open_llmc(f, vocab));
  d.val = TokenFile::open_llmc(files.val, vocab);
  if (d.val.size() < 2) bad_input("{}: {} validation tokens; expected at least 2", files.val.string(), d.val.size());
  d.val_bytes = token_bytes(d.val, 0, d.val.size(), *d.tokenizer);
  d.notes.push_back(fmt::format(
      "validated on {}{}", files.val.string(),
      files.unused.empty() ? ""
                           : fmt::format(", not on {} other files with \"val\" in their names", files.unused.size())));
  return d;
}

}  // namespace tessera
