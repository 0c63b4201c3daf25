// Runs other programs with fork() and execvp().
#include "base/process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <vector>

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

std::mutex program_list_mutex;
std::set<pid_t> running;  // each in a separate process group

int exit_status(int waited) { return WIFEXITED(waited) ? WEXITSTATUS(waited) : 128 + WTERMSIG(waited); }

// Runs in the child after fork(): calls only functions permitted in the child of a multi-threaded process.
[[noreturn]] void become(char* const* arguments, pid_t parent, int report, const char* directory, int out) {
  for (const int number : {SIGINT, SIGTERM, SIGUSR1, SIGPIPE, SIGXFSZ, SIGBUS}) ::signal(number, SIG_DFL);
  struct sigaction hangup {};
  ::sigaction(SIGHUP, nullptr, &hangup);
  if (hangup.sa_handler != SIG_IGN) ::signal(SIGHUP, SIG_DFL);  // stays ignored under nohup
  ::setpgid(0, 0);
  ::prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (::getppid() != parent) ::_exit(128 + SIGTERM);
  if (const int nothing = ::open("/dev/null", O_RDONLY); nothing >= 0) ::dup2(nothing, 0);
  for (int to = 1; out >= 0 && to <= 2; ++to) ::dup2(out, to);
  sigset_t none;
  ::sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  if (directory == nullptr || ::chdir(directory) == 0) ::execvp(arguments[0], arguments);
  const int error = errno;
  [[maybe_unused]] const ssize_t written = ::write(report, &error, sizeof(error));
  ::_exit(127);
}

// `directory`: null for the current one; `out`: -1 to inherit. Returns 0 or an errno.
int start(const std::vector<std::string>& command, const char* directory, int out, pid_t& child) {
  std::vector<char*> arguments;
  for (const std::string& word : command) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  std::array<int, 2> report{};
  if (::pipe2(report.data(), O_CLOEXEC) != 0) return errno;
  sigset_t all, before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);  // so that the child runs none of this process's handlers
  const pid_t parent = ::getpid();
  child = ::fork();
  if (child == 0) become(arguments.data(), parent, report[1], directory, out);
  int error = child < 0 ? errno : 0;
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  ::close(report[1]);
  if (child > 0) ::setpgid(child, child);  // before the group can be signalled
  const ssize_t told = ::read(report[0], &error, sizeof(error));
  ::close(report[0]);
  if (child > 0 && told <= 0) return 0;
  if (child > 0) ::waitpid(child, nullptr, 0);
  child = 0;
  return error;
}

// Returns false at the deadline. Retains at least the last 64 KiB of output.
bool drain(int pipe, Clock::time_point deadline, std::string& output) {
  std::array<char, 4096> block;
  while (true) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    if (left <= 0) return false;
    pollfd wait{pipe, POLLIN, 0};
    const int ready = ::poll(&wait, 1, static_cast<int>(left));
    if (ready == 0 || (ready < 0 && errno == EINTR)) continue;
    const ssize_t n = ::read(pipe, block.data(), block.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return true;
    output.append(block.data(), static_cast<size_t>(n));
    if (output.size() > 1 << 17) output.erase(0, 1 << 16);
  }
}

// Like waitpid(), but the child is reaped only when it leaves `running`, so its id cannot be reused earlier.
int wait_for(pid_t child) {
  siginfo_t ended{};
  while (::waitid(P_PID, static_cast<id_t>(child), &ended, WEXITED | WNOWAIT) < 0 && errno == EINTR) {
  }
  const std::lock_guard lock(program_list_mutex);
  running.erase(child);
  int status = 0;
  ::waitpid(child, &status, 0);
  return status;
}

std::string last_line(std::string_view output) {
  while (!output.empty() && (output.back() == '\n' || output.back() == '\r' || output.back() == ' '))
    output.remove_suffix(1);
  const size_t newline = output.find_last_of("\r\n");
  return std::string(newline == std::string::npos ? output : output.substr(newline + 1));
}

}  // namespace

ProgramResult run_program(const std::vector<std::string>& command, const std::filesystem::path& directory,
                          int timeout_seconds) {
  std::array<int, 2> pipe{};
  if (::pipe2(pipe.data(), O_CLOEXEC) != 0) return {127, std::strerror(errno)};
  pid_t child = 0;
  int error = 0;
  {
    const std::lock_guard lock(program_list_mutex);
    error = start(command, directory.c_str(), pipe[1], child);
    if (error == 0) running.insert(child);
  }
  ::close(pipe[1]);
  if (error != 0) {
    ::close(pipe[0]);
    return {127, error == ENOENT ? "command not found" : std::strerror(error)};
  }
  std::string output;
  const bool ended = drain(pipe[0], Clock::now() + std::chrono::seconds(timeout_seconds), output);
  ::close(pipe[0]);
  if (!ended) ::kill(-child, SIGKILL);
  const int status = wait_for(child);
  if (!ended) return {124, "timed out after " + std::to_string(timeout_seconds) + " s"};
  return {exit_status(status), last_line(output), output};
}

void kill_running_programs() {
  program_list_mutex.lock();  // never unlocked
  for (const pid_t child : running) ::kill(-child, SIGKILL);
}

// Orphans reparented to this process.
static std::set<pid_t> children() {
  std::set<pid_t> out;
  std::error_code none;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task", none)) {
    std::ifstream file(task.path() / "children");
    for (pid_t child = 0; file >> child;) out.insert(child);
  }
  return out;
}

StartedProgram::StartedProgram(const std::vector<std::string>& command) {
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  if (const int error = start(command, nullptr, -1, child_); error != 0)
    throw Error(command[0] + " cannot be started: " + (error == ENOENT ? "command not found" : std::strerror(error)));
}

StartedProgram::~StartedProgram() {
  if (child_ == 0) return;
  signal(SIGKILL);
  ::waitpid(child_, nullptr, 0);
}

std::optional<int> StartedProgram::ended() {
  int status = 0;
  if (child_ == 0 || ::waitpid(child_, &status, WNOHANG) <= 0) return {};
  child_ = 0;
  return exit_status(status);
}

int StartedProgram::end_rest(double seconds) {
  std::set<pid_t> told;
  const Clock::time_point patient =
      Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  const Clock::time_point end = patient + std::chrono::seconds(10);  // even SIGKILL is delayed by I/O on a lost disk
  for (std::set<pid_t> left; Clock::now() < end && !(left = children()).empty();
       std::this_thread::sleep_for(std::chrono::milliseconds(10)))
    for (const pid_t child : left) {
      const bool first = told.insert(child).second;
      if (first || Clock::now() > patient) ::kill(child, Clock::now() > patient ? SIGKILL : SIGTERM);
      ::waitpid(child, nullptr, WNOHANG);
    }
  return static_cast<int>(told.size());
}

void StartedProgram::signal(int number) const {
  if (child_ > 0) ::kill(-child_, number);
}

}  // namespace tessera
