// The files that a power cut leaves: nothing gets its name before its bytes are on the disk.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "data/checkpoint_dir.h"
#include "data/files.h"
#include "tests/data/system_calls.h"

namespace tessera {
namespace {
namespace fs = std::filesystem;
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

}  // namespace
}  // namespace tessera
