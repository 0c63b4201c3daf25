// generate and evaluate: same texts and losses under every plan, in a batch and alone.

#include <array>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <set>
#include <string>
#include <vector>

#include "data/tokenizer/described.h"
#include "tests/app/program.h"
#include "tests/support/direct_loss.h"
#include "train/checkpoint/state.h"

namespace tessera {

namespace {

constexpr const char* kPlans[] = {"--ranks 1", "--dp 2", "--dp 2 --zero 3",
                                  "--tp 2",    "--pp 2", "--tp 2 --pp 2 --dp 2 --zero 3"};

class InferenceTest : public ProgramTest {
 protected:
  void make(const std::string& model) const {
    anew("train " + kSmall + "--tokenizer bytes --ranks 1 --steps 30 --lr 0.02 --out base --layers 2 --model " + model);
  }
  std::string generate(const std::string& more) const { return must("generate base --threads-per-rank 1 " + more).out; }
  Json evaluate(const std::string& more) const {
    return must("evaluate base --threads-per-rank 1 --format json " + more).last_record();
  }
  double loss_on(const std::string& more) const { return evaluate("--data " + more).at("loss"); }
};

TEST_F(InferenceTest, GeneratedTextIsIdenticalUnderEveryPlan) {
  const std::string several =
      "--prompt 'Line 7' --prompt 'a text that is longer than all of the context' --prompt of --tokens 40 "
      "--temperature 0.7 --top-k 9 --repetition-penalty 1.1 --seed 5 --format json ";
  for (const char* model : {"llama-nano --kv-heads 2", "gpt-nano", "llama-nano --kv-heads 2 --experts 4"}) {
    make(model);
    const std::string one = generate("--prompt 'Line 7' --temperature 0 --tokens 40"), all = generate(several);
    EXPECT_EQ(parse_records(all).size(), 3u);
    for (const char* plan : kPlans) {
      EXPECT_EQ(generate(std::string("--prompt 'Line 7' --temperature 0 --tokens 40 ") + plan), one) << model << plan;
      EXPECT_EQ(generate(several + plan), all) << model << plan;
    }
  }
}

// Samples depend on the index of the prompt; greedy texts do not.
TEST_F(InferenceTest, BatchedPromptsMatchSinglePrompts) {
  make("llama-nano");
  write("prompts.txt", "Line 1\na text\n\nsays little, but more of it\nL\r\n");
  const std::vector<Json> together =
      parse_records(generate("--prompts prompts.txt --temperature 0 --tokens 25 --format json"));
  ASSERT_EQ(together.size(), 4u);
  EXPECT_EQ(together[3].at("prompt"), "L");
  for (const Json& one : together) {
    const std::string prompt = one.at("prompt").get<std::string>();
    const std::string alone = generate("--prompt '" + prompt + "' --temperature 0 --tokens 25");
    EXPECT_EQ(alone, prompt + one.at("text").get<std::string>() + "\n");
    test::expect_values(one, {{"tokens", 25}, {"ended", "length"}});
  }
}

// A stop text may span several tokens (here one byte each); text that may begin one is withheld until further tokens
// decide.
TEST_F(InferenceTest, StopsBeforeStopStrings) {
  make("llama-nano");
  const std::string full_text = generate("--prompt Line --temperature 0 --tokens 60"), text = full_text.substr(4);
  for (const size_t at : {5u, 17u, 30u})
    for (const size_t length : {1u, 3u, 6u}) {
      const std::string stop = text.substr(at, length), found = text.substr(0, text.find(stop));
      if (stop.find('\n') != std::string::npos || stop.find('\'') != std::string::npos) continue;
      const std::string more = "--prompt Line --temperature 0 --tokens 60 --stop zzz --stop '" + stop + "' ";
      EXPECT_EQ(generate(more), "Line" + found + "\n") << stop;
      test::expect_values(Json::parse(generate(more + "--format json")), {{"text", found}, {"ended", "stop"}});
    }
}

TEST_F(InferenceTest, EvaluationLossMatchesOneRankUnderEveryPlan) {
  write("other.txt", "Line 3 of a text that says nothing at all.\nAnd another line.\n");
  write("pairs.jsonl",
        "{\"prompt\": \"Line 1\", \"completion\": \" of a text\"}\n{\"prompt\": \"Li\", \"completion\": \"ne 2\"}\n");
  for (const char* model : {"llama-nano --kv-heads 2", "gpt-nano"}) {
    make(model);
    for (const std::string data : {"other.txt", "pairs.jsonl --template none"}) {
      const Json one = evaluate("--data " + data);
      const double loss = one.at("loss");
      EXPECT_EQ(one.at("tokens"), data == "other.txt" ? 60 : 14);
      for (const std::string plan : kPlans) {
        const double exact = plan.find("tp") == std::string::npos ? 0 : 1e-6;
        EXPECT_NEAR(loss_on(data + " " + plan), loss, exact) << model << data << plan;
      }
      EXPECT_NEAR(loss_on(data + " --batch 1"), loss, 1e-6);
    }
    const Json one = evaluate("--data other.txt");
    const double loss = one.at("loss");
    EXPECT_NEAR(one.at("bits_per_byte").get<double>(), loss * 60 / 61 / std::log(2.0), 1e-9);
    for (const char* plan : {"--cp 2", "--cp 2 --cp-mode ulysses", "--tp 2 --sp"})
      EXPECT_NEAR(loss_on(std::string("other.txt ") + plan), loss, 1e-6);
  }
}

// Training and evaluate report the same loss on the validation split.
TEST_F(InferenceTest, EvaluationLossMatchesValidationLossOfTraining) {
  must("data text.txt --tokenizer bytes --out tokens");
  const Json summary = train("--data tokens --steps 5 --ranks 1 --format json --out base").last_record();
  const Json found = evaluate("--data tokens");
  EXPECT_NEAR(found.at("loss").get<double>(), summary.at("val_loss").get<double>(), 1e-6);
  must("checkpoint export base --out folder");
  EXPECT_EQ(must("evaluate folder --threads-per-rank 1 --data tokens --format json").last_record(), found);
}

TEST_F(InferenceTest, RejectsInvalidOptions) {
  make("llama-nano");
  write("empty.txt", "");
  write("one.txt", "a");
  fails("evaluate base", 2, "--data: missing; expected text, tokens or examples");
  fails("evaluate base --data nowhere.txt", 4, "nowhere.txt");
  fails("evaluate base --data one.txt", 4, "1 tokens; expected at least 2");
  fails("evaluate base --data empty.txt", 4, "empty.txt");
  fails("evaluate base --data text.txt --tp 3", 2, "--tp: 3 does not divide");
  fails("evaluate base --data text.txt --lr 3", 2, "unknown option '--lr'");
  fails("evaluate base --data text.txt --context 32", 2, "--context: expected 16, the value of the model");
  fails("generate base --prompt ''", 2, "--prompt: expected at least one character");
  fails("generate base --stop ''", 2, "--stop: expected at least one character");
  fails("generate base --prompts empty.txt", 4, "contains no prompts; expected one per line");
  fails("generate base --cp 2", 2, "unknown option '--cp'");
  fails("generate base --min-p 2", 2, "--min-p: expected a number in [0, 1]");
  fails("generate nowhere", 4, "nowhere");
}

// The validation loss of a run, compared with its saved weights and its text.

class RunValidationTest : public ProgramTest {
 protected:
  // 'é' has two bytes, so tokens are longer than bytes.
  RunValidationTest() {
    std::string text;
    for (int i = 0; i < 500; ++i)
      text += fmt::format("L'{} é é été {}, {}.\n", i % 13, i * 7 % 31, i % 3 ? "né" : "et");
    write("text.txt", text);
    size_t cut = text.size() * 9 / 10;
    while ((static_cast<unsigned char>(text[cut]) & 0xC0) == 0x80) ++cut;
    held_out_ = split_characters(text.substr(cut));
    bytes_ = text.size() - cut;
    const std::vector<std::string> all = split_characters(text);
    vocabulary_ = {all.begin(), all.end()};  // in code point order, as in UTF-8
  }

  static std::vector<std::string> split_characters(const std::string& text) {
    std::vector<std::string> out;
    for (const char c : text)
      if ((static_cast<unsigned char>(c) & 0xC0) == 0x80)
        out.back() += c;
      else
        out.emplace_back(1, c);
    return out;
  }

  // The loss of a checkpoint's weights on one rank, without plan and dropout.
  double direct_loss(const std::string& checkpoint) const {
    const auto model = make_model(
        {.layers = 1, .heads = 2, .channels = 16, .context = 16, .vocab = static_cast<int64_t>(vocabulary_.size())});
    const ArenaPtr arena = make_arena();
    model->materialize(1, arena, DType::float32, DType::float32);
    read_values(model->units(), SavedTensors(path(checkpoint), "model").tensors());
    std::vector<int32_t> tokens;
    for (const std::string& c : held_out_)
      tokens.push_back(static_cast<int32_t>(std::distance(vocabulary_.begin(), vocabulary_.find(c))));
    return test::direct_loss(*model, tokens, arena);
  }

  std::vector<std::string> held_out_;
  std::set<std::string> vocabulary_;
  size_t bytes_ = 0;
};

TEST_F(RunValidationTest, LossMatchesSavedWeightsOverFullSplit) {
  int run = 0;
  for (const std::string plan :
       {"--ranks 1", "--ranks 2 --microbatches 2", "--ranks 2 --dp-mode dataparallel", "--cp 2 --ranks 2",
        "--tp 2 --ranks 4", "--ranks 2 --dp-mode ps-async --staleness 0"}) {
    SCOPED_TRACE(plan);
    const std::string out = fmt::format("run-{}", run++);
    const Ran ran =
        train(fmt::format("--dropout 0.3 --eval-every 6 --save-every 6 --format json --out {} {}", out, plan));
    size_t evaluated = 0;
    double last = 0;
    for (const Json& record : parse_records(ran.out)) {
      if (!record.contains("val_loss")) continue;
      const double loss = record["val_loss"], bits = record["val_bits_per_byte"];
      EXPECT_NEAR(bits, loss / std::log(2.0) * static_cast<double>(held_out_.size()) / static_cast<double>(bytes_),
                  1e-9);
      if (record["event"] == "summary") {
        EXPECT_EQ(loss, last);
        continue;
      }
      last = loss;
      ++evaluated;
      const double direct = direct_loss(fmt::format("{}/checkpoints/step-{}", out, record["step"].get<int64_t>()));
      EXPECT_NEAR(loss, direct, 1e-5 * direct) << record;
    }
    EXPECT_EQ(evaluated, plan.find("async") == std::string::npos ? 2U : 1U);
  }
}

// Training on mixtures and shards: messages, identical files after a resume within an epoch and under other layouts,
// and rejected inputs.

class MixturesTest : public ProgramTest {
 protected:
  MixturesTest() { std::ofstream(path("more.txt")) << std::string(1500, '1') << " and other digits\n"; }
  // A byte-level mixture of two texts.
  const std::string kMixed = "--tokenizer bytes --data text.txt=0.7,more.txt=0.3 ";
};

TEST_F(MixturesTest, ResumesBitwiseUnderDifferentLayouts) {
  const Ran reference =
      train(kMixed + "--save-every 5 --eval-every 5 --ranks 1 --microbatches 2 --format json --out whole");
  expect_has(reference.err, {"a mixture of 2 datasets\n70% text.txt", "30% more.txt"});
  Json eval;
  for (const Json& record : parse_records(reference.out))
    if (record["event"] == "eval") eval = record;
  EXPECT_NEAR(eval.at("val_loss").get<double>(),
              0.7 * eval.at("val_loss/text.txt").get<double>() + 0.3 * eval.at("val_loss/more.txt").get<double>(),
              1e-9);
  train(kMixed + "--save-every 5 --dp 2 --no-eval --format json --out run");
  EXPECT_TRUE(files("run/checkpoints/step-12") == files("whole/checkpoints/step-12"));
  expect_same_checkpoint_after_resume("run/checkpoints/step-12", 10, " --format json");
  // Another mixture or another order is a different run.
  fs::remove_all(path("run/checkpoints/step-12"));
  fails("train --resume --out run --data text.txt=0.3,more.txt=0.7", 2,
        "mixture is \"3:7\", but the checkpoint has \"7:3\"");
  fails("train --resume --out run --shuffle", 2, "shuffle is true, but the checkpoint has the default");
  const Json found = must("evaluate whole --data text.txt=7,more.txt=3 --format json").last_record(),
             parts = found.at("datasets");
  EXPECT_NEAR(found.at("loss").get<double>(),
              0.7 * parts.at("text.txt").at("loss").get<double>() + 0.3 * parts.at("more.txt").at("loss").get<double>(),
              1e-6);
}

TEST_F(MixturesTest, TrainsOnShardedDatasets) {
  expect_has(must("data 't*.txt' more.txt --tokenizer bytes --shard-tokens 10000 --out set").out, "in 4 files");
  expect_has(train("--data set --steps 3 --no-save --out run").err, " in 4 files (bytes)");
  fails("train --data set --model gpt-nano --context 20000 --ranks 1", 4, "expected at least 20001");
  fs::remove(path("set/train-00002.tok"));
  fails("train --data set", 4, "train-00002.tok");
}

TEST_F(MixturesTest, RejectsInvalidMixtures) {
  fails("train --data text.txt=1,more.txt=0", 2, "--data: the weight of 'more.txt': expected a positive number");
  fails("train --data text.txt=1,text.txt=2", 2, "'text.txt' is a duplicate");
  fails("train --data text.txt=1", 2, "1 weighted dataset");
  fails("train --data text.txt=1,nowhere=1", 4, "nowhere");
  fails("train --data text.txt=1,more.txt=1", 2, "different tokenizer (char,");
  fails("train --data 'x*.bin'", 4, "no file matches");
  fails("train --data text.txt=1,more.txt=1 --pack", 2, "--pack: requires --data FILE.jsonl");
  fails("data text.txt more.txt", 2, "--out: a dataset of 2 sources requires an output directory");
  fails("data text.txt --shard-tokens 5", 2, "--shard-tokens: requires --out");
}

// --document-mask: rejected inputs, and runs on tokens with <|endoftext|> under several plans.

// A byte tokenizer with <|endoftext|> in "tokenizer", and an llm.c file with documents of its tokens.
class DocumentsTest : public ProgramTest {
 protected:
  DocumentsTest() {
    constexpr uint16_t kEnd = 256;
    std::vector<std::string> tokens;
    for (const uint8_t b : bpe::bytes_in_order()) tokens.emplace_back(1, static_cast<char>(b));
    tokens.emplace_back("<|endoftext|>");
    const BpeTokenizer tokenizer(tokens, {}, "the test's");
    fs::create_directory(path("tokenizer"));
    std::ofstream(path("tokenizer/vocab.json")) << tokenizer.vocab_json();
    std::ofstream(path("tokenizer/merges.txt")) << tokenizer.merges_txt();
    const Philox random = Philox::named(1, "documents");
    std::vector<uint16_t> written;
    for (uint64_t i = 0; i < 4000; ++i)
      written.push_back(random.below(9, i) == 0 ? kEnd : static_cast<uint16_t>(60 + random.below(20, i, 1)));
    const std::array<int32_t, 256> header{20240520, 1, static_cast<int32_t>(written.size())};
    write("documents.bin", std::string(reinterpret_cast<const char*>(header.data()), sizeof header) +
                               std::string(reinterpret_cast<const char*>(written.data()), 2 * written.size()));
  }
  void train_on_documents(const std::string& more) const {
    train(" --data documents.bin --tokenizer ./tokenizer --steps 4 " + more);
  }
};

TEST_F(DocumentsTest, RejectsTokenizersWithoutEndOfDocumentToken) {
  for (const char* tokenizer : {"char", "bytes", "bpe"})
    fails("train " + kSmall + "--document-mask --out run --tokenizer " + tokenizer, 2,
          "--document-mask: the tokenizer has no end-of-document token; expected tokens with <|endoftext|>");
  fails("train --document-mask --dp-mode dataparallel --ranks 2 --batch 4", 2,
        "--document-mask: --dp-mode dataparallel scatters tokens");
  EXPECT_FALSE(fs::exists(path("run")));
}

TEST_F(DocumentsTest, EveryPlanTrainsWithDocumentMask) {
  for (const std::string family : {"gpt2", "llama"}) {
    const std::string model = "--layers 2 --tie-copies --family " + family;
    train_on_documents(model + " --document-mask --ranks 1 --out one-" + family);
    train_on_documents(model + " --ranks 1 --out crossed-" + family);
    const std::string expected = weights("one-" + family + "/checkpoints/step-4");
    EXPECT_NE(weights("crossed-" + family + "/checkpoints/step-4"), expected);
    train_on_documents(model + " --document-mask --pp 2 --out pp-" + family);
    EXPECT_EQ(weights("pp-" + family + "/checkpoints/step-4"), expected);
    train_on_documents(model + " --document-mask --cp 2 --tp 2 --sp --out cp-" + family);
    train_on_documents("--document-mask --dp-mode ps-async --ranks 2 --out async-" + family);
  }
  fails("train --resume --out crossed-gpt2 --document-mask --steps 8", 2,
        "document_mask is true, but the checkpoint has the default");
}

}  // namespace
}  // namespace tessera
