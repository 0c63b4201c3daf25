// The lock of a run's folder, and a file system that has no locks: the run says so, and ends where it meets another.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/file.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <optional>

#include "app/run/directory.h"
#include "data/files.h"
#include "tests/data/support.h"

namespace {
int refused = 0;  // the errno of locks; 0: there are some
}  // namespace

// Found by the program before the C library's.
extern "C" int flock(int fd, int how) noexcept {
  if (refused != 0) {
    errno = refused;
    return -1;
  }
  return reinterpret_cast<int (*)(int, int)>(dlsym(RTLD_NEXT, "flock"))(fd, how);
}

namespace tessera {
namespace {

class RunLocks : public testing::Test {
 protected:
  ~RunLocks() override { refused = 0; }
  const std::filesystem::path& run() const { return folder_.path(); }
  TemporaryDirectory folder_{std::filesystem::temp_directory_path() / "tessera-lock-"};
};

TEST_F(RunLocks, AFolderHasOneWriter) {
  std::optional<RunLock> first(run());
  EXPECT_EQ(first->note(), "");
  first->check();
  expect_error(Status::usage, {"is being written by another run, process"}, [&] { RunLock second(run()); });
  first->check();
  first.reset();
  RunLock(run()).check();
}

TEST_F(RunLocks, WithoutLocksARunEndsWhereItMeetsAnother) {
  for (const int cause : {ENOSYS, ENOLCK, EOPNOTSUPP}) {
    refused = cause;
    const RunLock first(run());
    EXPECT_NE(first.note().find(std::strerror(cause)), std::string::npos) << first.note();
    first.check();
    const RunLock second(run());
    second.check();
    expect_error(Status::output, {"is being written by another run, process"}, [&] { first.check(); });
    second.check();
  }
  refused = EIO;
  expect_error(Status::output, {"cannot lock", "Input/output error"}, [&] { RunLock failed(run()); });
}

}  // namespace
}  // namespace tessera
