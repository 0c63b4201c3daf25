// Command line and configuration file: values and error messages.
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "app/dataset.h"
#include "app/default_job.h"
#include "app/memory.h"
#include "app/pretrained.h"
#include "app/resolve.h"
#include "app/train/rank.h"
#include "app/train/text_sample.h"
#include "base/utf8.h"
#include "tests/app/parsed.h"
#include "tests/app/program.h"
#include "tests/support/gpu.h"
#include "train/check.h"
#include "train/device.h"

namespace tessera {
namespace {

using namespace test;

using Messages = std::vector<std::string>;

// The errors of a command line, each in one line; empty if it is accepted.
Messages refused(const std::string& line) {
  try {
    parsed(line);
  } catch (const Error& e) {
    EXPECT_EQ(static_cast<int>(e.status()), static_cast<int>(Status::usage)) << e.what();
    EXPECT_EQ(std::string(e.what()).find('\n'), std::string::npos) << e.what();
    EXPECT_EQ(error_messages(e).front(), e.what());
    return error_messages(e);
  }
  return {};
}

// The first error.
std::string message(const std::string& line) {
  const Messages all = refused(line);
  return all.empty() ? "" : all.front();
}

class ConfigTest : public testing::Test {
 protected:
  std::string file(const std::string& text) const {
    const std::string path = directory_.path() / "c.toml";
    std::ofstream(path) << text;
    return path;
  }
  TypedOptions read(const std::string& text) const {
    TypedOptions o;
    apply_config_file(o, file(text));
    return o;
  }
  TemporaryDirectory directory_{fs::temp_directory_path() / "tessera-config-"};
};

TEST(InitialModel, RandomizesOnlyNewAdapters) {
  ModelConfig config = *preset("llama-nano");
  config.vocab = 65;
  config.lora.rank = 2;
  config.lora.targets = {"q_proj", "v_proj"};
  const std::unique_ptr<LanguageModel> model = first_model(config);
  for (const Parameter* p : model->parameters())
    EXPECT_EQ(p->init.deviation > 0, p->name.ends_with(".lora_A.weight")) << p->name;
}

TEST(CommandLine, ParsesOptionValues) {
  const TrainCommand parsed_one = parsed_command("--layers 2 --lr=3e-4 --dtype bf16 --quiet --out 'x y' --seed 0");
  const TrainConfig& o = parsed_one.config;
  EXPECT_EQ(std::tuple(o.model.layers, parsed_one.set.contains("heads"), o.optim.lr, value_name(o.optim.dtype),
                       parsed_one.options.quiet, o.run.out, o.optim.seed),
            std::tuple(2, false, 3e-4, "bf16", true, "x y", 0));
  EXPECT_FALSE(o.optim.min_lr);  // a smaller --lr implies a smaller --min-lr
  EXPECT_EQ(parsed_train("--steps 5 --steps 7").optim.steps, 7);
  const auto g = std::get<GenerateOptions>(parsed("generate run --prompt --x --top-p 0.5"));
  EXPECT_EQ(std::tuple(g.from, g.top_p), std::tuple("run", 0.5));
  EXPECT_EQ(std::get<GenerateOptions>(parsed("generate train")).from, "train");  // a valid name of a run
  EXPECT_EQ(std::get<DatasetOptions>(parsed("data a.txt --tokenizer bytes")).tokenizer, "bytes");
}

TEST(CommandLine, HelpListsEveryOption) {
  const std::string help = std::get<Print>(parsed("train --help")).text;
  TypedOptions defaults;
  for (const Setting& s : field_descriptors(defaults))
    if (s.field.in_words) expect_has(help, {"--" + s.word(), with_options(std::string(s.help)).substr(0, 20)});
  expect_has(help, {"Examples:", "[0.001]"});  // defaults are shown
  const std::string all = std::get<Print>(parsed("--help")).text;
  expect_has(all, {"train", "generate", "data", "report", "TESSERA_CACHE", "TMPDIR"});
  EXPECT_EQ(std::get<Print>(parsed("--version")).text, "tessera " TESSERA_VERSION "\n");
}

TEST(CommandLine, ErrorsNameOptionExpectedAndActualValue) {
  EXPECT_EQ(message("train --rnaks=2"), "unknown option '--rnaks'; did you mean '--ranks'?");
  const std::string commands =
      "expected train, verify, audit, generate, evaluate, checkpoint, data, bench, plan, report, explore, lab or "
      "describe";
  EXPECT_EQ(message("trian"), "unknown command 'trian'; " + commands + "; did you mean 'train'?");
  EXPECT_EQ(message(""), "no command given; " + commands + " (see tessera --help)");
  EXPECT_EQ(message("train --lay 3"), "unknown option '--lay'; did you mean '--layers'?");
  EXPECT_EQ(message("train generate x"), "unexpected argument 'generate'");
  for (const std::string flag : {"--quiet", "--untied"})
    EXPECT_EQ(message("train " + flag + "=maybe"), flag + ": expected true or false, got 'maybe'");
  EXPECT_EQ(message("train --data caf\xe9"), "--data: expected UTF-8, got 'caf\\xe9'");
  EXPECT_EQ(message("data x --out ''"), "--out: expected a new directory, got ''");
  EXPECT_EQ(message("train extra"), "unexpected argument 'extra'");
  EXPECT_EQ(message("train --dtype fp23"), "--dtype: expected fp32, bf16, fp64, got 'fp23'; did you mean 'fp32'?");
  EXPECT_EQ(message("train --device GPU"), "--device: expected cpu, cuda, got 'GPU'; did you mean 'cuda'?");
  EXPECT_EQ(message("bench --device gpu"), "--device: expected cpu, cuda, got 'gpu'; did you mean 'cuda'?");
  for (const char* line : {"evaluate", "generate"}) EXPECT_EQ(message(line), "FROM is required") << line;
  const std::tuple<const char*, const char*, Messages> values[] = {
      {"train --layers", "an integer in [1, 100000]", {"0", "-3", "2.5", "1000000000"}},
      {"train --batch", "an integer in [1, 1000000000]", {"99999999999999999999"}},
      {"train --lr", "a number of at least 0", {"fast", "nan", "-1"}},
      {"train --lr", "a number in [0, 1e+300]", {"1e308"}},
      {"train --dropout", "a number in [0, 1)", {"1"}},
      {"train --device", "cpu, cuda", {"metal"}},
      {"generate x --device", "cpu, cuda", {"metal"}},
      {"train --data", "a value", {""}},
      {"generate x --top-p", "a number in [1e-09, 1]", {"0"}},
      {"data x --vocab", "an integer in [256, 1000000000]", {"255"}},
      {"describe --format", "json", {"text"}}};
  for (const auto& [line, expected, wrong] : values)
    for (const std::string& value : wrong)
      EXPECT_EQ(message(fmt::format("{} '{}'", line, value)),
                fmt::format("{}: expected {}, got '{}'", std::strstr(line, "--"), expected, value));
}

// Also in a build without CUDA and without a GPU: one line for every way to select the device.
TEST_F(ConfigTest, RejectsUnavailableDevice) {
  for (const std::string& option :
       {std::string("train --device cuda"), std::string("verify --device cuda"),
        "train --config " + file("device = \"cuda\"\n"), std::string("train --device cuda --offload optimizer")}) {
    const std::string line = message(option);
    EXPECT_TRUE(test::no_gpu().empty() ? line.empty() : line.starts_with("--device cuda: ")) << option << line;
  }
  EXPECT_EQ(std::get<GenerateOptions>(parsed("generate x --device cuda")).args, (Args{{"device", "cuda"}}));
}

TEST(CommandLine, RejectsConflictingOptions) {
  EXPECT_EQ(message("train --model gpt-nano --min-lr 1"), "--min-lr: expected at most --lr (0.001), got 1");
  EXPECT_EQ(message("train --resume"), "--resume: requires --out DIR, the run to resume");
  EXPECT_EQ(message("train --model gpt2"), "");
}

TEST(CommandLine, FalseFlagsHaveNoEffect) {
  EXPECT_EQ(message("train --resume=false --out gone"), "");
  EXPECT_EQ(message("train --resume --resume=false --out gone"), "");
  EXPECT_THROW(parsed("train --resume=false --init gone"), InputError);          // not read by a resumed run
  EXPECT_THROW(parsed("train --resume=false --resume --out gone"), InputError);  // as --restarts passes it
  for (const char* flag : {"document-mask", "pack", "skip-bad", "no-bos", "lora-rslora"})
    EXPECT_TRUE(is_default_job(parsed_train(fmt::format("--{}=false", flag)))) << flag;
  EXPECT_FALSE(is_default_job(parsed_train("--untied=false")));  // sets a size
}

TEST(CommandLine, RejectsModelsLargerThanRam) {
  for (const char* args : {"--channels 900000", "--vocab 1000000000 --channels 100000"})
    expect_has(error_message([&] { check_minimum_memory(parsed_train(args)); }), "this machine has available");
  EXPECT_NO_THROW(check_minimum_memory(parsed_train("")));
  EXPECT_EQ(message("train --model gpt2 --tokenizer bytes"), "");
}

// A command line of all defaults printed by `describe` is equivalent to an empty one.
TEST(CommandLine, DescribeListsEveryOption) {
  const auto all = Json::parse(std::get<Print>(parsed("describe --format json")).text);
  std::map<std::string, Json> commands;
  for (const auto& c : all.at("commands")) commands[c.at("command")] = c;
  EXPECT_TRUE(commands.contains("checkpoint import") && commands.contains("plan") && commands.contains("describe"));
  std::string args = "--model gpt-nano";
  size_t given = 0;
  std::map<std::string, Json> options;
  for (const auto& o : commands.at("train").at("options")) {
    options[o.at("name")] = o;
    if (o.at("kind") == "flag" || !o.contains("default") || o.at("name") == "model") continue;
    const auto& default_value = o.at("default");
    args += fmt::format(" --{} '{}'", o.at("name").get<std::string>(),
                        default_value.is_string() ? default_value.get<std::string>() : default_value.dump());
    ++given;
  }
  EXPECT_EQ(written_values(args), written_values("--model gpt-nano"));
  EXPECT_GT(given, 39U);
  EXPECT_EQ(options.at("sync-every"),
            Json::parse(R"({"name": "sync-every", "group": "Plan", "kind": "integer", "default": 1, "least": 1.0,
              "most": 1e9, "help": "with --dp-mode diloco: local steps between two synchronizations"})"));
  EXPECT_EQ(options.at("dropout").at("below"), 1);
  EXPECT_EQ(options.at("untied").at("denies"), "tied");
  EXPECT_EQ(options.at("dtype").at("choices"), Json::parse(R"(["fp32", "bf16", "fp64"])"));
  EXPECT_FALSE(options.at("layers").contains("default"));  // set by the preset
  EXPECT_EQ(options.at("out").at("in_file"), false);
  EXPECT_EQ(commands.at("verify").at("options")[0].at("name"), "model");
}

// The default of every option, or the bracketed defaults in its help. A changed default must also be changed in the
// list.
TEST(CommandLine, DefaultsMatchReferenceList) {
  std::set<std::string> found, expected;
  const Json all = Json::parse(std::get<Print>(parsed("describe --format json")).text);
  for (const Json& c : all.at("commands"))
    for (const Json& o : c.at("options")) {
      std::string in_help;
      const std::string help = o.at("help");
      for (size_t at = 0; (at = help.find('[', at)) != std::string::npos; ++at)
        in_help += " " + help.substr(at, help.find(']', at) + 1 - at);
      if (o.contains("default") || !in_help.empty())
        found.insert(fmt::format("{} {} {}", c.at("command").get<std::string>(), o.at("name").get<std::string>(),
                                 o.contains("default") ? o.at("default").dump() : in_help.substr(1)));
    }
  for (const std::string& line : to_lines(read_file(TESSERA_SOURCE_DIR "/tests/app/fixtures/defaults.txt")))
    expected.insert(line);
  std::vector<std::string> added, gone;
  std::ranges::set_difference(found, expected, std::back_inserter(added));
  std::ranges::set_difference(expected, found, std::back_inserter(gone));
  EXPECT_EQ(added, Messages()) << "new or changed";
  EXPECT_EQ(gone, Messages()) << "removed or changed";
  // Bracketed defaults are the values of a job.
  for (const auto& [rule, momentum] : {std::pair{"sgd", 0.9}, {"muon", 0.95}})
    EXPECT_EQ(parsed_train(std::string("--optimizer ") + rule).optim.momentum, momentum) << rule;
  const ModelConfig m = parsed_train("--model moe-nano").model;
  EXPECT_EQ(std::tuple(m.experts.balance_loss, m.experts.z_loss, m.experts.capacity, m.experts.per_token,
                       m.experts.shared, m.window, m.norm_eps, m.rotary.theta, m.rotary.factor,
                       m.rotary.low_freq_factor, m.rotary.high_freq_factor, m.rotary.original_context),
            std::tuple(0.01, 0.001, 0, 2, 0, 0, 1e-5, 10000, 1, 1, 4, 8192));
  EXPECT_EQ(parsed_train("--model llama-nano --rope-scaling yarn --rope-factor 2").model.rotary.high_freq_factor, 32);
}

TEST(CommandLine, ConvertsPercentagesToStepsAndRates) {
  const auto schedule = [](const std::string& args) { return lr_schedule(parsed_train(args).optim); };
  const std::pair<const char*, int64_t> warmups[] = {{"--steps 49 --warmup 3%", 1},  // 1.47
                                                     {"--steps 50 --warmup 3%", 2},  // 1.5, rounded up
                                                     {"--steps 49 --warmup 1%", 0},
                                                     {"--steps 51 --warmup 1%", 1},
                                                     {"--steps 49 --warmup 100%", 49}};
  for (const auto& [args, steps] : warmups) EXPECT_EQ(schedule(args).warmup, steps) << args;
  EXPECT_DOUBLE_EQ(schedule("--lr 0.02").min_lr, 0.002);  // a tenth
  EXPECT_DOUBLE_EQ(schedule("--lr 0.02 --min-lr 5%").min_lr, 0.001);
  EXPECT_DOUBLE_EQ(schedule("--lr 0.02 --min-lr 100%").min_lr, 0.02);
  EXPECT_DOUBLE_EQ(schedule("--lr 0.02 --min-lr 0.02").min_lr, 0.02);
  EXPECT_EQ(refused("train --lr 0.02 --min-lr 0.0201"), Messages{"--min-lr: expected at most --lr (0.02), got 0.0201"});
}

TEST(CommandLine, BenchPassesFlagsToGoogleBenchmark) {
  const auto options = [](const char* line) { return std::get<BenchOptions>(parsed(line)); };
  EXPECT_EQ(options("bench --benchmark_filter=norm --v=1").args, (Messages{"--benchmark_filter=norm", "--v=1"}));
  EXPECT_TRUE(options("bench").args.empty());
  const auto on_gpu = options("bench --device cuda --benchmark_filter=norm");
  EXPECT_TRUE(on_gpu.device == Device::cuda && on_gpu.args == Messages{"--benchmark_filter=norm"});
}

TEST(CommandLine, PresetsSetModelSizes) {
  const auto sizes = [](const std::string& args) {
    const ModelConfig s = parsed_train(args).model;
    return std::array{s.layers, s.heads, s.channels, s.context};
  };
  EXPECT_EQ(sizes(""), (std::array<int64_t, 4>{4, 4, 128, 64}));
  EXPECT_EQ(sizes("--model gpt-mini --context 32"), (std::array<int64_t, 4>{6, 6, 384, 32}));
  EXPECT_EQ(sizes("--model gpt2-xl --tokenizer bytes"), (std::array<int64_t, 4>{48, 25, 1600, 1024}));
}

TEST_F(ConfigTest, OptionsOverrideConfigurationFile) {
  const std::string path = file("layers = 2\nlr = 1\nmin-lr = 0.5\ndata = \"x.txt\"  # a comment\n");
  const TrainConfig o = parsed_train("--layers 3 --config " + path);
  EXPECT_EQ(std::tuple(o.model.layers, o.optim.lr, o.data.source), std::tuple(3, 1, "x.txt"));
}

TEST_F(ConfigTest, RejectsResumeWithoutCheckpoints) {
  const std::string saves = file("layers = 2\n");
  const std::string expected =
      "--resume: cannot be combined with --no-save (an option, or a key in the run's config.toml)";
  EXPECT_EQ(message("train --resume --out x --no-save --config " + saves), expected);
  EXPECT_EQ(message("train --resume --out x --no-eval --config " + saves), "");
  const std::string saves_not = file("no-save = true\n");
  EXPECT_EQ(message("train --resume --out x --config " + saves_not), expected);
  EXPECT_EQ(message("verify --no-save"), "unknown option '--no-save'");
}

TEST_F(ConfigTest, RoundTripsThroughToml) {
  TypedOptions o;
  o["layers"] = 7;
  o["lr"] = 0.1 + 0.2;
  o.data.source = "a \"quoted\" \\ name\twith\ncontrols\x7f and ü";
  o.data.tokenizer = "bytes";
  o["weight_decay"] = 3;
  o["recompute"] = "gelu+norm";
  const TypedOptions back = read(to_toml(o));
  EXPECT_EQ(config_values(back), config_values(o));
  EXPECT_EQ(back.optim.lr, o.optim.lr);
  EXPECT_EQ(back.data.source, o.data.source);
}

TEST_F(ConfigTest, ParsesEveryTomlStringForm) {
  EXPECT_EQ(read("data = \"a\\\"[\"").data.source, "a\"[");
  EXPECT_EQ(read("data = 'a\\'  # [\n").data.source, "a\\");
  EXPECT_EQ(read("data = \"a#b=c.d\" # \"\"\"\nlayers = 2\n").data.source, "a#b=c.d");
  EXPECT_EQ(read("data = \"[\u00e9]'''\\\\\"\n").data.source, "[\u00e9]'''\\");
  EXPECT_EQ(read("data = \"\\u00e9\\t\\\"\\\\\"#\n").data.source, "\u00e9\t\"\\");
}

TEST_F(ConfigTest, ParsesWhitespaceCommentsAndByteOrderMark) {
  const TypedOptions o =
      read("\xEF\xBB\xBFlayers=2\r\n\t \r\n#\r\n  lr\t= 5E-5#x\r\nno-save =true\n\nseed = 9223372036854775807");
  EXPECT_EQ(std::tuple(o.model.layers, o.optim.lr, o.run.no_save, o.optim.seed), std::tuple(2, 5e-5, true, INT64_MAX));
  EXPECT_EQ(config_values(read("# As a run writes it.\n" + to_toml(o))), config_values(o));
}

TEST_F(ConfigTest, ErrorsNameLineAndColumn) {
  const auto expect = [&](const std::string& text, const std::string& args) {
    expect_error(Status::usage, {args}, [&] { read(text); });
  };
  expect("layers = 2\nhedas = 3\n", "c.toml:2:1: hedas: unknown key; did you mean 'heads'?");
  for (const std::string value : {"\"two\"", "2.0", "0"})
    expect("layers = " + value + "\n", "c.toml:1:1: layers: expected an integer in [1, 100000], got '" + value + "'");
  expect("seed = 9223372036854775808\n", "seed: expected an integer of at least 0, got '9223372036854775808'");
  expect("lr = true\n", "lr: expected a number of at least 0, got 'true'");
  expect("no-save = \"true\"\n", "no-save: expected true or false, got '\"true\"'");
  expect("\n  data = 3\n", "c.toml:2:3: data: expected a string, got '3'");
  expect("tokenizer = true\n", "tokenizer: expected a string, got 'true'");
  expect("out = \"x\"\n", "out: unknown key");
  const auto unexpected = [&](const std::string& text, const std::string& at, const std::string& found) {
    expect(text, "c.toml:" + at + ": expected KEY = VALUE, got " + found);
  };
  expect("layers = 2\nheads = 2\n\n layers = 2\n", "c.toml:4:2: duplicate key layers");
  const std::tuple<const char*, const char*, const char*> lines[] = {{"layers\n", "1:7", "the end of the line"},
                                                                     {"layers 2\n", "1:8", "'2'"},
                                                                     {" = 2\n", "1:2", "'= 2'"},
                                                                     {"[model]\nlayers = 2\n", "1:1", "'[model]'"},
                                                                     {"layers = 2\n  [[ \n", "2:3", "'[[ '"},
                                                                     {"model.layers = 2\n", "1:6", "'.layers = 2'"},
                                                                     {"'layers' = 2\n", "1:1", "''layers' = 2'"},
                                                                     {"\u00e9 = 2\n", "1:1", "'\u00e9 = 2'"}};
  for (const auto& [text, at, found] : lines) unexpected(text, at, found);
  std::string deep = "a";
  for (int i = 0; i < 300'000; ++i) deep += ".a";
  unexpected(deep + " = 1\n", "1:2", "'.a.a");
  const std::string may = "; expected a single string, number, true or false";
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
  const std::string utf8 = "; control characters and invalid UTF-8 are not allowed";
  unexpected("data = 'caf\xe9'\n", "1:12", "'\\xe9''" + utf8);
  unexpected("lr = 1 # a\x1b[2J\n", "1:11", "'\\x1b[2J'" + utf8);
  unexpected("lr = 1\r'a'\n", "1:7", "'\\x0d'a''" + utf8);
  expect_error(Status::input, {"/nonexistent.toml"}, [] { parsed_train("--config /nonexistent.toml"); });
}

// --attention and --deterministic: rejected values, defaults, and what a run reports.

// A run whose attention cuDNN supports, with these changes.
using Values = std::vector<std::pair<const char*, const char*>>;
TrainConfig on_gpu(const Values& others = {}, int64_t ranks = 1) {
  TypedOptions o;
  o["device"] = "cuda", o["dtype"] = "bf16", o["channels"] = 256, o.ranks = ranks;
  for (const auto& [name, value] : others) o[name] = value;
  return resolve(o);
}

TEST(AttentionChoice, RejectsUnavailableKernels) {
  const std::string without =
      "--attention: this build has no cuDNN; expected --attention own, or a build with -DTESSERA_CUDNN=ON";
  const auto expect = [&](const std::string& args, const std::string& with) {
    EXPECT_EQ(message("train --attention cudnn" + args), kWithCudnn ? with : without);
  };
  expect("", "--attention: cuDNN kernels require a GPU; expected --attention own, or --device cuda");
  expect(" --device cuda", "--attention: cuDNN kernels require bf16, got fp32; expected own, got cudnn");
  if (kWithCudnn)
    expect(" --device cuda --dtype bf16 --dropout 0.1",
           "--attention: cuDNN kernels do not support dropout from the counter-based RNG; expected own, got cudnn");
  EXPECT_EQ(message("train --attention flash"), "--attention: expected cudnn, own, got 'flash'");
  EXPECT_EQ(message("train --attention own --deterministic"),
            "");  // on the CPU both options match the default behaviour
}

TEST(AttentionChoice, SelectsCudnnOnGpuIfBuiltWithCudnn) {
  EXPECT_EQ(asks_cudnn(on_gpu().plan), kWithCudnn);
  EXPECT_FALSE(asks_cudnn(on_gpu({{"attention", "own"}}).plan));
  EXPECT_FALSE(asks_cudnn(on_gpu({{"device", "cpu"}}).plan));
  TypedOptions proof = verify_defaults();  // bitwise comparisons require kernels that guarantee it
  proof["device"] = "cuda";
  EXPECT_FALSE(asks_cudnn(resolve(proof).plan));
  EXPECT_TRUE(proof.plan.deterministic);
  EXPECT_FALSE(TypedOptions().plan.deterministic);
}

TEST(AttentionChoice, RunPrintsSelectedKernelsAndReason) {
  const auto expect = [](const Values& others, const std::string& why) {
    EXPECT_EQ(describe_attention(on_gpu(others)), "attention: custom kernels (" + why + ")");
  };
  expect({{"attention", "own"}}, "`attention` own");
  if (!kWithCudnn) return expect({}, "built without cuDNN");
  expect({{"dtype", "fp32"}}, "cuDNN kernels require bf16, got fp32");
  expect({{"dropout", "0.1"}}, "cuDNN kernels do not support dropout from the counter-based RNG");
}

TEST(AttentionChoice, ConfigurationStoresKernelChoice) {
  TypedOptions read;
  const TrainCommand command = parsed_command("--attention own --deterministic");
  apply_config(read, to_toml(command.config, &command.set), "c.toml");
  EXPECT_EQ(value_name(read.plan.attention), "own");
  EXPECT_TRUE(read.plan.deterministic);
}

using AttentionChoiceGpu = test::OnGpu;

TEST_F(AttentionChoiceGpu, CudnnSupportsGpt) {
  if (!kWithCudnn) GTEST_SKIP() << "a build without cuDNN";
  const auto expect = [](const TrainConfig& job, const std::string& begins, const std::string& ends = "") {
    const std::string description = describe_attention(job);
    EXPECT_TRUE(description.starts_with("attention: " + begins) && description.ends_with(ends)) << description;
  };
  expect(on_gpu(), "cuDNN 9.");
  expect(on_gpu({{"dp", "1"}, {"cp", "2"}}, 2), "cuDNN 9.");  // the tiles of ring attention
  expect(on_gpu({{"deterministic", "true"}}), "", ", gradients accumulated in a fixed order");
  expect(on_gpu({{"deterministic", "true"}, {"channels", "80"}}), "custom kernels (cuDNN 9.");  // heads of 20
}

// Error messages: all errors at once, with the nearest valid value, and for files the option and the system's reason;
// the default job.

TEST(OptionErrors, PrintsAllCommandLineErrors) {
  EXPECT_EQ(refused("train --layers 0 --hedas 3 --lr fast --dtype fp23 --whats"),
            (Messages{"unknown option '--hedas'; did you mean '--heads'?", "unknown option '--whats'",
                      "--layers: expected an integer in [1, 100000], got '0'",
                      "--dtype: expected fp32, bf16, fp64, got 'fp23'; did you mean 'fp32'?",
                      "--lr: expected a number of at least 0, got 'fast'"}));
  EXPECT_EQ(refused("generate x --top-p 0 --tokens x --tp 0"),
            (Messages{"--tokens: expected an integer in [1, 1000000000], got 'x'",
                      "--top-p: expected a number in [1e-09, 1], got '0'",
                      "--tp: expected an integer in [1, 1024], got '0'"}));
  EXPECT_EQ(refused("data x --vocab 1 --out ''"),
            (Messages{"--vocab: expected an integer in [256, 1000000000], got '1'",
                      "--out: expected a new directory, got ''"}));
  EXPECT_EQ(refused("plan --top 0 --pp 0 --hardware h100").size(), 2U);
  EXPECT_EQ(refused("train --layers"), Messages{"--layers: expected a value, got none"});
  EXPECT_EQ(refused("train --hedas --layers").size(), 2U);
}

TEST(OptionErrors, PrintsAllIndependentPlanErrors) {
  const Messages found =
      refused("verify --heads 3 --microbatches 5 --pp 8 --schedule zbh1 --dp-mode ps-sync --zero 1 --min-lr 9");
  for (const char* args :
       {"--schedule: unknown schedule 'zbh1'; expected naive, gpipe, 1f1b, interleaved, zb-h1, zb-h2, zb-v, v-half, "
        "v-min, or the path of a file; did you mean 'zb-h1'?",
        "--heads: 3 heads do not divide 128 channels; nearest valid value: 2 or 4",
        "--microbatches: 5 does not divide the batch size, 12; nearest valid value: 4 or 6",
        "--zero: 1 requires --dp-mode ddp, got ps-sync",
        "--pp: 8 ranks have 8 stages, more than the 4 layers; expected at most 4 stages, as with --pp 4",
        "--min-lr: expected at most --lr (0.003), got 9"})
    EXPECT_NE(std::ranges::find(found, args), found.end()) << args;
  EXPECT_EQ(found.size(), 6U) << fmt::format("{}", fmt::join(found, "\n"));  // without consequential errors
  const TrainConfig wrong{.model = {.heads = 3}, .plan = {.cp = 3, .microbatches = 5}};
  try {
    check(wrong);
    ADD_FAILURE() << "is accepted";
  } catch (const Error& e) {
    EXPECT_EQ(error_messages(e).size(), 3U) << e.what();
  }
}

TEST(OptionErrors, NameNearestValidValue) {
  const auto expect = [](const std::string& args, const std::string& nearest) {
    const Messages found = refused(args);
    ASSERT_EQ(found.size(), 1U) << nearest;
    EXPECT_TRUE(found[0].ends_with(nearest)) << found[0];
  };
  for (const std::string half : {"fp16", "float16", "half", "bfloat16"})
    expect("verify --dtype " + half, "did you mean 'bf16'?");
  expect("verify --all-reduce nccl", "did you mean 'native'?");
  expect("train --learning-rate 1e-3", "did you mean '--lr'?");
  expect("verify --tensor-model-parallel-size 2", "did you mean '--tp'?");
  expect("verify --pp 6 --schedule zb-v --microbatches 12", "expected at most 4 stages, as with --pp 2");
  expect("verify --tp 2 --vocab 1", "expected at most 1");
  expect("verify --model llama-nano --head-dim 5", "expected an even number such as 6, got 5");
  expect("verify --lora-rank 2 --lora-targets c_atn", "did you mean 'c_attn'?");
}

TEST_F(ProgramTest, ReportsEachErrorOnOneLine) {
  const Ran r = run("train --layers 0 --lr fast --out run");
  EXPECT_EQ(r.status, 2);
  EXPECT_EQ(r.err,
            "tessera: --lr: expected a number of at least 0, got 'fast'\n"
            "tessera: --layers: expected an integer in [1, 100000], got '0'\n");
  EXPECT_FALSE(fs::exists(path("run")));
  EXPECT_EQ(run("report --figure memory --svg --ranks 2 --heads 3 --batch 12 --microbatches 5").err,
            "tessera: --microbatches: 5 does not divide the batch size, 12; nearest valid value: 4 or 6\n"
            "tessera: --heads: 3 heads do not divide 128 channels; nearest valid value: 2 or 4\n");
}

TEST_F(ProgramTest, ReportsUnreadableFileWithOptionAndReason) {
  fs::create_directory(path("folder"));
  const auto expect = [&](const std::string& arguments, const std::string& line) {
    const Ran r = run(arguments);
    EXPECT_EQ(r.status, 4) << arguments;
    EXPECT_EQ(r.err, "tessera: " + line + "\n") << arguments;
  };
  for (const auto& [arguments, what] :
       {std::pair{"train --config gone.toml", "--config: cannot open gone.toml"},
        {"train --resume --out gone", "--resume: cannot open gone/config.toml"},
        {"train --data gone.jsonl --tokenizer bytes", "--data: cannot open gone.jsonl"},
        {"train --data text.txt --dp-mode ps-async --replay gone", "--replay: cannot open gone"},
        {"train --pp 2 --schedule ./gone.txt", "--schedule: cannot open ./gone.txt"},
        {"plan --cases gone --format json", "--cases: cannot open gone"},
        {"plan --hardware ./gone.toml --ranks 2", "--hardware: cannot open ./gone.toml"},
        {"plan --model gone.json --hardware h100 --ranks 2", "--model: cannot open gone.json"},
        {"generate run --prompts gone", "--prompts: cannot open gone"}})
    expect(arguments, std::string(what) + ": No such file or directory");
  expect("train --config folder", "--config: folder is a directory; expected a file");
  expect("train --data folder", "--data: folder is not a dataset: it has no dataset.json");
  expect("train --data text.txt --tokenizer folder",
         "--tokenizer: folder: no tokenizer; expected tokenizer.json, or vocab.json and merges.txt");
  expect("train --init gone --out made", "--init: gone: no such file or directory; expected a run or a checkpoint");
  EXPECT_FALSE(fs::exists(path("made")));
  expect("plan --hardware h100 --software folder/ --ranks 2", "--software: folder/ is a directory; expected a file");
}

TEST_F(ProgramTest, QuietRunsPrintNoSample) {
  const Ran r = train("--out run --quiet --sp --tp 1 --tokenizer bytes");
  EXPECT_EQ(r.err, "");
  expect_lacks(r.out, "Sample:");
  expect_has(r.out, "generate more text with");
  expect_has(train("--out told --sp").err,
             "--sp: shards tokens over the ranks of --tp and has no effect with --tp 1; expected --tp 2 or more");
  const Ran bytes = run("generate run --tokens 400 --temperature 50");  // the output is almost random bytes
  EXPECT_EQ(find_invalid_utf8(bytes.out), std::string::npos);
  expect_has(bytes.out, "\\x");
}

TEST(CommandLine, HelpCommandMatchesHelpOption) {
  const auto text = [](const std::string& args) { return std::get<Print>(parsed(args)).text; };
  EXPECT_EQ(text("help"), text("--help"));
  EXPECT_EQ(text("help train"), text("train --help"));
  expect_has(text("help train"), default_job_args(default_job()));
}

TEST(DefaultJob, MatchesItsCommandLine) {
  const TrainConfig job = parsed_train("");
  EXPECT_TRUE(is_default_job(job));
  EXPECT_EQ(written_values(default_job_args(job)), written_values("")) << default_job_args(job);
}

TEST(DefaultJob, AppliesUnlessModelOrDataIsChosen) {
  const TrainConfig cube = parsed_train("--pp 2 --steps 9 --lr 0.001");
  EXPECT_TRUE(is_default_job(cube));
  EXPECT_EQ(cube.preset, default_job().preset);
  EXPECT_EQ(cube.optim.lr, 0.001);
  EXPECT_NE(default_job_args(cube).find("--lr 0.001"), std::string::npos);
  for (const char* args : {"--data x.txt", "--model gpt-nano", "--layers 4", "--tokenizer char"}) {
    const TrainConfig o = parsed_train(args);
    EXPECT_FALSE(is_default_job(o)) << args;
    EXPECT_EQ(o.optim.lr, TypedOptions().optim.lr) << args;
    EXPECT_EQ(o.preset, "gpt-nano") << args;
  }
}

TEST_F(ProgramTest, ConfigurationFileOverridesDefaultJob) {
  write("a.toml", "channels = 64\n");
  write("b.toml", "steps = 7\n");
  EXPECT_FALSE(is_default_job(parsed_train("--config " + path("a.toml").string())));
  EXPECT_TRUE(is_default_job(parsed_train("--config " + path("b.toml").string())));
}

TEST(TokenizerChoice, ParsesVocabularySize) {
  EXPECT_EQ(tokenizer_choice("bpe-1024", "char", true).vocab_size, 1024);
  EXPECT_EQ(tokenizer_choice("bpe-1024", "char", true).name, "bpe");
  EXPECT_EQ(tokenizer_choice("bpe", "char", true).vocab_size, 50257);
  for (const char* wrong : {"bpe-", "bpe-x", "bpe-255", "bpe-1e3", "bp"})
    EXPECT_THROW(tokenizer_choice(wrong, "char", true), Error) << wrong;
}

TEST(SampleText, DropsIncompleteSentences) {
  EXPECT_EQ(complete_sentences("nd of it. She was there. He said so, and"), "She was there.");
  EXPECT_EQ(complete_sentences("so. \"Is it?\" said Mr. Bennet. \"It is,\" cried Mrs. Long.\" And"),
            "\"Is it?\" said Mr. Bennet. \"It is,\" cried Mrs. Long.\"");
  EXPECT_EQ(complete_sentences("x.\n\nThe end!\nThe very"), "The end!");
  const char* const unchanged =
      "A long beginning without an end. Yes. and then nothing";  // most of the text would be lost
  for (const char* text : {unchanged, "int main() { return 0; }", ""}) EXPECT_EQ(complete_sentences(text), text);
}

}  // namespace
}  // namespace tessera
