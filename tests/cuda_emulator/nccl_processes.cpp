// Ranks in several processes: the process that created an id serves requests of others through a socket, sequentially,
// with one thread per remote communicator. Arrays stay in place: the serving process receives their addresses and
// accesses the other process's memory (process_vm_readv).
//
// After a process disappears, no more data is moved, and pending operations of its peers never complete, as with NCCL,
// whose kernels wait forever.
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <map>
#include <mutex>
#include <system_error>
#include <thread>

#include "tests/cuda_emulator/nccl_exchange.h"

namespace tessera::emulator {
namespace {

enum class Ask : uint8_t { join, state, come, is_done, close };
struct Question {
  Ask ask = Ask::join;
  char name[sizeof(ncclUniqueId)] = {};  // name of the exchange, for `join`
  int ranks = 0, rank = 0;
  NcclCall call = {};   // for `come`, which returns a ticket
  uint64_t ticket = 0;  // for `is_done`
};

[[noreturn]] void refuse(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

int new_socket() {
  const int made = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  if (made < 0) refuse("emulated NCCL: socket");
  return made;
}

// An abstract socket address, which disappears with the process.
struct Address {
  explicit Address(pid_t process) {
    const std::string name = "tessera emulated NCCL of " + std::to_string(process);
    std::memcpy(address.sun_path + 1, name.data(), name.size());
    size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&address); }
  sockaddr_un address{.sun_family = AF_UNIX, .sun_path = {}};
  socklen_t size;
};

pid_t other_end(int connection) {
  ucred who{};
  socklen_t size = sizeof(who);
  if (getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &who, &size) != 0) refuse("emulated NCCL: SO_PEERCRED");
  return who.pid;
}

// One remote communicator.
class RemoteRank {
 public:
  explicit RemoteRank(int connection) : connection_(connection), process_(other_end(connection)) {}
  void serve() {
    Question question;
    while (recv(connection_, &question, sizeof(question), 0) == sizeof(question)) {
      const uint64_t answer = answer_to(question);
      if (send(connection_, &answer, sizeof(answer), MSG_NOSIGNAL) != sizeof(answer)) break;
    }
    if (exchange_) exchange_->close();
    ::close(connection_);
  }

 private:
  uint64_t answer_to(Question& question) {
    switch (question.ask) {
      case Ask::join:
        exchange_ = exchange_named(question.name, question.ranks);
        exchange_->join();
        return 0;
      case Ask::state:
        return exchange_->state();
      case Ask::come:
        question.call.process = process_;
        waiting_[tickets_] = exchange_->come(question.rank, question.call);
        return tickets_++;
      case Ask::is_done: {
        const auto place = waiting_.find(question.ticket);
        const bool done = place->second();
        if (done) waiting_.erase(place);
        return done;
      }
      default:
        exchange_->close();
        return 0;
    }
  }

  const int connection_;
  const pid_t process_;
  std::shared_ptr<NcclExchange> exchange_;
  std::map<uint64_t, std::function<bool()>> waiting_;
  uint64_t tickets_ = 0;
};

void answer_all(int door) {
  for (;;)
    if (const int connection = accept4(door, nullptr, nullptr, SOCK_CLOEXEC); connection >= 0)
      std::thread([connection] { RemoteRank(connection).serve(); }).detach();
}

class RemoteExchange final : public NcclExchange {
 public:
  RemoteExchange(pid_t process, std::string name, int ranks)
      : name_(std::move(name)), ranks_(ranks), connection_(new_socket()) {
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY);  // the server accesses this process's memory
    const Address address(process);
    if (connect(connection_, address.get(), address.size) == 0) return;
    ::close(connection_);
    refuse("emulated NCCL: connect");
  }
  ~RemoteExchange() override { ::close(connection_); }

  int ranks() const override { return ranks_; }
  void join() override {
    Question question{.ask = Ask::join, .ranks = ranks_};
    std::memcpy(question.name, name_.data(), name_.size());
    ask(question);
  }
  ncclResult_t state() override {
    const uint64_t answer = ask({.ask = Ask::state});
    return answer == kGone ? ncclInProgress : static_cast<ncclResult_t>(answer);
  }
  void close() override { ask({.ask = Ask::close}); }
  std::function<bool()> come(int rank, const NcclCall& call) override {
    const uint64_t ticket = ask({.ask = Ask::come, .rank = rank, .call = call});
    return [this, ticket, done = false]() mutable {
      return done = done || ask({.ask = Ask::is_done, .ticket = ticket}) == 1;
    };
  }

 private:
  static constexpr uint64_t kGone = ~uint64_t{0};
  uint64_t ask(const Question& question) {
    const std::lock_guard lock(mutex_);
    uint64_t answer = kGone;
    if (send(connection_, &question, sizeof(question), MSG_NOSIGNAL) != sizeof(question)) return kGone;
    return recv(connection_, &answer, sizeof(answer), 0) == sizeof(answer) ? answer : kGone;
  }

  const std::string name_;
  const int ranks_, connection_;
  std::mutex mutex_;
};

}  // namespace

void accept_processes() {
  static const int door = [] {
    const int made = new_socket();
    const Address address(getpid());
    if (bind(made, address.get(), address.size) != 0 || listen(made, 64) != 0) refuse("emulated NCCL: bind");
    std::thread(answer_all, made).detach();  // until the process ends
    return made;
  }();
  static_cast<void>(door);
}

std::shared_ptr<NcclExchange> remote_exchange(pid_t process, const std::string& name, int ranks) {
  return std::make_shared<RemoteExchange>(process, name, ranks);
}

}  // namespace tessera::emulator
