// Ways around what a file system does not know.
#include "tensor/file_system.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <vector>

namespace tessera {

bool is_unknown_operation(int cause) {
  return cause == EINVAL || cause == ENOSYS || cause == EOPNOTSUPP || cause == ENOLCK || cause == ENODEV;
}

int make_room(int descriptor, int64_t from, int64_t to) {
  int cause = EINTR;
  while (cause == EINTR) cause = ::posix_fallocate(descriptor, from, to - from);
  if (!is_unknown_operation(cause)) return cause;
  const std::vector<char> zeros(size_t{1} << 20);
  while (from < to) {
    const ssize_t n = ::pwrite(descriptor, zeros.data(), std::min(zeros.size(), static_cast<size_t>(to - from)), from);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return n < 0 ? errno : EIO;
    from += n;
  }
  return 0;
}

}  // namespace tessera
