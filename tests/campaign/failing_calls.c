/* A library for LD_PRELOAD that fails one system call of a program: tests/campaign/faults.py compiles it.
 *
 * Of the calls that create or write files in FAULT_FOLDER, call number FAULT_AT (from 1) fails with errno FAULT_ERRNO; 0
 * makes a write short. If FAULT_LOG is set, each call is logged there with name and path. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static atomic_long calls;

/* Whether this call must fail; errno 0 requests a short write instead. */
static int is_here(const char *name, const char *path) {
  const char *const folder = getenv("FAULT_FOLDER"), *const at = getenv("FAULT_AT"), *const log = getenv("FAULT_LOG");
  if (!folder || strncmp(path, folder, strlen(folder)) != 0) return 0;
  const long number = atomic_fetch_add(&calls, 1) + 1;
  if (log) {
    char line[PATH_MAX + 64];
    const int n = snprintf(line, sizeof line, "%s %s\n", name, path);
    const int fd = (int)syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
    if (fd >= 0) {
      syscall(SYS_write, fd, line, (size_t)n);
      syscall(SYS_close, fd);
    }
  }
  if (!at || number != atol(at)) return 0;
  errno = atoi(getenv("FAULT_ERRNO"));
  return 1;
}

static int of_name(const char *name, int folder, const char *path) {
  char whole[2 * PATH_MAX], from[PATH_MAX] = "", link[64];
  if (path[0] != '/') {
    if (folder == AT_FDCWD) {
      if (!getcwd(from, sizeof from)) return 0;
    } else {
      snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
      const ssize_t n = readlink(link, from, sizeof from - 1);
      if (n <= 0) return 0;
      from[n] = 0;
    }
    snprintf(whole, sizeof whole, "%s/%s", from, path);
    path = whole;
  }
  return is_here(name, path);
}

static int of_file(const char *name, int fd) {
  char link[64], path[PATH_MAX];
  const int saved = errno, flags = fcntl(fd, F_GETFL);
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const ssize_t n = flags < 0 || (flags & O_ACCMODE) == O_RDONLY ? -1 : readlink(link, path, sizeof path - 1);
  errno = saved;
  if (n <= 0) return 0;
  path[n] = 0;
  return is_here(name, path);
}

/* The C library's function, looked up at the first call. */
#define REAL(type, name, ...)                                              \
  static type (*real)(__VA_ARGS__);                                        \
  if (!real) *(void **)&real = dlsym(RTLD_NEXT, #name)

#define OPEN(name)                                                         \
  int name(const char *path, int flags, ...) {                             \
    REAL(int, name, const char *, int, ...);                               \
    va_list more;                                                          \
    va_start(more, flags);                                                 \
    const mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0; \
    va_end(more);                                                          \
    if ((flags & O_ACCMODE) != O_RDONLY && of_name("open", AT_FDCWD, path) && errno) return -1; \
    return real(path, flags, mode);                                        \
  }
OPEN(open)
OPEN(open64)

#define FOPEN(name)                                                        \
  FILE *name(const char *path, const char *mode) {                         \
    REAL(FILE *, name, const char *, const char *);                        \
    if (mode[0] != 'r' && of_name("fopen", AT_FDCWD, path) && errno) return NULL; \
    return real(path, mode);                                               \
  }
FOPEN(fopen)
FOPEN(fopen64)

ssize_t write(int fd, const void *bytes, size_t n) {
  REAL(ssize_t, write, int, const void *, size_t);
  if (of_file("write", fd)) {
    if (errno) return -1;
    n = n > 1 ? n / 2 : n;
  }
  return real(fd, bytes, n);
}
ssize_t writev(int fd, const struct iovec *parts, int n) {
  REAL(ssize_t, writev, int, const struct iovec *, int);
  if (of_file("writev", fd) && errno) return -1;
  return real(fd, parts, n);
}
#define PWRITE(name, offset)                                               \
  ssize_t name(int fd, const void *bytes, size_t n, offset at) {           \
    REAL(ssize_t, name, int, const void *, size_t, offset);                \
    if (of_file("pwrite", fd)) {                                           \
      if (errno) return -1;                                                \
      n = n > 1 ? n / 2 : n;                                               \
    }                                                                      \
    return real(fd, bytes, n, at);                                         \
  }
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)

#define ON_FILE(name)                                                      \
  int name(int fd) {                                                       \
    REAL(int, name, int);                                                  \
    return of_file(#name, fd) && errno ? -1 : real(fd);                    \
  }
ON_FILE(fsync)
ON_FILE(fdatasync)
ON_FILE(syncfs)

int close(int fd) { /* closes the file even if it reports an error */
  REAL(int, close, int);
  const int fails = of_file("close", fd) && errno, cause = errno, done = real(fd);
  if (!fails) return done;
  errno = cause;
  return -1;
}

#define SIZED(name, offset)                                                \
  int name(int fd, offset size) {                                          \
    REAL(int, name, int, offset);                                          \
    return of_file("ftruncate", fd) && errno ? -1 : real(fd, size);        \
  }
SIZED(ftruncate, off_t)
SIZED(ftruncate64, off64_t)

#define ROOM(name, offset)                                                 \
  int name(int fd, offset at, offset size) {                               \
    REAL(int, name, int, offset, offset);                                  \
    return of_file("posix_fallocate", fd) && errno ? errno : real(fd, at, size); \
  }
ROOM(posix_fallocate, off_t)
ROOM(posix_fallocate64, off64_t)

#define MAP(name, offset)                                                  \
  void *name(void *at, size_t n, int rights, int flags, int fd, offset from) { \
    REAL(void *, name, void *, size_t, int, int, int, offset);             \
    if (fd >= 0 && of_file("mmap", fd) && errno) return MAP_FAILED;        \
    return real(at, n, rights, flags, fd, from);                           \
  }
MAP(mmap, off_t)
MAP(mmap64, off64_t)

int mkdir(const char *path, mode_t mode) {
  REAL(int, mkdir, const char *, mode_t);
  return of_name("mkdir", AT_FDCWD, path) && errno ? -1 : real(path, mode);
}
int rename(const char *from, const char *to) {
  REAL(int, rename, const char *, const char *);
  return of_name("rename", AT_FDCWD, from) && errno ? -1 : real(from, to);
}
int renameat2(int at, const char *from, int there, const char *to, unsigned flags) {
  REAL(int, renameat2, int, const char *, int, const char *, unsigned);
  return of_name("renameat2", at, from) && errno ? -1 : real(at, from, there, to, flags);
}
