// Files after a power cut: nothing gets its name before its bytes are on the disk. And file systems that refuse what
// ext4 does: renaming with flags (NFS, Lustre, FUSE), making room, mapping, flushing a folder. Everything has its way
// around that, and promises what it promises elsewhere.
#include <fmt/format.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>

#include "tensor/arena.h"
#include "tests/train/checkpoints.h"
#include "tests/train/system_calls.h"

namespace tessera {
namespace {
namespace fs = std::filesystem;
using test::refused;
using test::watched;

class FlushTest : public testing::Test {
 protected:
  FlushTest() { watched = &calls_; }
  ~FlushTest() override { watched = nullptr; }
  // The place of the last such call, -1 where there is none.
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
  TemporaryDirectory folder_{fs::canonical(fs::temp_directory_path()) / "tessera-flush-"};
  std::vector<test::Watched> calls_;
};

TEST_F(FlushTest, AFileIsOnTheDiskBeforeItHasItsName) {
  write_file(folder_.path() / "file", "some words");
  const int64_t named = last("named", folder_.path() / "file");
  ASSERT_GT(named, 0);
  expect_flushed_before(calls_[static_cast<size_t>(named) - 1].path, named);
}

TEST_F(FlushTest, ACheckpointIsOnTheDiskBeforeItHasItsName) {
  NewCheckpoint made(folder_.path(), 3);
  const fs::path attempt = made.path();
  write_file(attempt / "one", "words");
  SharedFile::create(attempt / "parts", "header", 100);
  const std::string bytes(50, 'x');
  const SharedFile parts(attempt / "parts");
  parts.write(6, std::as_bytes(std::span(bytes)));
  parts.flush();
  made.finish("{}", 2);
  const int64_t named = last("named", folder_.path() / "step-3");
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
  EXPECT_GT(last("fsync", folder_.path()), named) << "its name is on the disk";
  EXPECT_GT(last("named", folder_.path() / "latest"), last("fsync", folder_.path())) << "before `latest` says it";
}

class FileSystems : public Checkpoints {
 protected:
  ~FileSystems() override {
    refused.clear();
    watched = nullptr;
  }
  // A checkpoint whose one file holds `text`.
  Checkpoint save(int64_t step, const std::string& text, size_t keep = 9) const {
    NewCheckpoint made(dir(), step);
    write_file(made.path() / "text", text);
    return made.finish("{}", keep);
  }
  // The checkpoint that a run which begins now goes on from.
  std::string newest_text() {
    const auto found = newest();
    EXPECT_TRUE(passed_over_.empty());
    return found ? fmt::format("{}: {}", found->step, read_file(found->path / "text")) : "";
  }
};
using Names = std::vector<std::string>;

TEST_F(FileSystems, ACheckpointIsMadeWherePlainRenamingIsAllThereIs) {
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
  expect_error(Status::output, {"cannot make the checkpoint", "Input/output error"}, [&] { save(5, "lost"); });
  EXPECT_EQ(names(), Names{});
}

// Nothing but an empty folder gives way.
TEST_F(FileSystems, PlainRenamingReplacesNothingUnseen) {
  refused["renameat2"] = EINVAL;
  fs::create_directories(dir());
  std::ofstream(dir() / "step-3") << "a file of somebody's";
  expect_error(Status::output, {"cannot make the checkpoint", "step-3"}, [&] { save(3, "first"); });
  EXPECT_EQ(read_file(dir() / "step-3"), "a file of somebody's");
  EXPECT_EQ(names(), Names{"step-3"});
}

// A program that is killed between any two of its calls leaves the older checkpoint of that step or the newer one.
TEST_F(FileSystems, AKillWhileAStepIsReplacedLosesNothing) {
  refused["renameat2"] = EINVAL;
  save(2, "early");
  save(3, "old");
  write_best(dir(), {3, 1.5});
  const fs::path whole = path("whole");
  fs::copy(dir(), whole, fs::copy_options::recursive);
  // Moved aside, and nothing more.
  fs::rename(dir() / "step-3", dir() / "step-3.replaced");
  EXPECT_EQ(newest_text(), "3: old");
  ASSERT_TRUE(best_checkpoint(dir()));
  EXPECT_EQ(best_checkpoint(dir())->step, 3);
  save(3, "new");
  EXPECT_EQ(newest_text(), "3: new");
  EXPECT_EQ(names(), (Names{"best", "latest", "step-2", "step-3"})) << "the older one goes at the next save";
  // Moved aside and replaced, and not yet removed.
  fs::rename(whole / "step-3", dir() / "step-3.replaced");
  EXPECT_EQ(newest_text(), "3: new");
  save(4, "next");
  EXPECT_EQ(names(), (Names{"best", "latest", "step-2", "step-3", "step-4"}));
  EXPECT_EQ(newest_text(), "4: next");
}

TEST_F(FileSystems, TheOldOneIsOnTheDiskUnderItsOtherNameBeforeTheNewOneHasItsOwn) {
  refused["renameat2"] = EINVAL;
  save(3, "old");
  std::vector<test::Watched> calls;
  watched = &calls;
  save(3, "new");
  watched = nullptr;
  const auto at = [&](const std::string& call, const fs::path& path, int64_t from = 0) {
    for (int64_t i = from; i < std::ssize(calls); ++i)
      if (calls[static_cast<size_t>(i)].call == call && calls[static_cast<size_t>(i)].path == path.string()) return i;
    return int64_t{-1};
  };
  const fs::path folder = fs::canonical(dir());
  const int64_t moved = at("named", dir() / "step-3.replaced"), named = at("named", dir() / "step-3");
  ASSERT_GT(moved, 0);
  EXPECT_GT(named, at("fsync", folder, moved));
  EXPECT_GT(at("fsync", folder, moved), moved);
  const int64_t flushed = at("fsync", folder, named), removed = at("rename", dir() / "step-3.replaced", named);
  EXPECT_GT(flushed, named);
  EXPECT_GT(removed, flushed) << "the old one stays until the new one's name is on the disk";
}

TEST_F(FileSystems, AFolderThatCannotBeFlushedIsFlushedWithAll) {
  std::vector<test::Watched> calls;
  for (const int cause : {EINVAL, EOPNOTSUPP}) {
    refused["fsync"] = cause;
    calls.clear();
    watched = &calls;
    save(1, "text");
    watched = nullptr;
    EXPECT_EQ(std::ranges::count(calls, std::string("syncfs"), &test::Watched::call), 2) << std::strerror(cause);
  }
  refused["fsync"] = EIO;
  expect_error(Status::output, {"cannot flush", "Input/output error"}, [&] { save(2, "text"); });
}

TEST_F(FileSystems, RoomIsMadeByWritingWhereItCannotBePromised) {
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

TEST_F(FileSystems, AFileThatCannotBeMappedIsRead) {
  const fs::path some = file("some", std::string(100'000, 'a') + "end");
  refused["mmap"] = ENODEV;
  const MappedFile whole(some);
  ASSERT_EQ(whole.bytes().size(), 100'003U);
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(whole.bytes().data()) + 99'999, 4), "aend");
  EXPECT_EQ(mapped_file_at(whole.bytes().data()), nullptr) << "nobody can cut it short";
  expect_error(Status::output, {"cannot map a file to keep tensors in", "TMPDIR"}, [&] { file_region(path("")); });
  refused["mmap"] = ENOMEM;
  expect_error(Status::input, {"cannot map", "some"}, [&] { MappedFile{some}; });
}

}  // namespace
}  // namespace tessera
