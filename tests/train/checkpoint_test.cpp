// Checkpoint directories are complete or absent whatever happens during a save, and damaged ones are rejected. After a
// power failure no name refers to unflushed data. File systems without rename flags (NFS, Lustre, FUSE), preallocation,
// mapping or directory flushes are handled with the same guarantees.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <system_error>
#include <vector>

#include "data/safetensors.h"
#include "tensor/random.h"
#include "tests/data/support.h"
#include "train/checkpoint/directory.h"

namespace {

// File system calls are recorded, and rejected as by some file systems, through functions that take precedence over the
// C library's.
struct Watched {
  std::string call, path;
};
// Receives each call during a test; null: none.
std::vector<Watched>* watched = nullptr;

// The errno of each rejected call: "renameat2" (with flags), "fsync" (of directories), "fallocate", "mmap".
std::map<std::string, int> refused;

std::string descriptor_path(int fd) {
  std::error_code ignored;
  return std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(fd), ignored);
}

void note(const char* call, const std::string& path) {
  if (watched != nullptr) watched->push_back({call, path});
}

// Whether a call is rejected; sets errno.
bool refuses(const char* call) {
  const auto found = refused.find(call);
  if (found == refused.end()) return false;
  errno = found->second;
  return true;
}

// The calls made by an action.
std::vector<Watched> record_calls(const std::function<void()>& action) {
  std::vector<Watched> calls;
  watched = &calls;
  action();
  watched = nullptr;
  return calls;
}

template <class F>
F* original(const char* name) {
  return reinterpret_cast<F*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" {
int fsync(int fd) {
  note("fsync", descriptor_path(fd));
  if (std::filesystem::is_directory(descriptor_path(fd)) && refuses("fsync")) return -1;
  return original<int(int)>("fsync")(fd);
}
int syncfs(int fd) noexcept {
  note("syncfs", descriptor_path(fd));
  return original<int(int)>("syncfs")(fd);
}
ssize_t write(int fd, const void* bytes, size_t count) {
  note("write", watched != nullptr ? descriptor_path(fd) : "");
  return original<ssize_t(int, const void*, size_t)>("write")(fd, bytes, count);
}
ssize_t pwrite(int fd, const void* bytes, size_t count, off_t at) {
  note("write", descriptor_path(fd));
  return original<ssize_t(int, const void*, size_t, off_t)>("pwrite")(fd, bytes, count, at);
}
int rename(const char* from, const char* to) noexcept {
  note("rename", from);
  note("named", to);
  return original<int(const char*, const char*)>("rename")(from, to);
}
int renameat2(int from_dir, const char* from, int to_dir, const char* to, unsigned int flags) noexcept {
  if (flags != 0 && refuses("renameat2")) return -1;
  note("rename", from);
  note("named", to);
  return original<decltype(renameat2)>("renameat2")(from_dir, from, to_dir, to, flags);
}
int posix_fallocate(int fd, off_t from, off_t size) {
  if (refuses("fallocate")) return errno;
  return original<int(int, off_t, off_t)>("posix_fallocate")(fd, from, size);
}
void* mmap(void* at, size_t size, int protection, int flags, int fd, off_t from) noexcept {
  if (fd >= 0 && refuses("mmap")) return MAP_FAILED;
  return original<void*(void*, size_t, int, int, int, off_t)>("mmap")(at, size, protection, flags, fd, from);
}
}

namespace tessera {
namespace {

namespace fs = std::filesystem;

// A checkpoint directory for one test.
class CheckpointTest : public DataTest {
 protected:
  ~CheckpointTest() override {
    refused.clear();
    watched = nullptr;
  }
  std::filesystem::path dir() const { return path("checkpoints"); }
  std::optional<Checkpoint> newest() {
    passed_over_.clear();
    return newest_checkpoint(dir(), passed_over_);
  }
  std::vector<std::string> names() const { return names_in(dir()); }
  // Two files whose contents depend on the step.
  Checkpoint save(int64_t step, size_t keep = 9, size_t bytes = 3000) const {
    const auto content = [=](char ch) { return std::string(bytes, static_cast<char>(ch + step % 20)); };
    NewCheckpoint made(dir(), step);
    write_file(made.path() / "model.bin", content('a'));
    write_file(made.path() / "state.bin", content('A'));
    return made.finish(R"({"seed": 5})", keep);
  }
  // One file that contains `text`.
  Checkpoint save(int64_t step, const std::string& text, size_t keep = 9) const {
    NewCheckpoint made(dir(), step);
    write_file(made.path() / "text", text);
    return made.finish("{}", keep);
  }
  // The checkpoint from which a new run would resume.
  std::string newest_text() {
    const auto found = newest();
    EXPECT_TRUE(passed_over_.empty());
    return found ? fmt::format("{}: {}", found->step, read_file(found->path / "text")) : "";
  }
  std::vector<std::string> passed_over_;
};
using Names = std::vector<std::string>;

TEST_F(CheckpointTest, FindsNewestAndRemovesOldCheckpoints) {
  EXPECT_FALSE(newest());
  for (const int64_t step : {5, 100, 20}) save(step);
  EXPECT_EQ(newest()->step, 100);  // by number, not by name or time
  EXPECT_EQ(newest()->about, R"({"seed":5})");
  EXPECT_EQ(read_file(newest()->path / "model.bin"), std::string(3000, 'a'));
  EXPECT_EQ(read_file(dir() / "latest"), "step-20\n");
  save(200, 2);
  EXPECT_EQ(names(), (Names{"latest", "step-100", "step-200"}));
}

TEST_F(CheckpointTest, RetainsBestCheckpoint) {
  EXPECT_FALSE(best_checkpoint(dir()));
  save(10);
  write_best(dir(), {10, 1.5});
  for (const int64_t step : {20, 30, 40}) save(step, 2);
  EXPECT_EQ(names(), (Names{"best", "latest", "step-10", "step-30", "step-40"}));
  EXPECT_EQ(best_checkpoint(dir())->val_loss, 1.5);
  write_best(dir(), {40, 1.25});
  save(50, 1);
  EXPECT_EQ(names(), (Names{"best", "latest", "step-40", "step-50"}));
  fs::remove_all(dir() / "step-40");
  EXPECT_FALSE(best_checkpoint(dir())) << "it is no more";
}

// Several writers each write their own bytes; the result equals that of a single writer.
TEST_F(CheckpointTest, SharedFileMatchesSingleWriter) {
  fs::create_directories(dir());
  const std::string a(40, 'a'), b(24, 'b');
  const auto bytes = [](const std::string& s) { return std::as_bytes(std::span(s)); };
  const std::vector<TensorBytes> tensors = {{"x", DType::float32, {5, 2}, bytes(a)},
                                            {"y", DType::int64, {3}, bytes(b)}};
  write_safetensors(dir() / "one", tensors, {{"steps", "3"}});
  const SafetensorsLayout layout = safetensors_layout(tensors, {{"steps", "3"}});
  SharedFile::create(dir() / "parts", layout.header, layout.size);
  EXPECT_THROW(SharedFile::create(dir() / "parts", layout.header, layout.size), OutputError) << "it is there";
  const SharedFile first(dir() / "parts"), second(dir() / "parts");
  second.write(layout.begins.at("y"), bytes(b));
  first.write(layout.begins.at("x") + 8, bytes(a).subspan(8));
  second.write(layout.begins.at("x"), bytes(a).first(8));
  EXPECT_EQ(read_file(dir() / "parts"), read_file(dir() / "one"));
}

TEST_F(CheckpointTest, ReplacesExistingDirectoryAndRejectsFile) {
  save(7, 9, 10);
  save(7, 9, 20);
  EXPECT_EQ(fs::file_size(newest()->path / "model.bin"), 20U);
  EXPECT_EQ(names(), (Names{"latest", "step-7"}));
  std::ofstream(dir() / "step-8") << "x";
  EXPECT_THROW(save(8), OutputError);
  EXPECT_EQ(names(), (Names{"latest", "step-7", "step-8"}));
  EXPECT_EQ(newest()->step, 7);
}

TEST_F(CheckpointTest, ReportsAndSkipsDamagedCheckpoints) {
  const auto damage = [&](const std::string& message, const std::string& name, const std::optional<std::string>& left) {
    save(10);
    const fs::path newer = save(20).path;
    fs::remove(newer / name);
    if (left) write_file(newer / name, *left);
    expect_error(Status::input, {message}, [&] { open_checkpoint(newer); });
    EXPECT_EQ(newest()->step, 10);
    ASSERT_EQ(passed_over_.size(), 1U);
    EXPECT_TRUE(has(passed_over_[0], message));
    fs::remove_all(dir());
  };
  const fs::path complete = save(20).path;
  const std::string manifest = read_file(complete / "manifest.json");
  std::string state = read_file(complete / "state.bin");
  state[1234] = static_cast<char>(state[1234] ^ 4);  // one bit
  damage("state.bin", "state.bin", state);
  damage("model.bin", "model.bin", std::string(2999, 'a'));
  damage("model.bin", "model.bin", {});
  damage("manifest.json", "manifest.json", {});
  damage("manifest.json", "manifest.json", manifest.substr(0, 50));
  damage("version", "manifest.json", R"({"format":"tessera checkpoint","version":2})");
  damage("not a checkpoint", "manifest.json", "[]");
  damage("no checkpoint files are listed", "manifest.json",
         R"({"format":"tessera checkpoint","version":1,"step":1,"files":{},"about":{}})");
  EXPECT_THROW(open_checkpoint(dir() / "step-99"), InputError);
}

// A file size limit simulates a full disk: the write fails midway.
TEST_F(CheckpointTest, FailedSaveOnFullDiskLeavesNoFilesAndNamesFile) {
  save(10, 9, 1000);
  write_file(NewCheckpoint(dir(), 20).path() / "model.bin", "abc");  // abandoned
  EXPECT_EQ(names(), (Names{"latest", "step-10"}));
  EXPECT_EQ(newest()->step, 10);
  expect_full_disk(2000, "model.bin", [&] { save(20, 1, 100000); });
  EXPECT_EQ(names(), (Names{"latest", "step-10"}));
  EXPECT_EQ(newest()->step, 10);
}

// Kills at random moments during repeated saves: a complete checkpoint always remains, and partial ones are removed.
TEST_F(CheckpointTest, KillAtAnyMomentLeavesCompleteCheckpoint) {
  save(1, 2, 200000);
  const Philox random(8);
  int unfinished = 0;
  for (uint64_t round = 0; round < 25; ++round) {
    const int64_t from = newest()->step;
    const pid_t child = fork();
    if (child == 0) {
      for (int64_t step = from + 1;; ++step) save(step, 2, 200000);
    }
    usleep(static_cast<useconds_t>(1000 + random.below(25000, round)));
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    const std::optional<Checkpoint> found = newest();
    ASSERT_TRUE(found);
    EXPECT_TRUE(passed_over_.empty()) << passed_over_[0];
    EXPECT_GE(found->step, from);
    for (const std::string& name : names()) unfinished += name.find(".tmp-") != std::string::npos;
    remove_stale(dir(), true);
  }
  for (const std::string& name : names()) EXPECT_FALSE(has(name, ".tmp-"));
  EXPECT_GT(unfinished, 0);
}

// This process has no save in progress, so a partial checkpoint with its pid belongs to a dead process.
TEST_F(CheckpointTest, RetainsPartialCheckpointsOfLiveProcesses) {
  save(1);
  const pid_t living = fork();
  if (living == 0) {
    for (;;) pause();
  }
  const fs::path theirs = dir() / ("step-5.tmp-" + std::to_string(living)), dead = dir() / "step-6.tmp-999999999",
                 ours = dir() / ("step-7.tmp-" + std::to_string(getpid()));
  for (const fs::path& attempt : {theirs, dead, ours}) fs::create_directories(attempt);
  std::vector<fs::path> removed = remove_stale(dir(), true);
  std::sort(removed.begin(), removed.end());
  EXPECT_EQ(removed, (std::vector<fs::path>{dead, ours}));
  EXPECT_TRUE(fs::exists(theirs));
  EXPECT_FALSE(fs::exists(dead) || fs::exists(ours));
  EXPECT_EQ(newest()->step, 1);
  kill(living, SIGKILL);
  waitpid(living, nullptr, 0);
  EXPECT_EQ(remove_stale(dir(), true), (std::vector<fs::path>{theirs}));
}

class FlushTest : public testing::Test {
 protected:
  FlushTest() { watched = &calls_; }
  ~FlushTest() override { watched = nullptr; }
  // Index of the last such call, or -1 if there is none.
  int64_t last(const std::string& call, const fs::path& path) const {
    for (size_t i = calls_.size(); i-- > 0;)
      if (calls_[i].call == call && calls_[i].path == path.string()) return static_cast<int64_t>(i);
    return -1;
  }
  void expect_flushed_before(const fs::path& path, int64_t before) const {
    EXPECT_GT(last("fsync", path), last("write", path)) << path;
    EXPECT_LT(last("fsync", path), before) << path;
    EXPECT_GE(last("fsync", path), 0) << path;
  }
  TemporaryDirectory directory_{fs::canonical(fs::temp_directory_path()) / "tessera-flush-"};
  std::vector<Watched> calls_;
};

TEST_F(FlushTest, FlushesFileBeforeRename) {
  write_file(directory_.path() / "file", "some words");
  const int64_t named = last("named", directory_.path() / "file");
  ASSERT_GT(named, 0);
  expect_flushed_before(calls_[static_cast<size_t>(named) - 1].path, named);
}

TEST_F(FlushTest, FlushesCheckpointBeforeRename) {
  NewCheckpoint made(directory_.path(), 3);
  const fs::path attempt = made.path();
  write_file(attempt / "one", "words");
  SharedFile::create(attempt / "parts", "header", 100);
  const std::string bytes(50, 'x');
  const SharedFile parts(attempt / "parts");
  parts.write(6, std::as_bytes(std::span(bytes)));
  parts.flush();
  made.finish("{}", 2);
  const int64_t named = last("named", directory_.path() / "step-3");
  ASSERT_GT(named, 0);
  expect_flushed_before(attempt / "parts", named);
  for (const char* file : {"one", "manifest.json"}) {
    const int64_t file_named = last("named", attempt / file);
    ASSERT_GT(file_named, 0) << file;
    EXPECT_LT(file_named, last("fsync", attempt)) << file;
    expect_flushed_before(calls_[static_cast<size_t>(file_named) - 1].path, file_named);
  }
  EXPECT_LT(last("fsync", attempt), named) << "the folder's own entries";
  EXPECT_GT(last("named", attempt / "manifest.json"), last("write", attempt / "parts")) << "the manifest comes last";
  EXPECT_GT(last("fsync", directory_.path()), named) << "its name is on the disk";
  EXPECT_GT(last("named", directory_.path() / "latest"), last("fsync", directory_.path())) << "before `latest` says it";
}

using FileSystems = CheckpointTest;

TEST_F(FileSystems, SavesIfRenameat2Fails) {
  for (const int cause : {EINVAL, ENOSYS, EOPNOTSUPP}) {
    refused["renameat2"] = cause;
    EXPECT_EQ(read_file(save(3, "first").path / "text"), "first");
    EXPECT_EQ(read_file(save(3, "second").path / "text"), "second") << "in the place of another";
    EXPECT_EQ(names(), (Names{"latest", "step-3"})) << std::strerror(cause);
    EXPECT_EQ(newest_text(), "3: second");
    save(4, "third", 1);
    EXPECT_EQ(names(), (Names{"latest", "step-4"}));
    fs::remove_all(dir());
  }
  refused["renameat2"] = EIO;
  expect_error(Status::output, {"cannot create the checkpoint", "Input/output error"}, [&] { save(5, "lost"); });
  EXPECT_EQ(names(), Names{});
}

// Only an empty directory is replaced.
TEST_F(FileSystems, RenameFallbackReplacesNoForeignFiles) {
  refused["renameat2"] = EINVAL;
  fs::create_directories(dir());
  std::ofstream(dir() / "step-3") << "a file of somebody's";
  expect_error(Status::output, {"cannot create the checkpoint", "step-3"}, [&] { save(3, "first"); });
  EXPECT_EQ(read_file(dir() / "step-3"), "a file of somebody's");
  EXPECT_EQ(names(), Names{"step-3"});
}

// A program killed between any two calls leaves the old or the new checkpoint of that step.
TEST_F(FileSystems, KillDuringReplacementLosesNoCheckpoint) {
  refused["renameat2"] = EINVAL;
  save(2, "early");
  save(3, "old");
  write_best(dir(), {3, 1.5});
  const fs::path complete = path("whole");
  fs::copy(dir(), complete, fs::copy_options::recursive);
  // The old checkpoint is renamed, and the new one is not yet in place.
  fs::rename(dir() / "step-3", dir() / "step-3.replaced");
  EXPECT_EQ(newest_text(), "3: old");
  ASSERT_TRUE(best_checkpoint(dir()));
  EXPECT_EQ(best_checkpoint(dir())->step, 3);
  save(3, "new");
  EXPECT_EQ(newest_text(), "3: new");
  EXPECT_EQ(names(), (Names{"best", "latest", "step-2", "step-3"})) << "the older one goes at the next save";
  // The old checkpoint is renamed and replaced, but not yet removed.
  fs::rename(complete / "step-3", dir() / "step-3.replaced");
  EXPECT_EQ(newest_text(), "3: new");
  save(4, "next");
  EXPECT_EQ(names(), (Names{"best", "latest", "step-2", "step-3", "step-4"}));
  EXPECT_EQ(newest_text(), "4: next");
}

TEST_F(FileSystems, FlushesRenameOfOldCheckpointFirst) {
  refused["renameat2"] = EINVAL;
  save(3, "old");
  const std::vector<Watched> calls = record_calls([&] { save(3, "new"); });
  const auto at = [&](const std::string& call, const fs::path& path, int64_t from = 0) {
    for (int64_t i = from; i < std::ssize(calls); ++i)
      if (calls[static_cast<size_t>(i)].call == call && calls[static_cast<size_t>(i)].path == path.string()) return i;
    return int64_t{-1};
  };
  const fs::path directory = fs::canonical(dir());
  const int64_t moved = at("named", dir() / "step-3.replaced"), named = at("named", dir() / "step-3");
  ASSERT_GT(moved, 0);
  EXPECT_GT(named, at("fsync", directory, moved));
  EXPECT_GT(at("fsync", directory, moved), moved);
  const int64_t flushed = at("fsync", directory, named), removed = at("rename", dir() / "step-3.replaced", named);
  EXPECT_GT(flushed, named);
  EXPECT_GT(removed, flushed) << "the old one stays until the new one's name is on the disk";
}

TEST_F(FileSystems, FlushesFileSystemIfDirectoryFlushFails) {
  for (const int cause : {EINVAL, EOPNOTSUPP}) {
    refused["fsync"] = cause;
    const std::vector<Watched> calls = record_calls([&] { save(1, "text"); });
    EXPECT_EQ(std::ranges::count(calls, std::string("syncfs"), &Watched::call), 2) << std::strerror(cause);
  }
  refused["fsync"] = EIO;
  expect_error(Status::output, {"cannot flush", "Input/output error"}, [&] { save(2, "text"); });
}

TEST_F(FileSystems, AllocatesByWritingIfFallocateFails) {
  for (const int cause : {EINVAL, ENOSYS}) {
    refused["fallocate"] = cause;
    const fs::path made = path(fmt::format("shared-{}", cause));
    SharedFile::create(made, "first", 3'000'000);
    EXPECT_EQ(read_file(made), "first" + std::string(3'000'000 - 5, '\0'));
    struct stat info {};
    ASSERT_EQ(::stat(made.c_str(), &info), 0);
    EXPECT_GE(info.st_blocks * 512, 3'000'000) << "no holes";
    const auto region = file_region(path(""));
    region->commit(1000);
    region->base()[999] = std::byte{7};
    region->commit(9'000'000);
    EXPECT_EQ(region->base()[999], std::byte{7}) << "what is there stays";
    region->base()[8'999'999] = std::byte{8};
  }
  refused["fallocate"] = ENOSPC;
  expect_error(Status::output, {"of 10 bytes", "No space left"},
               [&] { SharedFile::create(path("full"), "first", 10); });
}

TEST_F(FileSystems, ReadsFilesIfMappingFails) {
  const fs::path some = file("some", std::string(100'000, 'a') + "end");
  refused["mmap"] = ENODEV;
  const MappedFile complete(some);
  ASSERT_EQ(complete.bytes().size(), 100'003U);
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(complete.bytes().data()) + 99'999, 4), "aend");
  EXPECT_EQ(mapped_file_at(complete.bytes().data()), nullptr) << "nobody can cut it short";
  expect_error(Status::output, {"cannot map a file for tensors", "TMPDIR"}, [&] { file_region(path("")); });
  refused["mmap"] = ENOMEM;
  expect_error(Status::input, {"cannot map", "some"}, [&] { MappedFile{some}; });
}

}  // namespace
}  // namespace tessera
