// Helpers of end-to-end tests: a working directory with a text and a cache, and the small model that is trained there.
#pragma once
#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "base/files.h"
#include "tests/support/texts.h"
#include "train/checkpoint/directory.h"

namespace tessera {

namespace fs = std::filesystem;
using Json = nlohmann::json;

namespace test {

struct Ran {
  int status = 0;
  std::string out, err;
  std::string last_line() const { return last_line(err); }
  Json last_record() const { return Json::parse(last_line(out)); }

 private:
  static std::string last_line(const std::string& all) {
    const std::string text = all.substr(0, all.find_last_not_of('\n') + 1);
    return text.substr(text.rfind('\n') + 1);
  }
};

inline std::vector<std::string> to_lines(const std::string& text) {
  std::vector<std::string> out;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) out.push_back(line);
  return out;
}

// The values of a file with one value per line.
inline std::vector<Json> parse_records(const std::string& text) {
  std::vector<Json> out;
  for (const std::string& line : to_lines(text)) out.push_back(Json::parse(line));
  return out;
}

// Expects an object with these values and possibly others.
inline void expect_values(const Json& object, const Json& values, const std::string& where = "") {
  for (const auto& [key, value] : values.items())
    EXPECT_TRUE(object.contains(key) && object[key] == value) << where << " " << key << ": " << object;
}

// The exit status of a terminated process, or 1000 if it was killed by a signal.
inline int exit_status(int status) { return WIFEXITED(status) ? WEXITSTATUS(status) : 1000; }
inline int wait_for_exit(pid_t child) {
  int status = 0;
  waitpid(child, &status, 0);
  return exit_status(status);
}

// Waits for the end; returns false after a timeout, when the process is killed.
inline bool ends(pid_t child, int& status, double seconds, int signal) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (waitpid(child, &status, WNOHANG) == 0) {
    if (std::chrono::steady_clock::now() > end) {
      kill(child, signal);
      waitpid(child, &status, 0);
      return false;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return true;
}

// Polls a condition for up to a minute.
inline bool comes(const std::function<bool()>& condition) {
  for (int i = 0; i < 60000; ++i) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return false;
}

// The program's path: in the build directory, or in a packed build (bench/pack.sh) next to the tests.
inline std::string built_program() {
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
  fs::path path(const std::string& name) const { return directory_.path() / name; }
  // Runs the program in the test's directory; `before` is shell code that precedes it.
  Ran run(const std::string& arguments, const std::string& before = "") const {
    return run_program(built_program(), arguments, before);
  }
  Ran run_program(const std::string& program, const std::string& arguments, const std::string& before = "") const {
    const std::string command =
        fmt::format("exec < /dev/null; cd '{}' && export TESSERA_CACHE=cache && {} '{}' {} > out.txt 2> err.txt",
                    directory_.path().string(), before, program, arguments);
    const int status = exit_status(std::system(command.c_str()));
    return {status, read_file(path("out.txt")), read_file(path("err.txt"))};
  }
  // Runs a command that must succeed; otherwise the test ends.
  Ran must(const std::string& arguments, const std::string& before = "", Place at = Place::current()) const {
    const Ran r = run(arguments, before);
    if (r.status == 0) return r;
    throw std::runtime_error(
        fmt::format("{}:{}: {}: status {}: {}", at.file_name(), at.line(), arguments, r.status, r.err + r.out));
  }
  Ran train(const std::string& more, Place at = Place::current()) const {
    return must("train " + kSmall + more, "", at);
  }
  // Runs a command after removing its --out.
  Ran anew(const std::string& arguments, Place at = Place::current()) const {
    const size_t out = arguments.rfind("--out ") + 6;
    fs::remove_all(path(arguments.substr(out, arguments.find(' ', out) - out)));
    return must(arguments, "", at);
  }
  // Standard error of the last command.
  std::string log() const { return read_file(path("err.txt")); }
  // Removes this checkpoint, the newest of its run, and expects the run to resume after `step`, an older one, and to
  // write identical files again.
  void expect_same_checkpoint_after_resume(const std::string& checkpoint, int64_t step,
                                           const std::string& more = "") const {
    const std::string before = files(checkpoint);
    fs::remove_all(path(checkpoint));
    ASSERT_GT(step, 0) << "a restarted run does not test resuming";
    const std::string resumed = fmt::format("resuming after step {}\n", step);
    expect_has(must("train --resume --out " + checkpoint.substr(0, checkpoint.find('/')) + more).err, resumed);
    EXPECT_TRUE(files(checkpoint) == before) << checkpoint << more;
  }
  double compute_loss(const std::string& words) const {
    return must("evaluate " + words + " --data text.txt --threads-per-rank 1 --format json").last_record().at("loss");
  }
  // The step and validation records of a run without timing data; an incomplete last line is omitted.
  std::vector<Json> records(const std::string& run) const {
    const std::string all = fs::exists(path(run) / "metrics.jsonl") ? read_file(path(run) / "metrics.jsonl") : "";
    std::vector<Json> out = parse_records(all.substr(0, all.rfind('\n') + 1));
    std::erase_if(out, [](const Json& record) { return record.at("event") == "summary"; });
    for (Json& record : out)
      for (const char* key : {"tokens_per_s", "step_ms"}) record.erase(key);
    return out;
  }
  // Values read by TensorBoard.
  std::vector<fs::path> event_files(const std::string& run) const {
    std::vector<fs::path> out;
    for (const auto& e : fs::directory_iterator(path(run)))
      if (e.path().filename().string().starts_with("events.out.tfevents.")) out.push_back(e.path());
    return out;
  }
  Json to_json(const std::string& file) const { return Json::parse(read_file(path(file))); }
  void write(const std::string& file, const std::string& text) const {
    std::ofstream(path(file), std::ios::binary) << text;
  }
  void fails(const std::string& arguments, int status, const std::string& words, const std::string& before = "") const {
    const Ran r = run(arguments, before);
    EXPECT_EQ(r.status, status) << arguments << ": " << r.err;
    EXPECT_TRUE(r.last_line().starts_with("tessera: ")) << r.err;
    EXPECT_NE(r.last_line().find(words), std::string::npos) << arguments << ": " << r.last_line();
  }
  void fails_in_one_line(const std::string& arguments, int status, const std::string& words,
                         const std::string& before = "") const {
    fails(arguments, status, words, before);
    const std::string errors = read_file(path("err.txt"));
    EXPECT_EQ(std::count(errors.begin(), errors.end(), '\n'), 1) << arguments << ": " << errors;
  }
  std::string weights(const std::string& checkpoint) const { return read_file(path(checkpoint) / "model.safetensors"); }
  std::string optimizer(const std::string& checkpoint) const {
    return read_file(path(checkpoint) / "optimizer.safetensors");
  }
  std::string files(const std::string& checkpoint) const { return weights(checkpoint) + optimizer(checkpoint); }

  // Starts the program without waiting for its end; standard output is discarded.
  pid_t start(const std::string& arguments, const std::string& before = "") const {
    const pid_t child = fork();
    if (child != 0) return child;
    const std::string command =
        fmt::format("cd '{}' && export TESSERA_CACHE=cache && {} exec '{}' {} > /dev/null 2> err.txt",
                    directory_.path().string(), before, TESSERA_BINARY, arguments);
    execl("/bin/sh", "sh", "-c", command.c_str(), nullptr);
    _exit(99);
  }

  // Sends the signal when run "run" has completed a few steps or written `bytes` of records. Returns the exit status,
  // or 1000 if it was killed by a signal.
  int interrupted(const std::string& arguments, int signal, uintmax_t bytes = 1) const {
    const pid_t child = start(arguments);
    EXPECT_TRUE(comes([&] { return recorded() >= bytes; }));
    kill(child, signal);
    return wait_for_exit(child);
  }
  // The size of the records written by run "run".
  uintmax_t recorded() const {
    std::error_code error;
    const uintmax_t bytes = fs::file_size(path("run/metrics.jsonl"), error);
    return error ? 0 : bytes;
  }

  // The following functions inspect the run in "run" at any time.
  fs::path checkpoints() const { return path("run/checkpoints"); }
  // Names of incomplete files and directories, as printed by the program.
  std::vector<std::string> partial_files() const {
    std::vector<std::string> out;
    for (const std::string directory : {"run", "run/checkpoints"}) {
      if (!fs::exists(path(directory))) continue;
      for (const auto& e : fs::directory_iterator(path(directory)))
        if (const std::string name = e.path().filename().string(); name.find(".tmp-") != std::string::npos)
          out.push_back(std::string(directory).append("/").append(name));
    }
    return out;
  }
  void expect_no_temporary(const std::string& directory) const {
    for (const auto& e : fs::recursive_directory_iterator(path(directory)))
      expect_lacks(e.path().filename().string(), ".tmp-");
  }
  // The step of the newest checkpoint, 0 if there is none; all checkpoints must be complete.
  int64_t newest_step() const {
    std::vector<std::string> damaged;
    const auto newest = newest_checkpoint(checkpoints(), damaged);
    EXPECT_TRUE(damaged.empty()) << damaged.front();
    if (!newest) return 0;
    for (const auto& e : fs::directory_iterator(checkpoints())) {
      const std::string name = e.path().filename().string();
      if (name.starts_with("step-") && name.find(".tmp-") == std::string::npos) {
        EXPECT_NO_THROW(open_checkpoint(e.path()));
      }
    }
    return newest->step;
  }
  // Replaces a file of a checkpoint and updates the manifest's checksum.
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
  // The step in the file `latest`, without validating checkpoints; 0 if there is none.
  int64_t newest_saved() const {
    const fs::path latest = checkpoints() / "latest";
    std::error_code error;
    return fs::exists(latest, error) ? std::stoll(read_file(latest).substr(5)) : 0;
  }
  // Whether this process is saving, or was saving when it ended.
  bool saving(pid_t child) const {
    const std::string mark = fmt::format(".tmp-{}-", child);
    const std::vector<std::string> names = partial_files();
    return std::any_of(names.begin(), names.end(), [&](const std::string& name) {
      return name.starts_with("run/checkpoints/") && name.find(mark) != std::string::npos;
    });
  }

  const std::string kSmall =
      "--data text.txt --layers 1 --heads 2 --channels 16 --context 16 --batch 4 --steps 12 --warmup 2 --lr 0.03 "
      "--threads-per-rank 1 ";
  TemporaryDirectory directory_{fs::temp_directory_path() / "tessera-program-"};
};

}  // namespace test

using test::parse_records;
using test::ProgramTest;
using test::Ran;

}  // namespace tessera
