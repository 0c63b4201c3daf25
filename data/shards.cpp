// Finding and opening shards.
#include "data/shards.h"

#include <fmt/format.h>
#include <glob.h>
#include <sys/resource.h>

#include <algorithm>
#include <utility>

#include "data/llmc_file.h"
#include "tensor/error.h"

namespace tessera {
namespace fs = std::filesystem;
namespace {

std::vector<fs::path> sorted(std::vector<fs::path> files) {
  std::ranges::sort(files, {}, [](const fs::path& f) { return f.string(); });
  return files;
}

// What a pattern matches; nothing where it matches nothing.
std::vector<fs::path> matches(const std::string& pattern) {
  ::glob_t found{};
  const int status = ::glob(pattern.c_str(), 0, nullptr, &found);
  std::vector<fs::path> files;
  std::error_code error;
  for (size_t i = 0; i < found.gl_pathc; ++i)
    if (fs::is_regular_file(found.gl_pathv[i], error)) files.emplace_back(found.gl_pathv[i]);
  ::globfree(&found);
  if (status != 0 && status != GLOB_NOMATCH) throw InputError(fmt::format("{}: cannot be looked through", pattern));
  return sorted(std::move(files));
}

bool is_pattern(const std::string& spec) {
  std::error_code error;
  return spec.find_first_of("*?[") != std::string::npos && !fs::exists(spec, error);
}

std::vector<fs::path> files_in(const fs::path& folder) {
  std::vector<fs::path> files;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error))
    if (is_llmc_file(it->path())) files.push_back(it->path());
  return sorted(std::move(files));
}

bool is_for_validation(const fs::path& file) { return file.filename().string().find("val") != std::string::npos; }

// Of a pattern for files to train on.
std::vector<fs::path> validation_files(std::string pattern) {
  const size_t at = pattern.rfind("train");
  if (at == std::string::npos || pattern.find('/', at) != std::string::npos) return {};
  return matches(pattern.replace(at, 5, "val"));
}

// Of shards there may be more than a process has files open as usual; where it may not have more, opening says so.
void allow_open_files(size_t count) {
  ::rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  const rlim_t wanted = std::min<rlim_t>(limit.rlim_max, count + 256);
  if (limit.rlim_cur >= wanted) return;
  limit.rlim_cur = wanted;
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

}  // namespace

std::vector<fs::path> matching_files(const std::string& spec) {
  if (!is_pattern(spec)) return {};
  std::vector<fs::path> files = matches(spec);
  if (files.empty()) throw InputError(fmt::format("`data` '{}': no file matches", spec));
  return files;
}

bool names_shards(const std::string& spec) {
  if (is_pattern(spec)) return true;
  std::error_code error;
  return fs::is_directory(spec, error) && !fs::exists(fs::path(spec) / "dataset.json", error) &&
         !files_in(spec).empty();
}

ShardFiles find_shards(const std::string& spec) {
  const bool pattern = is_pattern(spec);
  const std::vector<fs::path> files = pattern ? matching_files(spec) : files_in(spec);
  ShardFiles out;
  std::vector<fs::path> val;
  for (const fs::path& f : files) {
    if (!is_llmc_file(f))
      throw InputError(fmt::format(
          "{}: expected a token file of llm.c; of several texts or lists of documents `tessera data` makes a dataset",
          f.string()));
    (is_for_validation(f) ? val : out.train).push_back(f);
  }
  if (val.empty() && pattern) val = validation_files(spec);
  if (val.empty() && !out.train.empty()) {
    val.push_back(out.train.back());
    out.train.pop_back();
  }
  if (out.train.empty())
    throw InputError(
        fmt::format("`data` '{}': {} file{}; expected at least one to train on, and another to validate on", spec,
                    files.size(), files.size() == 1 ? "" : "s"));
  out.val = val.front();
  out.unused.assign(val.begin() + 1, val.end());
  return out;
}

Dataset open_shards(const std::string& spec, const TokenizerChoice& choice) {
  const ShardFiles files = find_shards(spec);
  require_folder(spec, choice);
  Dataset d;
  d.source = spec;
  d.tokenizer = make_tokenizer(choice, "", "", spec);
  const int64_t vocab = d.tokenizer->vocab_size();
  allow_open_files(files.train.size());
  for (const fs::path& f : files.train) d.train.push_back(TokenFile::open_llmc(f, vocab));
  d.val = TokenFile::open_llmc(files.val, vocab);
  if (d.val.size() < 2)
    throw InputError(
        fmt::format("{}: {} tokens to validate on; expected at least 2", files.val.string(), d.val.size()));
  std::vector<int32_t> held(static_cast<size_t>(d.val.size()));
  d.val.copy(0, d.val.size(), held.data());
  d.val_bytes = std::ssize(d.tokenizer->decode(held));
  d.notes.push_back(fmt::format(
      "validated on {}{}", files.val.string(),
      files.unused.empty() ? "" : fmt::format(", not on {} more with \"val\" in their names", files.unused.size())));
  return d;
}

}  // namespace tessera
