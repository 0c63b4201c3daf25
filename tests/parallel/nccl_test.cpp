// The NCCL transport without a GPU: a fake NCCL records every call, with threads as ranks.

#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "parallel/comm/nccl/transport.h"
#include "parallel/comm/thread_transport.h"
#include "tests/parallel/arrays.h"
#include "tests/support/errors.h"

namespace tessera {
namespace {

using namespace test;

// One rank's calls, with pointers as element offsets into its known arrays.
struct Log {
  std::vector<std::string> calls;
  const std::byte *in = nullptr, *out = nullptr;
  int64_t element = 4;
  bool stuck = false, captured = false;
  const Arena* gpu = nullptr;  // a placeholder for the rank's GPU arena, never accessed
};

class FakeNccl final : public NcclApi {
 public:
  explicit FakeNccl(Log& log) : log_(log) {}
  NcclId make_id() override {
    NcclId id;
    std::strcpy(id.bytes.data(), "the id");
    return id;
  }
  void begin(int ranks, const NcclId& id, int rank) override {
    note("begin " + std::to_string(rank) + "/" + std::to_string(ranks) + " " + id.bytes.data());
  }
  bool queued() override { return true; }
  bool finished() override { return !log_.stuck; }
  void abort() override { note("abort"); }
  void group_start() override { note("("); }
  void group_end() override { note(")"); }
  void all_reduce(const void* in, void* out, int64_t count, DType dtype, Reduction reduction) override {
    note("all_reduce " + at(in) + at(out) + of(count, dtype) + of(reduction));
  }
  void reduce_scatter(const void* in, void* out, int64_t count, DType dtype, Reduction reduction) override {
    note("reduce_scatter " + at(in) + at(out) + of(count, dtype) + of(reduction));
  }
  void all_gather(const void* in, void* out, int64_t count, DType dtype) override {
    note("all_gather " + at(in) + at(out) + of(count, dtype));
  }
  void broadcast(const void* in, void* out, int64_t count, DType dtype, int root) override {
    note("broadcast " + at(in) + at(out) + of(count, dtype) + " root " + std::to_string(root));
  }
  void reduce(const void* in, void* out, int64_t count, DType dtype, Reduction reduction, int root) override {
    note("reduce " + at(in) + at(out) + of(count, dtype) + of(reduction) + " root " + std::to_string(root));
  }
  void send(const void* data, int64_t count, DType dtype, int to) override {
    note("send " + at(data) + of(count, dtype) + " to " + std::to_string(to));
  }
  void recv(void* data, int64_t count, DType dtype, int from) override {
    note("recv " + at(data) + of(count, dtype) + " from " + std::to_string(from));
  }
  void after(Arena& gpu) override { note(&gpu == log_.gpu ? "after" : "after another's"); }
  bool is_captured(Arena&) const override { return log_.captured; }
  std::shared_ptr<void> point() override {
    note("point");
    return std::make_shared<size_t>(log_.calls.size());
  }
  void join(Arena& gpu, const std::shared_ptr<void>& point) override {
    const size_t at = *static_cast<size_t*>(point.get());
    note(&gpu == log_.gpu && log_.calls.at(at - 1) == "point" ? "join" : "join another's");
  }
  std::unique_ptr<NcclApi> another() const override { return std::make_unique<FakeNccl>(log_); }

 private:
  void note(const std::string& call) { log_.calls.push_back(call); }
  static std::string of(int64_t count, DType dtype) {
    return std::to_string(count) + " " + std::string(to_string(dtype));
  }
  static std::string of(Reduction reduction) { return reduction == Reduction::sum ? " sum" : " max"; }
  std::string at(const void* p) const {
    const auto* const memory = static_cast<const std::byte*>(p);
    if (!p) return "- ";
    const bool is_out = log_.out && memory >= log_.out && (memory < log_.in || log_.out > log_.in);
    return (is_out ? "out+" : "in+") + std::to_string((memory - (is_out ? log_.out : log_.in)) / log_.element) + " ";
  }
  Log& log_;
};

// The calls of rank 1 of three for one collective of nominal GPU arrays.
std::vector<std::string> record_calls(Call call, Algorithm algorithm = Algorithm::native) {
  std::vector<std::string> seen;
  const auto group = make_thread_group(3, 20, true, std::make_shared<FailureState>());
  launch({.ranks = 3, .timeout_s = 20}, [&](Communicator& world) {
    std::vector<std::byte> memory(4096);
    Log log;
    log.in = memory.data();
    log.out = memory.data() + 2048;
    log.element = element_size(call.dtype);
    const ArenaPtr gpu = make_arena();
    log.gpu = gpu.get();
    NcclTransport nccl(std::make_unique<FakeNccl>(log), std::make_unique<ThreadTransport>(group, world.rank()), 20);
    EXPECT_EQ(log.calls, std::vector<std::string>{"begin " + std::to_string(world.rank()) + "/3 the id"});
    log.calls.clear();
    Call mine = call;
    mine.in = log.in;
    mine.gpu = gpu.get();
    mine.out = call.op == Op::all_reduce ? memory.data() : memory.data() + 2048;
    EXPECT_EQ(run_collective(nccl, algorithm, mine), sent_directly(call, 3, world.rank()));
    ASSERT_FALSE(log.calls.empty());
    EXPECT_EQ(log.calls.front(), "after");  // after earlier work of the rank's own stream
    ASSERT_GE(log.calls.size(), 3U);
    EXPECT_EQ(log.calls[log.calls.size() - 2], "point");
    EXPECT_EQ(log.calls.back(), "join");  // before its later work
    if (world.rank() == 1) seen = {log.calls.begin() + 1, log.calls.end() - 2};
    world.barrier();
  });
  return seen;
}

using Calls = std::vector<std::string>;

TEST(Nccl, MapsCollectivesToLibraryCalls) {
  EXPECT_EQ(record_calls({.op = Op::all_reduce, .dtype = DType::bfloat16, .count = 10}),
            Calls{"all_reduce in+0 in+0 10 bfloat16 sum"});
  EXPECT_EQ(record_calls({.op = Op::all_reduce, .reduction = Reduction::max, .count = 10}),
            Calls{"all_reduce in+0 in+0 10 float32 max"});
  EXPECT_EQ(record_calls({.op = Op::reduce_scatter, .count = 12}), Calls{"reduce_scatter in+0 out+0 4 float32 sum"});
  EXPECT_EQ(record_calls({.op = Op::all_gather, .dtype = DType::bfloat16, .count = 12}),
            Calls{"all_gather in+0 out+0 4 bfloat16"});
  EXPECT_EQ(record_calls({.op = Op::broadcast, .root = 2, .count = 12}),
            Calls{"broadcast in+0 out+0 12 float32 root 2"});
  EXPECT_EQ(record_calls({.op = Op::reduce, .root = 2, .count = 12}), Calls{"reduce in+0 out+0 12 float32 sum root 2"});
}

TEST(Nccl, UnevenChunksUseGroupedCalls) {
  EXPECT_EQ(record_calls({.op = Op::reduce_scatter, .count = 11}),
            (Calls{"(", "reduce in+0 - 3 float32 sum root 0", "reduce in+3 out+0 4 float32 sum root 1",
                   "reduce in+7 - 4 float32 sum root 2", ")"}));
  EXPECT_EQ(record_calls({.op = Op::all_gather, .count = 11}),
            (Calls{"(", "broadcast out+0 out+0 3 float32 root 0", "broadcast in+0 out+3 4 float32 root 1",
                   "broadcast out+7 out+7 4 float32 root 2", ")"}));
  EXPECT_EQ(record_calls({.op = Op::all_gather, .count = 2}),  // rank 0 has no elements
            (Calls{"(", "broadcast in+0 out+0 1 float32 root 1", "broadcast out+1 out+1 1 float32 root 2", ")"}));
}

TEST(Nccl, AllToAllUsesGroupedSendsAndReceives) {
  EXPECT_EQ(record_calls({.op = Op::all_to_all, .count = 6}),
            (Calls{"(", "send in+0 2 float32 to 0", "recv out+0 2 float32 from 0", "send in+2 2 float32 to 1",
                   "recv out+2 2 float32 from 1", "send in+4 2 float32 to 2", "recv out+4 2 float32 from 2", ")"}));
  const UnevenSplits splits{{2, 1, 0}, {0, 1, 4}};
  EXPECT_EQ(record_calls({.op = Op::all_to_all, .count = 3, .splits = &splits}, Algorithm::direct),
            (Calls{"(", "send in+0 2 float32 to 0", "send in+2 1 float32 to 1", "recv out+0 1 float32 from 1",
                   "recv out+1 4 float32 from 2", ")"}));
  EXPECT_EQ(record_calls({.op = Op::gather, .root = 1, .count = 5}),
            (Calls{"(", "send in+0 2 float32 to 1", "recv out+0 1 float32 from 0", "recv out+1 2 float32 from 1",
                   "recv out+3 2 float32 from 2", ")"}));
  EXPECT_EQ(record_calls({.op = Op::gather, .root = 0, .count = 5}), (Calls{"(", "send in+0 2 float32 to 0", ")"}));
  EXPECT_EQ(record_calls({.op = Op::scatter, .root = 1, .count = 5}),
            (Calls{"(", "recv out+0 2 float32 from 1", "send in+0 1 float32 to 0", "send in+1 2 float32 to 1",
                   "send in+3 2 float32 to 2", ")"}));
  EXPECT_EQ(record_calls({.op = Op::scatter, .root = 2, .count = 5}, Algorithm::direct),
            (Calls{"(", "recv out+0 2 float32 from 2", ")"}));
}

TEST(Nccl, RejectsAlgorithmsWithFixedReductionOrder) {
  EXPECT_THROW(record_calls({.op = Op::all_reduce, .count = 4}, Algorithm::direct), Error);
  EXPECT_THROW(record_calls({.op = Op::reduce_scatter, .count = 4}, Algorithm::ring), Error);
}

TEST(Nccl, HostArraysUseHostTransport) {
  const auto group = make_thread_group(2, 20, true, std::make_shared<FailureState>());
  launch({.ranks = 2, .timeout_s = 20}, [&](Communicator& world) {
    Log log;
    Communicator c(std::make_unique<NcclTransport>(std::make_unique<FakeNccl>(log),
                                                   std::make_unique<ThreadTransport>(group, world.rank()), 20),
                   "data", Algorithm::native);
    const Tensor x = make_array(c.rank(), 100, DType::float32, make_arena());
    c.all_reduce(x);
    EXPECT_EQ(values(x), test::summed(2, 100));
    EXPECT_EQ(c.sum(2), 4);
    c.barrier();
    EXPECT_EQ(log.calls.size(), 1U);
    const auto rows = c.split(0, -c.rank(), "rows");
    EXPECT_EQ(log.calls.back(), "begin " + std::to_string(1 - c.rank()) + "/2 the id");
    if (c.rank() == 0) c.send(x, 1, 5);
    if (c.rank() == 1) c.recv(x, 0, 5);
    EXPECT_EQ(log.calls.size(), 2U);
    EXPECT_EQ(values(x), test::summed(2, 100));
  });
}

// Two ranks, each with an all-reduce of 100 elements in nominal GPU memory.
void on_two_ranks(double timeout_s, const std::function<void(Log&, NcclTransport&, const Call&)>& f) {
  const auto group = make_thread_group(2, 20, true, std::make_shared<FailureState>());
  launch({.ranks = 2, .timeout_s = 20}, [&](Communicator& world) {
    const Tensor x = Tensor::zeros({100}, DType::float32, make_arena());
    Log log;
    log.in = x.raw();
    log.gpu = x.arena().get();
    log.stuck = true;
    NcclTransport nccl(std::make_unique<FakeNccl>(log), std::make_unique<ThreadTransport>(group, world.rank()),
                       timeout_s);
    f(log, nccl, {.op = Op::all_reduce, .count = 100, .in = x.raw(), .out = x.raw(), .gpu = x.arena().get()});
    world.barrier();
  });
}

TEST(Nccl, StuckCollectiveIsAbortedAndNamed) {
  on_two_ranks(1, [](Log& log, NcclTransport& nccl, const Call& call) {
    expect_error(Status::communication,
                 {"all_reduce of 400 bytes (float32, on a GPU): NCCL did not complete it within 1 s"},
                 [&] { nccl.native(call); });
    EXPECT_EQ(log.calls.back(), "abort");
  });
}

// During capture of the rank's stream no call waits; background calls are joined by wait(), and all of a rank's
// communicators are aborted after one has failed.
TEST(Nccl, CaptureOnlyQueuesCollectives) {
  on_two_ranks(0.1, [](Log& log, NcclTransport& nccl, const Call& call) {
    const std::unique_ptr<Transport> other = nccl.split(0, nccl.rank());
    log.captured = true;
    log.calls.clear();
    EXPECT_TRUE(nccl.only_queues(call));
    EXPECT_EQ(nccl.native(call), sent_directly(call, 2, nccl.rank()));
    const std::string reduce = "all_reduce in+0 in+0 100 float32 sum";
    EXPECT_EQ(log.calls, (Calls{"after", reduce, "point", "join"}));
    log.calls.clear();
    const std::function<void()> first = nccl.start_native(call), second = nccl.start_native(call);
    EXPECT_EQ(log.calls, (Calls{"after", reduce, "point", "after", reduce, "point"}));
    second();
    first();
    EXPECT_EQ(log.calls.size(), 8U);
    EXPECT_EQ(log.calls.back(), "join");
    log.captured = false;
    EXPECT_FALSE(nccl.only_queues(call));
    nccl.check_progress(0.05, "the step");
    log.calls.clear();
    EXPECT_THROW(nccl.check_progress(0.2, "the step"), CommError);
    EXPECT_EQ(log.calls, (Calls{"abort", "abort"}));
    EXPECT_THROW(other->native(call), CommError);
    EXPECT_EQ(nccl.background(), other->background());
  });
}

// A rank fails while a collective waits for it: NCCL is aborted immediately, long before the timeout.
TEST(Nccl, FailedRankAbortsOtherRanks) {
  on_two_ranks(20, [](Log& log, NcclTransport& nccl, const Call& call) {
    if (nccl.rank() == 1) return nccl.fail("out of memory");
    EXPECT_THROW(nccl.native(call), PeerFailed);
    EXPECT_EQ(log.calls.back(), "abort");
    EXPECT_THROW(nccl.native(call), CommError);  // no calls may follow
  });
}

TEST(Nccl, RejectsBackendWithoutGpus) {
  const std::string what =
      error_message([] { launch({.backend = Backend::nccl, .ranks = 2, .timeout_s = 20}, [](Communicator&) {}); });
  if (what == "nothing was thrown") GTEST_SKIP() << "this machine has GPUs";
  EXPECT_TRUE(has(what, kWithNccl ? "`backend` nccl: every rank needs a separate GPU; expected 2 GPUs on this machine"
                                  : "`backend` nccl: this build has no NCCL"));
}

}  // namespace
}  // namespace tessera
