// Writing to standard output.
#include "app/output.h"

#include <fmt/format.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "tensor/error.h"

namespace tessera {

bool print(std::string_view text) {
  errno = 0;
  if (std::fwrite(text.data(), 1, text.size(), stdout) == text.size() && std::fflush(stdout) == 0) return true;
  const int cause = errno;
  std::clearerr(stdout);
  if (cause == EPIPE) return false;
  throw OutputError(fmt::format("cannot write standard output: {}", std::strerror(cause)));
}

}  // namespace tessera
