// The program as its users meet it: every test runs the binary.
#include "tests/app/program.h"

#include <signal.h>

#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

namespace tessera {
namespace {
namespace fs = std::filesystem;
using test::ProgramTest;
using test::Ran;
using Json = nlohmann::json;

TEST_F(ProgramTest, TrainsAndLeavesARunThatGenerates) {
  const Ran r = train("--out run");
  ASSERT_EQ(r.status, 0) << r.err;
  EXPECT_NE(r.out.find("the validation loss is"), std::string::npos);
  EXPECT_NE(r.out.find("A sample:"), std::string::npos);
  for (const char* name : {"config.toml", "metrics.jsonl", "checkpoints/latest",
                           "checkpoints/step-12/model.safetensors", "checkpoints/step-12/manifest.json"})
    EXPECT_TRUE(fs::exists(path("run") / name)) << name;
  const Ran a = run("generate run --prompt 'Line 7' --tokens 60 --seed 4"),
            b = run("generate run/checkpoints/step-12 --prompt 'Line 7' --tokens 60 --seed 4");
  EXPECT_EQ(a.status, 0) << a.err;
  EXPECT_EQ(a.out, b.out);
  EXPECT_EQ(a.out.size(), 6U + 60 + 1);
  EXPECT_NE(run("generate run --prompt 'Line 7' --tokens 60 --seed 5").out, a.out);
  EXPECT_EQ(run("generate run --tokens 40 --temperature 0").out,
            run("generate run --tokens 40 --temperature 3 --top-k 1").out);
  expect_failure("generate run --prompt '{'", 2, "character");
  expect_failure("generate run --prompt ''", 2, "--prompt");
  expect_failure("generate text.txt", 4, "text.txt");
}

TEST_F(ProgramTest, MoreThreadsThanOpenMpCanStartAreRefused) {
  expect_failure("verify --layers 1 --steps 1", 2, "OMP_NUM_THREADS: expected at most 1024 threads, found 100000",
                 "OMP_NUM_THREADS=100000");
}

TEST_F(ProgramTest, AFilterThatMatchesNoBenchmarkIsRefused) {
  expect_failure("bench --benchmark_filter=nosuch", 2, "no benchmark matches the filter 'nosuch'");
}

TEST_F(ProgramTest, JsonIsOneObjectPerLineWithTheKeysPromised) {
  const Ran r = train("--out run --format json --eval-every 5 --quiet");
  ASSERT_EQ(r.status, 0) << r.err;
  EXPECT_EQ(r.err, "");
  EXPECT_EQ(r.out, read_file(path("run/metrics.jsonl")));
  std::istringstream lines(r.out);
  std::map<std::string, int> events;
  std::vector<double> losses;
  Json last;
  for (std::string line; std::getline(lines, line);) {
    last = Json::parse(line);
    ++events[last.at("event")];
    if (last["event"] == "step") {
      for (const char* key : {"step", "loss", "lr", "grad_norm", "tokens_per_s", "step_ms"})
        EXPECT_TRUE(last.at(key).is_number()) << key;
      losses.push_back(last["loss"]);
    }
    if (last["event"] == "eval") {
      EXPECT_GT(last.at("val_loss").get<double>(), 0);
    }
  }
  EXPECT_EQ(events, (std::map<std::string, int>{{"step", 12}, {"eval", 3}, {"summary", 1}}));
  for (const char* key : {"steps", "tokens", "loss", "val_loss", "val_bits_per_byte", "tokens_per_s", "mfu",
                          "peak_bytes", "sent_bytes", "plan", "out"})
    EXPECT_TRUE(last.contains(key)) << key;
  EXPECT_EQ(last["tokens"], 12 * 4 * 16);
  EXPECT_LT(losses.back(), losses.front() - 0.1);
  EXPECT_NEAR(losses.front(), std::log(31), 0.3);
}

TEST_F(ProgramTest, SameSeedSameBitsAndAnotherSeedOthers) {
  for (const char* name : {"a", "b"}) ASSERT_EQ(train(fmt::format("--dropout 0.1 --out {}", name)).status, 0);
  ASSERT_EQ(train("--dropout 0.1 --out c --seed 2").status, 0);
  EXPECT_EQ(weights("a/checkpoints/step-12"), weights("b/checkpoints/step-12"));
  EXPECT_NE(weights("a/checkpoints/step-12"), weights("c/checkpoints/step-12"));
  // The resolved configuration is the run.
  ASSERT_EQ(run("train --config a/config.toml --out d").status, 0);
  EXPECT_EQ(weights("a/checkpoints/step-12"), weights("d/checkpoints/step-12"));
}

TEST_F(ProgramTest, AResumedRunIsTheRunThatWasNotStopped) {
  for (const char* kind : {"--optimizer adamw --dtype fp32", "--optimizer adamw --dtype bf16",
                           "--optimizer sgd --lr 0.1 --momentum 0.8 --dtype bf16"}) {
    const std::string options = fmt::format("{} --dropout 0.1 --save-every 5 --eval-every 0 --microbatches 2 ", kind);
    ASSERT_EQ(train(options + "--out whole").status, 0);
    ASSERT_EQ(train(options + "--out parts --steps 12").status, 0);
    fs::remove_all(path("parts/checkpoints/step-12"));
    const Ran r = run("train --resume --out parts");
    ASSERT_EQ(r.status, 0) << r.err;
    EXPECT_NE(r.err.find("going on after step 10"), std::string::npos) << r.err;
    EXPECT_EQ(weights("whole/checkpoints/step-12"), weights("parts/checkpoints/step-12")) << kind;
    EXPECT_EQ(optimizer("whole/checkpoints/step-12"), optimizer("parts/checkpoints/step-12")) << kind;
    fs::remove_all(path("whole"));
    fs::remove_all(path("parts"));
  }
}

TEST_F(ProgramTest, ResumeRefusesAnotherRunAndPassesOverDamage) {
  ASSERT_EQ(train("--out run --save-every 5").status, 0);
  expect_failure("train --resume --out run --seed 3 --layers 2", 2, "layers is 2 and was 1; seed is 3 and was 1337");
  expect_failure("train --resume --out nowhere", 4, "nowhere/config.toml");
  expect_failure("train " + kSmall + " --out run", 2, "--resume");
  expect_failure("train " + kSmall + " --out text.txt", 2, "text.txt");
  const fs::path file = path("run/checkpoints/step-12/model.safetensors");
  std::fstream(file, std::ios::in | std::ios::out | std::ios::binary).seekp(2000).put('x').put('y');
  const Ran r = run("train --resume --out run");
  EXPECT_EQ(r.status, 0);
  EXPECT_NE(r.err.find("passed over a checkpoint: run/checkpoints/step-12/model.safetensors: checksum"),
            std::string::npos)
      << r.err;
  EXPECT_NE(r.err.find("going on after step 10"), std::string::npos) << r.err;
  fs::resize_file(file, 1000);
  expect_failure("generate run/checkpoints/step-12", 4, "model.safetensors: 1000 bytes");
}

TEST_F(ProgramTest, InterruptionsSaveACheckpointAndLeaveTheirStatus) {
  for (const int signal : {SIGINT, SIGTERM}) {
    const pid_t child = fork();
    if (child == 0) {
      const std::string log = path("log.txt").string(), out = path(fmt::format("run-{}", signal)).string(),
                        data = path("text.txt").string();
      setenv("TESSERA_CACHE", path("cache").c_str(), 1);
      std::freopen(log.c_str(), "w", stderr);
      std::freopen("/dev/null", "w", stdout);
      execl(TESSERA_BINARY, "tessera", "train", "--data", data.c_str(), "--layers", "1", "--channels", "16", "--heads",
            "2", "--context", "16", "--steps", "100000000", "--threads-per-rank", "1", "--eval-every", "0", "--out",
            out.c_str(), nullptr);
      _exit(99);
    }
    const fs::path metrics = path(fmt::format("run-{}/metrics.jsonl", signal));
    for (int i = 0; i < 400 && (!fs::exists(metrics) || fs::file_size(metrics) == 0); ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    kill(child, signal);
    int status = 0;
    waitpid(child, &status, 0);
    ASSERT_TRUE(WIFEXITED(status));
    EXPECT_EQ(WEXITSTATUS(status), 128 + signal) << read_file(path("log.txt"));
    std::vector<std::string> passed_over;
    const auto checkpoint = newest_checkpoint(path(fmt::format("run-{}/checkpoints", signal)), passed_over);
    ASSERT_TRUE(checkpoint);
    EXPECT_GT(checkpoint->step, 0);
    EXPECT_NE(read_file(path("log.txt")).find("goes on"), std::string::npos);
  }
}

TEST_F(ProgramTest, BadDataIsRefusedBeforeAnythingIsWritten) {
  std::ofstream(path("empty.txt"));
  std::ofstream(path("one.txt")) << "x";
  std::ofstream(path("nul.bin")) << std::string("abc\0def", 7);
  std::ofstream(path("latin.txt")) << "caf\xe9 " << std::string(500, 'x');
  const auto with = [&](const std::string& data) { return fmt::format("train {} --data {} --out run", kSmall, data); };
  expect_failure(with("missing.txt"), 4, "missing.txt");
  expect_failure(with("empty.txt"), 4, "empty.txt");
  expect_failure(with("nul.bin"), 4, "nul.bin");
  expect_failure(with("latin.txt"), 4, "latin.txt");
  expect_failure(with("cache"), 4, "cache");
  expect_failure(with("/dev/null"), 4, "/dev/null");
  expect_failure(with("text.txt") + " --context 100000", 2, "100000");
  expect_failure(with("text.txt") + " --vocab 5", 2, "--vocab");
  EXPECT_NE(run(with("one.txt")).status, 0);
  EXPECT_FALSE(fs::exists(path("run")));
}

TEST_F(ProgramTest, OutputThatCannotBeWrittenIsStatus6) {
  expect_failure("train " + kSmall + " --out /proc/run", 6, "/proc/run");
  expect_failure("train " + kSmall + " --out run", 6, "run/",
                 "ulimit -f 3;");  // blocks of 1 KiB: a checkpoint does not fit
  for (const auto& e : fs::recursive_directory_iterator(path("run")))
    EXPECT_EQ(e.path().filename().string().find(".tmp-"), std::string::npos) << e.path();
}

TEST_F(ProgramTest, ALossThatIsNotANumberIsStatus5) {
  expect_failure("train " + kSmall + " --lr 1e30 --min-lr 1e30 --warmup 0 --clip 0 --out run", 5,
                 "expected finite numbers");
  EXPECT_FALSE(fs::exists(path("run/checkpoints")));
}

TEST_F(ProgramTest, AFullStandardOutputIsStatus6) {
  ASSERT_EQ(train("--out run").status, 0);
  const auto full = [&](const std::string& arguments) {
    const int status = std::system(fmt::format("cd '{}' && TESSERA_CACHE=cache '{}' {} > /dev/full 2> err.txt",
                                               folder_.path().string(), TESSERA_BINARY, arguments)
                                       .c_str());
    EXPECT_NE(read_file(path("err.txt")).find("cannot write standard output"), std::string::npos) << arguments;
    return WEXITSTATUS(status);
  };
  EXPECT_EQ(full("--help"), 6);
  EXPECT_EQ(full("generate run --tokens 5 --prompt Line"), 6);
  EXPECT_EQ(full("data text.txt"), 6);
  EXPECT_EQ(full("bench --benchmark_filter=^op/gelu/forward/fp32 --benchmark_min_time=0.001"), 6);
  EXPECT_EQ(full("train " + kSmall + " --format json --out full"), 6);
}

TEST_F(ProgramTest, AMessageStaysOneLineWhateverItQuotes) {
  expect_failure("train --layers \"$(printf 'a\\n\\033b')\"", 2, "found 'a\\x0a\\x1bb'");
}

TEST_F(ProgramTest, AFinishedRunResumesToNothing) {
  ASSERT_EQ(train("--out run").status, 0);
  const std::string config = read_file(path("run/config.toml"));
  expect_failure("train --resume --out run --steps 5", 2, "--steps: expected at least the 12");
  EXPECT_EQ(read_file(path("run/config.toml")), config);
  const Ran r = run("train --resume --out run --format json");
  ASSERT_EQ(r.status, 0) << r.err;
  const std::string last = r.out.substr(r.out.rfind('\n', r.out.size() - 2) + 1);
  EXPECT_TRUE(Json::parse(last).at("loss").is_null()) << last;
  EXPECT_TRUE(Json::parse(last).at("val_loss").is_number()) << last;
}

// Asynchronous runs save and validate in places of their own.
TEST_F(ProgramTest, ARunMayLeaveNoCheckpointAndNoValidation) {
  for (const std::string mode : {"", "--ranks 2 --dp-mode ps-async --servers 2 "}) {
    const std::string every = mode + "--save-every 5 --eval-every 5 ";
    const Ran r = train(every + "--no-save --no-eval --out run");
    ASSERT_EQ(r.status, 0) << r.err;
    EXPECT_EQ(r.out.find("A sample:"), std::string::npos) << r.out;
    EXPECT_EQ(r.out.find("validation loss"), std::string::npos) << r.out;
    EXPECT_NE(r.out.find("not validated (--no-eval)"), std::string::npos) << r.out;
    EXPECT_NE(r.out.find("without a checkpoint (--no-save)"), std::string::npos) << r.out;
    EXPECT_EQ(r.err.find("validat"), std::string::npos) << r.err;
    EXPECT_FALSE(fs::exists(path("run/checkpoints")));
    EXPECT_EQ(read_file(path("run/metrics.jsonl")).find("\"eval\""), std::string::npos);
    expect_failure("generate run", 4, "run: no usable checkpoint: none was saved there");
    expect_failure("report run", 4, "run: there is no report.json in it");
    expect_failure("train --resume --out run", 2, "--resume: expected a run that saves checkpoints, found --no-save");
    fs::remove_all(path("run"));
  }
}

TEST_F(ProgramTest, ARunWithoutCheckpointIsTheSameRun) {
  const auto summary = [&](const std::string& options) {
    const Ran r = train("--format json " + options);
    EXPECT_EQ(r.status, 0) << r.err;
    return Json::parse(r.out.substr(r.out.rfind('\n', r.out.size() - 2) + 1));
  };
  const Json whole = summary("--out whole"), unsaved = summary("--no-save --out unsaved"),
             bare = summary("--no-save --no-eval --trace --out bare");
  EXPECT_EQ(unsaved.at("loss"), whole.at("loss"));
  EXPECT_EQ(unsaved.at("val_loss"), whole.at("val_loss"));
  EXPECT_EQ(bare.at("loss"), whole.at("loss"));
  EXPECT_TRUE(bare.at("val_loss").is_null() && bare.at("val_bits_per_byte").is_null()) << bare;
  EXPECT_EQ(run("report bare").status, 0);  // draws what there is
  EXPECT_EQ(read_file(path("bare/report.html")).find("validation loss</dt>"), std::string::npos);
  EXPECT_EQ(interrupted("train " + kSmall + "--steps 100000000 --no-save --out run", SIGINT), 130);
  EXPECT_NE(read_file(path("err.txt")).find("nothing was saved (--no-save)"), std::string::npos);
  EXPECT_FALSE(fs::exists(path("run/checkpoints")));
}

TEST_F(ProgramTest, ClosedOutputDoesNotStopARun) {
  EXPECT_EQ(run("train " + kSmall + " --out run --format json | head -1").status, 0);
  EXPECT_TRUE(fs::exists(path("run/checkpoints/step-12")));
}

TEST_F(ProgramTest, MakesDatasets) {
  const Ran r = run("data text.txt --tokenizer bytes --out made");
  EXPECT_EQ(r.status, 0) << r.err;
  EXPECT_NE(r.out.find("vocabulary 256 (bytes)"), std::string::npos) << r.out;
  EXPECT_EQ(run("train " + kSmall + " --data made --steps 2 --out run").status, 0);
  const Ran bpe = run("data text.txt --tokenizer bpe --vocab 280 --out made-bpe");
  EXPECT_EQ(bpe.status, 0) << bpe.err;
  EXPECT_NE(bpe.out.find("(bpe)"), std::string::npos) << bpe.out;
  EXPECT_EQ(run("train " + kSmall + " --data text.txt --tokenizer made-bpe --steps 2 --out run-bpe").status, 0);
  EXPECT_EQ(run("generate run-bpe --tokens 20 --prompt '\xF0\x9F\x98\x80'").status, 0);
  expect_failure("train --data text.txt --tokenizer bpee", 2, "found 'bpee'; did you mean 'bpe'?");
  expect_failure("data text.txt --tokenizer .", 4, "vocab.json");
  expect_failure("data text.txt --out made", 6, "made");
  expect_failure("data missing.txt", 4, "missing.txt");
}

}  // namespace
}  // namespace tessera
