// Functions that stand before the C library's.
#include "tests/train/system_calls.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>

namespace tessera::test {

std::vector<Watched>* watched = nullptr;
std::map<std::string, int> refused;

namespace {

std::string path_of(int fd) {
  std::string name(4096, '\0');
  const ssize_t n = readlink(("/proc/self/fd/" + std::to_string(fd)).c_str(), name.data(), name.size());
  return n > 0 ? name.substr(0, static_cast<size_t>(n)) : "";
}

void note(const char* call, const std::string& path) {
  if (watched != nullptr) watched->push_back({call, path});
}

// The errno of a call that is refused; else 0.
int refusal(const char* call) {
  if (refused.empty()) return 0;
  const auto found = refused.find(call);
  return found == refused.end() ? 0 : found->second;
}

bool is_folder(int fd) {
  struct stat info {};
  return fstat(fd, &info) == 0 && S_ISDIR(info.st_mode);
}

template <class F>
F* original(const char* name) {
  return reinterpret_cast<F*>(dlsym(RTLD_NEXT, name));
}

}  // namespace
}  // namespace tessera::test

namespace test = tessera::test;

extern "C" {
int fsync(int fd) {
  test::note("fsync", test::path_of(fd));
  if (const int cause = test::refusal("fsync"); cause != 0 && test::is_folder(fd)) {
    errno = cause;
    return -1;
  }
  return test::original<int(int)>("fsync")(fd);
}
int syncfs(int fd) noexcept {
  test::note("syncfs", test::path_of(fd));
  return test::original<int(int)>("syncfs")(fd);
}
ssize_t write(int fd, const void* bytes, size_t count) {
  test::note("write", test::watched != nullptr ? test::path_of(fd) : "");
  return test::original<ssize_t(int, const void*, size_t)>("write")(fd, bytes, count);
}
ssize_t pwrite(int fd, const void* bytes, size_t count, off_t at) {
  test::note("write", test::path_of(fd));
  return test::original<ssize_t(int, const void*, size_t, off_t)>("pwrite")(fd, bytes, count, at);
}
int rename(const char* from, const char* to) noexcept {
  test::note("rename", from);
  test::note("named", to);
  return test::original<int(const char*, const char*)>("rename")(from, to);
}
int renameat2(int from_dir, const char* from, int to_dir, const char* to, unsigned int flags) noexcept {
  if (const int cause = test::refusal("renameat2"); cause != 0 && flags != 0) {
    errno = cause;
    return -1;
  }
  test::note("rename", from);
  test::note("named", to);
  return test::original<int(int, const char*, int, const char*, unsigned int)>("renameat2")(from_dir, from, to_dir, to,
                                                                                            flags);
}
int posix_fallocate(int fd, off_t from, off_t size) {
  if (const int cause = test::refusal("fallocate")) return cause;
  return test::original<int(int, off_t, off_t)>("posix_fallocate")(fd, from, size);
}
void* mmap(void* at, size_t size, int protection, int flags, int fd, off_t from) noexcept {
  if (const int cause = fd >= 0 ? test::refusal("mmap") : 0) {
    errno = cause;
    return MAP_FAILED;
  }
  return test::original<void*(void*, size_t, int, int, int, off_t)>("mmap")(at, size, protection, flags, fd, from);
}
}
