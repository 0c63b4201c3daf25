// Functions that the program finds before the C library's.
#include "tests/parallel/mpi/scarce.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sys/mman.h>

#include <cerrno>

namespace tessera::test {

Scarce scarce;

namespace {
template <class F>
F* original(const char* name) {
  return reinterpret_cast<F*>(dlsym(RTLD_NEXT, name));
}
}  // namespace
}  // namespace tessera::test

using tessera::test::original;
using tessera::test::scarce;

extern "C" {
int memfd_create(const char* name, unsigned int flags) noexcept {
  if (!scarce.memory) return original<int(const char*, unsigned int)>("memfd_create")(name, flags);
  errno = ENOSYS;
  return -1;
}
int pthread_create(pthread_t* made, const pthread_attr_t* how, void* (*body)(void*), void* of) noexcept {
  if (scarce.threads) return EAGAIN;
  return original<int(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*)>("pthread_create")(made, how, body,
                                                                                                     of);
}
}
