// Files that change under a running program, or are not what they should be: one line that names them, and status 4.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "app/signals.h"
#include "data/files.h"
#include "data/safetensors.h"
#include "tests/app/program.h"

namespace tessera {
namespace {
namespace fs = std::filesystem;
using test::Ran;

class ChangedFilesTest : public test::ProgramTest {
 protected:
  // Begins a long run on the dataset "made", changes its token files when a few steps are made, and returns the end.
  template <class Change>
  Ran changed(const std::string& more, const Change& change) {
    fs::remove_all(path("made"));
    fs::remove_all(path("run"));
    EXPECT_EQ(run("data text.txt --out made").status, 0);
    const pid_t child = start("train " + kSmall + "--data made --steps 100000000 --save-every 0 --eval-every 0 " +
                              "--timeout 20 --out run " + more);
    std::error_code error;
    for (int i = 0; i < 20000 && !(fs::exists(path("run/metrics.jsonl"), error) &&
                                   fs::file_size(path("run/metrics.jsonl"), error) > 0);
         ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    change();
    int status = 0;
    for (int i = 0; i < 3000 && waitpid(child, &status, WNOHANG) == 0; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    if (kill(child, SIGKILL) == 0) waitpid(child, &status, 0);
    return {WIFEXITED(status) ? WEXITSTATUS(status) : 1000, "", read_file(path("err.txt"))};
  }
  // The same text in a file of the checkpoint, with the manifest's checksum made to fit.
  void rewrite(const fs::path& checkpoint, const std::string& name, const std::string& bytes) const {
    const std::string manifest = read_file(checkpoint / "manifest.json");
    std::string with = manifest;
    const auto put = [&](const std::string& key, const std::string& value, const char* end) {
      const size_t at = with.find(key, with.find(name)) + key.size();
      with.replace(at, with.find_first_of(end, at) - at, value);
    };
    put("\"bytes\": ", std::to_string(bytes.size()), ",");
    put("\"xxh3\": \"", fmt::format("{:016x}", checksum(bytes)), "\"");
    std::ofstream(checkpoint / name, std::ios::binary) << bytes;
    std::ofstream(checkpoint / "manifest.json") << with;
  }
};

TEST_F(ChangedFilesTest, ATokenFileThatIsCutShortIsNamed) {
  for (const char* more : {"--ranks 1", "--ranks 2", "--ranks 2 --dp-mode ps-async"})
    for (const uintmax_t left : {uintmax_t{64}, uintmax_t{5000}}) {
      const Ran r = changed(more, [&] { fs::resize_file(path("made/train.tok"), left); });
      EXPECT_EQ(r.status, 4) << more << ": " << r.err;
      EXPECT_NE(r.last_line().find("made/train.tok was cut short while it was used"), std::string::npos) << r.err;
    }
}

TEST_F(ChangedFilesTest, ATokenThatIsNoneIsNamedWithItsPlace) {
  const Ran r = changed("--ranks 2", [&] {
    const auto size = fs::file_size(path("made/train.tok"));
    std::fstream(path("made/train.tok"), std::ios::in | std::ios::out | std::ios::binary).seekp(64)
        << std::string(size - 64, '\x7f');
  });
  EXPECT_EQ(r.status, 4) << r.err;
  EXPECT_NE(r.last_line().find("made/train.tok: token 32639 at position "), std::string::npos) << r.err;
  EXPECT_NE(r.last_line().find("is outside the vocabulary of 31"), std::string::npos) << r.err;
}

// The thread that reads what is gone can do nothing more; the program says why it ends.
TEST_F(ChangedFilesTest, AMappedFileThatIsCutShortIsNamed) {
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
      testing::ExitedWithCode(4), "tessera: .*tessera-mapped-.* was cut short while it was read");
  EXPECT_EQ(mapped_file_at(this), nullptr);
}

TEST_F(ChangedFilesTest, ACheckpointThatHoldsMoreThanTheModelIsRefused) {
  ASSERT_EQ(train("--out run").status, 0);
  const fs::path checkpoint = path("run/checkpoints/step-12");
  for (const std::string name : {"model.safetensors", "optimizer.safetensors"}) {
    const std::string good = read_file(checkpoint / name);
    const Safetensors file(std::as_bytes(std::span(good)), name);
    std::vector<TensorBytes> tensors = file.tensors();
    const std::vector<float> more{1, 2};
    tensors.push_back({"surplus.weight", DType::float32, {2}, std::as_bytes(std::span(more))});
    write_safetensors(path("more"), tensors, file.metadata());
    rewrite(checkpoint, name, read_file(path("more")));
    expect_failure("train --resume --out run --steps 14", 4, name + ": the model has no tensor 'surplus.weight'");
    if (name.starts_with("model"))
      expect_failure("generate run --tokens 3", 4, name + ": the model has no tensor 'surplus.weight'");
    rewrite(checkpoint, name, good);
  }
  EXPECT_EQ(run("train --resume --out run --steps 14").status, 0);
}

TEST_F(ChangedFilesTest, ARecordThatIsNoFileIsRefused) {
  ASSERT_EQ(mkfifo(path("pipe").c_str(), 0600), 0);
  std::ofstream(path("huge"));
  fs::resize_file(path("huge"), uintmax_t{1} << 40);
  const std::string replay = "train " + kSmall + "--ranks 2 --dp-mode ps-async --out run --replay ";
  expect_failure(replay + "pipe", 4, "pipe: expected a file with a record");
  expect_failure(replay + "/dev/zero", 4, "/dev/zero: expected a file with a record");
  expect_failure(replay + "huge", 4, "huge: 1099511627776 bytes; expected a record of at most");
  expect_failure(replay + "missing", 4, "missing: cannot be read");
}

TEST_F(ChangedFilesTest, ATemporaryFolderThatIsNoneIsNamed) {
  expect_failure("train " + kSmall + "--offload optimizer --out run", 6,
                 "TMPDIR: expected a folder for temporary files, found '/nonexistent/t'",
                 "export TMPDIR=/nonexistent/t;");
}

// A reservation of addresses leaves some for others, whatever the limit is.
TEST_F(ChangedFilesTest, LimitsOnAddressSpaceLeaveRoom) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer wants more addresses";
#endif
  for (const int gb : {6, 8, 12, 16, 20, 24, 33, 65}) {
    const Ran r = run(fmt::format("train {} --steps 2 --no-save --batch 8 --ranks 8 --out run-{}", kSmall, gb),
                      fmt::format("ulimit -v {};", gb * 1000 * 1000));
    EXPECT_EQ(r.status, 0) << gb << " GB: " << r.err;
  }
}

TEST_F(ChangedFilesTest, NumbersAtTheEndOfTheirTypeAreRefused) {
  for (const char* option : {"steps", "warmup", "save-every", "eval-every", "check-replicas"})
    expect_failure(fmt::format("train {} --{} 9223372036854775807", kSmall, option), 2,
                   fmt::format("--{}: expected a whole number in [", option));
  expect_failure("train --lr 1e308", 2, "--lr: expected a number in [0, 1e+300], found '1e308'");
  expect_failure("train --lr -1", 2, "--lr: expected a number of at least 0, found '-1'");
}

TEST_F(ChangedFilesTest, TasksThatCannotJoinAreRefused) {
  for (const char* more : {"", "--backend threads", "--ranks 2"})
    expect_failure("train " + kSmall + more + " --out run", 2, "srun has started 4 tasks that cannot join each other",
                   "export SLURM_STEP_NUM_TASKS=4 SLURM_NTASKS=4;");
  EXPECT_EQ(run("train " + kSmall + "--out run", "export SLURM_NTASKS=4;").status, 0);
}

TEST_F(ChangedFilesTest, NamesAreShownWithoutCommandsForATerminal) {
  const std::string name = "$(printf 'a\\033[31mb')";
  const Ran r = train(fmt::format("--out \"{}\"", name));
  ASSERT_EQ(r.status, 0) << r.err;
  const Ran data = run(fmt::format("data text.txt --out \"made-{}\"", name)),
            text = run(fmt::format("generate \"{}\" --tokens 2", name));
  for (const std::string& shown : {r.err, r.out, data.out, text.err}) {
    EXPECT_EQ(shown.find('\033'), std::string::npos) << shown;
    EXPECT_NE(shown.find("a\\x1b[31mb"), std::string::npos) << shown;
  }
}

TEST_F(ChangedFilesTest, AMessageIsShortWhateverItQuotes) {
  const Ran r = run(fmt::format("train --layers {}", std::string(8000, '7')));
  EXPECT_EQ(r.status, 2);
  EXPECT_LT(r.err.size(), 1100U);
}

}  // namespace
}  // namespace tessera
