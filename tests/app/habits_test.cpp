// Convenience options: epochs and fractions in place of steps, a separate validation file, early stopping; and changes
// of an initial model: new tokens, another end token, a shorter context.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "data/safetensors.h"
#include "tests/app/program.h"

namespace tessera {
namespace {

class TrainOptionsTest : public ProgramTest {
 protected:
  std::string config() const { return read_file(path("run/config.toml")); }
  std::vector<int64_t> validated() const {
    std::vector<int64_t> steps;
    for (const auto& record : parse_records(read_file(path("run/metrics.jsonl"))))
      if (record["event"] == "eval") steps.push_back(record["step"]);
    return steps;
  }
};

TEST_F(TrainOptionsTest, ConvertsEpochsAndFractionsToSteps) {
  std::string rows;  // 30 training rows, 4 per step: 7.5 steps per epoch
  for (int i = 0; i < 33; ++i) rows += fmt::format("{{\"prompt\": \"{} and\", \"completion\": \" {}\"}}\n", i, i * i);
  write("rows.jsonl", rows);
  const std::string model =
      "train --data rows.jsonl --model gpt-nano --layers 1 --channels 16 --context 16 --batch 4 --tokenizer bytes "
      "--threads-per-rank 1 --lr 0.02 ";
  for (const char* plan : {"--ranks 1 ", "--ranks 2 --zero 1 "}) {
    anew(model + plan + "--epochs 2 --eval-every 0.5e --save-every 1e --warmup 20% --min-lr 5% --out run");
    expect_has(config(),
               {"steps = 15\n", "eval-every = 4\n", "save-every = 8\n", "warmup = \"20%\"\n", "min-lr = \"5%\"\n"});
    expect_lacks(config(), "epochs");
    EXPECT_EQ(validated(), (std::vector<int64_t>{4, 8, 12, 15}));
    anew(model + plan + "--steps 15 --eval-every 4 --warmup 3 --min-lr 0.001 --out told");
    EXPECT_EQ(weights("run/checkpoints/step-15"), weights("told/checkpoints/step-15"));
    must("train --resume --out run --config run/config.toml --epochs 3");  // fractions remain in effect
    expect_has(config(), "steps = 23\n");
  }
  for (const auto& [epochs, steps] :
       {std::pair{"0.39", 3}, {"0.4", 3}, {"0.41", 4}, {"0.01", 1}}) {  // times 7.5, rounded up
    anew(model + "--no-eval --no-save --epochs " + epochs + " --out run");
    expect_has(config(), fmt::format("steps = {}\n", steps));
  }
  fails(model + "--epochs 2 --steps 3", 2, "--epochs: cannot be combined with --steps");
  // Later options, and the command line, take precedence over the configuration file.
  must("train --config run/config.toml --epochs 0.5 --out half");
  expect_has(read_file(path("half/config.toml")), "steps = 4\n");
  write("epochs.toml", "epochs = 2.0\n");
  must(model + "--config epochs.toml --steps 1 --no-eval --out one");
  fails(model + "--warmup 101%", 2, "--warmup: expected a number in [0, 100], got '101'");
  fails(model + "--warmup 3e", 2, "--warmup: expected an integer");
  write("few.jsonl", rows.substr(0, rows.find("{\"prompt\": \"10 ")));  // 9 training rows, 39 in both files
  const auto mixed = must(
      "train --data rows.jsonl=1,few.jsonl=2 --model gpt-nano --layers 1 --channels 16 --context 16 "
      "--batch 4 --tokenizer bytes --threads-per-rank 1 --epochs 1 --no-eval --out mixed");
  expect_has(mixed.err,
             "an epoch of the mixture has 39 sequences, the total of its datasets, and reads rows.jsonl 0.433 "
             "times, few.jsonl 2.89 times");
  expect_has(read_file(path("mixed/config.toml")), "steps = 10\n");
}

TEST_F(TrainOptionsTest, PatienceStopsNewAndResumedRuns) {
  const std::string still = "--lr 0 --eval-every 2 --out run ";  // no validation improves on the first
  const auto r = train(still + "--steps 40 --patience 2");
  expect_has(r.err, "2 validations without improvement (--patience): stopping after step 6 of 40");
  EXPECT_EQ(validated(), (std::vector<int64_t>{2, 4, 6}));
  EXPECT_TRUE(fs::exists(path("run/checkpoints/step-6")));
  anew("train " + kSmall + still + "--steps 4");
  must("train --resume --out run --config run/config.toml --steps 40 --patience 2");
  EXPECT_EQ(validated(), (std::vector<int64_t>{2, 4, 6}));
  fails("train --patience 2 --eval-every 0", 2, "--patience: requires periodic validation, got");
  fails("train --patience 2 --no-eval", 2, "--patience: requires periodic validation, got --no-eval");
}

TEST_F(TrainOptionsTest, HoldsOutValidationFileOrFraction) {
  write("other.txt", std::string(700, 'o'));
  const auto tokens = static_cast<int64_t>(fs::file_size(path("text.txt")));
  const auto held = [&](const std::string& more) {
    return anew("train " + kSmall + "--tokenizer bytes --steps 1 --out run --format json " + more).err;
  };
  const auto grouped = [](int64_t n) { return fmt::format("{:.1f}K", static_cast<double>(n) / 1000); };
  expect_has(held("--val-share 0.25"), grouped(tokens - tokens * 3 / 4) + " tokens held out");
  expect_has(held("--val-data other.txt"), {grouped(tokens) + " characters of training text", "700 tokens held out"});
  must("train --resume --out run --config run/config.toml --steps 3");
  write("rows.jsonl", "{\"prompt\": \"a\", \"completion\": \"b\"}\n");
  train("--tokenizer bytes --data rows.jsonl --val-data rows.jsonl --steps 1 --out rows");
  fails("train --val-data other.txt --val-share 0.2", 2, "--val-data: cannot be combined with --val-share");
  fails("train --data text.txt --val-data rows.jsonl", 2, "--val-data: expected text");
  must("data text.txt --tokenizer bytes --out made");
  fails("train --data made --val-share 0.2", 2, "--val-share: expected text or examples");
}

// Initial models.

class InitTest : public ProgramTest {
 protected:
  // A run "base" with 290 tokens and its exported folder "f".
  void make_base(const std::string& more = "") {
    train("--model llama-nano --ffn 32 --tokenizer bpe-290 --steps 3 --ranks 1 --no-eval --quiet --out base " + more);
    must("checkpoint export base --out f");
  }
  Ran tune(const std::string& more) const {
    return anew(
        "train --data text.txt --batch 4 --steps 1 --lr 0 --no-eval --threads-per-rank 1 --format json --out run " +
        more);
  }
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

// transformers 5.24 samples new rows around the mean of the old ones (with 1e-9 of their variance); the ids are those
// of its add_special_tokens().
TEST_F(InitTest, NewEmbeddingRowsEqualMeanOfExistingRows) {
  make_base();
  const std::string added = "--add-tokens '<|im_start|>,<|im_end|>' ";
  std::string first;
  for (const char* plan : {"--init f --ranks 1", "--init base --ranks 2 --tp 2", "--init f --ranks 2 --zero 3",
                           "--init f --ranks 2 --dp-mode ps-async"}) {
    expect_has(tune(added + plan).err,
               "<|im_start|> is token 290, <|im_end|> is token 291; new embedding rows are initialized");
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
  must("train --resume --out run --quiet --config run/config.toml --steps 2");
  must("train --config run/config.toml --out again");
  expect_has(read_file(path("again/config.toml")), "vocab = 292\n");
  must("checkpoint export run --out out");
  EXPECT_EQ(to_json("out/config.json")["vocab_size"], 292);
  const Json tokens = to_json("out/tokenizer.json")["added_tokens"];
  ASSERT_EQ(tokens.size(), 2U);
  EXPECT_TRUE(tokens[1]["id"] == 291 && tokens[1]["content"] == "<|im_end|>" && tokens[1]["special"] == true) << tokens;
  const auto output = must("generate out --special --prompt 'Line<|im_end|>' --tokens 2 --temperature 0");
  EXPECT_TRUE(output.out.starts_with("Line<|im_end|>")) << output.out;

  fails("train --init f --data text.txt --lora-rank 2 " + added, 2,
        "--add-tokens: 2 of the tokens are new, but adapter training does not update embedding rows");
  fails("train --init f --data text.txt --tokenizer bytes " + added, 2,
        "--add-tokens: with --init, expected a tokenizer directory or no --tokenizer");
  fails("train --data text.txt --add-tokens '<a>'", 2, "--add-tokens: not supported with --tokenizer char");
  fails("train --init f --data text.txt --add-tokens 'a,,b'", 2, "--add-tokens: expected comma-separated names");
}

TEST_F(InitTest, NewTokensUseSpareEmbeddingRowsFirst) {
  make_base("--vocab 291");
  const std::vector<float> old = values("base/checkpoints/step-3/model.safetensors", "tokens.weight");
  tune("--init f --add-tokens '<a>' --ranks 1");
  EXPECT_EQ(values("run/checkpoints/step-1/model.safetensors", "tokens.weight"), old);
  tune("--init base --add-tokens '<a>,<b>' --ranks 1");
  const std::vector<float> now = values("run/checkpoints/step-1/model.safetensors", "tokens.weight");
  EXPECT_EQ(now.size(), old.size() + 16);
  EXPECT_TRUE(std::equal(old.begin(), old.end(), now.begin()));
}

TEST_F(InitTest, EndOptionSelectsEosToken) {
  make_base();
  std::string rows;
  for (int i = 0; i < 12; ++i) rows += "{\"prompt\": \"Line 7\", \"completion\": \" of it\"}\n";
  write("rows.jsonl", rows);
  tune("--init f --data rows.jsonl --add-tokens '<|end|>' --end '<|end|>' --ranks 1 --steps 120 --lr 0.02 --warmup 5");
  must("checkpoint export run --out out");
  for (const std::string from : {"run", "out"}) {
    const Json output = must("generate " + from + " --prompt 'Line 7' --temperature 0 --format json").last_record();
    test::expect_values(output, {{"text", " of it"}, {"ended", "end"}}, from);
  }
  for (const char* file : {"out/config.json", "out/generation_config.json"})
    EXPECT_EQ(to_json(file)["eos_token_id"], 290) << file;
  EXPECT_EQ(to_json("out/tokenizer_config.json")["eos_token"], "<|end|>");
  // An existing end token is replaced in all files of the folder.
  Json settings = to_json("out/generation_config.json");
  settings["eos_token_id"] = {290, 7};
  write("out/generation_config.json", settings.dump());
  write("out/special_tokens_map.json", R"({"eos_token": "<|end|>"})");
  tune("--init out --data rows.jsonl --add-tokens '<x>' --end '<x>' --ranks 1");
  const Json files = to_json("run/checkpoints/step-1/tokenizer.json")["files"];
  EXPECT_EQ(Json::parse(files["generation_config.json"].get<std::string>())["eos_token_id"], 291);
  for (const char* file : {"tokenizer_config.json", "special_tokens_map.json"})
    EXPECT_EQ(Json::parse(files[file].get<std::string>())["eos_token"], "<x>") << file;
  fails("train --init out --data rows.jsonl --end '<|ends|>'", 2,
        "--end: expected one of the tokenizer's 1 special tokens (--add-tokens adds more), got '<|ends|>'; did you "
        "mean '<|end|>'?");
  must("data text.txt --tokenizer out --out made");
  fails("train --init out --data made --add-tokens '<x>' --end '<x>'", 2,
        "--end: the texts in the dataset made end with a different token, or with none; expected <|end|>");
  tune("--init out --data made --add-tokens '<x>' --ranks 1");
}

TEST_F(InitTest, RejectsTokensOutsideEmbeddingTableOnlyIfUsed) {
  make_base();
  Json tokenizer = to_json("f/tokenizer.json");
  tokenizer["added_tokens"].push_back({{"id", 290}, {"content", "<x>"}, {"special", false}, {"normalized", false}});
  write("f/tokenizer.json", tokenizer.dump());
  expect_has(tune("--init f --ranks 2").err,
             "the tokenizer has 291 tokens, but the embedding table has only 290 rows; the data contain no token "
             "without a row");
  for (const char* next : {"train --resume --out run --quiet --config run/config.toml --steps 2",
                           "checkpoint reshard run --out two --ranks 2 --tp 2", "generate run --prompt Line --tokens 3",
                           "train --init run --data text.txt --steps 1 --lr 0 --no-eval --out more"})
    must(next);
  write("x.txt", "Line 1 of it\n<x> Line 2 of a text that is not short\n");
  write("x.jsonl", "{\"prompt\": \"a\", \"completion\": \"b\"}\n{\"prompt\": \"a\", \"completion\": \"<x>\"}\n");
  must("data x.txt --tokenizer f --out made");
  const std::string is = " token 290, '<x>', is outside the model's embedding table of 290 rows";
  for (const char* command : {"train --init f --no-save --data ", "evaluate f --data "})
    for (const auto& [data, where] :
         {std::pair{"x.txt", "x.txt:"}, {"x.jsonl", "x.jsonl:2:"}, {"made", "x.txt:"}, {"text.txt=1,made=1", "x.txt:"}})
      fails(std::string(command) + data, 4, where + is);
  fails("generate f --prompt 'a<x>'", 2, "--prompt:" + is);
  fails("train --data text.txt --model gpt-nano --tokenizer f --vocab 290", 2,
        "--vocab: expected at least the tokenizer's vocabulary size, 291, got 290");
}

// The table of learned positions stays complete; the context uses its first rows.
TEST_F(InitTest, ShorterContextUsesFirstPositionEmbeddings) {
  train("--model gpt-nano --layers 2 --context 64 --tokenizer bytes --steps 3 --ranks 1 --no-eval --out base");
  must("checkpoint export base --out f");
  const std::vector<float> old = values("f/model.safetensors", "transformer.wpe.weight");
  ASSERT_EQ(old.size(), 64U * 16);
  const std::string short_ = "--init f --context 16 --lr 0.01 --warmup 1 --weight-decay 0 --steps 3 ";
  std::vector<double> losses;
  for (const char* plan :
       {"--ranks 1", "--ranks 2 --tp 2 --sp", "--ranks 2 --cp 2", "--ranks 2 --pp 2", "--ranks 2 --zero 3"}) {
    losses.push_back(tune(short_ + plan).last_record()["loss"]);
    EXPECT_NEAR(losses.back(), losses[0], 1e-5) << plan;
  }
  const std::vector<float> now = values("run/checkpoints/step-3/model.safetensors", "positions.weight");
  ASSERT_EQ(now.size(), old.size());
  EXPECT_TRUE(std::equal(old.begin() + 256, old.end(), now.begin() + 256)) << "rows beyond the context";
  for (size_t row = 0; row < 16; ++row) EXPECT_NE(now[row * 16], old[row * 16]) << row;
  must("train --resume --out run --quiet --config run/config.toml --steps 4");
  must("checkpoint export run --out out");
  EXPECT_EQ(to_json("out/config.json")["n_positions"], 64);
  EXPECT_EQ(values("out/model.safetensors", "transformer.wpe.weight"),
            values("run/checkpoints/step-4/model.safetensors", "positions.weight"));
  must("train --init run --data text.txt --context 64 --steps 1 --no-eval --quiet --out longer");
  // As many tokens as the context, independent of the size of the table.
  EXPECT_NEAR(compute_loss("out --context 16"), compute_loss("run --context 16"), 1e-6);
  for (const std::string from : {"f", "run"})
    fails("train --init " + from + " --data text.txt --context 65", 2,
          "--context: expected 64, the value of the model, got 65");
  fails("train --data text.txt --positions 32", 2, "--positions: expected at least 64 position embeddings (--context)");
  fails("train --data text.txt --model llama-nano --positions 99", 2, "--positions: requires --family gpt2");
  must(
      "verify --layers 2 --heads 2 --channels 16 --context 16 --positions 64 --batch 4 --steps 2 --ranks 4 --tp 2 "
      "--zero 3 --threads-per-rank 1");
}

}  // namespace
}  // namespace tessera
