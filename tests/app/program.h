// Helpers of the tests that run the binary: a folder with a text and a cache, and the small model that is trained
// there.
#pragma once
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <system_error>
#include <thread>

#include "data/files.h"
#include "train/checkpoint/directory.h"

namespace tessera::test {

struct Ran {
  int status = 0;
  std::string out, err;
  std::string last_line() const {
    const std::string text = err.substr(0, err.find_last_not_of('\n') + 1);
    return text.substr(text.rfind('\n') + 1);
  }
};

// The program's path: where it was built, or in a packed build (bench/pack.sh) beside the tests.
inline std::string built_program() {
  namespace fs = std::filesystem;
  return fs::exists(TESSERA_BINARY)
             ? TESSERA_BINARY
             : (fs::read_symlink("/proc/self/exe").parent_path().parent_path() / "bin/tessera").string();
}

class ProgramTest : public testing::Test {
 protected:
  ProgramTest() {
    std::string text;
    for (int i = 0; i < 900; ++i)
      text += fmt::format("Line {} of a text that says little, but {} of it.\n", i, i % 7 == 0 ? "more" : "less");
    std::ofstream(path("text.txt")) << text;
  }
  std::filesystem::path path(const std::string& name) const { return folder_.path() / name; }
  // Runs the program in the test's folder; `before` is shell code in front of it.
  Ran run(const std::string& arguments, const std::string& before = "") const {
    return run_program(built_program(), arguments, before);
  }
  Ran run_program(const std::string& program, const std::string& arguments, const std::string& before = "") const {
    const std::string command = fmt::format("cd '{}' && export TESSERA_CACHE=cache && {} '{}' {} > out.txt 2> err.txt",
                                            folder_.path().string(), before, program, arguments);
    const int status = std::system(command.c_str());
    return {WIFEXITED(status) ? WEXITSTATUS(status) : 1000, read_file(path("out.txt")), read_file(path("err.txt"))};
  }
  Ran train(const std::string& more) const { return run("train " + kSmall + more); }
  void expect_failure(const std::string& arguments, int status, const std::string& words,
                      const std::string& before = "") const {
    const Ran r = run(arguments, before);
    EXPECT_EQ(r.status, status) << arguments << ": " << r.err;
    EXPECT_TRUE(r.last_line().starts_with("tessera: ")) << r.err;
    EXPECT_NE(r.last_line().find(words), std::string::npos) << arguments << ": " << r.last_line();
  }
  std::string weights(const std::string& checkpoint) const { return read_file(path(checkpoint) / "model.safetensors"); }
  std::string optimizer(const std::string& checkpoint) const {
    return read_file(path(checkpoint) / "optimizer.safetensors");
  }

  // The same without waiting for its end; standard output is dropped.
  pid_t start(const std::string& arguments, const std::string& before = "") const {
    const pid_t child = fork();
    if (child != 0) return child;
    const std::string command =
        fmt::format("cd '{}' && export TESSERA_CACHE=cache && {} exec '{}' {} > /dev/null 2> err.txt",
                    folder_.path().string(), before, TESSERA_BINARY, arguments);
    execl("/bin/sh", "sh", "-c", command.c_str(), nullptr);
    _exit(99);
  }

  // Sends the signal when run "run" has made a few steps, or `bytes` of records. Returns the exit status, or 1000 when
  // it ended in another way.
  int interrupted(const std::string& arguments, int signal, uintmax_t bytes = 1) const {
    const pid_t child = start(arguments);
    const std::filesystem::path metrics = path("run/metrics.jsonl");
    std::error_code error;
    for (int i = 0;
         i < 20000 && (!std::filesystem::exists(metrics, error) || std::filesystem::file_size(metrics, error) < bytes);
         ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    kill(child, signal);
    int status = 0;
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000;
  }

  // --- the run in the folder "run", which may be disturbed at any moment ---
  std::filesystem::path checkpoints() const { return path("run/checkpoints"); }
  // Names of half-written files and folders, as the program prints them.
  std::vector<std::string> half_written() const {
    std::vector<std::string> out;
    for (const std::string folder : {"run", "run/checkpoints"}) {
      if (!std::filesystem::exists(path(folder))) continue;
      for (const auto& e : std::filesystem::directory_iterator(path(folder)))
        if (const std::string name = e.path().filename().string(); name.find(".tmp-") != std::string::npos)
          out.push_back(std::string(folder).append("/").append(name));
    }
    return out;
  }
  // The step of the newest checkpoint, 0 if there is none. Whatever has a checkpoint's name must be one.
  int64_t newest_step() const {
    std::vector<std::string> damaged;
    const auto newest = newest_checkpoint(checkpoints(), damaged);
    EXPECT_TRUE(damaged.empty()) << damaged.front();
    if (!newest) return 0;
    for (const auto& e : std::filesystem::directory_iterator(checkpoints())) {
      const std::string name = e.path().filename().string();
      if (name.starts_with("step-") && name.find(".tmp-") == std::string::npos) {
        EXPECT_NO_THROW(open_checkpoint(e.path()));
      }
    }
    return newest->step;
  }
  // Whether this process is saving, or was when it ended.
  bool saving(pid_t child) const {
    const std::string mark = fmt::format(".tmp-{}-", child);
    const std::vector<std::string> names = half_written();
    return std::any_of(names.begin(), names.end(), [&](const std::string& name) {
      return name.starts_with("run/checkpoints/") && name.find(mark) != std::string::npos;
    });
  }

  const std::string kSmall =
      "--data text.txt --layers 1 --heads 2 --channels 16 --context 16 --batch 4 --steps 12 --warmup 2 "
      "--lr 0.03 --threads-per-rank 1 ";
  TemporaryDirectory folder_{std::filesystem::temp_directory_path() / "tessera-program-"};
};

}  // namespace tessera::test
