// The command `plan`: text and JSON output.
#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <numeric>
#include <string>
#include <tuple>
#include <vector>

#include "app/plan/plan.h"
#include "models/decoder.h"
#include "models/stages.h"
#include "tests/app/parsed.h"
#include "tests/app/program.h"
#include "tests/app/report_checks.h"

namespace tessera {
namespace {

class PlanningTest : public ProgramTest {
 protected:
  std::vector<Json> lines(const std::string& arguments, int status = 0) const {
    const Ran r = run("plan --format json " + arguments);
    EXPECT_EQ(r.status, status) << r.err;
    return parse_records(r.out);
  }
  const std::string k7b_ = "--model llama2-7b --hardware h100 --software megatron --batch 64 ";
};

void expect_numbers(const Json& object, std::initializer_list<const char*> keys) {
  for (const char* key : keys) EXPECT_TRUE(object.contains(key) && object[key].is_number()) << key << " " << object;
}

void expect_layout(const Json& plan) {
  expect_numbers(plan, {"dp", "tp", "pp", "cp", "zero", "sequences", "microbatches", "ep"});
  EXPECT_TRUE(plan["sp"].is_boolean() && plan["schedule"].is_string() && plan["recompute"].is_string()) << plan;
}

void expect_plan(const Json& line) {
  EXPECT_EQ(line["event"], "plan");
  expect_layout(line["plan"]);
  expect_numbers(line, {"step_s", "tokens_per_s", "mfu", "hfu", "tflops_per_rank", "bubble"});
  expect_numbers(line["parts"], {"compute", "recompute", "bubble", "tp", "cp", "ep", "dp", "optimizer"});
  expect_numbers(line["memory"], {"parameters", "gradients", "optimizer", "activations", "communication", "peak"});
  EXPECT_EQ(line["step_s_range"].size(), 2U);
  EXPECT_EQ(line["memory_per_stage"].size(), line["plan"]["pp"].get<size_t>());
  for (const auto& [axis, operations] : line["bytes"].items())
    for (const auto& [operation, bytes] : operations.items()) EXPECT_TRUE(bytes.is_number()) << axis << operation;
  EXPECT_EQ(line["fits"].get<bool>(), !line.contains("over"));
  if (line["fits"]) return;
  EXPECT_GT(line["over"]["bytes"], 0);
  EXPECT_TRUE(line["over"]["largest"].is_string());
}

TEST_F(PlanningTest, JsonContainsEveryField) {
  const std::vector<Json> all = lines(k7b_ + "--ranks 16 --top 5");
  ASSERT_GE(all.size(), 6U);
  double before = 0;
  bool fitting = true;
  for (size_t i = 0; i + 1 < all.size(); ++i) {
    expect_plan(all[i]);
    EXPECT_TRUE(all[i]["memory_by"] == "formula" || all[i]["memory_by"] == "dry run");
    if (fitting && !all[i]["fits"].get<bool>()) fitting = false;
    EXPECT_EQ(all[i]["fits"].get<bool>(), fitting);
    if (fitting) {
      EXPECT_LE(before, all[i]["step_s"].get<double>());
    }
    before = all[i]["step_s"];
  }
  const Json& last = all.back();
  EXPECT_EQ(last["event"], "recommendation");
  EXPECT_EQ(last["plan"], all[0]["plan"]);
  EXPECT_TRUE(last["why"].is_array() && last["why"].size() >= 3 && last["why"][0].is_string());
  for (const Json& w : last["why_not"]) {
    expect_layout(w["plan"]);
    EXPECT_TRUE(w["because"].is_string());
  }
  EXPECT_TRUE(last["weakest_assumption"].is_string());
  EXPECT_TRUE(last["command"].get<std::string>().starts_with("mpirun -n 16 --npernode 8 tessera train "));
}

TEST_F(PlanningTest, PredictsFixedLayoutEvenIfItDoesNotFit) {
  const std::string full_layout = "--dp 8 --tp 1 --pp 1 --cp 1 --microbatches 8 --recompute none --zero ";
  const std::vector<Json> small = lines(k7b_ + full_layout + "3 --memory 1000"),
                          large = lines(k7b_ + full_layout + "0");
  ASSERT_TRUE(small.size() == 2 && large.size() == 1);
  EXPECT_EQ(small[0]["plan"]["zero"], 3);
  EXPECT_TRUE(small[0]["fits"] && !large[0]["fits"]);
}

// train accepts the printed command; placement and launching of ranks depend on the target machine.
TEST_F(PlanningTest, TrainAcceptsPrintedCommand) {
  for (const std::string question :
       {"--model llama2-7b --hardware h100 --software megatron --ranks 8 --batch 256",
        "--model llama3-70b --context 4096 --hardware a100-80 --software megatron --ranks 64 --batch 128",
        "--model gpt2-xl --vocab 50304 --hardware a100-40 --software megatron --ranks 4 --batch 64 --pp 2",
        "--model gpt2 --untied --hardware a100-40 --software megatron --ranks 2 --batch 8 --cp 2",
        "--model mixtral-8x7b --hardware h100 --software megatron --ranks 64 --batch 128",
        "--model llama3-8b --hardware h100 --software megatron --ranks 16 --batch 32 --pp 4 --schedule interleaved "
        "--tp 2 --sp --recompute block"}) {
    SCOPED_TRACE(question);
    const auto o = std::get<PlanOptions>(test::parsed("plan " + question));
    const planner::SearchRequest q = make_question(o).question;
    const planner::SearchResult a = search(q, 3);
    ASSERT_FALSE(a.best.empty());
    for (const planner::Candidate& c : a.best) {
      std::string line = train_command(o, q, c.layout);
      const std::string place = " --device cuda --backend nccl --all-reduce native";
      ASSERT_TRUE(line.ends_with(place)) << line;
      line = line.substr(line.find("train "));
      line.resize(line.size() - place.size());
      if (line.find("--ranks") == std::string::npos) line += fmt::format(" --ranks {}", q.ranks);
      ASSERT_NO_THROW(test::parsed(line)) << line;
      const TrainConfig run = std::get<TrainCommand>(test::parsed(line)).config;
      const Plan &found = run.plan, &p = c.layout.plan;
      EXPECT_EQ(
          std::tie(run.optim.batch, found.pp, found.tp, found.cp, found.ep, found.sp, found.zero, found.microbatches),
          std::tie(q.batch, p.pp, p.tp, p.cp, c.layout.ep, p.sp, p.zero, p.microbatches));
    }
  }
}

TEST_F(PlanningTest, HtmlPageIsSelfContained) {
  for (const std::string more : {"--ranks 8", "--ranks 16 --pp 4 --tp 2 --schedule zb-v",
                                 "--ranks 2 --dp 2 --tp 1 --pp 1 --cp 1 --microbatches 1 --zero 0 --recompute none"}) {
    must("plan " + k7b_ + more + " --memory 80 --html page.html");
    const std::string html = read_file(path("page.html"));
    test::expect_page(html);
    expect_has(html,
               {"id=\"plan\"", "id=\"ranking\"", "id=\"memory\"", "id=\"time\"", "id=\"bytes\"", "limit 80.0 GB"});
    EXPECT_EQ(html.find("id=\"pipeline\"") != std::string::npos, more.find("--pp 4") != std::string::npos);
  }
}

TEST_F(PlanningTest, TextOutputIsConcise) {
  const Ran r = must("plan " + k7b_ + "--ranks 8");
  EXPECT_LE(std::count(r.out.begin(), r.out.end(), '\n'), 50);
  expect_has(r.out, {"llama2-7b: 6.74 billion parameters", "8 ranks on h100", "\nRecommended, number 1: ",
                     "\nAlternatives:\n", "\nWeakest assumption: ", "\nCommand:\n  tessera train --model llama2-7b "});
}

TEST_F(PlanningTest, NamesMissingGigabytesIfNoPlanFits) {
  const std::string args =
      "--model llama3-70b --context 4096 --hardware a100-40 --software megatron --ranks 8 --batch 64";
  fails_in_one_line("plan " + args, 2, " GB: the nearest, ");
  expect_has(log(), {" GB more, mainly for ", "; nearest number of ranks with a plan that fits: "});
  for (const Json& line : lines(args, 2)) expect_plan(line);
}

TEST_F(PlanningTest, RejectsInvalidInputWithOneLineError) {
  const std::string rest = R"("channels": 64, "heads": 2, "vocab": 100, "context": 64)";
  for (const auto& [name, layers] : {std::pair{"good", "2"}, {"negative", "-2"}, {"huge", "99999999999999999999"}})
    write(std::string(name) + ".json", fmt::format("{{\"layers\": {}, {}}}", layers, rest));
  write("missing.json", R"({"layers": 2, "channels": 64, "heads": 2, "context": 64})");
  write("unknown.json", "{\"layers\": 2, \"widht\": 3, " + rest + "}");
  write("torn.json", R"({"layers": 2,)");
  for (const auto& [name, line] : {std::pair{"zero", "intra_bytes_per_s = 0"},
                                   {"nan", "memory_bytes = nan"},
                                   {"unknown", "peak = 1"},
                                   {"minus", "peak_flops = -1e15"}})
    write(std::string(name) + ".toml", std::string("base = \"h100\"\n") + line + "\n");
  write("base.toml", "base = \"h1000\"\n");
  const std::string h100 = "plan --hardware h100 --ranks 8 --batch 8 ",
                    nano = "plan --model gpt-nano --ranks 2 --batch 8 ";
  struct Bad {
    std::string line, args;
    int status = 2;
  };
  const std::vector<Bad> table = {
      {"plan --ranks 8", "--hardware: missing; expected a100-40, "},
      {"plan --hardware h100", "--ranks: missing; expected the number of ranks"},
      {nano + "--hardware h101", "h101"},
      {nano + "--hardware none.toml", "none.toml", 4},
      {nano + "--hardware zero.toml", "zero.toml: intra_bytes_per_s: expected more than 0, got 0"},
      {nano + "--hardware nan.toml", "nan.toml"},
      {nano + "--hardware unknown.toml", "unknown.toml: peak"},
      {nano + "--hardware minus.toml", "minus.toml: peak_flops: expected more than 0"},
      {nano + "--hardware base.toml", "h1000"},
      {nano + "--hardware h100 --software fdsp", "fdsp"},
      {h100 + "--model missing.json", "missing.json: model.vocab: required, but missing"},
      {h100 + "--model unknown.json", "unknown.json: model.widht"},
      {h100 + "--model negative.json", "negative.json: "},
      {h100 + "--model torn.json", "torn.json", 4},
      {h100 + "--model huge.json", "huge.json", 4},
      {h100 + "--model nowhere.json", "nowhere.json", 4},
      {h100 + "--model good.json --layers 3", "--layers: cannot be combined with --model"},
      {h100 + "--model lama2-7b", "did you mean 'llama2-7b'?"},
      {h100 + "--model gpt2 --batch 1e18", "--batch: expected an integer"},
      {h100 + "--model gpt2 --batch 1000000000000000000", "--batch: expected an integer"},
      {h100 + "--model gpt2 --ranks 1000000000", "--ranks: expected an integer in [1, 1048576]"},
      {h100 + "--model gpt2 --ranks nan", "--ranks: expected an integer"},
      {h100 + "--model gpt2 --memory 1e300", "--memory: expected a number in [0.001, 1000000]"},
      {h100 + "--model gpt2 --memory nan", "--memory: expected a number"},
      {h100 + "--model gpt2 --memory 0", "--memory: expected a number"},
      {h100 + "--model gpt2 --top 0", "--top: expected an integer"},
      {h100 + "--model gpt2 --ranks 8191", "--ranks: 8191 cannot be factored into axes that fit"},
      {h100 + "--model gpt2 --tp 8", "--tp: 8 does not divide the 12 heads"},
      {h100 + "--model gpt2 --dp 3", "--ranks: dp 3 does not divide the 8 ranks"},
      {h100 + "--model gpt2 --pp 2 --dp 2 --tp 1 --cp 1", "--ranks: pp 2 x dp 2 x cp 1 x tp 1 is 4 ranks; expected 8"},
      {h100 + "--model gpt2 --microbatches 3", "--batch: "},
      {h100 + "--model gpt2 --schedule 2f2b", "--schedule: unknown schedule '2f2b'"},
      {h100 + "--model gpt2 --schedule plan.txt", "--schedule: expected a name"},
      {h100 + "--model gpt2 --zero 4", "--zero: expected"},
      {h100 + "--model gpt2 --dtype fp32", "--dtype: expected bf16"},
      {h100 + "--model gpt2 --html ''", "--html: expected a file"},
      {h100 + "--model gpt2 --out x", "unknown option '--out'"},
      {h100 + "--model gpt2 --memory 0.1", "no plan fits 0.1 GB: the nearest, "},
  };
  for (const auto& [line, args, status] : table) fails_in_one_line(line, status, args);
  EXPECT_EQ(run(nano + "--hardware h100 --html missing/page.html").status, 6);
}

// Resolution of axes, and one-line errors for invalid plans.

TEST(MeshAxes, DefaultSizesAreDerivedFromWorldSize) {
  using Axes = std::array<int64_t, 4>;
  const auto axes = [](const std::string& args) {
    const Plan p = test::parsed_train("--backend threads " + args).plan;
    return Axes{p.pp, p.dp, p.cp, p.tp};
  };
  const std::pair<std::string, Axes> table[] = {{"--tp 2", {1, 1, 1, 2}},
                                                {"--ranks 8 --tp 2", {1, 4, 1, 2}},
                                                {"--ranks 8 --pp 2 --tp 2", {2, 2, 1, 2}},
                                                {"--ranks 8 --dp 2 --tp 2 --cp 1", {2, 2, 1, 2}},
                                                {"--ranks 6 --dp 1 --pp 1 --tp 2 --context 60", {1, 1, 3, 2}},
                                                {"--ranks 3", {1, 3, 1, 1}}};
  for (const auto& [args, expected] : table) EXPECT_EQ(axes(args), expected) << args;
}

TEST(Plan, RejectsInvalidPlansWithOneLineError) {
  const std::pair<const char*, const char*> refused[] = {
      {"--tp 3", "--tp: 3 does not divide the 4 heads; nearest valid value: 2 or 4"},
      {"--ranks 8 --tp 3", "is 3 ranks; expected 8; nearest valid value: 6 or 9 ranks"},
      {"--pp 8", "--pp: 8 ranks have 8 stages, more than the 4 layers"},
      {"--pp 4 --schedule zb-v", "4 ranks have 8 stages, more than the 4 layers"},
      {"--pp 2 --microbatches 3 --schedule interleaved", "3 micro-batches"},
      {"--cp 3", "got 64 tokens for 6 chunks; nearest valid --context: 60 or 66"},
      {"--cp 8 --cp-mode ulysses", "do not divide the 4 heads per rank"},
      {"--tp 4 --kv-heads 4 --cp 2 --cp-mode ulysses", "do not divide the 1 heads per rank"},
      {"--tp 2 --sp --context 7", "--sp: 2 ranks of --tp do not divide the 7 tokens"},
      {"--backend nccl", "--backend: nccl requires ranks on GPUs; expected --device cuda"},
      {"--backend nccl --dp-mode ps-sync",
       "--backend: ps-sync reduces on one rank, in rank order, which nccl does not support; expected threads or mpi"},
      {"--all-reduce native", "--all-reduce: thread ranks have no native all-reduce"},
      {"--tp 2 --dp-mode ps-sync", "--dp-mode: ps-sync supports only data-parallel ranks"},
      {"--pp 2 --dp-mode ps-async", "--dp-mode: ps-async supports only data-parallel ranks"},
      {"--pp 2 --schedule foo", "--schedule: unknown schedule 'foo'"},
      {"--chunks 3", "--chunks: requires --schedule interleaved, got 1f1b"},
      {"--dp 5", "12 is not divisible by 5 data ranks"},
      {"--tp 4 --vocab 3", "--tp: a vocabulary of 3 cannot be sharded over 4 ranks"}};
  for (const auto& [args, why] : refused)
    expect_error(Status::usage, {why},
                 [&, args = args] { test::parsed_train("--backend threads " + std::string(args)); });
}

// GPT-2's head costs as much as five of its blocks.
TEST(SplitLayers, LastStageAccountsForCostOfHead) {
  Decoder gpt2({.layers = 12, .heads = 12, .channels = 768, .context = 1024, .vocab = 50304});
  const std::vector<Range> stages = split_layers(gpt2, 4);
  std::vector<int64_t> sizes;
  for (const Range& r : stages) sizes.push_back(r.size());
  EXPECT_EQ(std::accumulate(sizes.begin(), sizes.end(), int64_t{0}), 12);
  EXPECT_EQ(sizes.back(), 1);
  EXPECT_EQ(*std::max_element(sizes.begin(), sizes.end()), 4);
  Decoder small({.layers = 8, .channels = 64, .context = 16, .vocab = 8});
  const std::vector<Range> even = split_layers(small, 4);
  for (size_t s = 0; s < 4; ++s) EXPECT_EQ(even[s].size(), 2);
  EXPECT_THROW(split_layers(gpt2, 13), Error);
}

TEST(SplitLayers, UnitsBelongToStageOfTheirLayer) {
  const std::vector<Range> layers = {{0, 2}, {2, 3}, {3, 12}};
  Decoder model({.layers = 12, .heads = 1, .channels = 4, .context = 4, .vocab = 4, .tie_copies = true});
  std::map<std::string, int> stages;
  const std::vector<Module::Unit> units = model.layout();
  const std::vector<int> of_units = stages_of_units(model, layers);
  for (size_t u = 0; u < units.size(); ++u) stages[units[u].name] = of_units[u];
  EXPECT_EQ(stages.size(), 16U);
  const std::pair<const char*, int> expected[] = {{"tokens", 0},    {"positions", 0}, {"blocks.1", 0}, {"blocks.2", 1},
                                                  {"blocks.11", 2}, {"norm", 2},      {"head", 2}};
  for (const auto& [unit, stage] : expected) EXPECT_EQ(stages.at(unit), stage) << unit;
}

}  // namespace
}  // namespace tessera
