// Command line and configuration file: what they set, and what they say about mistakes.

#include <fstream>
#include <nlohmann/json.hpp>

#include "app/commands.h"
#include "app/job_of.h"
#include "app/run/pretrained.h"
#include "tests/support/gpu.h"
#include "train/device.h"

namespace tessera {

namespace {

Command parse(std::vector<const char*> words) {
  words.insert(words.begin(), "tessera");
  return parse_command_line(static_cast<int>(words.size()), words.data());
}
TrainOptions train(std::vector<const char*> words) {
  words.insert(words.begin(), "train");
  return std::get<TrainOptions>(parse(words));
}
// The message of the error that f throws, in one line; empty when it throws none.
template <class F>
std::string message(const F& f, Status status = Status::usage) {
  try {
    f();
  } catch (const Error& e) {
    EXPECT_EQ(static_cast<int>(e.status()), static_cast<int>(status)) << e.what();
    EXPECT_EQ(std::string(e.what()).find('\n'), std::string::npos) << e.what();
    return e.what();
  }
  return "";
}
std::string message(std::vector<const char*> words) {
  return message([&] { parse(words); });
}

class ConfigTest : public testing::Test {
 protected:
  std::string file(const std::string& text) const {
    const std::string path = folder_.path() / "c.toml";
    std::ofstream(path) << text;
    return path;
  }
  TrainOptions read(const std::string& text) const {
    TrainOptions o;
    apply_config_file(o, file(text));
    return o;
  }
  TemporaryDirectory folder_{std::filesystem::temp_directory_path() / "tessera-config-"};
};

TEST(CommandLine, SetsWhatItSays) {
  const TrainOptions o =
      train({"--layers", "2", "--lr=3e-4", "--dtype", "bf16", "--quiet", "--out", "x y", "--seed", "0"});
  EXPECT_EQ(o.sizes.layers, 2);
  EXPECT_FALSE(o.gives("heads"));
  EXPECT_EQ(o.optim.lr, 3e-4);
  EXPECT_EQ(text_of(o.optim.dtype), "bf16");
  EXPECT_TRUE(o.quiet);
  EXPECT_EQ(o.out, "x y");
  EXPECT_EQ(o.optim.seed, 0);
  EXPECT_FALSE(o.optim.min_lr);  // a smaller --lr alone brings a smaller --min-lr with it
  EXPECT_EQ(train({"--steps", "5", "--steps", "7"}).optim.steps, 7);
  const auto g = std::get<GenerateOptions>(parse({"generate", "run", "--prompt", "--x", "--top-p", "0.5"}));
  EXPECT_EQ(g.from, "run");
  EXPECT_EQ(g.top_p, 0.5);
  EXPECT_EQ(std::get<GenerateOptions>(parse({"generate", "train"})).from, "train");  // a run may be called so
  EXPECT_EQ(std::get<DatasetOptions>(parse({"data", "a.txt", "--tokenizer", "bytes"})).tokenizer, "bytes");
}

TEST(CommandLine, HelpTeachesEveryOption) {
  const std::string help = std::get<Print>(parse({"train", "--help"})).text;
  TrainOptions defaults;
  for (const Setting& s : settings_of(defaults)) {
    if (!s.field.in_words) continue;
    EXPECT_NE(help.find("--" + s.word()), std::string::npos) << s.word();
    EXPECT_NE(help.find(with_options(std::string(s.field.help)).substr(0, 20)), std::string::npos) << s.word();
  }
  EXPECT_NE(help.find("Examples:"), std::string::npos);
  EXPECT_NE(help.find("[0.001]"), std::string::npos);  // defaults are shown
  const std::string all = std::get<Print>(parse({"--help"})).text;
  for (const char* command : {"train", "generate", "data", "report", "TESSERA_CACHE", "TMPDIR"})
    EXPECT_NE(all.find(command), std::string::npos);
  EXPECT_EQ(std::get<Print>(parse({"--version"})).text, "tessera " TESSERA_VERSION "\n");
}

TEST(CommandLine, SaysWhichOptionWhatIsExpectedAndWhatWasFound) {
  EXPECT_EQ(message({"train", "--rnaks=2"}), "unknown option '--rnaks'; did you mean '--ranks'?");
  EXPECT_EQ(
      message({"trian"}),
      "unknown command 'trian'; expected train, verify, generate, evaluate, checkpoint, data, bench, plan, report, "
      "explore, lab or describe; did you mean 'train'?");
  EXPECT_EQ(message({"evaluate"}), "FROM is required");
  EXPECT_EQ(
      message({}),
      "no command given; expected train, verify, generate, evaluate, checkpoint, data, bench, plan, report, explore, "
      "lab or describe (tessera --help says more)");
  EXPECT_EQ(message({"train", "--lay", "3"}), "unknown option '--lay'; did you mean '--layers'?");
  EXPECT_EQ(message({"train", "generate", "x"}), "unexpected word 'generate'");
  EXPECT_EQ(message({"train", "--quiet=maybe"}), "--quiet: expected true or false, found 'maybe'");
  EXPECT_EQ(message({"train", "--untied=maybe"}), "--untied: expected true or false, found 'maybe'");
  EXPECT_EQ(message({"train", "--data", "caf\xe9"}), "--data: expected UTF-8, found 'caf\\xe9'");
  EXPECT_EQ(message({"data", "x", "--out", ""}), "--out: expected a folder to make, found ''");
  EXPECT_EQ(message({"train", "extra"}), "unexpected word 'extra'");
  EXPECT_EQ(message({"train", "--layers"}), "--layers: expected a value, found none");
  EXPECT_EQ(message({"train", "--layers", "0"}), "--layers: expected a whole number in [1, 100000], found '0'");
  EXPECT_EQ(message({"train", "--layers", "-3"}), "--layers: expected a whole number in [1, 100000], found '-3'");
  EXPECT_EQ(message({"train", "--layers", "2.5"}), "--layers: expected a whole number in [1, 100000], found '2.5'");
  EXPECT_EQ(message({"train", "--batch", "99999999999999999999"}),
            "--batch: expected a whole number in [1, 1000000000], found '99999999999999999999'");
  EXPECT_EQ(message({"train", "--lr", "fast"}), "--lr: expected a number of at least 0, found 'fast'");
  EXPECT_EQ(message({"train", "--lr", "nan"}), "--lr: expected a number of at least 0, found 'nan'");
  EXPECT_EQ(message({"train", "--dropout", "1"}), "--dropout: expected a number in [0, 1), found '1'");
  EXPECT_EQ(message({"train", "--dtype", "fp23"}),
            "--dtype: expected fp32, bf16, fp64, found 'fp23'; did you mean 'fp32'?");
  EXPECT_EQ(message({"train", "--device", "GPU"}), "--device: expected cpu, cuda, found 'GPU'; did you mean 'cuda'?");
  EXPECT_EQ(message({"bench", "--device", "gpu"}), "--device: expected cpu, cuda, found 'gpu'; did you mean 'cuda'?");
  EXPECT_EQ(message({"train", "--device", "metal"}), "--device: expected cpu, cuda, found 'metal'");
  EXPECT_EQ(message({"generate", "x", "--device", "metal"}), "--device: expected cpu, cuda, found 'metal'");
  EXPECT_EQ(message({"train", "--data", ""}), "--data: expected a value, found ''");
  EXPECT_EQ(message({"generate"}), "FROM is required");
  EXPECT_EQ(message({"generate", "x", "--top-p", "0"}), "--top-p: expected a number in [1e-09, 1], found '0'");
  EXPECT_EQ(message({"data", "x", "--vocab", "255"}),
            "--vocab: expected a whole number in [256, 1000000000], found '255'");
}

// In a build without CUDA and on a machine without a GPU too: one line, whichever way it was asked for.
TEST_F(ConfigTest, ADeviceMustBeThere) {
  const std::string config = file("device = \"cuda\"\n");
  const std::vector<std::vector<const char*>> ways = {
      {"train", "--device", "cuda"}, {"train", "--config", config.c_str()}, {"verify", "--device", "cuda"}};
  for (const std::vector<const char*>& way : ways) {
    const std::string line = message(way);
    EXPECT_TRUE(test::no_gpu().empty() ? line.empty() : line.starts_with("--device cuda: ")) << line;
  }
  EXPECT_EQ(std::get<GenerateOptions>(parse({"generate", "x", "--device", "cuda"})).words, (Words{{"device", "cuda"}}));
  const std::string offload = message({"train", "--device", "cuda", "--offload", "optimizer"});
  EXPECT_TRUE(test::no_gpu().empty() ? offload.empty() : offload.starts_with("--device cuda: ")) << offload;
}

TEST(CommandLine, RefusesOptionsThatDoNotGoTogether) {
  EXPECT_EQ(message({"train", "--heads", "3"}),
            "--heads: 3 heads do not divide 128 channels; the nearest that does: 2 or 4");
  EXPECT_EQ(message({"train", "--microbatches", "5"}),
            "--microbatches: 5 do not divide a batch of 12; the nearest that does: 4 or 6");
  EXPECT_EQ(message({"train", "--model", "gpt-nano", "--min-lr", "1"}),
            "--min-lr: expected at most --lr (0.001), found 1");
  EXPECT_EQ(message({"train", "--resume"}), "--resume: expected --out DIR, the run to continue; found no --out");
  EXPECT_EQ(message({"train", "--model", "gpt2"}), "");
}

TEST(CommandLine, RefusesModelsLargerThanTheMachine) {
  const auto refused = [](std::vector<const char*> words) {
    try {
      ask_for_least_memory(job_of(train(std::move(words))));
    } catch (const Error& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  EXPECT_NE(refused({"--channels", "900000"}).find("this machine has available"), std::string::npos);
  EXPECT_NE(refused({"--vocab", "1000000000", "--channels", "100000"}).find("this machine has available"),
            std::string::npos);
  EXPECT_EQ(refused({}), "");
  EXPECT_EQ(message({"train", "--layers", "1000000000"}),
            "--layers: expected a whole number in [1, 100000], found '1000000000'");
  EXPECT_EQ(message({"train", "--model", "gpt2", "--tokenizer", "bytes"}), "");
}

// A command line made of the defaults that `describe` gives means the same as one without a word.
TEST(CommandLine, DescribesEveryOption) {
  const auto all = nlohmann::json::parse(std::get<Print>(parse({"describe", "--format", "json"})).text);
  std::map<std::string, nlohmann::json> commands;
  for (const auto& c : all.at("commands")) commands[c.at("command")] = c;
  EXPECT_TRUE(commands.contains("checkpoint import") && commands.contains("plan") && commands.contains("describe"));
  std::vector<std::string> words{"--model", "gpt-nano"};
  std::map<std::string, nlohmann::json> options;
  for (const auto& o : commands.at("train").at("options")) {
    options[o.at("name")] = o;
    if (o.at("kind") == "flag" || !o.contains("default") || o.at("name") == "model") continue;
    const auto& usual = o.at("default");
    words.push_back("--" + o.at("name").get<std::string>());
    words.push_back(usual.is_string() ? usual.get<std::string>() : usual.dump());
  }
  std::vector<const char*> typed;
  for (const std::string& word : words) typed.push_back(word.c_str());
  EXPECT_EQ(config_values(train(typed)), config_values(train({"--model", "gpt-nano"})));
  EXPECT_GT(words.size(), 80U);
  EXPECT_EQ(
      options.at("sync-every"),
      nlohmann::json::parse(R"({"name": "sync-every", "group": "Plan", "kind": "integer", "default": 1, "least": 1.0,
              "most": 1e9, "help": "with --dp-mode diloco: steps that each data rank makes alone"})"));
  EXPECT_EQ(options.at("dropout").at("below"), 1);
  EXPECT_EQ(options.at("untied").at("denies"), "tied");
  EXPECT_EQ(options.at("dtype").at("choices"), nlohmann::json::parse(R"(["fp32", "bf16", "fp64"])"));
  EXPECT_FALSE(options.at("layers").contains("default"));  // the preset's
  EXPECT_EQ(options.at("out").at("in_file"), false);
  EXPECT_EQ(commands.at("verify").at("options")[0].at("name"), "model");
  EXPECT_EQ(message({"describe", "--format", "text"}), "--format: expected json, found 'text'");
}

TEST(CommandLine, HandsTheFlagsOfBenchOn) {
  EXPECT_EQ(std::get<BenchOptions>(parse({"bench", "--benchmark_filter=norm", "--v=1"})).words,
            (std::vector<std::string>{"--benchmark_filter=norm", "--v=1"}));
  EXPECT_TRUE(std::get<BenchOptions>(parse({"bench"})).words.empty());
  const auto on_gpu = std::get<BenchOptions>(parse({"bench", "--device", "cuda", "--benchmark_filter=norm"}));
  EXPECT_EQ(on_gpu.device, Device::cuda);
  EXPECT_EQ(on_gpu.words, std::vector<std::string>{"--benchmark_filter=norm"});
}

TEST(CommandLine, PresetsHaveTheirSizes) {
  const auto sizes = [](std::vector<const char*> words) {
    const ModelConfig s = job_of(train(std::move(words))).model;
    return std::array{s.layers, s.heads, s.channels, s.context};
  };
  EXPECT_EQ(sizes({}), (std::array<int64_t, 4>{4, 4, 128, 64}));
  EXPECT_EQ(sizes({"--model", "gpt-mini", "--context", "32"}), (std::array<int64_t, 4>{6, 6, 384, 32}));
  EXPECT_EQ(sizes({"--model", "gpt2-xl", "--tokenizer", "bytes"}), (std::array<int64_t, 4>{48, 25, 1600, 1024}));
}

TEST_F(ConfigTest, IsReadAndOptionsWin) {
  const std::string path = file("layers = 2\nlr = 1\nmin-lr = 0.5\ndata = \"x.txt\"  # a comment\n");
  const TrainOptions o = train({"--config", path.c_str(), "--layers", "3"});
  EXPECT_EQ(o.sizes.layers, 3);
  EXPECT_EQ(o.optim.lr, 1);
  EXPECT_EQ(o.data, "x.txt");
}

TEST_F(ConfigTest, ARunWithoutCheckpointsIsNotResumed) {
  const std::string saves = file("layers = 2\n");
  const std::string expected =
      "--resume: expected a run that saves checkpoints, found --no-save, by option or in its config.toml";
  EXPECT_EQ(message({"train", "--resume", "--out", "x", "--config", saves.c_str(), "--no-save"}), expected);
  EXPECT_EQ(message({"train", "--resume", "--out", "x", "--config", saves.c_str(), "--no-eval"}), "");
  const std::string saves_not = file("no-save = true\n");
  EXPECT_EQ(message({"train", "--resume", "--out", "x", "--config", saves_not.c_str()}), expected);
  EXPECT_EQ(message({"verify", "--no-save"}), "unknown option '--no-save'");
}

TEST_F(ConfigTest, RoundTrips) {
  TrainOptions o;
  o["layers"] = 7;
  o["lr"] = 0.1 + 0.2;
  o.data = "a \"quoted\" \\ name\twith\ncontrols\x7f and ü";
  o.tokenizer = "bytes";
  o["weight_decay"] = 3;
  o["recompute"] = "gelu+norm";
  const TrainOptions back = read(to_toml(o));
  EXPECT_EQ(config_values(back), config_values(o));
  EXPECT_EQ(back.optim.lr, o.optim.lr);
  EXPECT_EQ(back.data, o.data);
}

TEST_F(ConfigTest, StringsOfEveryKindHoldAnything) {
  EXPECT_EQ(read("data = \"a\\\"[\"").data, "a\"[");
  EXPECT_EQ(read("data = 'a\\'  # [\n").data, "a\\");
  EXPECT_EQ(read("data = \"a#b=c.d\" # \"\"\"\nlayers = 2\n").data, "a#b=c.d");
  EXPECT_EQ(read("data = \"[\u00e9]'''\\\\\"\n").data, "[\u00e9]'''\\");
  EXPECT_EQ(read("data = \"\\u00e9\\t\\\"\\\\\"#\n").data, "\u00e9\t\"\\");
}

TEST_F(ConfigTest, LinesMayBeWrittenInManyWays) {
  const TrainOptions o =
      read("\xEF\xBB\xBFlayers=2\r\n\t \r\n#\r\n  lr\t= 5E-5#x\r\nno-save =true\n\nseed = 9223372036854775807");
  EXPECT_EQ(o.sizes.layers, 2);
  EXPECT_EQ(o.optim.lr, 5e-5);
  EXPECT_TRUE(o.no_save);
  EXPECT_EQ(o.optim.seed, INT64_MAX);
  EXPECT_EQ(config_values(read("# As a run writes it.\n" + to_toml(o))), config_values(o));
}

TEST_F(ConfigTest, MistakesHaveTheirLineAndColumn) {
  const auto expect = [&](const std::string& text, const std::string& words) {
    const std::string found = message([&] { read(text); });
    EXPECT_NE(found.find(words), std::string::npos) << found;
  };
  expect("layers = 2\nhedas = 3\n", "c.toml:2:1: hedas: unknown key; did you mean 'heads'?");
  expect("layers = \"two\"\n", "c.toml:1:1: layers: expected a whole number in [1, 100000], found '\"two\"'");
  expect("layers = 2.0\n", "layers: expected a whole number in [1, 100000], found '2.0'");
  expect("seed = 9223372036854775808\n", "seed: expected a whole number of at least 0, found '9223372036854775808'");
  expect("lr = true\n", "lr: expected a number of at least 0, found 'true'");
  expect("no-save = \"true\"\n", "no-save: expected true or false, found '\"true\"'");
  expect("\n  data = 3\n", "c.toml:2:3: data: expected a string, found '3'");
  expect("tokenizer = true\n", "tokenizer: expected a string, found 'true'");
  expect("layers = 0\n", "c.toml:1:1: layers: expected a whole number in [1, 100000], found '0'");
  expect("out = \"x\"\n", "out: unknown key");
  const auto unexpected = [&](const std::string& text, const std::string& at, const std::string& found) {
    expect(text, "c.toml:" + at + ": expected KEY = VALUE, found " + found);
  };
  unexpected("layers = 2\nheads = 2\n\n layers = 2\n", "4:2", "layers for the second time");
  unexpected("layers\n", "1:7", "the end of the line");
  unexpected("layers 2\n", "1:8", "'2'");
  unexpected(" = 2\n", "1:2", "'= 2'");
  unexpected("[model]\nlayers = 2\n", "1:1", "'[model]'");
  unexpected("layers = 2\n  [[ \n", "2:3", "'[[ '");
  unexpected("model.layers = 2\n", "1:6", "'.layers = 2'");
  unexpected("'layers' = 2\n", "1:1", "''layers' = 2'");
  unexpected("\u00e9 = 2\n", "1:1", "'\u00e9 = 2'");
  std::string deep = "a";
  for (int i = 0; i < 300'000; ++i) deep += ".a";
  unexpected(deep + " = 1\n", "1:2", "'.a.a");
  const std::string may = " where one string, number, true or false may stand";
  unexpected("layers =\n", "1:9", "the end of the line" + may);
  for (const std::string value : {"[2]",      "{a = 1}",     "1979-05-27",  "07:32:00",
                                  "2\u00e9",  "1_000",       "0x10",        "+1",
                                  "02",       "1.",          ".5",          "1e999",
                                  "inf",      "-nan",        "null",        "True",
                                  "= 2",      "\"a",         "'a",          "'",
                                  "\"a\\",    "\"a\\\"",     "\"\\ud800\"", "\"\\U0001F600\"",
                                  "\"a\tb\"", "\"a\" \"b\"", "'a'b",        "\"\"\"a\"\"\"",
                                  "'''a'''",  "2 3",         "2'\u00e9'",   "\ufeff2"})
    unexpected("# [\ndata = " + value + "\nmodel = \"gpt2\"\n", "2:8", "'" + one_line(value) + "'" + may);
  const std::string utf8 = " where UTF-8 without control characters may stand";
  unexpected("data = 'caf\xe9'\n", "1:12", "'\\xe9''" + utf8);
  unexpected("lr = 1 # a\x1b[2J\n", "1:11", "'\\x1b[2J'" + utf8);
  unexpected("lr = 1\r'a'\n", "1:7", "'\\x0d'a''" + utf8);
  EXPECT_NE(message(
                [] {
                  train({"--config", "/nonexistent.toml"});
                },
                Status::input)
                .find("/nonexistent.toml"),
            std::string::npos);
}

// --attention and --deterministic: what is refused, what is the default, and what a run says of its attention.

// A run whose attention cuDNN can serve.
TrainOptions on_gpu() {
  TrainOptions o;
  o["device"] = "cuda";
  o["dtype"] = "bf16";
  o["channels"] = 256;
  o.ranks = 1;
  return o;
}

TEST(AttentionChoice, KernelsThatAreNotThereAreRefused) {
  const std::string without =
      "--attention: this program was built without cuDNN; expected own, or a build with -DTESSERA_CUDNN=ON";
  EXPECT_EQ(message({"train", "--attention", "cudnn"}),
            kWithCudnn ? "--attention: cuDNN's kernels are for GPUs; expected own, or --device cuda" : without);
  if (!kWithCudnn) {
    EXPECT_EQ(message({"train", "--attention", "cudnn", "--device", "cuda"}), without);
  }
  if (kWithCudnn) {
    EXPECT_EQ(message({"train", "--attention", "cudnn", "--device", "cuda"}),
              "--attention: cuDNN's take bf16, found fp32; expected own, found cudnn");
    EXPECT_EQ(message({"train", "--attention", "cudnn", "--device", "cuda", "--dtype", "bf16", "--dropout", "0.1"}),
              "--attention: cuDNN's cannot drop the elements that ours count; expected own, found cudnn");
  }
  EXPECT_EQ(message({"train", "--attention", "flash"}), "--attention: expected cudnn, own, found 'flash'");
  EXPECT_EQ(message({"train", "--attention", "own", "--deterministic"}), "");  // on the CPU both say what is so anyway
}

TEST(AttentionChoice, CudnnIsAskedWhereItIsBuiltAndOnAGpu) {
  TrainOptions o = on_gpu();
  EXPECT_EQ(asks_cudnn(job_of(o).plan), kWithCudnn);
  o["attention"] = "own";
  EXPECT_FALSE(asks_cudnn(job_of(o).plan));
  o = on_gpu();
  o["device"] = "cpu";
  EXPECT_FALSE(asks_cudnn(job_of(o).plan));
  o = verify_defaults();  // to the bit, so by kernels that promise it
  o["device"] = "cuda";
  EXPECT_FALSE(asks_cudnn(job_of(o).plan));
  EXPECT_TRUE(o.plan.deterministic);
  EXPECT_FALSE(TrainOptions().plan.deterministic);
}

TEST(AttentionChoice, ARunSaysWhoseKernelsAndWhy) {
  TrainOptions o = on_gpu();
  o["attention"] = "own";
  EXPECT_EQ(describe_attention(job_of(o)), "attention: our own kernels (`attention` own)");
  o = on_gpu();
  if (!kWithCudnn) {
    EXPECT_EQ(describe_attention(job_of(o)), "attention: our own kernels (built without cuDNN)");
    return;
  }
  o["dtype"] = "fp32";
  EXPECT_EQ(describe_attention(job_of(o)), "attention: our own kernels (cuDNN's take bf16, found fp32)");
  o = on_gpu();
  o["dropout"] = 0.1;
  EXPECT_EQ(describe_attention(job_of(o)),
            "attention: our own kernels (cuDNN's cannot drop the elements that ours count)");
}

TEST(AttentionChoice, TheirValuesAreKeptInTheConfiguration) {
  const std::vector<const char*> words{"tessera", "train", "--attention", "own", "--deterministic"};
  const auto o = std::get<TrainOptions>(parse_command_line(static_cast<int>(words.size()), words.data()));
  TrainOptions read;
  apply_config(read, to_toml(o), "c.toml");
  EXPECT_EQ(text_of(read.plan.attention), "own");
  EXPECT_TRUE(read.plan.deterministic);
}

using AttentionChoiceGpu = test::OnGpu;

TEST_F(AttentionChoiceGpu, CudnnServesAGpt) {
  if (!kWithCudnn) GTEST_SKIP() << "a build without cuDNN";
  TrainOptions o = on_gpu();
  EXPECT_TRUE(describe_attention(job_of(o)).starts_with("attention: cuDNN 9.")) << describe_attention(job_of(o));
  o.ranks = 2, o["dp"] = 1, o["cp"] = 2;  // the tiles of a ring
  EXPECT_TRUE(describe_attention(job_of(o)).starts_with("attention: cuDNN 9.")) << describe_attention(job_of(o));
  o = on_gpu();
  o["deterministic"] = true;
  EXPECT_TRUE(describe_attention(job_of(o)).ends_with(", gradients added in a fixed order"))
      << describe_attention(job_of(o));
  o["channels"] = 80;  // heads of 20
  EXPECT_TRUE(describe_attention(job_of(o)).starts_with("attention: our own kernels (cuDNN 9."))
      << describe_attention(job_of(o));
}

}  // namespace
}  // namespace tessera
