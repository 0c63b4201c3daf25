// What the tests share that run the binary: a folder with a text and a cache, and the small model that is trained
// there.
#pragma once
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "data/files.h"

namespace tessera::test {

struct Ran {
  int status = 0;
  std::string out, err;
  std::string last_line() const {
    const std::string text = err.substr(0, err.find_last_not_of('\n') + 1);
    return text.substr(text.rfind('\n') + 1);
  }
};

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
    const std::string command = fmt::format("cd '{}' && export TESSERA_CACHE=cache && {} '{}' {} > out.txt 2> err.txt",
                                            folder_.path().string(), before, TESSERA_BINARY, arguments);
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

  const std::string kSmall =
      "--data text.txt --layers 1 --heads 2 --channels 16 --context 16 --batch 4 --steps 12 --warmup 2 "
      "--lr 0.03 --threads-per-rank 1 ";
  TemporaryDirectory folder_{std::filesystem::temp_directory_path() / "tessera-program-"};
};

}  // namespace tessera::test
