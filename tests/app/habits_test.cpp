// Numbers as people say them: epochs and shares in place of steps, another file to validate on, an end by patience; and
// what they want of a model that they begin with: more tokens, another end, a shorter context.
#include <cstring>
#include <nlohmann/json.hpp>
#include <numeric>

#include "data/safetensors.h"
#include "tests/app/program.h"

namespace tessera {
namespace {

class HabitsTest : public test::ProgramTest {
 protected:
  std::string config() const { return read_file(path("run/config.toml")); }
  std::vector<int64_t> validated() const {
    std::vector<int64_t> steps;
    std::ifstream records(path("run/metrics.jsonl"));
    for (std::string line; std::getline(records, line);)
      if (const auto j = nlohmann::json::parse(line); j["event"] == "eval") steps.push_back(j["step"]);
    return steps;
  }
};

TEST_F(HabitsTest, EpochsAndSharesAreSteps) {
  std::ofstream rows(path("rows.jsonl"));  // 30 to train on, 4 to a step: 7.5 steps an epoch
  for (int i = 0; i < 33; ++i) rows << fmt::format(R"({{"prompt": "{} and", "completion": " {}"}})", i, i * i) << "\n";
  rows.close();
  const std::string model =
      "train --data rows.jsonl --model gpt-nano --layers 1 --channels 16 --context 16 --batch 4 "
      "--tokenizer bytes --threads-per-rank 1 --lr 0.02 ";
  for (const char* plan : {"--ranks 1 ", "--ranks 2 --zero 1 "}) {
    std::filesystem::remove_all(path("run"));
    std::filesystem::remove_all(path("told"));
    const auto r =
        run(model + plan + "--epochs 2 --eval-every 0.5e --save-every 1e --warmup 20% --min-lr 5% --out run");
    ASSERT_EQ(r.status, 0) << r.err;
    for (const char* line :
         {"steps = 15\n", "eval-every = 4\n", "save-every = 8\n", "warmup = \"20%\"\n", "min-lr = \"5%\"\n"})
      EXPECT_NE(config().find(line), std::string::npos) << line << config();
    EXPECT_EQ(config().find("epochs"), std::string::npos);
    EXPECT_EQ(validated(), (std::vector<int64_t>{4, 8, 12, 15}));
    const auto told = run(model + plan + "--steps 15 --eval-every 4 --warmup 3 --min-lr 0.001 --out told");
    ASSERT_EQ(told.status, 0) << told.err;
    EXPECT_EQ(weights("run/checkpoints/step-15"), weights("told/checkpoints/step-15"));
    const auto more = run("train --resume --out run --config run/config.toml --epochs 3");  // shares hold on
    ASSERT_EQ(more.status, 0) << more.err;
    EXPECT_NE(config().find("steps = 23\n"), std::string::npos) << config();
  }
  expect_failure(model + "--epochs 2 --steps 3", 2, "--epochs: expected no --steps");
  // A later word, or one of the command line, is in the place of what a file says.
  EXPECT_EQ(run("train --config run/config.toml --epochs 0.5 --out half").status, 0);
  EXPECT_NE(read_file(path("half/config.toml")).find("steps = 4\n"), std::string::npos);
  std::ofstream(path("epochs.toml")) << "epochs = 2.0\n";
  EXPECT_EQ(run(model + "--config epochs.toml --steps 1 --no-eval --out one").status, 0);
  expect_failure(model + "--warmup 101%", 2, "--warmup: expected a number in [0, 100], found '101'");
  expect_failure(model + "--warmup 3e", 2, "--warmup: expected a whole number");
  std::filesystem::copy_file(path("text.txt"), path("other.txt"));
  expect_failure("train --data other.txt=1,text.txt=1 --epochs 1 --tokenizer bytes", 2,
                 "--epochs: expected one source");
}

TEST_F(HabitsTest, PatienceEndsARunAlsoOneThatIsResumed) {
  const std::string still = "--lr 0 --eval-every 2 --out run ";  // no validation is better than the first
  const auto r = train(still + "--steps 40 --patience 2");
  ASSERT_EQ(r.status, 0) << r.err;
  EXPECT_NE(r.err.find("2 validations without a better loss (--patience): the run ends after step 6 of 40"),
            std::string::npos)
      << r.err;
  EXPECT_EQ(validated(), (std::vector<int64_t>{2, 4, 6}));
  EXPECT_TRUE(std::filesystem::exists(path("run/checkpoints/step-6")));
  std::filesystem::remove_all(path("run"));
  ASSERT_EQ(train(still + "--steps 4").status, 0);
  const auto more = run("train --resume --out run --config run/config.toml --steps 40 --patience 2");
  ASSERT_EQ(more.status, 0) << more.err;
  EXPECT_EQ(validated(), (std::vector<int64_t>{2, 4, 6}));
  expect_failure("train --patience 2 --eval-every 0", 2, "--patience: expected validations between steps, found");
  expect_failure("train --patience 2 --no-eval", 2, "--patience: expected validations between steps, found --no-eval");
}

TEST_F(HabitsTest, AFileOrAShareIsHeldOut) {
  std::ofstream(path("other.txt")) << std::string(700, 'o');
  const auto tokens = static_cast<int64_t>(std::filesystem::file_size(path("text.txt")));
  const auto held = [&](const std::string& more) {
    const auto r = run("data text.txt --tokenizer bytes");
    std::filesystem::remove_all(path("run"));
    const auto trained = train("--tokenizer bytes --steps 1 --out run --format json " + more);
    EXPECT_EQ(trained.status, 0) << trained.err;
    return trained.err;
  };
  const auto words = [](int64_t n) { return fmt::format("{:.1f}K", static_cast<double>(n) / 1000); };
  EXPECT_NE(held("--val-share 0.25").find(words(tokens - tokens * 3 / 4) + " tokens held out"), std::string::npos);
  const std::string whole = held("--val-data other.txt");
  EXPECT_NE(whole.find(words(tokens) + " characters of training text"), std::string::npos) << whole;
  EXPECT_NE(whole.find("700 tokens held out"), std::string::npos) << whole;
  const auto more = run("train --resume --out run --config run/config.toml --steps 3");
  EXPECT_EQ(more.status, 0) << more.err;
  std::ofstream(path("rows.jsonl")) << R"({"prompt": "a", "completion": "b"})"
                                    << "\n";
  EXPECT_EQ(train("--tokenizer bytes --data rows.jsonl --val-data rows.jsonl --steps 1 --out rows").status, 0);
  expect_failure("train --val-data other.txt --val-share 0.2", 2, "--val-data: expected no --val-share");
  expect_failure("train --data text.txt --val-data rows.jsonl", 2, "--val-data: expected a text");
  expect_failure("train --data text.txt --val-data nowhere.txt", 4, "nowhere.txt");
  ASSERT_EQ(run("data text.txt --tokenizer bytes --out made").status, 0);
  expect_failure("train --data made --val-share 0.2", 2, "--val-share: expected a text or a file of examples");
}

// --- a model to begin with ---

class BeginningTest : public test::ProgramTest {
 protected:
  using Json = nlohmann::json;

  // A run "base" of 290 tokens and a folder "f" of it.
  void make_base(const std::string& more = "") {
    const auto r = run(
        "train --data text.txt --model llama-nano --layers 1 --heads 2 --channels 16 --ffn 32 --context 16 --batch 4 "
        "--tokenizer bpe-290 --steps 3 --warmup 1 --lr 0.01 --ranks 1 --threads-per-rank 1 --no-eval --quiet --out "
        "base " +
        more);
    ASSERT_EQ(r.status, 0) << r.err;
    ASSERT_EQ(run("checkpoint export base --out f").status, 0);
  }
  test::Ran tune(const std::string& more) const {
    std::filesystem::remove_all(path("run"));
    return run(
        "train --data text.txt --batch 4 --steps 1 --lr 0 --no-eval --threads-per-rank 1 --format json --out run " +
        more);
  }
  Json json(const std::string& file) const { return Json::parse(read_file(path(file))); }
  void write(const std::string& file, const std::string& text) const { std::ofstream(path(file)) << text; }
  std::vector<float> values(const std::string& file, std::string_view name) const {
    const Safetensors all(path(file));
    for (const TensorBytes& t : all.tensors()) {
      if (t.name != name) continue;
      std::vector<float> out(t.bytes.size() / sizeof(float));
      std::memcpy(out.data(), t.bytes.data(), t.bytes.size());
      return out;
    }
    ADD_FAILURE() << file << " has no " << name;
    return {};
  }
};

// The mean of the old rows is where transformers 5.24 draws new ones, too (with 1e-9 of their variance); the ids are
// those of its add_special_tokens().
TEST_F(BeginningTest, NewTokensGetRowsThatAreTheMeanOfTheOthers) {
  make_base();
  const std::string added = "--add-tokens '<|im_start|>,<|im_end|>' ";
  std::string first;
  for (const char* plan : {"--init f --ranks 1", "--init base --ranks 2 --tp 2", "--init f --ranks 2 --zero 3",
                           "--init f --ranks 2 --dp-mode ps-async"}) {
    const auto r = tune(added + plan);
    ASSERT_EQ(r.status, 0) << plan << r.err;
    EXPECT_NE(r.err.find("<|im_start|> is token 290, <|im_end|> is token 291; a row that the table did not have"),
              std::string::npos)
        << r.err;
    const std::string made = weights("run/checkpoints/step-1");
    if (first.empty()) first = made;
    EXPECT_EQ(made, first) << plan;
  }
  for (const auto& [ours, theirs] :
       {std::pair{"tokens.weight", "model.embed_tokens.weight"}, {"head.weight", "lm_head.weight"}}) {
    const std::vector<float> old = values("f/model.safetensors", theirs),
                             now = values("run/checkpoints/step-1/model.safetensors", ours);
    ASSERT_EQ(now.size(), old.size() + 32) << ours;
    EXPECT_TRUE(std::equal(old.begin(), old.end(), now.begin())) << ours;
    for (size_t c = 0; c < 16; ++c) {
      double sum = 0;
      for (size_t i = c; i < old.size(); i += 16) sum += static_cast<double>(old[i]);
      for (const size_t row : {290, 291}) EXPECT_EQ(now[row * 16 + c], static_cast<float>(sum / 290)) << ours << c;
    }
  }
  EXPECT_EQ(run("train --resume --out run --quiet --config run/config.toml --steps 2").status, 0);
  EXPECT_EQ(run("train --config run/config.toml --out again").status, 0);
  EXPECT_NE(read_file(path("again/config.toml")).find("vocab = 292\n"), std::string::npos);
  ASSERT_EQ(run("checkpoint export run --out out").status, 0);
  EXPECT_EQ(json("out/config.json")["vocab_size"], 292);
  const Json tokens = json("out/tokenizer.json")["added_tokens"];
  ASSERT_EQ(tokens.size(), 2U);
  EXPECT_EQ(tokens[1]["id"], 291);
  EXPECT_EQ(tokens[1]["content"], "<|im_end|>");
  EXPECT_EQ(tokens[1]["special"], true);
  const auto said = run("generate out --special --prompt 'Line<|im_end|>' --tokens 2 --temperature 0");
  EXPECT_EQ(said.status, 0) << said.err;
  EXPECT_TRUE(said.out.starts_with("Line<|im_end|>")) << said.out;

  expect_failure("train --init f --data text.txt --lora-rank 2 " + added, 2,
                 "--add-tokens: 2 of them are new, and adapters leave their rows as they are");
  expect_failure("train --init f --data text.txt --tokenizer bytes " + added, 2, "--add-tokens: beside --init");
  expect_failure("train --data text.txt --add-tokens '<a>'", 2,
                 "--add-tokens: a char tokenizer knows characters alone");
  expect_failure("train --init f --data text.txt --add-tokens 'a,,b'", 2, "--add-tokens: expected names with commas");
}

TEST_F(BeginningTest, RowsToSpareAreUsedFirst) {
  make_base("--vocab 291");
  const std::vector<float> old = values("base/checkpoints/step-3/model.safetensors", "tokens.weight");
  ASSERT_EQ(tune("--init f --add-tokens '<a>' --ranks 1").status, 0);
  EXPECT_EQ(values("run/checkpoints/step-1/model.safetensors", "tokens.weight"), old);
  ASSERT_EQ(tune("--init base --add-tokens '<a>,<b>' --ranks 1").status, 0);
  const std::vector<float> now = values("run/checkpoints/step-1/model.safetensors", "tokens.weight");
  EXPECT_EQ(now.size(), old.size() + 16);
  EXPECT_TRUE(std::equal(old.begin(), old.end(), now.begin()));
}

TEST_F(BeginningTest, ATextEndsWithTheTokenThatIsNamed) {
  make_base();
  std::string rows;
  for (int i = 0; i < 12; ++i) rows += R"({"prompt": "Line 7", "completion": " of it"})" + std::string("\n");
  write("rows.jsonl", rows);
  const auto r = tune(
      "--init f --data rows.jsonl --add-tokens '<|end|>' --end '<|end|>' --ranks 1 --steps 120 --lr 0.02 --warmup 5");
  ASSERT_EQ(r.status, 0) << r.err;
  ASSERT_EQ(run("checkpoint export run --out out").status, 0);
  for (const char* from : {"run", "out"}) {
    const auto said = run(std::string("generate ") + from +
                          " --prompt 'Line 7' --temperature 0 --tokens 30 --format json --threads-per-rank 1");
    ASSERT_EQ(said.status, 0) << said.err;
    EXPECT_EQ(Json::parse(said.out)["text"], " of it") << from;
    EXPECT_EQ(Json::parse(said.out)["ended"], "end") << from;
  }
  EXPECT_EQ(json("out/config.json")["eos_token_id"], 290);
  EXPECT_EQ(json("out/generation_config.json")["eos_token_id"], 290);
  EXPECT_EQ(json("out/tokenizer_config.json")["eos_token"], "<|end|>");
  // The end of a folder that has one is replaced, in all of its files.
  Json settings = json("out/generation_config.json");
  settings["eos_token_id"] = {290, 7};
  write("out/generation_config.json", settings.dump());
  write("out/special_tokens_map.json", R"({"eos_token": "<|end|>"})");
  ASSERT_EQ(tune("--init out --data rows.jsonl --add-tokens '<x>' --end '<x>' --ranks 1").status, 0);
  const Json files = json("run/checkpoints/step-1/tokenizer.json")["files"];
  EXPECT_EQ(Json::parse(files["generation_config.json"].get<std::string>())["eos_token_id"], 291);
  for (const char* file : {"tokenizer_config.json", "special_tokens_map.json"})
    EXPECT_EQ(Json::parse(files[file].get<std::string>())["eos_token"], "<x>") << file;
  expect_failure("train --init out --data rows.jsonl --end '<|ends|>'", 2,
                 "--end: expected one of the tokenizer's 1 special tokens (--add-tokens adds some), found '<|ends|>'; "
                 "did you mean '<|end|>'?");
  ASSERT_EQ(run("data text.txt --tokenizer out --out made").status, 0);
  expect_failure("train --init out --data made --add-tokens '<x>' --end '<x>'", 2,
                 "--end: the texts in the dataset made have another end, or none; expected <|end|>");
  EXPECT_EQ(tune("--init out --data made --add-tokens '<x>' --ranks 1").status, 0);
}

TEST_F(BeginningTest, ATokenBeyondTheTableIsRefusedWhenItIsMet) {
  make_base();
  Json tokenizer = json("f/tokenizer.json");
  tokenizer["added_tokens"].push_back({{"id", 290}, {"content", "<x>"}, {"special", false}, {"normalized", false}});
  write("f/tokenizer.json", tokenizer.dump());
  const auto r = tune("--init f --ranks 2");
  ASSERT_EQ(r.status, 0) << r.err;
  EXPECT_NE(r.err.find("the tokenizer has 291 tokens and the model's table 290 rows: the data use none of the others"),
            std::string::npos)
      << r.err;
  for (const char* next : {"train --resume --out run --quiet --config run/config.toml --steps 2",
                           "checkpoint reshard run --out two --ranks 2 --tp 2", "generate run --prompt Line --tokens 3",
                           "train --init run --data text.txt --steps 1 --lr 0 --no-eval --out more"})
    EXPECT_EQ(run(next).status, 0) << next << read_file(path("err.txt"));
  write("x.txt", "Line 1 of it\n<x> Line 2 of a text that is not short\n");
  write("x.jsonl", R"({"prompt": "a", "completion": "b"})"
                   "\n"
                   R"({"prompt": "a", "completion": "<x>"})"
                   "\n");
  ASSERT_EQ(run("data x.txt --tokenizer f --out made").status, 0);
  const std::string is = " token 290, '<x>', is beyond the model's table of 290";
  for (const char* command : {"train --init f --no-save --data ", "evaluate f --data "})
    for (const auto& [data, where] :
         {std::pair{"x.txt", "x.txt:"}, {"x.jsonl", "x.jsonl:2:"}, {"made", "x.txt:"}, {"text.txt=1,made=1", "x.txt:"}})
      expect_failure(std::string(command) + data, 4, where + is);
  expect_failure("generate f --prompt 'a<x>'", 2, "--prompt: its" + is);
  expect_failure("train --data text.txt --model gpt-nano --tokenizer f --vocab 290", 2,
                 "--vocab: expected at least the tokenizer's 291, found 290");
}

// The table of learned positions stays whole: its first rows are those of the context.
TEST_F(BeginningTest, AShorterContextReadsTheFirstLearnedPositions) {
  const auto base = run(
      "train --data text.txt --model gpt-nano --layers 2 --heads 2 --channels 16 --context 64 --batch 4 --tokenizer "
      "bytes --steps 3 --warmup 1 --lr 0.01 --ranks 1 --threads-per-rank 1 --no-eval --out base");
  ASSERT_EQ(base.status, 0) << base.err;
  ASSERT_EQ(run("checkpoint export base --out f").status, 0);
  const std::vector<float> old = values("f/model.safetensors", "transformer.wpe.weight");
  ASSERT_EQ(old.size(), 64U * 16);
  const std::string short_ = "--init f --context 16 --lr 0.01 --warmup 1 --weight-decay 0 --steps 3 ";
  std::vector<double> losses;
  for (const char* plan :
       {"--ranks 1", "--ranks 2 --tp 2 --sp", "--ranks 2 --cp 2", "--ranks 2 --pp 2", "--ranks 2 --zero 3"}) {
    const auto r = tune(short_ + plan);
    ASSERT_EQ(r.status, 0) << plan << r.err;
    losses.push_back(Json::parse(r.out.substr(r.out.rfind('\n', r.out.size() - 2) + 1))["loss"]);
    EXPECT_NEAR(losses.back(), losses[0], 1e-5) << plan;
  }
  const std::vector<float> now = values("run/checkpoints/step-3/model.safetensors", "positions.weight");
  ASSERT_EQ(now.size(), old.size());
  EXPECT_TRUE(std::equal(old.begin() + 256, old.end(), now.begin() + 256)) << "rows behind the context";
  for (size_t row = 0; row < 16; ++row) EXPECT_NE(now[row * 16], old[row * 16]) << row;
  EXPECT_EQ(run("train --resume --out run --quiet --config run/config.toml --steps 4").status, 0);
  ASSERT_EQ(run("checkpoint export run --out out").status, 0);
  EXPECT_EQ(json("out/config.json")["n_positions"], 64);
  EXPECT_EQ(values("out/model.safetensors", "transformer.wpe.weight"),
            values("run/checkpoints/step-4/model.safetensors", "positions.weight"));
  EXPECT_EQ(run("train --init run --data text.txt --context 64 --steps 1 --no-eval --quiet --out longer").status, 0);
  // As many tokens as the context, wherever the table ends.
  const auto loss = [&](const std::string& words) {
    const auto r = run("evaluate " + words + " --data text.txt --threads-per-rank 1 --format json");
    EXPECT_EQ(r.status, 0) << r.err;
    return r.status == 0 ? Json::parse(r.out)["loss"].get<double>() : 0;
  };
  EXPECT_NEAR(loss("out --context 16"), loss("run --context 16"), 1e-6);
  expect_failure("train --init f --data text.txt --context 65", 2, "--context: the model has 64, found 65");
  expect_failure("train --init run --data text.txt --context 65", 2, "--context: the model has 64, found 65");
  expect_failure("train --data text.txt --positions 32", 2, "--positions: expected a row for each of the 64 tokens");
  expect_failure("train --data text.txt --model llama-nano --positions 99", 2, "--positions: goes with --family gpt2");
  const auto proof =
      run("verify --layers 2 --heads 2 --channels 16 --context 16 --positions 64 --batch 4 --steps 2 --ranks 4 --tp 2 "
          "--zero 3 --threads-per-rank 1");
  EXPECT_EQ(proof.status, 0) << proof.out;
}

}  // namespace
}  // namespace tessera
