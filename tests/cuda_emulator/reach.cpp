// Protection keys, and the report of a forbidden access.
#include "tests/cuda_emulator/reach.h"

#include <sys/mman.h>
#include <sys/types.h>
#include <unistd.h>

#include <csignal>
#include <cstring>

// Intercepts all mappings of the program itself (--wrap=mmap); libraries' mappings bypass it.
void* mapped(void* at, size_t bytes, int access, int flags, int file, off_t offset) asm("__wrap_mmap");
void* mapped_really(void* at, size_t bytes, int access, int flags, int file, off_t offset) asm("__real_mmap");

namespace tessera::emulator {
namespace {

constexpr int kShared = 0;  // default key of all other memory
constexpr unsigned kAll = 0;

#ifndef __SANITIZE_ADDRESS__  // AddressSanitizer reports the access with its stack
struct sigaction before {};

void tell(int, siginfo_t* what, void*);
#endif

// Created before main, so that every thread inherits the host's rights.
struct Keys {
  Keys() : gpu(pkey_alloc(0, PKEY_DISABLE_ACCESS)), host(pkey_alloc(0, kAll)) {
#ifndef __SANITIZE_ADDRESS__
    struct sigaction action {};
    action.sa_sigaction = tell;
    action.sa_flags = SA_SIGINFO;
    if (gpu > 0 && host > 0) sigaction(SIGSEGV, &action, &before);
#endif
  }
  bool work() const { return gpu > 0 && host > 0; }
  int gpu, host;
};
const Keys keys;

#ifndef __SANITIZE_ADDRESS__
// Reports the access; it is then retried with the previous handler and ends the program.
void tell(int, siginfo_t* what, void*) {
  const auto say = [](const char* line) { [[maybe_unused]] const ssize_t n = write(2, line, std::strlen(line)); };
  if (what->si_code == SEGV_PKUERR && static_cast<int>(what->si_pkey) == keys.gpu)
    say("emulated GPU: the host touches the GPU's memory\n");
  if (what->si_code == SEGV_PKUERR && static_cast<int>(what->si_pkey) == keys.host)
    say("emulated GPU: a kernel touches the host's memory, which is not pinned\n");
  sigaction(SIGSEGV, &before, nullptr);
}
#endif

void allow(void* p, size_t bytes, int access, int key) {
  if (keys.work()) pkey_mprotect(p, bytes, access, key);
}

}  // namespace

Acting::Acting(Side as) : gpu_(kAll), host_(kAll) {
  if (!keys.work()) return;
  gpu_ = static_cast<unsigned>(pkey_get(keys.gpu));
  host_ = static_cast<unsigned>(pkey_get(keys.host));
  pkey_set(keys.gpu, as == Side::host ? PKEY_DISABLE_ACCESS : kAll);
  pkey_set(keys.host, as == Side::kernel ? PKEY_DISABLE_ACCESS : kAll);
}
Acting::~Acting() {
  if (!keys.work()) return;
  pkey_set(keys.gpu, gpu_);
  pkey_set(keys.host, host_);
}

bool is_guarded() { return keys.work(); }
void assign_to_gpu(void* p, size_t bytes) { allow(p, bytes, PROT_READ | PROT_WRITE, keys.gpu); }
void assign_to_host(void* p, size_t bytes) { allow(p, bytes, PROT_READ | PROT_WRITE, keys.host); }
void assign_to_both(void* p, size_t bytes) { allow(p, bytes, PROT_READ | PROT_WRITE, kShared); }

}  // namespace tessera::emulator

void* mapped(void* at, size_t bytes, int access, int flags, int file, off_t offset) {
  void* const p = mapped_really(at, bytes, access, flags, file, offset);
  if (p != MAP_FAILED && tessera::emulator::keys.work()) pkey_mprotect(p, bytes, access, tessera::emulator::keys.host);
  return p;
}
