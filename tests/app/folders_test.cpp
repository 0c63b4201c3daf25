// Files that change during a run or are invalid: one line naming them, and status 4.
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <cstring>
#include <fstream>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <system_error>
#include <vector>

#include "app/signals.h"
#include "data/safetensors.h"
#include "tests/app/program.h"
#include "tests/data/support.h"
#include "tests/support/no_locks.h"
#include "train/run/directory.h"

namespace tessera {

namespace {

class InvalidInputTest : public ProgramTest {
 protected:
  // Starts a long run on the dataset "made", modifies its token files after a few steps, and returns the outcome.
  template <class Change>
  Ran changed(const std::string& more, const Change& change) {
    fs::remove_all(path("run"));
    anew("data text.txt --out made");
    const pid_t child = start("train " + kSmall + "--data made --steps 100000000 --save-every 0 --eval-every 0 " +
                              "--timeout 20 --out run " + more);
    EXPECT_TRUE(test::comes([&] { return recorded() > 0; }));
    change();
    int status = 0;
    test::ends(child, status, 60, SIGKILL);
    return {test::exit_status(status), "", log()};
  }
};

TEST_F(InvalidInputTest, ErrorsNameTruncatedTokenFile) {
  for (const char* more : {"--ranks 1", "--ranks 2", "--ranks 2 --dp-mode ps-async"})
    for (const uintmax_t left : {uintmax_t{64}, uintmax_t{5000}}) {
      const Ran r = changed(more, [&] { fs::resize_file(path("made/train.tok"), left); });
      EXPECT_EQ(r.status, 4) << more << ": " << r.err;
      expect_has(r.last_line(), "made/train.tok was truncated while in use");
    }
}

TEST_F(InvalidInputTest, ErrorsNamePositionOfInvalidToken) {
  const Ran r = changed("--ranks 2", [&] {
    const auto size = fs::file_size(path("made/train.tok"));
    std::fstream(path("made/train.tok"), std::ios::in | std::ios::out | std::ios::binary).seekp(64)
        << std::string(size - 64, '\x7f');
  });
  EXPECT_EQ(r.status, 4) << r.err;
  expect_has(r.last_line(), {"made/train.tok: token 32639 at position ", "is outside the vocabulary of 31"});
}

// The reading thread cannot continue, but the program reports the cause.
TEST_F(InvalidInputTest, ErrorsNameTruncatedMappedFile) {
  testing::GTEST_FLAG(death_test_style) = "threadsafe";
  EXPECT_EXIT(
      {
        const fs::path file = fs::temp_directory_path() / fmt::format("tessera-mapped-{}", getpid());
        std::ofstream(file) << std::string(100000, 'x');
        watch_signals();
        const MappedFile mapped(file);
        fs::resize_file(file, 0);
        fs::remove(file);
        const volatile std::byte* const bytes = mapped.bytes().data();
        if (bytes[50000] == std::byte{'x'}) std::puts("it was there");
      },
      testing::ExitedWithCode(4), "tessera: .*tessera-mapped-.* was truncated while it was being read");
  EXPECT_EQ(mapped_file_at(this), nullptr);
}

TEST_F(InvalidInputTest, RejectsCheckpointWithExtraTensors) {
  train("--out run");
  const fs::path checkpoint = path("run/checkpoints/step-12");
  for (const std::string name : {"model.safetensors", "optimizer.safetensors"}) {
    const std::string good = read_file(checkpoint / name);
    const Safetensors file(std::as_bytes(std::span(good)), name);
    std::vector<TensorBytes> tensors = file.tensors();
    const std::vector<float> more{1, 2};
    tensors.push_back({"surplus.weight", DType::float32, {2}, std::as_bytes(std::span(more))});
    write_safetensors(path("more"), tensors, file.metadata());
    rewrite(checkpoint, name, read_file(path("more")));
    fails("train --resume --out run --steps 14", 4, name + ": the model has no tensor 'surplus.weight'");
    if (name.starts_with("model"))
      fails("generate run --tokens 3", 4, name + ": the model has no tensor 'surplus.weight'");
    rewrite(checkpoint, name, good);
  }
  must("train --resume --out run --steps 14");
}

// Files that are read completely: endless files, and files larger than memory.
TEST_F(InvalidInputTest, RejectsEndlessAndHugeFiles) {
  ASSERT_EQ(mkfifo(path("pipe").c_str(), 0600), 0);
  std::ofstream(path("huge"));
  fs::resize_file(path("huge"), uintmax_t{1} << 40);
  for (const std::string option : {"--ranks 2 --dp-mode ps-async --replay ", "--ranks 2 --pp 2 --schedule ./",
                                   "--config ", "--restarts 1 --hostfile "}) {
    const std::string args = "train " + kSmall + option;
    fails(args + "pipe", 4, "pipe is not a regular file (a pipe or a device); expected a file");
    fails(args + "huge", 4, "huge: 1099511627776 bytes; expected at most 1073741824");
    if (!option.ends_with("./")) fails(args + "/dev/zero", 4, "/dev/zero is not a regular file");
  }
  fails("plan --format json --cases huge", 4, "--cases: huge: 1099511627776 bytes; expected at most");
  fails("plan --ranks 8 --hardware ./huge", 4, "./huge: 1099511627776 bytes; expected at most");
  fs::create_directory(path("hub"));
  for (const std::string file : {"config.json", "model.safetensors.index.json"}) {
    std::ofstream(path("hub") / file);
    fs::resize_file(path("hub") / file, uintmax_t{1} << 40);
    fails("train --init hub", 4, file + ": 1099511627776 bytes; expected at most");
    std::ofstream(path("hub") / file) << R"({"model_type": "gpt2"})";
  }
}

TEST_F(InvalidInputTest, ErrorsNameSymlinkLoops) {
  fs::create_symlink("b", path("a"));
  fs::create_symlink("a", path("b"));
  for (const auto& [args, option] :
       {std::pair("train --data a", "--data: cannot open a"),
        {"train --data text.txt --val-data a", "--val-data: cannot open a"},
        {"train --data text.txt --steps 1 --out a/x", "--out: cannot open a/x/config.toml"},
        {"train --init a", "--init: cannot open a/adapter_config.json"},
        {"train --config a", "--config: cannot open a"},
        {"generate a", "cannot open a/adapter_config.json"},
        {"checkpoint import a --out x", "cannot open a/config.json"},
        {"report a", "cannot open a/flight.json"}})
    fails(args, 4, fmt::format("{}: Too many levels of symbolic links", option));
  const fs::filesystem_error in_a_rank("status", path("a"),
                                       std::make_error_code(std::errc::too_many_symbolic_link_levels));
  EXPECT_EQ(failure_cause(in_a_rank), path("a").string() + ": Too many levels of symbolic links");
  expect_has(failure_cause(std::system_error(EAGAIN, std::system_category())), "ulimit -u");
  expect_lacks(failure_cause(std::system_error(EIO, std::system_category())), "ulimit");
}

TEST_F(InvalidInputTest, ErrorsNameTheOffendingOption) {
  train("--out run");
  fails("train " + kSmall + "--val-data nowhere", 4, "--val-data: cannot open nowhere: No such file");
  fails("train --data text.txt --context 1000000", 2,
        "--context: a context of 1000000 tokens is too long for a training text of");
  fails("checkpoint reshard run --out parts --dp 5 --zero 3", 2,
        "--dp: 5 data ranks x 1 micro-batches do not divide the batch of");
}

TEST_F(InvalidInputTest, ErrorsNameInvalidTemporaryDirectory) {
  fails("train " + kSmall + "--offload optimizer --out run", 6,
        "TMPDIR: expected a directory for temporary files, got '/nonexistent/t'", "export TMPDIR=/nonexistent/t;");
}

// Under any limit, the address space reserved by one rank leaves enough for the others.
TEST_F(InvalidInputTest, ReservationsRespectAddressSpaceLimits) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers need more address space";
#endif
  for (const int gb : {6, 8, 12, 16, 20, 24, 33, 65}) {
    must(fmt::format("train {} --steps 2 --no-save --batch 8 --ranks 8 --out run-{}", kSmall, gb),
         fmt::format("ulimit -v {};", gb * 1000 * 1000));
  }
}

TEST_F(InvalidInputTest, RejectsIntegersAtTypeLimits) {
  for (const char* option : {"steps", "warmup", "save-every", "eval-every", "check-replicas"})
    fails(fmt::format("train {} --{} 9223372036854775807", kSmall, option), 2,
          fmt::format("--{}: expected an integer in [", option));
}

TEST_F(InvalidInputTest, RejectsSlurmTasksWithoutPmi) {
  for (const char* more : {"", "--backend threads", "--ranks 2"})
    fails("train " + kSmall + more + " --out run", 2, "srun started 4 tasks without a PMI",
          "export SLURM_STEP_NUM_TASKS=4 SLURM_NTASKS=4;");
  must("train " + kSmall + "--out run", "export SLURM_NTASKS=4;");
}

TEST_F(InvalidInputTest, EscapesControlCharactersInFileNames) {
  const std::string name = "$(printf 'a\\033[31mb')";
  const Ran r = train(fmt::format("--out \"{}\"", name));
  const Ran data = run(fmt::format("data text.txt --out \"made-{}\"", name)),
            text = run(fmt::format("generate \"{}\" --tokens 2", name));
  for (const std::string& shown : {r.err, r.out, data.out, text.err}) {
    expect_lacks(shown, "\033");
    expect_has(shown, "a\\x1b[31mb");
  }
}

TEST_F(InvalidInputTest, ErrorsAreOneShortLine) {
  fails("train --layers \"$(printf 'a\\n\\033b')\"", 2, "got 'a\\x0a\\x1bb'");
  const Ran r = run(fmt::format("train --layers {}", std::string(8000, '7')));
  EXPECT_EQ(r.status, 2);
  EXPECT_LT(r.err.size(), 1100U);
}

// Output goes to the target of its name: a pipe, a device, standard output or the target of a link, none of which is
// replaced; never into a file that received the number of a closed descriptor.

class OutputFilesTest : public ProgramTest {
 protected:
  void SetUp() override { train("--out run --trace"); }
  // Creates a device for the test, so that the machine's own is not at risk. False if that is not possible.
  bool make_device(const char* name, unsigned int minor) const {
    const fs::path made = path(name);
    if (mknod(made.c_str(), S_IFCHR | 0666, makedev(1, minor)) != 0) return false;
    const int opened = ::open(made.c_str(), O_WRONLY | O_CLOEXEC);
    return opened >= 0 && ::close(opened) == 0;
  }
  bool is_device(const std::string& name) const { return fs::is_character_file(path(name)); }
};

const std::string kRows = "bench --benchmark_filter=^op/gelu/forward/fp32 --benchmark_min_time=0.001 ";

TEST_F(OutputFilesTest, WritesToDevices) {
  const std::string null = "null", full = "full";
  if (!make_device("null", 3) || !make_device("full", 7)) GTEST_SKIP() << "cannot create devices";
  for (const std::string& to : {std::string("report run --out "), kRows + "--benchmark_out="}) {
    must(to + null);
    EXPECT_TRUE(is_device(null)) << to;
    fails(to + full, 6, "cannot write full: No space left on device");
    EXPECT_TRUE(is_device(full)) << to;
  }
  const std::string record = "train " + kSmall + "--ranks 2 --dp-mode ps-async --no-save --no-eval --out ";
  must(record + "a --record " + null);
  EXPECT_TRUE(is_device(null));
  fails(record + "b --record " + full, 6, "full");
  fails("train " + kSmall + "--out " + null, 2, "null");
  fails("data text.txt --out " + null, 6, "null");
  EXPECT_TRUE(is_device(null) && is_device(full));
  expect_no_temporary(".");
}

TEST_F(OutputFilesTest, WritesToPipes) {
  ASSERT_EQ(mkfifo(path("pipe").c_str(), 0600), 0);
  must("report run --out pipe", "(timeout 30 cat pipe > page.html &) ;");
  EXPECT_TRUE(fs::is_fifo(path("pipe")));
  must("report run");
  const std::string page = read_file(path("run/report.html"));
  EXPECT_TRUE(test::comes([&] { return read_file(path("page.html")) == page; }));
  fails("data text.txt --out pipe", 6, "pipe");
  fails("train " + kSmall + "--out pipe", 2, "pipe");
}

TEST_F(OutputFilesTest, WritesToStandardOutput) {
  must("report run");
  const std::string page = read_file(path("run/report.html"));
  // Links like /dev/stdout.
  fs::create_symlink("/proc/self/fd/1", path("stdout"));
  fs::create_symlink("/proc/self/fd/2", path("stderr"));
  EXPECT_EQ(must("report run --out stdout").out, page);  // a file opened by the shell, which must not be replaced
  EXPECT_EQ(run("report run --out stdout | cat").out, page);
  EXPECT_EQ(run("report run --out stderr").err, page);
  EXPECT_TRUE(fs::is_symlink(path("stdout")) && fs::is_symlink(path("stderr")));
}

TEST_F(OutputFilesTest, FollowsSymlinks) {
  fs::create_directories(path("far"));
  fs::create_symlink("far/page.html", path("link.html"));
  for (const char* what : {"a new file", "an old one"}) {
    SCOPED_TRACE(what);
    must("report run --out link.html");
    EXPECT_TRUE(fs::is_symlink(path("link.html")));
    expect_has(read_file(path("far/page.html")), "<html");
  }
  fs::create_symlink("round.html", path("round.html"));
  fails("report run --out round.html", 6, "cannot write round.html");
  fs::create_symlink("nowhere", path("set"));
  fails("data text.txt --out set", 6, "set");
  EXPECT_TRUE(fs::is_symlink(path("set")));
  expect_no_temporary(".");
}

// A file planted at a guessable temporary name must not be written through.
TEST_F(OutputFilesTest, TemporaryNamesAreUnpredictable) {
  const TemporaryName first(path("x")), second(path("x"));
  EXPECT_NE(first.path(), second.path());
  write_file(path("victim"), "as it was");
  must("report run --out page.html", "ln -s victim page.html.tmp-$$; exec");
  EXPECT_EQ(read_file(path("victim")), "as it was");
}

TEST_F(OutputFilesTest, BenchWritesAllRowsOrFails) {
  const Ran r = must(kRows + "--benchmark_out=rows.json");
  expect_has(r.out, "op/gelu/forward/fp32");
  const Json rows = to_json("rows.json");
  EXPECT_EQ(rows.at("benchmarks").size(), 1U);
  EXPECT_TRUE(rows.at("context").contains("ceiling_fp32")) << rows;
  EXPECT_NO_THROW(Json::parse(run(kRows + "--benchmark_format=json").out));
  fails(kRows + "--benchmark_out=missing/rows.json", 6, "missing");
}

// Otherwise the first opened files would get descriptors 0, 1 and 2, and the printed output.
TEST_F(OutputFilesTest, FilesDoNotReuseClosedStandardDescriptors) {
  train("--out whole");
  for (const char* closed : {"0<&-", "1>&-", "2>&-", "1>&- 2>&-", "0<&- 1>&- 2>&-"}) {
    anew("train " + kSmall + "--out closed > /dev/null 2> err.txt " + closed + " #");
    for (const char* file :
         {"config.toml", "checkpoints/step-12/model.safetensors", "checkpoints/step-12/config.toml"}) {
      std::string expected = read_file(path("whole") / file);
      if (const size_t at = expected.find("whole"); at != std::string::npos) expected.replace(at, 5, "closed");
      EXPECT_EQ(read_file(path("closed") / file), expected) << closed << ": " << file;
    }
    EXPECT_NO_THROW(parse_records(read_file(path("closed/metrics.jsonl")))) << closed;
    ASSERT_EQ(event_files("closed").size(), 1U);
    expect_lacks(read_file(event_files("closed")[0]), {"characters of training text", "\nSample:", "validation loss"});
  }
}

TEST_F(OutputFilesTest, RunFilesAreWorldReadable) {
  must("train " + kSmall + "--out mine --trace", "umask 022;");
  for (const auto& e : fs::recursive_directory_iterator(path("mine"))) {
    const auto expected = e.is_directory() ? 0755 : 0644;
    EXPECT_EQ(static_cast<int>(e.status().permissions()), expected) << e.path();
  }
}

// The lock of a run directory; on a file system without locks, the run reports it and stops when it detects another
// run.

class RunLocks : public testing::Test {
 protected:
  ~RunLocks() override { refused = 0; }
  const fs::path& run() const { return directory_.path(); }
  TemporaryDirectory directory_{fs::temp_directory_path() / "tessera-lock-"};
};

TEST_F(RunLocks, AllowsOneWriterPerDirectory) {
  std::optional<RunLock> first(run());
  EXPECT_EQ(first->note(), "");
  first->check();
  expect_error(Status::usage, {"is being written by another run, process"}, [&] { RunLock second(run()); });
  first->check();
  first.reset();
  RunLock(run()).check();
}

TEST_F(RunLocks, DetectsSecondWriterWithoutLocks) {
  for (const int cause : {ENOSYS, ENOLCK, EOPNOTSUPP}) {
    refused = cause;
    const RunLock first(run());
    EXPECT_NE(first.note().find(std::strerror(cause)), std::string::npos) << first.note();
    first.check();
    const RunLock second(run());
    second.check();
    expect_error(Status::output, {"is being written by another run, process"}, [&] { first.check(); });
    second.check();
  }
  refused = EIO;
  expect_error(Status::output, {"cannot lock", "Input/output error"}, [&] { RunLock failed(run()); });
}

}  // namespace
}  // namespace tessera
