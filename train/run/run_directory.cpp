// Run directories and their checkpoints.
#include "train/run/run_directory.h"

#include <fcntl.h>
#include <fmt/chrono.h>
#include <fmt/ranges.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <random>
#include <set>
#include <system_error>

#include "base/bad_input.h"
#include "base/files.h"
#include "base/json.h"
#include "base/setting_json.h"
#include "data/tokenizer.h"
#include "train/checkpoint/full_state.h"
#include "train/config_file.h"

namespace tessera {

namespace fs = std::filesystem;
using Json = nlohmann::json;

fs::path new_run_directory() {
  make_directories("runs");
  const std::string base = fmt::format("runs/{:%Y-%m-%d-%H%M%S}", fmt::localtime(std::time(nullptr)));
  fs::path path = base;
  std::error_code error;
  for (int i = 2; !fs::create_directory(path, error) && !error; ++i) path = fmt::format("{}-{}", base, i);
  if (error) throw OutputError(fmt::format("cannot create the directory {}: {}", path.string(), error.message()));
  return path;
}

namespace {

// True for a new directory or a run that failed before its first complete file. Throws OutputError if the directory is
// unreadable.
bool is_unused(const fs::path& directory) {
  std::error_code error;
  for (fs::directory_iterator it(directory, error), end; !error && it != end; it.increment(error))
    if (const std::string name = it->path().filename().string();
        name != "lock" && name != kFlightFile && !name.starts_with("config.toml.tmp-"))
      return false;
  if (error == std::errc::not_a_directory) return false;
  if (error) throw OutputError(fmt::format("cannot read the directory {}: {}", directory.string(), error.message()));
  return true;
}

// "7:3"
std::string mixture_fractions(const Dataset& d) {
  std::string out;
  for (const MixturePart& p : d.parts) out += fmt::format("{}{}", out.empty() ? "" : ":", p.ratio);
  return out;
}

// A run can resume a checkpoint only if these values are equal.
Json run_identity(TrainConfig o, const ModelConfig& c, const Dataset* d) {
  TrainConfig defaults;
  defaults.model.heads = c.heads, defaults.model.channels = c.channels;
  defaults.model = resolve_sizes(defaults.model);
  o.model = resolve_sizes(c);
  Json out = identity_fields(field_descriptors(o), field_descriptors(defaults));
  if (d) {
    out["tokenizer"] = d->tokenizer->kind();
    for (const auto& [name, sum] : d->checksums()) out[name] = sum;
    if (!d->parts.empty()) out["mixture"] = mixture_fractions(*d);
  }
  if (c.lora.rank > 0 && c.lora.scale() != 0) out["lora_scale"] = c.lora.scale();
  return out;
}

fs::path lock_path(const fs::path& run) { return run / "lock"; }

std::string owner_text() {
  std::array<char, 256> host{};
  ::gethostname(host.data(), host.size() - 1);
  std::random_device random;
  return fmt::format("process {} on {} since {:%Y-%m-%d %H:%M:%S} ({:08x}{:08x})\n", ::getpid(), host.data(),
                     fmt::localtime(std::time(nullptr)), random(), random());
}

}  // namespace

void check_checkpoint_finite(const Checkpoint& checkpoint) {
  for (const char* stem : {kModel, kOptimizer}) {
    if (stem == kOptimizer && !SavedTensors::are_in(checkpoint.path, stem)) continue;  // imported weights
    const SavedTensors saved(checkpoint.path, stem);
    for (const auto& file : saved.files())
      for (const TensorBytes& t : file->tensors())
        if (const int64_t at = first_not_finite(t.dtype, t.bytes); at >= 0)
          bad_input("{}: tensor '{}' has inf or nan at element {}; expected finite values", file->what(), t.name, at);
  }
}

RunDirectory::RunDirectory(const RunConfig& r) : path_(r.out ? fs::path(*r.out) : new_run_directory()) {
  const auto check_content = [&] {
    const bool is_run = is_there(path_ / "config.toml");
    if (r.resume && !is_run) bad_input("`resume`: {} is not a run directory: config.toml is missing", path_.string());
    if (!r.resume && is_there(path_) && !is_unused(path_))
      bad_usage("`out`: {} {}", path_.string(),
                is_run ? "already contains a run; resume it with train `resume` or choose a different directory"
                       : "exists and is not an empty directory; expected a new directory");
  };
  check_content();
  make_directories(path_);
  lock_ = std::make_unique<RunLock>(path_);
  check_content();  // another run may have started and ended
  removed_ = remove_stale(path_, true);
  for (const fs::path& path : remove_stale(checkpoints(), true)) removed_.push_back(path);
}

void RunDirectory::write_config(const std::string& toml) const {
  check();
  write_file(path_ / "config.toml",
             "# Resolved configuration of this run; `config` reads files in this format.\n" + toml);
}

std::unique_ptr<NewCheckpoint> RunDirectory::begin_checkpoint(int64_t step, const std::string& toml,
                                                              const Dataset* dataset) const {
  check();
  auto made = std::make_unique<NewCheckpoint>(checkpoints(), step);
  write_file(made->path() / "config.toml", toml);
  if (dataset) write_file(made->path() / "tokenizer.json", dataset->tokenizer->to_json());
  return made;
}

std::string about(const SavedRun& run, const ModelConfig& config, const TrainConfig& o, const Dataset* dataset) {
  return Json{{"run", run_identity(o, config, dataset)},
              {"layout", {{"ranks", run.ranks}, {"strategy", run.strategy}}},
              {"data_cursor", {{"next_step", run.steps}}},
              {"updates", run.updates},
              {"losses", run.losses}}
      .dump();
}

std::optional<RunDirectory::Saved> RunDirectory::saved(const ModelConfig& config, const TrainConfig& o,
                                                       const Dataset* dataset,
                                                       std::vector<std::string>& passed_over) const {
  const std::optional<Checkpoint> checkpoint = newest_checkpoint(checkpoints(), passed_over, check_checkpoint_finite);
  if (!checkpoint && passed_over.empty()) return {};
  if (!checkpoint) bad_input("{}: no usable checkpoint: {}", path_.string(), passed_over.front());
  const std::string now = run_identity(o, config, dataset).dump(), what = checkpoint->path.string();
  if (!SavedTensors::are_in(checkpoint->path, kOptimizer))
    bad_usage("`resume`: {} has no optimizer state; use `init` {} and a new `out`", what, path_.string());
  if (const auto found = differences(checkpoint->about, now, what); !found.empty())
    bad_usage("`resume`: {}: {}", what, fmt::join(found, "; "));
  const Json about = parse_json(checkpoint->about, what);
  const std::optional<int64_t> updates = natural(about.value("updates", Json(checkpoint->step)));
  const Json losses = about.value("losses", Json(0.0));
  if (!updates || !losses.is_number()) bad_input("{}: the manifest has no valid number of updates", what);
  return Saved{checkpoint->path, checkpoint->step, *updates, losses.get<double>()};
}

std::optional<PushLog> saved_order(const fs::path& checkpoint, int ranks, int servers) {
  const fs::path file = checkpoint / "pushes.txt";
  if (!is_there(file)) return {};
  PushLog order = parse_push_log(read_file(file), file.string());
  const std::vector<Push>& first = order.servers[0];
  const std::vector<int64_t> clocks = clocks_after(first, std::ssize(first), order.workers);
  const bool same = order.workers == ranks && order.servers.size() == static_cast<size_t>(servers);
  if (!same && std::ranges::adjacent_find(clocks, std::not_equal_to<>()) != clocks.end())
    bad_usage(
        "`resume`: {} was saved during a replay, with workers at different steps; expected `dp_mode` ps-async with {} "
        "ranks and {} servers",
        checkpoint.string(), order.workers, order.servers.size());
  return order;
}

static std::string value_text(const Json& value) { return value.is_null() ? "the default" : value.dump(); }

std::vector<std::string> differences(const std::string& about, const std::string& now, const std::string& what) {
  const Json saved = parse_json(about, what).value("run", Json());
  if (!saved.is_object()) bad_input("{}: the manifest does not identify its run", what);
  const Json current = Json::parse(now);
  std::vector<std::string> out;
  Json all = saved;
  all.update(current);
  for (const auto& [key, any] : all.items())
    if (const Json before = saved.value(key, Json()), value = current.value(key, Json());
        before != value &&
        !(before.is_null() && (key == "validation" || key == "vocabulary")))  // absent from old checkpoints
      out.push_back(fmt::format("{} is {}, but the checkpoint has {}", key, value_text(value), value_text(before)));
  return out;
}

void load_model(LanguageModel& model, const Checkpoint& checkpoint) {
  const SavedTensors weights(checkpoint.path, kModel);
  std::set<std::string> names;
  for (const Parameter* p : model.parameters()) names.insert(p->name);
  weights.expect_no_others(names);
  read_values(model.units(), weights.tensors());
  for (const FlatUnit& unit : model.units()) ++unit.values.storage()->version;
}

bool is_at(const fs::path& file, int fd) {
  struct stat opened {
  }, named{};
  return ::fstat(fd, &opened) == 0 && ::lstat(file.c_str(), &named) == 0 && opened.st_ino == named.st_ino &&
         opened.st_dev == named.st_dev;
}

RunLock::RunLock(const fs::path& run) : run_(run) {
  const fs::path file = lock_path(run);
  fd_ = ::open(file.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0644);
  if (fd_ < 0) throw OutputError(fmt::format("cannot write {}: {}", file.string(), std::strerror(errno)));
  const int cause = ::flock(fd_, LOCK_EX | LOCK_NB) == 0 ? 0 : errno;
  if (is_unknown_operation(cause)) {
    note_ = fmt::format(
        "{} cannot be locked ({}): do not start another run in this directory; this run stops if it detects one",
        run.string(), std::strerror(cause));
  } else if (cause != 0) {
    ::close(fd_);
    if (cause != EWOULDBLOCK) throw OutputError(fmt::format("cannot lock {}: {}", file.string(), std::strerror(cause)));
    const std::string owner = read(run);
    bad_usage("`out`: {} is being written by another run, {}; expected a different directory", run.string(),
              owner.empty() ? "which has just started" : owner.substr(0, owner.find(" (")));
  }
  text_ = owner_text();
  ssize_t done = 0, n = ::ftruncate(fd_, 0) == 0 ? 0 : -1;
  while (n >= 0 && done < std::ssize(text_)) {
    n = ::pwrite(fd_, text_.data() + done, text_.size() - static_cast<size_t>(done), done);
    if (n > 0 || (n < 0 && errno == EINTR))
      done += std::max<ssize_t>(n, 0), n = 0;
    else if (n == 0)
      errno = EIO, n = -1;
  }
  if (n >= 0) return;
  const int failed = errno;
  ::close(fd_);
  throw OutputError(fmt::format("cannot write {}: {}", file.string(), std::strerror(failed)));
}

RunLock::~RunLock() { ::close(fd_); }

void RunLock::check() const {
  if (!is_at(lock_path(run_), fd_))
    throw OutputError(
        fmt::format("{}: the run directory was removed, moved or replaced during the run", run_.string()));
  if (!note_.empty() && read_file(lock_path(run_)) != text_)
    throw OutputError(fmt::format("{} is being written by another run, {}", run_.string(), read(run_)));
}

bool RunLock::is_held(const fs::path& run) {
  const Descriptor file(::open(lock_path(run).c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC));
  return file.get() >= 0 && ::flock(file.get(), LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK;
}

std::string RunLock::read(const fs::path& run) {
  const std::string text = read_file(lock_path(run));
  return text.substr(0, text.find('\n'));
}

}  // namespace tessera
