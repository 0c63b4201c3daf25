// A table of algorithms on a file system that has no locks: refused before anything is computed.
#include <dlfcn.h>
#include <sys/file.h>

#include <cerrno>
#include <cstring>

#include "tensor/cuda/gpus.h"
#include "tensor/ops/matmul/cuda/product.h"
#include "tests/support/errors.h"

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

TEST(AlgorithmLocks, AFolderWithoutLocksIsNamed) {
  if constexpr (kWithCuda) {
    for (const int cause : {ENOSYS, ENOLCK, EOPNOTSUPP}) {
      refused = cause;
      expect_error(Status::output, {std::strerror(cause), "TESSERA_CACHE names"},
                   [] { cuda::keep_algorithms_in(testing::TempDir()); });
      refused = 0;
    }
  } else {
    GTEST_SKIP() << "a build without CUDA";
  }
}

}  // namespace
}  // namespace tessera
