// Emulates a file system without locks, for the one test file of a program that includes this.
#pragma once
#include <dlfcn.h>
#include <sys/file.h>

#include <cerrno>

namespace {
int refused = 0;  // errno of lock calls; 0: supported
}  // namespace

// Takes precedence over the C library's.
extern "C" int flock(int fd, int how) noexcept {
  if (refused != 0) {
    errno = refused;
    return -1;
  }
  return reinterpret_cast<int (*)(int, int)>(dlsym(RTLD_NEXT, "flock"))(fd, how);
}
