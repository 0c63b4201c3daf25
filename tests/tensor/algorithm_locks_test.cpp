// An algorithm table on a file system without locks is rejected before any computation.
#include <cstring>

#include "tensor/cuda/gpus.h"
#include "tensor/ops/matmul/cuda/gemm.h"
#include "tests/support/errors.h"
#include "tests/support/no_locks.h"

namespace tessera {
namespace {

TEST(AlgorithmLocks, ReportsDirectoryWithoutLockSupport) {
  if constexpr (kWithCuda) {
    for (const int cause : {ENOSYS, ENOLCK, EOPNOTSUPP}) {
      refused = cause;
      expect_error(Status::output, {std::strerror(cause), "set TESSERA_CACHE"},
                   [] { cuda::cache_algorithms_in(testing::TempDir()); });
      refused = 0;
    }
  } else {
    GTEST_SKIP() << "a build without CUDA";
  }
}

}  // namespace
}  // namespace tessera
