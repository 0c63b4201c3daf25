// The learner's process: the program with the learner's code, sandboxed and queried over a socket.
//
// It runs in a separate session. A system call filter (seccomp) denies starting processes and programs, signalling
// other processes, the network and writing files; memory, output and time are limited. It can only answer, time out or
// exit. Each answer contains the random number of its request.
#include <fcntl.h>
#include <fmt/format.h>
#include <linux/audit.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <tuple>
#include <vector>

#include "base/write_file.h"
#include "lab/check.h"
#include "parallel/comm/launch.h"

namespace tessera::lab {
namespace {

namespace fs = std::filesystem;

constexpr int kChannel = 3;                          // file descriptor in the learner's process
constexpr uint64_t kMemory = uint64_t{2} << 30;      // in addition to the initial memory
constexpr uint64_t kMaxPrinted = uint64_t{1} << 20;  // bytes
constexpr uint32_t kDeny = SECCOMP_RET_ERRNO | EPERM;
constexpr uint64_t kLongestAnswer = uint64_t{1} << 26;  // bytes

struct Header {
  uint64_t number = 0, size = 0;
};

struct Reply {
  int status = 0;  // 0, or the Status of the exception
  std::string text;
  auto fields() { return std::tie(status, text); }
};

// Denied system calls: access to other processes, file systems, network and system settings.
constexpr int kSignals[] = {SYS_kill, SYS_tkill, SYS_rt_sigqueueinfo, SYS_rt_tgsigqueueinfo, SYS_pidfd_send_signal};
constexpr int kProcesses[] = {SYS_execveat,   SYS_ptrace,           SYS_setpriority,
                              SYS_pidfd_open, SYS_process_vm_readv, SYS_process_vm_writev,
                              SYS_pidfd_getfd};
constexpr int kDisks[] = {SYS_unlinkat,  SYS_renameat,          SYS_renameat2, SYS_linkat,    SYS_symlinkat,
                          SYS_truncate,  SYS_openat2,           SYS_mkdirat,   SYS_mknodat,   SYS_fchmodat,
                          SYS_fchmod,    SYS_fchownat,          SYS_fchown,    SYS_utimensat, SYS_setxattr,
                          SYS_fsetxattr, SYS_open_by_handle_at, SYS_mount};
constexpr int kSystem[] = {SYS_socket,      SYS_connect, SYS_io_uring_setup, SYS_shmget,
                           SYS_userfaultfd, SYS_keyctl,  SYS_unshare,        SYS_bpf};
#ifdef __x86_64__
constexpr uint32_t kArchitecture = AUDIT_ARCH_X86_64;
constexpr uint64_t kAddresses = uint64_t{1} << 46;  // size of the address space
// Only on x86-64.
constexpr int kOld[] = {SYS_fork,  SYS_vfork, SYS_unlink, SYS_rmdir, SYS_rename, SYS_link,   SYS_symlink, SYS_creat,
                        SYS_mkdir, SYS_mknod, SYS_chmod,  SYS_chown, SYS_lchown, SYS_utimes, SYS_utime};
#else
constexpr uint32_t kArchitecture = AUDIT_ARCH_AARCH64;
constexpr uint64_t kAddresses = uint64_t{1} << 38;
constexpr std::array<int, 0> kOld{};
#endif

// Filter constants set by the process: two addresses (low and high half) and its process id.
constexpr size_t kLater = 0xffffff00;

// BPF filter of a process that may create threads and execute one program, whose name and arguments are at secret
// addresses.
std::vector<sock_filter> confining_filter() {
  constexpr size_t writes = O_WRONLY | O_RDWR | O_CREAT | O_TRUNC, first = offsetof(seccomp_data, args);
  std::vector<sock_filter> out;
  const auto add = [&](int what, size_t k, int passed = 0, int failed = 0) {
    out.push_back({static_cast<uint16_t>(what), static_cast<uint8_t>(passed), static_cast<uint8_t>(failed),
                   static_cast<uint32_t>(k)});
  };
  const auto load = [&](size_t offset) { add(BPF_LD | BPF_W | BPF_ABS, offset); };
  // Returns `result` if an argument word of the call passes (with `unless`: fails) a test with k.
  const auto end = [&](int call, size_t word, int test, size_t k, bool unless = false, uint32_t result = kDeny) {
    load(offsetof(seccomp_data, nr));
    add(BPF_JMP | BPF_K | BPF_JEQ, static_cast<size_t>(call), 0, 3);
    load(word);
    add(BPF_JMP | BPF_K | test, k, unless ? 1 : 0, unless ? 0 : 1);
    add(BPF_RET | BPF_K, result);
  };
  load(offsetof(seccomp_data, arch));
  add(BPF_JMP | BPF_K | BPF_JEQ, kArchitecture, 1, 0);
  add(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS);
  load(offsetof(seccomp_data, nr));
  add(BPF_JMP | BPF_K | BPF_JGE, 0x40000000, 0, 1);  // the x32 system call table
  add(BPF_RET | BPF_K, kDeny);
  for (const std::span<const int> calls : {std::span<const int>(kSignals), {kProcesses}, {kDisks}, {kSystem}, {kOld}})
    for (const int call : calls) end(call, first, BPF_JGE, 0);
  end(SYS_clone3, first, BPF_JGE, 0, false, SECCOMP_RET_ERRNO | ENOSYS);  // the C library then falls back to clone()
  end(SYS_clone, first, BPF_JSET, CLONE_THREAD, true);
  end(SYS_openat, first + 16, BPF_JSET, writes);
#ifdef SYS_open
  end(SYS_open, first + 8, BPF_JSET, writes);
#endif
  end(SYS_prlimit64, first, BPF_JEQ, 0, true);
  for (size_t i = 0; i < 4; ++i) end(SYS_execve, first + 4 * i, BPF_JEQ, kLater + i, true);
  end(SYS_tgkill, first, BPF_JEQ, kLater + 4, true);
  add(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
  return out;
}

void limit(int what, uint64_t maximum) {
  rlimit now{};
  ::getrlimit(what, &now);
  now.rlim_cur = now.rlim_max = std::min<rlim_t>(now.rlim_max, maximum);
  ::setrlimit(what, &now);
}

// Bytes that count towards memory limits; the learner's program begins with as many.
uint64_t data_now() {
  std::ifstream sizes("/proc/self/statm");  // in pages; the sixth value is limited by RLIMIT_DATA
  uint64_t pages = 0;
  for (int i = 0; i < 6; ++i) sizes >> pages;
  return pages * static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
}

// At a random address, because the filter would accept a second exec with these addresses.
void* hidden_copy(const void* from, size_t bytes) {
  for (;;) {
    uint64_t at = 0;
    if (::getrandom(&at, sizeof(at), 0) != sizeof(at)) ::_exit(127);
    void* const wanted = reinterpret_cast<void*>(at % kAddresses & ~uint64_t{0xffff});
    void* const to =
        ::mmap(wanted, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    if (to == wanted) return std::memcpy(to, from, bytes);
  }
}

// Runs after fork(); uses only async-signal-safe functions.
[[noreturn]] void become(std::span<char* const> args, char* const* environment, std::vector<sock_filter>& filter,
                         int channel, int output, uint64_t memory) {
  ::setsid();
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  for (int number = 1; number < NSIG; ++number) ::signal(number, number == SIGXFSZ ? SIG_IGN : SIG_DFL);
  sigset_t none;
  ::sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  ::dup2(::open("/dev/null", O_RDONLY | O_CLOEXEC), 0);
  for (const int to : {1, 2}) ::dup2(output, to);
  ::dup2(channel, kChannel);
  ::fcntl(kChannel, F_SETFD, 0);
  ::close_range(kChannel + 1, ~0U, 0);
  limit(RLIMIT_DATA, memory);
  limit(RLIMIT_FSIZE, kMaxPrinted);
  limit(RLIMIT_CORE, 0);
  for (unsigned long privilege = 0; ::prctl(PR_CAPBSET_READ, privilege, 0, 0, 0) >= 0; ++privilege)
    if (privilege != CAP_DAC_READ_SEARCH) ::prctl(PR_CAPBSET_DROP, privilege, 0, 0, 0);
  const auto* const name = static_cast<const char*>(hidden_copy(args[0], std::strlen(args[0]) + 1));
  auto* const list = static_cast<char* const*>(hidden_copy(args.data(), args.size_bytes()));
  const auto first = reinterpret_cast<uint64_t>(name), second = reinterpret_cast<uint64_t>(list);
  const std::array<uint64_t, 5> known{first, first >> 32, second, second >> 32, static_cast<uint64_t>(::getpid())};
  for (sock_filter& step : filter)
    if (const size_t i = step.k - kLater; i < known.size()) step.k = static_cast<uint32_t>(known[i]);
  const sock_fprog program{static_cast<uint16_t>(filter.size()), filter.data()};
  if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0)
    ::execve(name, list, environment);
  ::_exit(127);
}

class Learner {
 public:
  // Starts `PROGRAM lab answer NAME` with output to `output`. Throws Error if the process cannot be started or
  // sandboxed.
  Learner(const fs::path& program, std::string_view exercise, const fs::path& output, int seconds);
  ~Learner() {
    if (process_ <= 0) return;
    ::kill(process_, SIGKILL);
    ::waitpid(process_, nullptr, 0);
  }

  std::string ask();
  // Throws Failure if the process ended or timed out.
  void move(bool sends, void* data, size_t size);

 private:
  [[noreturn]] void ended();

  fs::path output_;
  std::optional<Descriptor> channel_;
  pid_t process_ = 0;
  int seconds_;
  std::chrono::steady_clock::time_point end_ = std::chrono::steady_clock::now() + std::chrono::seconds(seconds_);
};

Learner::Learner(const fs::path& program, std::string_view exercise, const fs::path& output, int seconds)
    : output_(output), seconds_(seconds) {
  uint32_t action = SECCOMP_RET_ERRNO;
  if (::syscall(SYS_seccomp, SECCOMP_GET_ACTION_AVAIL, 0, &action) != 0)
    throw Error(
        "lab check: this system does not support system call filters (seccomp), which sandbox a learner's program");
  std::string name = program, answer(exercise);
  std::array<char*, 5> args{name.data(), const_cast<char*>("lab"), const_cast<char*>("answer"), answer.data()};
  // UCX, loaded by Open MPI 5, opens a socket in a thread and would print an error into the learner's output.
  std::vector<char*> environment{const_cast<char*>("UCX_VFS_ENABLE=n")};
  for (char* const* entry = environ; *entry != nullptr; ++entry) environment.push_back(*entry);
  environment.push_back(nullptr);
  std::vector<sock_filter> filter = confining_filter();
  const uint64_t memory = data_now() + kMemory;
  std::array<int, 2> ends{};
  const Descriptor printed(::open(output.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  if (printed.get() < 0 || ::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) != 0)
    throw OutputError(output.string() + ": " + std::generic_category().message(errno));
  channel_.emplace(ends[0]);
  const Descriptor its(ends[1]);
  process_ = ::fork();
  if (process_ == 0) become(args, environment.data(), filter, its.get(), printed.get(), memory);
  if (process_ < 0) throw Error("lab check: cannot start a process: " + std::generic_category().message(errno));
}

void Learner::move(bool sends, void* data, size_t size) {
  for (size_t done = 0; done < size;) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(end_ - std::chrono::steady_clock::now());
    pollfd wait{channel_->get(), static_cast<int16_t>(sends ? POLLOUT : POLLIN), 0};
    if (left.count() <= 0 || ::poll(&wait, 1, static_cast<int>(left.count())) == 0)
      throw Failure{"time", fmt::format("not finished within {} s", seconds_), "an infinite loop"};
    char* const at = static_cast<char*>(data) + done;
    const ssize_t n = sends ? ::send(channel_->get(), at, size - done, MSG_NOSIGNAL | MSG_DONTWAIT)
                            : ::recv(channel_->get(), at, size - done, MSG_DONTWAIT);
    if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) ended();
    done += static_cast<size_t>(std::max<ssize_t>(n, 0));
  }
}

std::string Learner::ask() {
  std::random_device entropy;
  uint64_t number = uint64_t{entropy()} << 32 | entropy();
  move(true, &number, sizeof(number));
  Header header;
  move(false, &header, sizeof(header));
  if (header.number != number || header.size > kLongestAnswer)
    throw Failure{"answer", "the reply does not match the request",
                  "your code writes to a file descriptor that it did not open, or prepared answers in advance"};
  std::string bytes(header.size, 0);
  move(false, bytes.data(), bytes.size());
  std::string_view left = bytes;
  auto reply = take<Reply>(left);
  if (reply.status != 0) throw Error(reply.text, static_cast<Status>(reply.status));
  return std::move(reply.text);
}

void Learner::ended() {
  int status = 0;
  pid_t found = 0;
  for (int i = 0; i < 200 && (found = ::waitpid(process_, &status, WNOHANG)) == 0; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  if (found == 0)
    throw Failure{"answer", "your code stopped answering but did not exit",
                  "it closes file descriptors that it did not open"};
  process_ = 0;
  std::string last;
  std::ifstream printed(output_);
  for (std::string line; std::getline(printed, line);) last = one_line(line);
  if (WIFEXITED(status) && WEXITSTATUS(status) == static_cast<int>(Status::communication))
    throw Failure{"time", last, "a rank neither finishes nor communicates: an infinite loop"};
  if (WIFEXITED(status))
    throw Failure{"exit", fmt::format("the program exited with status {}: {}", WEXITSTATUS(status), last),
                  "a function must return or throw an exception, not exit the program"};
  const int number = WTERMSIG(status);
  throw Failure{"crash", fmt::format("the program was killed by signal {}", number),
                number == SIGSEGV
                    ? "access outside of an array or to an undefined tensor, or a lambda reads a destroyed "
                      "variable (capture by value)"
                    : "corrupted memory, or std::abort() was called"};
}

}  // namespace

Verdict grade_program(const Exercise& e, const fs::path& program, const fs::path& output, int seconds) {
  std::random_device entropy;
  uint64_t seed = uint64_t{entropy()} << 32 | entropy();
  Learner learner(program, e.name, output, seconds);
  try {
    learner.move(true, &seed, sizeof(seed));
    return grade(
        e, [&](const auto&) { return learner.ask(); }, seed);
  } catch (const Failure& wrong) {
    return refused(e, wrong);
  }
}

void answer(const Exercise& e) {
  const auto receive = [](uint64_t& x) { return ::recv(kChannel, &x, sizeof(x), MSG_WAITALL) == sizeof(x); };
  std::fflush(stdout);
  ::setlinebuf(stdout);  // preserves output before a crash
  uint64_t seed = 0;
  if (!receive(seed)) throw Error("lab answer: no channel; expected to be started by `lab check`");
  struct Closed {};
  const auto ask = [&](const std::function<std::string()>& local) {
    Header header;
    if (!receive(header.number)) throw Closed();
    Reply reply;
    try {
      reply.text = local();
    } catch (const Error& error) {
      reply = {static_cast<int>(error.status()), error.what()};
    } catch (const std::exception& error) {
      reply = {static_cast<int>(Status::usage), error.what()};
    } catch (...) {
      reply = {static_cast<int>(Status::usage), text_of_thrown(std::current_exception())};
    }
    std::fflush(stdout);
    const std::string bytes = packed(reply);
    header.size = bytes.size();
    const std::string all = packed(header) + bytes;
    ssize_t n = 0;
    for (size_t done = 0; done < all.size(); done += static_cast<size_t>(n))
      if ((n = ::send(kChannel, all.data() + done, all.size() - done, MSG_NOSIGNAL)) < 0) throw Closed();
    return std::string();
  };
  try {
    Grading grading(e, ask, seed, false);
    e.grade(grading);
  } catch (const Closed&) {  // no further requests
  }
}

}  // namespace tessera::lab
