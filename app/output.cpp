// Writing to standard output.
#include "app/output.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "tensor/error.h"

namespace tessera {

void open_standard_descriptors() {
  for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; ++fd)
    if (::fcntl(fd, F_GETFD) < 0 && ::open("/dev/null", O_RDWR) != fd)  // the lowest that is free
      std::abort();
}

bool print(std::string_view text) {
  errno = 0;
  if (std::fwrite(text.data(), 1, text.size(), stdout) == text.size() && std::fflush(stdout) == 0) return true;
  const int cause = errno;
  std::clearerr(stdout);
  if (cause == EPIPE) return false;
  throw OutputError(fmt::format("cannot write standard output: {}", std::strerror(cause)));
}

}  // namespace tessera
