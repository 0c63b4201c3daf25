// TCP ranks match thread ranks bitwise; the rendezvous; MPI launcher detection; the exchange through shared memory.
#include "tests/parallel/tcp.h"

#include <dlfcn.h>
#include <poll.h>
#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <latch>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "parallel/comm/forwarding_transport.h"
#include "parallel/comm/shared_exchange.h"
#include "parallel/comm/thread_transport.h"
#include "tests/parallel/mpi/mpi_checks.h"
#include "tests/support/errors.h"

// Replaces the C library's name service: late.invalid is this host, but the first lookups fail, and the next return an
// address without a listener.
static std::atomic<int> failing_lookups = 0, former_lookups = 0;
extern "C" int getaddrinfo(const char* node, const char* service, const addrinfo* hints, addrinfo** result) {
  static const auto library = reinterpret_cast<decltype(&::getaddrinfo)>(::dlsym(RTLD_NEXT, "getaddrinfo"));
  if (std::string_view(node == nullptr ? "" : node) == "late.invalid") {
    if (failing_lookups-- > 0) return EAI_NONAME;
    node = former_lookups-- > 0 ? "127.0.0.2" : "127.0.0.1";
  }
  return library(node, service, hints, result);
}

namespace tessera {
namespace {

using namespace test;

using Texts = std::vector<std::string>;

// Runs the ranks over TCP and returns their errors.
Texts over_tcp(int ranks, const std::function<void(Communicator&)>& body, double timeout_s = 30) {
  const std::string address = test::free_address();
  return test::run_ranks(ranks, [&](int rank) {
    launch({.backend = Backend::tcp,
            .ranks = ranks,
            .threads_per_rank = 1,
            .timeout_s = timeout_s,
            .rendezvous = address,
            .rank = rank},
           body);
  });
}

TEST(Tcp, CollectivesSubgroupsAndMessagesAreCorrect) {
  for (const int n : {1, 2, 3}) {
    const Texts errors = over_tcp(n, [&](Communicator& world) {
      for (const Algorithm algorithm : test::kByMessages) {
        world.set_algorithm(algorithm);
        check_operations(world, {1, 17, 5003}, {DType::float32, DType::bfloat16, DType::int64}, {make_arena()});
      }
      const auto reversed = world.split(7, -world.rank(), "reversed");
      test::expect(reversed->rank() == n - 1 - world.rank() && reversed->world_rank(0) == n - 1, "the key's order");
      const auto pairs = world.split(world.rank() / 2, 0, "pairs"), again = world.split(world.rank() / 2, 0, "again");
      std::vector<Work> pending;
      std::vector<Tensor> x;
      for (int i = 0; i < 12; ++i) {  // equal sizes, so that groups could be confused
        x.push_back(make_array(world.rank(), 3000, DType::float32, make_arena()));
        pending.push_back((i % 3 == 0 ? world : i % 3 == 1 ? *pairs : *again).start_all_reduce(x.back()));
      }
      for (Work& p : pending) p.wait();
      for (size_t i = 0; i < x.size(); i += 3) test::expect(values(x[i]) == test::summed(n, 3000), "in the background");
      test::expect(values(x[1]) == values(x[2]), "two groups of the same ranks");
    });
    EXPECT_EQ(errors, Texts(static_cast<size_t>(n)));
  }
  EXPECT_EQ(test::failures, 0);
}

TEST(Tcp, SumsMatchThreadRanksBitwise) {
  constexpr int64_t kSize = 10'007;
  for (const Algorithm algorithm : test::kByMessages) {
    const std::vector<double> expected = sum_of_threads(3, algorithm, kSize, DType::float32);
    const Texts errors = over_tcp(3, [&](Communicator& world) {
      world.set_algorithm(algorithm);
      const Tensor x = for_order(world.rank(), 3, kSize, DType::float32);
      world.all_reduce(x);
      EXPECT_EQ(values(x), expected) << to_string(algorithm);
    });
    EXPECT_EQ(errors, Texts(3));
  }
}

TEST(Tcp, OtherRanksReportFailedRank) {
  std::latch others(2);  // otherwise rank 1 fails during the initial exchange of the world
  Texts errors = over_tcp(3, [&](Communicator& world) {
    if (world.rank() == 1) {
      others.wait();
      throw std::runtime_error("the cause");
    }
    others.count_down();
    world.all_reduce(zeros(100));
  });
  EXPECT_EQ(errors[1], "[rank 1] the cause");
  for (const size_t r : {0, 2}) {
    EXPECT_TRUE(has(errors[r], "all_reduce of 400 bytes"));
    EXPECT_TRUE(has(errors[r], "rank 1 has failed: the cause"));
  }
  errors = over_tcp(2, [&](Communicator& world) { world.all_reduce(zeros(100 + world.rank())); });
  EXPECT_TRUE(has(errors[0] + errors[1], "recv of 20")) << errors[0] << "\n" << errors[1];
  errors = over_tcp(
      2,
      [&](Communicator& world) {
        if (world.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(4500));
        world.barrier();
      },
      2);
  EXPECT_TRUE(has(errors[0], "rank 1 sent nothing within 2 s")) << errors[0];
}

// A killed process closes its connections without a message; invalid messages are rejected.
TEST(Tcp, ReportsBrokenConnectionAsRankFailure) {
  const auto after = [](const std::string& bytes) {
    const std::string address = test::free_address();
    Texts errors = test::run_ranks(2, [&](int rank) {
      const RendezvousOptions options{.address = address, .rank = rank, .ranks = 2, .timeout_s = 10};
      if (rank == 1) {
        const RendezvousResult joined = join_rendezvous(options);
        write_all(joined.peers[0].get(), bytes.data(), bytes.size(), Deadline(5));
        return;
      }
      TcpTransport all(std::make_shared<TcpWorld>(join_rendezvous(options), 0, 10));
      std::array<std::byte, 8> there{};
      all.recv(1, 0, there.data(), 8);
    });
    return errors[0];
  };
  EXPECT_EQ(after(""), "recv of 8 bytes: rank 1 has failed: its connection has closed");
  TcpWorld::Head head{.bytes = 8};
  const auto text = [&] { return std::string(reinterpret_cast<const char*>(&head), sizeof(head)); };
  EXPECT_EQ(after(text() + "12345678"), "");
  EXPECT_EQ(after(text() + "123"), "recv of 8 bytes: rank 1 has failed: its connection has closed");
  head.bytes = -8;
  EXPECT_EQ(after(text()), "recv of 8 bytes: rank 1 has failed: it sent an invalid message");
  head.bytes = int64_t{1} << 60;
  EXPECT_EQ(after(text()), "recv of 8 bytes: rank 1 has failed: it sent an invalid message");
  head.bytes = int64_t{1} << 40;  // memory is allocated for received bytes, not for announced ones
  rusage before{}, afterwards{};
  getrusage(RUSAGE_SELF, &before);
  EXPECT_EQ(after(text() + "123"), "recv of 8 bytes: rank 1 has failed: its connection has closed");
  getrusage(RUSAGE_SELF, &afterwards);
  EXPECT_LT(afterwards.ru_maxrss - before.ru_maxrss, 256 << 10) << "KiB";
  EXPECT_EQ(after(std::string(24, '\x7f')), "recv of 8 bytes: rank 1 has failed: it sent an invalid message");
}

// The rendezvous connects every pair, closes foreign connections, and sends all ranks the errors about missing,
// duplicate or mismatched ranks.
TEST(Rendezvous, ConnectsEveryPair) {
  for (const int n : {1, 2, 3, 7}) {
    const std::string address = free_address();
    const Texts errors = run_ranks(n, [&](int rank) {
      if (rank == 0) std::this_thread::sleep_for(std::chrono::milliseconds(30));  // the others retry
      const RendezvousResult joined = join_rendezvous({.address = address, .rank = rank, .ranks = n, .timeout_s = 20});
      EXPECT_EQ(joined.local_rank, rank);
      EXPECT_EQ(joined.local_world_size, n);
      const Deadline deadline(20);
      for (int peer = 0; peer < n; ++peer) {
        if (peer == rank) continue;
        const int32_t mine = 100 * rank + peer;
        int32_t theirs = 0;
        const int fd = joined.peers[static_cast<size_t>(peer)].get();
        ASSERT_TRUE(write_all(fd, &mine, sizeof(mine), deadline) && read_all(fd, &theirs, sizeof(theirs), deadline));
        EXPECT_EQ(theirs, 100 * peer + rank);
      }
    });
    EXPECT_EQ(errors, Texts(static_cast<size_t>(n)));
  }
}

// Connects to rank 0 and sends this text; the caller may keep the connection open.
Descriptor foreign_connection(const std::string& address, const std::string& text) {
  const auto [host, port] = parse_address(address);
  std::string why;
  const Deadline deadline(5);
  Descriptor s = connected(
      *resolved(host, port, address), [&] { return deadline.is_over(); }, why);
  if (s) write_all(s.get(), text.data(), text.size(), Deadline(1));
  return s;
}

TEST(Rendezvous, ClosesForeignConnections) {
  const std::string address = free_address();
  const Philox sample = Philox::named(1, "strangers");
  std::vector<Descriptor> connections;
  std::latch strangers(1);  // rank 0 listens until the other ranks arrive
  const Texts errors = run_ranks(4, [&](int rank) {
    if (rank < 3) {
      if (rank > 0) strangers.wait();
      join_rendezvous({.address = address, .rank = rank, .ranks = 3, .timeout_s = 20});
      return;
    }
    connections.push_back(foreign_connection(address, "GET / HTTP/1.1\r\nHost: a\r\nAccept: text/html\r\n\r\n"));
    for (int i = 0; i < 100; ++i)
      connections.push_back(foreign_connection(address, i % 3 == 0 ? "" : "TSRmeet1"));  // incomplete
    for (uint64_t i = 0; i < 20; ++i) {
      std::string noise(1 + sample.below(200, 2 * i), ' ');
      for (size_t at = 0; at < noise.size(); ++at) noise[at] = static_cast<char>(sample.below(256, 1000 * i + at));
      foreign_connection(address, noise);
    }
    strangers.count_down();
  });
  EXPECT_EQ(errors, Texts(4));
}

// A supervisor restarts a killed rank while others wait.
TEST(Rendezvous, RestartedRankReplacesItsPreviousProcess) {
  for (const int ended : {0, 1, 2}) {
    const std::string address = free_address();
    const Texts errors = run_ranks(3, [&](int rank) {
      if (ended == 0 && rank == 0) {  // the first process of rank 0: listens, receives hellos, and exits
        const auto [host, port] = parse_address(address);
        const Addresses at = resolved(host, port, address);
        const Descriptor listener = listening_on(at->ai_addr, at->ai_addrlen, at->ai_family);
        ASSERT_TRUE(listener && wait_for(listener.get(), POLLIN, Deadline(10)));
        const Descriptor guest(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
        Hello hello;
        ASSERT_TRUE(read_all(guest.get(), &hello, sizeof(hello), Deadline(10)));
      }
      if (ended > 0 && rank == ended) {
        const Hello hello{.ranks = 3, .rank = static_cast<uint32_t>(rank)};
        foreign_connection(address, {reinterpret_cast<const char*>(&hello), sizeof(hello)});
        std::this_thread::sleep_for(std::chrono::milliseconds(rank == 1 ? 0 : 150));
      }
      if (rank > 0 && rank != ended) std::this_thread::sleep_for(std::chrono::milliseconds(100));
      const RendezvousResult joined = join_rendezvous({.address = address, .rank = rank, .ranks = 3, .timeout_s = 20});
      EXPECT_EQ(std::ranges::count_if(joined.peers, [](const Descriptor& peer) { return bool(peer); }), 2);
    });
    EXPECT_EQ(errors, Texts(3)) << "rank " << ended;
  }
}

// A rank exits between its hello and rank 0's answer: ranks that have received the answer join again, with the
// restarted rank.
TEST(Rendezvous, RanksJoinAgainAfterOneDisconnects) {
  const std::string address = free_address();
  std::latch again(1);
  const Texts errors = run_ranks(3, [&](int rank) {
    if (rank == 0) {  // the first answer, sent to rank 1 only
      const auto [host, port] = parse_address(address);
      const Addresses at = resolved(host, port, address);
      const Descriptor listener = listening_on(at->ai_addr, at->ai_addrlen, at->ai_family);
      ASSERT_TRUE(listener && wait_for(listener.get(), POLLIN, Deadline(20)));
      const Descriptor guest(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
      Hello hello;
      ASSERT_TRUE(read_all(guest.get(), &hello, sizeof(hello), Deadline(20)));
      EXPECT_EQ(hello.rank, 1U);
      std::array<PeerPlace, 3> places{};
      Answer answer{.bytes = sizeof(places), .token = {'t'}};
      ASSERT_TRUE(write_all(guest.get(), &answer, sizeof(answer), Deadline(20)));
      ASSERT_TRUE(write_all(guest.get(), places.data(), sizeof(places), Deadline(20)));
      answer.refused = Answer::kAgain, answer.bytes = 0;
      ASSERT_TRUE(write_all(guest.get(), &answer, sizeof(answer), Deadline(20)));
      again.count_down();
    }
    if (rank == 2) again.wait();
    const RendezvousResult met = join_rendezvous({.address = address, .rank = rank, .ranks = 3, .timeout_s = 20});
    EXPECT_EQ(std::ranges::count_if(met.peers, [](const Descriptor& peer) { return bool(peer); }), 2);
  });
  EXPECT_EQ(errors, Texts(3));
}

TEST(Rendezvous, RetriesUnresolvedHostNames) {
  const std::string address = free_address(), port = address.substr(address.find(':'));
  for (const int first_calls : {1, 7}) {
    failing_lookups = first_calls;
    const Texts errors = run_ranks(3, [&](int rank) {
      join_rendezvous({.address = "late.invalid" + port, .rank = rank, .ranks = 3, .timeout_s = 20});
    });
    EXPECT_EQ(errors, Texts(3));
    EXPECT_LE(failing_lookups, 0);
  }
}

TEST(Rendezvous, EveryRankReportsUnresolvedHostName) {
  failing_lookups = 1000;
  const Texts errors = run_ranks(2, [&](int rank) {
    join_rendezvous({.address = "late.invalid:29500", .rank = rank, .ranks = 2, .timeout_s = 2});
  });
  for (const std::string& text : errors)
    EXPECT_EQ(text,
              "`rendezvous`: 'late.invalid:29500' does not resolve within 2 s: Name or service not known; expected "
              "the name or the address of rank 0's host");
  EXPECT_LT(failing_lookups, 998);
}

TEST(Rendezvous, ResolvesHostNamesAgainAfterAddressChange) {
  const std::string address = free_address(), port = address.substr(address.find(':'));
  failing_lookups = 0, former_lookups = 1;
  const Texts errors = run_ranks(2, [&](int rank) {
    join_rendezvous(
        {.address = (rank == 0 ? "127.0.0.1" : "late.invalid") + port, .rank = rank, .ranks = 2, .timeout_s = 20});
  });
  EXPECT_EQ(errors, Texts(2));
}

TEST(Rendezvous, RetriesOccupiedPort) {
  const std::string address = free_address();
  const auto [host, port] = parse_address(address);
  const Addresses at = resolved(host, port, address);
  Descriptor former = listening_on(at->ai_addr, at->ai_addrlen, at->ai_family);
  ASSERT_TRUE(former);
  const std::string message = "`rendezvous`: rank 0 cannot listen on " + address +
                              " within 0.3 s: Address already in use; expected an address of this host and a "
                              "free port";
  EXPECT_EQ(
      run_ranks(1, [&](int) { join_rendezvous({.address = address, .rank = 0, .ranks = 2, .timeout_s = 0.3}); })[0],
      message);
  const Texts errors = run_ranks(3, [&](int rank) {
    std::this_thread::sleep_for(std::chrono::milliseconds(rank == 0 ? 0 : 600));
    if (rank == 1) former = Descriptor();
    if (rank < 2) join_rendezvous({.address = address, .rank = rank, .ranks = 2, .timeout_s = 20});
  });
  EXPECT_EQ(errors, Texts(3));
}

TEST(Rendezvous, NamesExitedRank) {
  const std::string address = free_address();
  const Texts errors = run_ranks(2, [&](int rank) {
    if (rank == 0) return void(join_rendezvous({.address = address, .rank = 0, .ranks = 3, .timeout_s = 2}));
    const Hello hello{.ranks = 3, .rank = 2};
    foreign_connection(address, {reinterpret_cast<const char*>(&hello), sizeof(hello)});
  });
  EXPECT_EQ(errors[0],
            "[rendezvous] ranks 1, 2 did not connect to " + address + " within 2 s; rank 2 had connected and exited");
}

TEST(Rendezvous, ReportsMissingRanksToAllPeers) {
  const std::string address = free_address();
  const Texts errors =
      run_ranks(2, [&](int rank) { join_rendezvous({.address = address, .rank = rank, .ranks = 4, .timeout_s = 2}); });
  for (const std::string& text : errors)
    EXPECT_EQ(text, "[rendezvous] ranks 2, 3 did not connect to " + address + " within 2 s");
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(run_ranks(1, [&](int) { join_rendezvous({.address = address, .rank = 1, .ranks = 2, .timeout_s = 2}); })[0],
            "[rendezvous] no answer at " + address + " within 2 s: Connection refused; expected rank 0's address");
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(8));
}

TEST(Rendezvous, ReportsMismatchesToAllPeers) {
  const std::string address = free_address();
  const auto all_say = [&](const std::vector<RendezvousOptions>& meetings, const std::string& expected) {
    const Texts errors = run_ranks(static_cast<int>(meetings.size()), [&](int i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100 * i));
      join_rendezvous(meetings[static_cast<size_t>(i)]);
    });
    for (const std::string& text : errors) EXPECT_EQ(text, "`rank`: " + expected);
  };
  all_say({{address, 0, 3, 10}, {address, 1, 3, 10}, {address, 1, 3, 10}},
          "rank 1 connected to the rendezvous twice; expected each rank once");
  all_say({{address, 0, 3, 10}, {address, 1, 4, 10}},
          "rank 1 expects 4 ranks, and rank 0 expects 3; expected the same `ranks` on all ranks");
  EXPECT_EQ(refusal({.ranks = 3, .rank = 3}, {true, false, false}),
            "rank 3 is out of range for 3 ranks; expected 0 to 2");
  EXPECT_EQ(refusal({.ranks = 3, .rank = 2}, {true, false, false}), "");
  EXPECT_THROW(join_rendezvous({address, 2, 2, 1}), FieldError);
}

TEST(Rendezvous, RejectsInvalidReplies) {
  const std::string address = free_address();
  const Texts errors = run_ranks(2, [&](int rank) {
    if (rank == 1) join_rendezvous({.address = address, .rank = 1, .ranks = 2, .timeout_s = 5});
    if (rank == 1) return;
    const auto [host, port] = parse_address(address);
    const Addresses a = resolved(host, port, address);
    const Descriptor listener = listening_on(a->ai_addr, a->ai_addrlen, a->ai_family);
    ASSERT_TRUE(wait_for(listener.get(), POLLIN, Deadline(5)));
    const Descriptor s(::accept(listener.get(), nullptr, nullptr));
    const std::string text = "HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n";
    write_all(s.get(), text.data(), text.size(), Deadline(1));
  });
  EXPECT_EQ(errors[1], "[rendezvous] the process at " + address + " is not rank 0 of Tessera, or has exited");
}

TEST(Rendezvous, ParsesHostAndPort) {
  EXPECT_EQ(parse_address("node1:29500"), std::pair(std::string("node1"), std::string("29500")));
  EXPECT_EQ(parse_address("[::1]:80").first, "::1");
  for (const char* text : {"", "node1", "node1:", ":1", "node1:0", "node1:65536", "node1:x", "node1:1x", "node1:-1"})
    EXPECT_THROW(parse_address(text), FieldError) << text;
  EXPECT_THROW(join_rendezvous({"no-such-host.invalid:1", 1, 2, 0.1}), FieldError);
  EXPECT_THROW(join_rendezvous({"192.0.2.1:29500", 0, 2, 0.1}), FieldError);  // reserved for documentation
}

// MPI launcher detection with fake environments, and errors of builds without MPI.

using Environment = std::map<std::string, std::string>;

auto environment_variables(const Environment& environment) {
  return [&](const char* variable) {
    const auto found = environment.find(variable);
    return found == environment.end() ? nullptr : found->second.c_str();
  };
}
std::optional<MpiSurroundings> with(const Environment& environment) {
  return mpi_surroundings(environment_variables(environment));
}

TEST(LauncherEnvironment, DetectsLaunchers) {
  EXPECT_EQ(with({{"OMPI_COMM_WORLD_SIZE", "4"}})->ranks, 4);
  EXPECT_EQ(with({{"PMI_SIZE", "3"}, {"PMI_RANK", "1"}})->ranks, 3);
  EXPECT_EQ(with({{"MV2_COMM_WORLD_SIZE", "2"}})->ranks, 2);
  EXPECT_EQ(with({{"SLURM_NTASKS", "8"}, {"SLURM_PROCID", "0"}, {"PMIX_RANK", "0"}})->ranks, 8);
  EXPECT_EQ(with({{"SLURM_NTASKS", "8"}, {"SLURM_STEP_NUM_TASKS", "2"}, {"PMI_RANK", "0"}})->ranks, 2);
}

TEST(LauncherEnvironment, IgnoresUnrelatedVariables) {
  EXPECT_FALSE(with({}));
  EXPECT_FALSE(with({{"OMPI_COMM_WORLD_SIZE", "four"}}));
  EXPECT_FALSE(with({{"PMI_SIZE", ""}}));
  EXPECT_FALSE(with({{"SLURM_NTASKS", "8"}, {"SLURM_PROCID", "0"}}));  // an allocation, or tasks without PMI
}

TEST(LauncherEnvironment, DetectsTasksWithoutPmi) {
  const auto lone = [](const Environment& environment) { return unlinked_tasks(environment_variables(environment)); };
  EXPECT_EQ(lone({{"SLURM_STEP_NUM_TASKS", "4"}}), 4);
  EXPECT_EQ(lone({{"SLURM_STEP_NUM_TASKS", "4"}, {"PMI_RANK", "1"}}), 0);
  EXPECT_EQ(lone({{"SLURM_STEP_NUM_TASKS", "2"}, {"OMPI_COMM_WORLD_SIZE", "8"}}),
            0);  // the step consists of mpirun's daemons
  EXPECT_EQ(lone({{"SLURM_STEP_NUM_TASKS", "1"}}), 0);
  EXPECT_EQ(lone({{"SLURM_NTASKS", "4"}}), 0);  // an allocation
}

TEST(LauncherEnvironment, ErrorNamesMissingBackend) {
  if (kWithMpi) GTEST_SKIP() << "this build has MPI";
  const std::string what = error_message([] { launch({.backend = Backend::mpi}, [](Communicator&) {}); });
  EXPECT_TRUE(has(what, "this build has no MPI"));
}

// The exchange through shared memory, with threads as processes, so that ThreadSanitizer can check it.

// Sends messages, and nothing else, as the transport of processes does.
class Messages final : public ForwardingTransport {
 public:
  using ForwardingTransport::ForwardingTransport;
  std::unique_ptr<Transport> split(int color, int key) override { return inner().split(color, key); }
  int64_t direct(const Call&) override { throw Error("expected messages"); }
  int64_t messages = 0;
  void send(int to, int tag, const std::byte* data, int64_t bytes) override {
    ++messages;
    ForwardingTransport::send(to, tag, data, bytes);
  }
};

// The shared memory of a group of threads, each with its own mapping.
struct Shared {
  explicit Shared(int n) : memory(std::make_unique<SharedPlace[]>(static_cast<size_t>(n))) {
    const auto group = make_thread_group(n, 20, true, std::make_shared<FailureState>());
    for (int r = 0; r < n; ++r)
      ranks.push_back(std::make_unique<Messages>(std::make_unique<ThreadTransport>(group, r)));
  }
  SharedExchange exchange(int rank, PeerMemory* peers = nullptr) const {
    std::vector<SharedPlace*> places;
    for (size_t r = 0; r < ranks.size(); ++r) places.push_back(&memory[r]);
    return SharedExchange(*ranks[static_cast<size_t>(rank)], std::move(places),
                          {.timeout_s = 20, .oversubscribed = true}, peers);
  }
  int64_t messages(int rank) const { return ranks[static_cast<size_t>(rank)]->messages; }
  std::unique_ptr<SharedPlace[]> memory;
  std::vector<std::unique_ptr<Messages>> ranks;
};

Call make_call(Op op, DType dtype, int64_t count, const Tensor& in, const Tensor& out) {
  return {.op = op, .dtype = dtype, .count = count, .in = in.raw(), .out = out.raw(), .region = &in.arena()->region()};
}

void check(SharedExchange& shared, const Communicator& world, int64_t count, DType dtype, const ArenaPtr& arena) {
  const int n = world.size(), me = world.rank();
  const std::vector<double> total = summed(n, count);
  const Tensor mine = make_array(me, count, dtype, arena), x = mine.clone();
  const Tensor part = Tensor::empty({chunk_range(count, n, me).size()}, dtype, arena),
               full = Tensor::zeros({count}, dtype, arena);
  EXPECT_EQ(shared.run(make_call(Op::all_reduce, dtype, count, x, x)),
            sent_directly({.op = Op::all_reduce, .dtype = dtype, .count = count}, n, me));
  EXPECT_EQ(values(x), total);
  shared.run(make_call(Op::reduce_scatter, dtype, count, mine, part));
  EXPECT_EQ(values(part), cut(total, n, me));
  shared.run(make_call(Op::all_gather, dtype, count, part, full));
  EXPECT_EQ(values(full), total);
  shared.run({.op = Op::barrier});
}

TEST(SharedExchange, MatchesThreadRanks) {
  for (const int n : {2, 3, 5}) {
    const Shared memory(n);
    launch({.ranks = n, .timeout_s = 20}, [&](Communicator& world) {
      SharedExchange shared = memory.exchange(world.rank());
      const ArenaPtr arena = make_arena();
      for (const int64_t count : {0, 1, 100, 32'768, 100'001})
        for (const DType dtype : {DType::float32, DType::bfloat16, DType::float64})
          check(shared, world, count, dtype, arena);
      EXPECT_GT(memory.messages(world.rank()), 0);
    });
  }
}

// Each rank has its own mapping of the others' arrays, like processes.
TEST(SharedExchange, MappableArraysAreReadInPlace) {
  for (const int n : {2, 3, 5}) {
    const Shared memory(n);
    launch({.ranks = n, .timeout_s = 20}, [&](Communicator& world) {
      PeerMemory peers;
      SharedExchange shared = memory.exchange(world.rank(), &peers);
      const ArenaPtr arena = make_shared_arena();
      for (const int64_t count : {0, 1, 100, 32'768, 100'001})
        for (const DType dtype : {DType::float32, DType::bfloat16, DType::float64})
          check(shared, world, count, dtype, arena);
      EXPECT_EQ(memory.messages(world.rank()), 0);
    });
  }
}

TEST(SharedExchange, SendsMessagesIfOneArrayIsUnmappable) {
  const Shared memory(3);
  launch({.ranks = 3, .timeout_s = 20}, [&](Communicator& world) {
    PeerMemory peers;
    SharedExchange shared = memory.exchange(world.rank(), &peers);
    const ArenaPtr reached = make_shared_arena(), own = make_arena();
    for (const int64_t count : {0, 1, 100, 5000, 100'001})
      for (int round = 0; round < 4; ++round)
        check(shared, world, count, DType::float32, round == world.rank() ? own : reached);
  });
}

// A destroyed arena has released its memory even if another rank has mapped it.
TEST(SharedExchange, DestroyedArenaReleasesMappedMemory) {
  PeerMemory peers;
  ArenaPtr arena = make_shared_arena();
  std::optional<Tensor> x = Tensor::zeros({1 << 20}, DType::float32, arena);
  x->data<float>()[1000] = 3;
  const SharedArrayRef reach = make_shared_ref(make_call(Op::all_reduce, DType::float32, x->numel(), *x, *x));
  ASSERT_TRUE(reach.known());
  const auto* const seen = reinterpret_cast<const volatile float*>(peers.base(reach) + reach.in);
  EXPECT_EQ(seen[1000], 3);
  x.reset();
  arena.reset();
  EXPECT_EQ(seen[1000], 0);
}

TEST(SharedExchange, NamesMismatchedCalls) {
  const Shared memory(2);
  const auto body = [&](Communicator& world) {
    SharedExchange shared = memory.exchange(world.rank());
    const Tensor x = zeros(100 + world.rank());
    shared.run(make_call(Op::all_reduce, DType::float32, x.numel(), x, x));
  };
  const std::string what = error_message([&] { launch({.ranks = 2, .timeout_s = 20}, body); }, Status::communication);
  EXPECT_TRUE(has(what, "calls all_reduce of 40"));
}

}  // namespace
}  // namespace tessera
