// The messages about a user's mistakes: all of them at once, with the nearest value that can be, and for files the
// option and the system's reason; and the default job.
#include <fmt/ranges.h>

#include "app/commands.h"
#include "app/job_of.h"
#include "app/train/train.h"
#include "data/utf8.h"
#include "tests/app/program.h"

namespace tessera {
namespace {

using test::ProgramTest;
using test::Ran;
using Messages = std::vector<std::string>;

Command parse(std::vector<const char*> words) {
  words.insert(words.begin(), "tessera");
  return parse_command_line(static_cast<int>(words.size()), words.data());
}
TrainOptions parse_train(std::vector<const char*> words) {
  words.insert(words.begin(), "train");
  return std::get<TrainOptions>(parse(words));
}
Messages refused(const std::vector<const char*>& words, Status status = Status::usage) {
  try {
    parse(words);
  } catch (const Error& e) {
    EXPECT_EQ(static_cast<int>(e.status()), static_cast<int>(status)) << e.what();
    EXPECT_EQ(messages_of(e).front(), e.what());
    return messages_of(e);
  }
  return {};
}

TEST(Mistakes, OnTheCommandLineAreAllSaid) {
  EXPECT_EQ(refused({"train", "--layers", "0", "--hedas", "3", "--lr", "fast", "--dtype", "fp23", "--whats"}),
            (Messages{"unknown option '--hedas'; did you mean '--heads'?", "unknown option '--whats'",
                      "--layers: expected a whole number in [1, 100000], found '0'",
                      "--dtype: expected fp32, bf16, fp64, found 'fp23'; did you mean 'fp32'?",
                      "--lr: expected a number of at least 0, found 'fast'"}));
  EXPECT_EQ(refused({"generate", "x", "--top-p", "0", "--tokens", "x", "--tp", "0"}),
            (Messages{"--tokens: expected a whole number in [1, 1000000000], found 'x'",
                      "--top-p: expected a number in [1e-09, 1], found '0'",
                      "--tp: expected a whole number in [1, 1024], found '0'"}));
  EXPECT_EQ(refused({"data", "x", "--vocab", "1", "--out", ""}),
            (Messages{"--vocab: expected a whole number in [256, 1000000000], found '1'",
                      "--out: expected a folder to make, found ''"}));
  EXPECT_EQ(refused({"plan", "--top", "0", "--pp", "0", "--hardware", "h100"}).size(), 2U);
  EXPECT_EQ(refused({"train", "--layers"}), Messages{"--layers: expected a value, found none"});
  EXPECT_EQ(refused({"train", "--hedas", "--layers"}).size(), 2U);
}

TEST(Mistakes, OfAPlanThatDoNotHangTogetherAreAllSaid) {
  const Messages found = refused({"verify", "--heads", "3", "--microbatches", "5", "--pp", "8", "--schedule", "zbh1",
                                  "--dp-mode", "ps-sync", "--zero", "1", "--min-lr", "9"});
  for (const char* words :
       {"--schedule: there is none named 'zbh1'; expected naive, gpipe, 1f1b, interleaved, zb-h1, zb-h2, zb-v, v-half, "
        "v-min, or the "
        "path of a file; did you mean 'zb-h1'?",
        "--heads: 3 heads do not divide 128 channels; the nearest that does: 2 or 4",
        "--microbatches: 5 do not divide a batch of 12; the nearest that does: 4 or 6",
        "--zero: 1 goes with --dp-mode ddp, found ps-sync",
        "--pp: 8 ranks make 8 stages, more than the 4 layers; expected at most 4 stages, as of --pp 4",
        "--min-lr: expected at most --lr (0.003), found 9"})
    EXPECT_NE(std::ranges::find(found, words), found.end()) << words;
  EXPECT_EQ(found.size(), 6U) << fmt::format("{}", fmt::join(found, "\n"));  // and not what follows from another
  const Job wrong{.model = {.heads = 3}, .plan = {.cp = 3, .microbatches = 5}};
  try {
    check(wrong);
    ADD_FAILURE() << "is taken";
  } catch (const Error& e) {
    EXPECT_EQ(messages_of(e).size(), 3U) << e.what();
  }
}

TEST(Mistakes, HaveTheNearestThatCanBe) {
  const auto expect = [](const std::vector<const char*>& words, const std::string& nearest) {
    const Messages found = refused(words);
    ASSERT_EQ(found.size(), 1U) << nearest;
    EXPECT_TRUE(found[0].ends_with(nearest)) << found[0];
  };
  for (const char* half : {"fp16", "float16", "half", "bfloat16"})
    expect({"verify", "--dtype", half}, "did you mean 'bf16'?");
  expect({"verify", "--all-reduce", "nccl"}, "did you mean 'native'?");
  expect({"train", "--learning-rate", "1e-3"}, "did you mean '--lr'?");
  expect({"verify", "--tensor-model-parallel-size", "2"}, "did you mean '--tp'?");
  expect({"verify", "--pp", "6", "--schedule", "zb-v", "--microbatches", "12"},
         "expected at most 4 stages, as of --pp 2");
  expect({"verify", "--tp", "2", "--vocab", "1"}, "expected at most 1");
  expect({"verify", "--model", "llama-nano", "--head-dim", "5"}, "expected an even number, as 6, found 5");
  expect({"verify", "--lora-rank", "2", "--lora-targets", "c_atn"}, "did you mean 'c_attn'?");
}

TEST_F(ProgramTest, EachMistakeHasALine) {
  const Ran r = run("train --layers 0 --lr fast --out run");
  EXPECT_EQ(r.status, 2);
  EXPECT_EQ(r.err,
            "tessera: --lr: expected a number of at least 0, found 'fast'\n"
            "tessera: --layers: expected a whole number in [1, 100000], found '0'\n");
  EXPECT_FALSE(std::filesystem::exists(path("run")));
  EXPECT_EQ(run("report --figure memory --svg --ranks 2 --heads 3 --batch 12 --microbatches 5").err,
            "tessera: --microbatches: 5 do not divide a batch of 12; the nearest that does: 4 or 6\n"
            "tessera: --heads: 3 heads do not divide 128 channels; the nearest that does: 2 or 4\n");
}

TEST_F(ProgramTest, AFileThatCannotBeReadIsSaidByOptionAndReason) {
  std::filesystem::create_directory(path("folder"));
  const auto expect = [&](const std::string& arguments, const std::string& line) {
    const Ran r = run(arguments);
    EXPECT_EQ(r.status, 4) << arguments;
    EXPECT_EQ(r.err, "tessera: " + line + "\n") << arguments;
  };
  expect("train --config gone.toml", "--config: cannot open gone.toml: No such file or directory");
  expect("train --config folder", "--config: folder is a directory; expected a file");
  expect("train --resume --out gone", "--resume: cannot open gone/config.toml: No such file or directory");
  expect("train --data gone.jsonl --tokenizer bytes", "--data: cannot open gone.jsonl: No such file or directory");
  expect("train --data folder", "--data: folder is no dataset: it has no dataset.json");
  expect("train --data text.txt --tokenizer folder",
         "--tokenizer: folder: no tokenizer; expected tokenizer.json, or vocab.json and merges.txt");
  expect("train --init gone", "--init: gone: no such file or directory; expected a run or a checkpoint");
  expect("train --data text.txt --dp-mode ps-async --replay gone",
         "--replay: cannot open gone: No such file or directory");
  expect("train --pp 2 --schedule ./gone.txt", "--schedule: cannot open ./gone.txt: No such file or directory");
  expect("plan --cases gone --format json", "--cases: cannot open gone: No such file or directory");
  expect("plan --hardware ./gone.toml --ranks 2", "--hardware: cannot open ./gone.toml: No such file or directory");
  expect("plan --hardware h100 --software folder/ --ranks 2", "--software: folder/ is a directory; expected a file");
  expect("plan --model gone.json --hardware h100 --ranks 2",
         "--model: cannot open gone.json: No such file or directory");
  expect("generate run --prompts gone", "--prompts: cannot open gone: No such file or directory");
}

TEST_F(ProgramTest, QuietRunsEndWithoutASample) {
  const Ran r = train("--out run --quiet --sp --tp 1 --tokenizer bytes");
  EXPECT_EQ(r.status, 0) << r.err;
  EXPECT_EQ(r.err, "");
  EXPECT_EQ(r.out.find("A sample"), std::string::npos) << r.out;
  EXPECT_NE(r.out.find("write more with"), std::string::npos) << r.out;
  const Ran told = train("--out told --sp");
  EXPECT_NE(told.err.find("--sp: cuts the tokens among the ranks of --tp, and there is only one; expected --tp 2 or "
                          "more"),
            std::string::npos)
      << told.err;
  const Ran bytes = run("generate run --tokens 400 --temperature 50");  // as good as any byte
  EXPECT_EQ(find_invalid_utf8(bytes.out), std::string::npos);
  EXPECT_NE(bytes.out.find("\\x"), std::string::npos) << bytes.out;
}

TEST(CommandLine, HelpIsACommandToo) {
  const auto text = [](std::vector<const char*> words) { return std::get<Print>(parse(std::move(words))).text; };
  EXPECT_EQ(text({"help"}), text({"--help"}));
  EXPECT_EQ(text({"help", "train"}), text({"train", "--help"}));
  EXPECT_NE(text({"help", "train"}).find(default_job_words(default_job())), std::string::npos);
}

TEST(DefaultJob, IsWhatItsWordsSay) {
  const TrainOptions job = parse_train({});
  EXPECT_TRUE(is_default_job(job));
  const std::string words = default_job_words(job);
  std::vector<std::string> parts;
  for (size_t at = 0; at <= words.size();) {
    const size_t end = std::min(words.find(' ', at), words.size());
    parts.push_back(words.substr(at, end - at));
    at = end + 1;
  }
  std::vector<const char*> typed;
  for (const std::string& part : parts) typed.push_back(part.c_str());
  EXPECT_EQ(config_values(parse_train(typed)), config_values(job)) << words;
}

TEST(DefaultJob, IsChangedByItsPlanAndEndsWhereAModelOrATextIsChosen) {
  const TrainOptions cube = parse_train({"--pp", "2", "--steps", "9", "--lr", "0.001"});
  EXPECT_TRUE(is_default_job(cube));
  EXPECT_EQ(cube.model, default_job().model);
  EXPECT_EQ(cube.optim.lr, 0.001);
  EXPECT_NE(default_job_words(cube).find("--lr 0.001"), std::string::npos);
  for (const auto& words : std::vector<std::vector<const char*>>{
           {"--data", "x.txt"}, {"--model", "gpt-nano"}, {"--layers", "4"}, {"--tokenizer", "char"}}) {
    const TrainOptions o = parse_train(words);
    EXPECT_FALSE(is_default_job(o)) << words[0];
    EXPECT_EQ(o.optim.lr, TrainOptions().optim.lr) << words[0];
    EXPECT_EQ(o.model, "gpt-nano") << words[0];
  }
}

TEST_F(ProgramTest, AFileMayChooseToo) {
  std::ofstream(path("a.toml")) << "channels = 64\n";
  std::ofstream(path("b.toml")) << "steps = 7\n";
  EXPECT_FALSE(is_default_job(parse_train({"--config", path("a.toml").c_str()})));
  EXPECT_TRUE(is_default_job(parse_train({"--config", path("b.toml").c_str()})));
}

TEST(TokenizerChoice, OfASize) {
  EXPECT_EQ(tokenizer_choice("bpe-1024", "char", true).vocab_size, 1024);
  EXPECT_EQ(tokenizer_choice("bpe-1024", "char", true).name, "bpe");
  EXPECT_EQ(tokenizer_choice("bpe", "char", true).vocab_size, 50257);
  for (const char* wrong : {"bpe-", "bpe-x", "bpe-255", "bpe-1e3", "bp"})
    EXPECT_THROW(tokenizer_choice(wrong, "char", true), Error) << wrong;
}

TEST(Sentences, BeginAndEndWhole) {
  EXPECT_EQ(whole_sentences("nd of it. She was there. He said so, and"), "She was there.");
  EXPECT_EQ(whole_sentences("so. \"Is it?\" said Mr. Bennet. \"It is,\" cried Mrs. Long.\" And"),
            "\"Is it?\" said Mr. Bennet. \"It is,\" cried Mrs. Long.\"");
  EXPECT_EQ(whole_sentences("x.\n\nThe end!\nThe very"), "The end!");
  EXPECT_EQ(whole_sentences("int main() { return 0; }"), "int main() { return 0; }");
  EXPECT_EQ(whole_sentences("A long beginning without an end. Yes. and then nothing"),
            "A long beginning without an end. Yes. and then nothing");  // most of it would be gone
  EXPECT_EQ(whole_sentences(""), "");
}

}  // namespace
}  // namespace tessera
