// End-to-end tests, which run the program.
#include "tests/app/program.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <map>
#include <regex>
#include <string>
#include <vector>

namespace tessera {
namespace {

TEST_F(ProgramTest, LimitsOpenMpSpinningUnlessConfigured) {
  const auto spins = [&](const std::string& args) {  // as reported by the OpenMP library
    const std::string output =
        must("--version", "env -u GOMP_SPINCOUNT -u OMP_WAIT_POLICY OMP_DISPLAY_ENV=verbose " + args).err;
    const std::string name = "GOMP_SPINCOUNT = '";
    const size_t at = output.find(name) + name.size();
    return output.substr(at, output.find('\'', at) - at);
  };
  EXPECT_EQ(spins(""), "1000");
  EXPECT_EQ(spins("GOMP_SPINCOUNT=77"), "77");
  EXPECT_EQ(spins("OMP_WAIT_POLICY=passive"), "0");
}

TEST_F(ProgramTest, TrainedRunGeneratesText) {
  const Ran r = train("--out run");
  expect_has(r.out, {"the validation loss is", "\nSample:"});
  for (const char* name : {"config.toml", "metrics.jsonl", "checkpoints/latest",
                           "checkpoints/step-12/model.safetensors", "checkpoints/step-12/manifest.json"})
    EXPECT_TRUE(fs::exists(path("run") / name)) << name;
  const Ran a = must("generate run --prompt 'Line 7' --tokens 60 --seed 4");
  EXPECT_EQ(run("generate run/checkpoints/step-12 --prompt 'Line 7' --tokens 60 --seed 4").out, a.out);
  EXPECT_EQ(a.out.size(), 6U + 60 + 1);
  EXPECT_NE(run("generate run --prompt 'Line 7' --tokens 60 --seed 5").out, a.out);
  EXPECT_EQ(run("generate run --tokens 40 --temperature 0").out,
            run("generate run --tokens 40 --temperature 3 --top-k 1").out);
  fails("generate run --prompt '{'", 2, "character");
  fails("generate text.txt", 4, "text.txt");
}

TEST_F(ProgramTest, RejectsOmpNumThreadsAboveLimit) {
  fails("verify --layers 1 --steps 1", 2, "OMP_NUM_THREADS: expected at most 1024 threads, got 100000",
        "OMP_NUM_THREADS=100000");
}

#ifdef __x86_64__
TEST_F(ProgramTest, MaxCpuIsaLimitsInstructionSet) {
  fails("describe", 2, "TESSERA_MAX_CPU_ISA: expected avx2, avx512, avx512_bf16 or amx, got 'AVX9'",
        "TESSERA_MAX_CPU_ISA=AVX9");
  const Ran r = must("train " + kSmall + " --steps 1 --no-save --no-eval", "TESSERA_MAX_CPU_ISA=avx2");
  expect_has(r.err, {", avx2)"});
}
#endif

TEST_F(ProgramTest, JsonContainsDocumentedKeys) {
  const Ran r = train("--out run --format json --eval-every 5 --quiet");
  EXPECT_EQ(r.err, "");
  EXPECT_EQ(r.out, read_file(path("run/metrics.jsonl")));
  std::map<std::string, int> events;
  std::vector<double> losses;
  for (const Json& record : parse_records(r.out)) {
    ++events[record.at("event")];
    EXPECT_TRUE(record["event"] != "eval" || record.at("val_loss").get<double>() > 0) << record;
    if (record["event"] != "step") continue;
    for (const char* key : {"step", "loss", "lr", "grad_norm", "tokens_per_s", "step_ms"})
      EXPECT_TRUE(record.at(key).is_number()) << key;
    losses.push_back(record["loss"]);
  }
  EXPECT_EQ(events, (std::map<std::string, int>{{"step", 12}, {"eval", 3}, {"summary", 1}}));
  const Json last = r.last_record();
  for (const char* key : {"steps", "tokens", "loss", "val_loss", "val_bits_per_byte", "tokens_per_s", "mfu",
                          "peak_bytes", "sent_bytes", "plan", "out"})
    EXPECT_TRUE(last.contains(key)) << key;
  EXPECT_EQ(last["tokens"], 12 * 4 * 16);
  EXPECT_LT(losses.back(), losses.front() - 0.1);
  EXPECT_NEAR(losses.front(), std::log(31), 0.3);
}

TEST_F(ProgramTest, SeedDeterminesWeightsBitwise) {
  for (const char* name : {"a", "b"}) train(fmt::format("--dropout 0.1 --out {}", name));
  train("--dropout 0.1 --out c --seed 2");
  EXPECT_EQ(weights("a/checkpoints/step-12"), weights("b/checkpoints/step-12"));
  EXPECT_NE(weights("a/checkpoints/step-12"), weights("c/checkpoints/step-12"));
  // The resolved configuration reproduces the run.
  must("train --config a/config.toml --out d");
  EXPECT_EQ(weights("a/checkpoints/step-12"), weights("d/checkpoints/step-12"));
}

TEST_F(ProgramTest, ResumeRejectsDifferentOptionsAndSkipsDamagedCheckpoints) {
  train("--out run --save-every 5");
  fails("train --resume --out run --seed 3 --layers 2", 2,
        "layers is 2, but the checkpoint has 1; seed is 3, but the checkpoint has 1337");
  fails("train " + kSmall + " --out run", 2, "--resume");
  fails("train " + kSmall + " --out text.txt", 2, "text.txt");
  const fs::path file = path("run/checkpoints/step-12/model.safetensors");
  std::fstream(file, std::ios::in | std::ios::out | std::ios::binary).seekp(2000).put('x').put('y');
  const Ran r = must("train --resume --out run");
  expect_has(r.err,
             {"skipped a checkpoint: run/checkpoints/step-12/model.safetensors: checksum", "resuming after step 10"});
  fs::resize_file(file, 1000);
  fails("generate run/checkpoints/step-12", 4, "model.safetensors: size is 1000 bytes");
}

TEST_F(ProgramTest, RejectsInvalidDataBeforeWritingFiles) {
  write("empty.txt", "");
  write("one.txt", "x");
  write("nul.bin", std::string("abc\0def", 7));
  write("latin.txt", "caf\xe9 " + std::string(500, 'x'));
  const auto with = [&](const std::string& data) { return fmt::format("train {} --data {} --out run", kSmall, data); };
  for (const std::string data : {"missing.txt", "empty.txt", "nul.bin", "latin.txt", "cache", "/dev/null"})
    fails(with(data), 4, data);
  fails(with("text.txt") + " --context 100000", 2, "100000");
  fails(with("text.txt") + " --vocab 5", 2, "--vocab");
  EXPECT_NE(run(with("one.txt")).status, 0);
  EXPECT_FALSE(fs::exists(path("run")));
}

TEST_F(ProgramTest, UnwritableOutputReturnsStatus6) {
  train("--out run");
  for (const std::string& arguments :
       {std::string("--help"), std::string("generate run --tokens 5 --prompt Line"), std::string("data text.txt"),
        std::string("bench --benchmark_filter=^op/gelu/forward/fp32 --benchmark_min_time=0.001"),
        "train " + kSmall + " --format json --out full"})
    fails(arguments + " 2> err.txt > /dev/full #", 6, "cannot write to standard output");
  fails("train " + kSmall + " --out /proc/run", 6, "/proc/run");
}

TEST_F(ProgramTest, ResumedFinishedRunTrainsNoSteps) {
  train("--out run");
  const std::string config = read_file(path("run/config.toml"));
  fails("train --resume --out run --steps 5", 2, "--steps: expected at least 12");
  EXPECT_EQ(read_file(path("run/config.toml")), config);
  const Json last = must("train --resume --out run --format json").last_record();
  EXPECT_TRUE(last.at("loss").is_null() && last.at("val_loss").is_number()) << last;
}

// Asynchronous runs have separate code for saving and validation.
TEST_F(ProgramTest, TrainsWithoutCheckpointsAndValidation) {
  for (const std::string mode : {"", "--ranks 2 --dp-mode ps-async --servers 2 "}) {
    const Ran r = anew("train " + kSmall + mode + "--save-every 5 --eval-every 5 --no-save --no-eval --out run");
    expect_lacks(r.out, {"\nSample:", "validation loss"});
    expect_has(r.out, {"not validated (--no-eval)", "without a checkpoint (--no-save)"});
    expect_lacks(r.err, "validat");
    EXPECT_FALSE(fs::exists(path("run/checkpoints")));
    expect_lacks(read_file(path("run/metrics.jsonl")), "\"eval\"");
    fails("generate run", 4, "run: no usable checkpoint: none was saved");
    write("run/a.gguf", "GGUF");
    for (const char* const from : {"run", "run/a.gguf"})
      fails(std::string("evaluate ") + from + " --data text.txt", 4, "none was saved; a.gguf is a GGUF model");
    fails("checkpoint import run --out x", 4, "expected a Hugging Face folder; a.gguf is a GGUF model");
    fails("report run", 4, "run: report.json is missing");
    fails("train --resume --out run", 2, "--resume: cannot be combined with --no-save");
  }
}

TEST_F(ProgramTest, NoSaveDoesNotAffectTraining) {
  const auto summary = [&](const std::string& options) { return train("--format json " + options).last_record(); };
  const Json saved = summary("--out whole"), unsaved = summary("--no-save --out unsaved"),
             bare = summary("--no-save --no-eval --trace --out bare");
  for (const Json& other : {unsaved, bare}) EXPECT_EQ(other.at("loss"), saved.at("loss"));
  EXPECT_EQ(unsaved.at("val_loss"), saved.at("val_loss"));
  EXPECT_TRUE(bare.at("val_loss").is_null() && bare.at("val_bits_per_byte").is_null()) << bare;
  must("report bare");  // reports the available data
  expect_lacks(read_file(path("bare/report.html")), "validation loss</dt>");
  EXPECT_EQ(interrupted("train " + kSmall + "--steps 100000000 --no-save --out run", SIGINT), 130);
  expect_has(log(), "nothing was saved (--no-save)");
  EXPECT_FALSE(fs::exists(path("run/checkpoints")));
}

TEST_F(ProgramTest, ClosedOutputDoesNotStopTraining) {
  must("train " + kSmall + " --out run --format json | head -1");
  EXPECT_TRUE(fs::exists(path("run/checkpoints/step-12")));
}

TEST_F(ProgramTest, WritesDatasets) {
  expect_has(must("data text.txt --tokenizer bytes --out made").out, "vocabulary 256 (bytes)");
  must("train " + kSmall + " --data made --steps 2 --out run");
  expect_has(must("data text.txt --tokenizer bpe --vocab 280 --out made-bpe").out, "(bpe)");
  must("train " + kSmall + " --data text.txt --tokenizer made-bpe --steps 2 --out run-bpe");
  must("generate run-bpe --tokens 20 --prompt '\xF0\x9F\x98\x80'");
  fails("train --data text.txt --tokenizer bpee", 2, "got 'bpee'; did you mean 'bpe'?");
  fails("data text.txt --tokenizer .", 4, "vocab.json");
  fails("data text.txt --out made", 6, "made");
  fails("data missing.txt", 4, "missing.txt");
}

// The command `lab`: list, errors, and the status of an unsolved exercise. (docs/lab.md shows solved ones, tests/lab
// tests the exercises.)

using LabTest = ProgramTest;

TEST_F(LabTest, ListsExercises) {
  const Ran r = must("lab");
  expect_has(r.out, {"p14  leaderboard", " 1  messages", " 7  1f1b", "10  clipping"});
  EXPECT_EQ(run("lab list").out, r.out);
}

TEST_F(LabTest, RejectsInvalidCommands) {
  fs::create_directory(path("empty"));
  fails("lab start", 2, "N");
  fails("lab start 2", 2, "DIR");
  fails("lab start 12 a", 2, "unknown exercise '12'; expected a number or name: 1 messages");
  fails("lab check p1 none.txt", 4, "none.txt");
  fails("lab grade p1", 2, "use lab check to grade a file");
  fails("lab start p1 .", 2, "is not empty");
  fails("verify --placements none.txt", 4, "none.txt");
  fails("verify --placements none.txt --tp 2", 2, "cannot be combined with plan options");
  fails("lab again", 2, "unexpected argument 'again'");
  fails("lab check 2", 2, "expected N and DIR, or --all with a directory");
  fails("lab check 2 --all empty", 2, "--all: cannot be combined with an exercise, got '2'");
  fails("lab check --all nowhere", 4, "nowhere is not a directory");
  fails("lab answer 2", 2, "no channel");
  fails("lab start 2 .", 2, "is not empty; expected a new or empty directory");
  fails("lab check 2 empty", 4, "ring.cpp is missing; `tessera lab start 2 empty` creates it");
  fs::copy_file(TESSERA_BINARY, path("elsewhere"));
  const Ran r = run_program(path("elsewhere").string(), "lab start 2 a");
  EXPECT_EQ(r.status, 2);
  expect_has(r.last_line(), "exercises require the build files");
  EXPECT_FALSE(fs::exists(path("a")));
}

TEST_F(LabTest, UnsolvedExerciseReturnsStatus1) {
  fs::create_directory(path("mine"));
  must("lab start 7 mine");
  const Ran r = run("lab check 7 mine");
  EXPECT_EQ(r.status, 1) << r.err;
  expect_has(r.out, "failed nothing\n  found  not written yet: one_f_one_b");
}

// A class: an unchanged exercise and a solved puzzle (ada), submissions that cannot be built (bo), and a copy of the
// puzzle (cy).
TEST_F(LabTest, GradesClassDespiteInvalidSubmissions) {
  for (const char* directory : {"class/bo/first", "class/cy"}) fs::create_directories(path(directory));
  must("lab start 7 class/ada");
  must("lab start p3 class/ada/p3");
  const std::string begun = read_file(path("class/ada/p3/placements.txt"));
  const auto given = [&](const char* name) {
    const size_t at = begun.find(name) + 3;
    return begun.substr(at, begun.find('\n', at) - at);
  };
  const std::string x = given("\nx "), y = given("\ny "), bias = y == "I" ? "I" : y == "S(2)" ? "S(0)" : "I->R";
  write("class/ada/p3/placements.txt", begun.substr(0, begun.find("\nx ")) + "\nx " + x +
                                           "->R\nup.weight S(0)\nup.bias S(0)\nh S(2)\ndown.weight S(1)\nz P->" + y +
                                           "\ndown.bias " + bias + "\ny " + y + "\n");
  fs::copy(path("class/ada/p3"), path("class/cy/mine"));
  write("class/bo/one_f_one_b.cpp", "#error no\n");
  for (const char* empty : {"class/bo/first/ring.cpp", "class/notes.txt"}) write(empty, "");
  const std::string none = "   -   -   -   -   -   -   -   -   -   -   -", before = "       -   -   6" + none;
  EXPECT_EQ(
      must("lab check --all class").out,
      "learner  p1  p2  p3  p4  p5  p6  p7  p8  p9 p10 p11 p12 p13 p14   1   2   3   4   5   6   7   8   9  10  11"
      "   all\n"
      "ada    " +
          before.substr(4) +
          "   -   -   -   -   -   -   0   -   -   -   -     6\n"
          "bo     " +
          std::string("   -   -   -") + none +
          "   -   0   -   -   -   -   0   -   -   -   -     0\n"
          "cy     " +
          before.substr(4) + none +
          "     6\n"
          "note: cy, p3: has the same seed as ada: the same task was submitted twice\n");
  expect_has(must("lab check --all class --format json").out,
             {R"({"learner":"ada","exercise":"1f1b","number":7,"solved":false,"points":0,"of":6,)",
              R"({"learner":"ada","puzzle":"column-row","number":3,"solved":true,"points":6,"of":6,"bounds":[)",
              R"("score":{"bytes_sent":)", R"({"learner":"ada","points":6,"of":150,"solved":1})",
              R"("broke":"compiler")", R"("found":"undefined function tessera::ring(tessera::Transport&)"});
}

// The text of `tessera verify` agrees with its JSON.

using VerifyTextTest = ProgramTest;

TEST_F(VerifyTextTest, PlacementTextMatchesJson) {
  const std::string rest = "\nup.weight S(0)\nup.bias S(0)\nh S(2)\ndown.weight S(1)\nz P->I\ndown.bias I\ny I\n";
  write("right.txt", "mlp tp=2\nx I->R" + rest), write("wrong.txt", "mlp tp=2\nx I" + rest);
  test::expect_values(Json::parse(must("verify --placements right.txt --format json").out),
                      {{"passed", true},
                       {"sent", {{"measured", 16384}, {"expected", 16384}}},
                       {"text", must("verify --placements right.txt").out}});
  const Ran failed = run("verify --format=json --placements wrong.txt");
  EXPECT_EQ(failed.status, 1);
  const Json wrong = Json::parse(failed.out);
  test::expect_values(wrong, {{"passed", false}, {"alike", false}});
  expect_has(failed.err, wrong["failures"].at(0).get<std::string>());
  expect_has(run("verify --placements wrong.txt").out, wrong["diagnosis"].at(0).at("text").get<std::string>());
}

const std::string kProof =
    "verify --heads 2 --channels 16 --context 8 --vocab 32 --batch 4 --steps 1 --threads-per-rank 1 ";

TEST_F(VerifyTextTest, ListsEveryOperationAndRank) {
  const std::string line = kProof + "--layers 2 --microbatches 2 --dp 1 --pp 2";
  const Ran text = must(line);
  const Json output = Json::parse(must(line + " --format json").out);
  const auto expect_match = [&](const std::string& pattern) {
    EXPECT_TRUE(std::regex_search(text.out, std::regex(pattern))) << pattern << "\n" << text.out;
  };
  for (const auto& [axis, operations] : output["bytes"].items())
    for (const auto& [operation, counts] : operations.items())
      expect_match(fmt::format("\n +{} +{} +{} +{} +{:.2f} +{} ok +\\d+\n", axis, operation, counts["calls"].dump(),
                               counts["sent"].dump(), counts["sent"].get<double>() / 1e6, counts["expected"].dump()));
  const Json& memory = output["memory"];
  for (size_t rank = 0; rank < 2; ++rank) {
    std::string pattern = fmt::format("\n +{}", rank);
    for (const char* category : {"parameters", "gradients", "optimizer"})
      pattern += fmt::format(" +{}", memory[category]["measured"][rank].dump());
    const Json& peak = memory["peak"]["measured"][rank];
    expect_match(pattern + fmt::format(" ok +{} +{:.2f} +\\d+ ok\n", peak.dump(), peak.get<double>() / 1e6));
  }
  expect_match("in flight per stage, by pipeline rank: 2 1; expected 2 1 ok\n");
  expect_match("simulated bubble fraction.*: 0\\.3333; formula 0\\.3333\n");
}

TEST_F(VerifyTextTest, OmitsBubbleWithoutPipelineStages) {
  const std::string line = kProof + "--layers 1 --ranks 2";
  expect_lacks(must(line).out, "bubble");
  EXPECT_TRUE(Json::parse(must(line + " --format json").out)["bubble"].is_null());
}

const std::string kWithFault = kProof + "--layers 1 --dp 2 ";

TEST_F(VerifyTextTest, PrintsFailedChecksAndLikelyCause) {
  const std::string line = kWithFault + "--defect missing-gradient-sum";
  const Ran json = run(line + " --format json");
  EXPECT_EQ(json.status, 1) << json.err;
  const Json output = Json::parse(json.out);
  EXPECT_FALSE(output["passed"].get<bool>());
  EXPECT_EQ(output["defect"]["name"], "missing-gradient-sum");
  EXPECT_EQ(output["diagnosis"][0]["cause"], "missing-gradient-sum");
  std::map<std::string, int> bounds;
  for (const Json& b : output["broken"]) ++bounds[b["bound"].get<std::string>()];
  for (const char* bound : {"gradient", "parameter", "state", "bytes", "gradient norm"}) EXPECT_GE(bounds[bound], 1);
  const Ran hidden = run(line + " --hide");
  EXPECT_EQ(hidden.status, 1);
  const auto at = [&](const char* args) { return hidden.out.find(args); };
  EXPECT_LT(at("checks failed:"), at("Which fault was injected?")) << hidden.out;
  EXPECT_LT(at("Which fault was injected?"), at("Likely cause: gradients are not reduced")) << hidden.out;
  EXPECT_LT(at("Likely cause"), at("Injected fault: missing-gradient-sum, on every rank")) << hidden.out;
  expect_has(run(line + " --hide", "echo missing-gradient-sum |").out, "\nCorrect.\n");
  expect_has(run(line + " --hide", "echo lost-call |").out, "\nWrong.\n");
}

TEST_F(VerifyTextTest, MarksFailedRowsConcisely) {
  const std::string sums = run(kWithFault + "--defect missing-gradient-sum").out;
  EXPECT_TRUE(std::regex_search(sums, std::regex("dp +all_reduce +[0-9]+ +!0 +0.00 +[0-9]+ WRONG"))) << sums;
  const std::string broken =
      sums.substr(sums.find("checks failed"), sums.find("Likely cause") - sums.find("checks failed"));
  EXPECT_LE(std::ranges::count(broken, '\n'), 14) << broken;
  EXPECT_TRUE(std::regex_search(broken, std::regex("gradient 'tokens.weight' .*; and [0-9]+ more: "))) << broken;
  expect_lacks(broken, "all 1 times");
  const std::string held = run(kWithFault + "--defect kept-gradients").out;
  EXPECT_TRUE(std::regex_search(held, std::regex("\n  1 +[0-9]+ +![0-9]+ +[0-9]+ WRONG"))) << held;
  const std::string three = std::regex_replace(kWithFault, std::regex("--batch 4|--dp 2"), "") + "--batch 6 --dp 3 ";
  expect_has(run(three + "--defect ring-order").out, ", within rounding error");
}

TEST_F(VerifyTextTest, RandomFaultIsReproducibleFromSeed) {
  const std::string once = run(kWithFault + "--defect random").out, again = run(kWithFault + "--defect random").out;
  const std::string args = "A random fault, reproducible with --seed ",
                    seed = once.substr(args.size(), once.find('.') - args.size());
  EXPECT_NE(once, again);
  EXPECT_EQ(run(kWithFault + "--defect random --seed " + seed).out, once);
}

TEST_F(VerifyTextTest, RejectsInapplicableFaults) {
  fails(kWithFault + "--defect missing-output-sum", 2, "--defect: missing-output-sum does not apply");
  expect_has(log(), "it requires --tp 2 (4 ranks)");
  fails(kWithFault + "--defect untied-copies", 2, "it requires --pp 2 and --layers 2 (4 ranks)");
  fails(kWithFault + "--defect nothing", 2, "expected random, list or a name printed by list, got 'nothing'");
  fails(kWithFault + "--hide", 2, "--hide");
  expect_has(run("verify --defect list").out, "stale-part");
  EXPECT_EQ(Json::parse(run("verify --defect list --format json").out).at(0).at("name"), "missing-gradient-sum");
}

}  // namespace
}  // namespace tessera
