// `tessera audit` as a user runs it: recordings of PyTorch in tests/audit/recordings/, copies of them with a changed
// tensor, and dumps of Tessera; exit status, text, JSON, figures, errors, and interrupts.
#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <regex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/app/program.h"
#include "tests/app/report_checks.h"

namespace tessera {
namespace {

class AuditTest : public ProgramTest {
 protected:
  AuditTest() {
    for (const char* name :
         {"dtensor_tp2", "fsdp2_dp2_tp2", "fsdp2_dp4", "pipelining_1f1b", "reference", "reference_clipped"})
      fs::copy(fs::path(TESSERA_SOURCE_DIR) / "tests/audit/recordings" / name, path(name));
  }
  // Replaces the values of one tensor of a file. T is its dtype.
  template <class T>
  void change(const std::string& file, const std::string& key, const std::function<T(T)>& value) const {
    std::string bytes = read_file(path(file));
    uint64_t size = 0;
    std::memcpy(&size, bytes.data(), sizeof(size));
    const Json offsets = Json::parse(bytes.substr(8, size)).at(key).at("data_offsets");
    for (size_t at = 8 + size + offsets[0].get<size_t>(); at < 8 + size + offsets[1].get<size_t>(); at += sizeof(T)) {
      T x;
      std::memcpy(&x, bytes.data() + at, sizeof(T));
      x = value(x);
      std::memcpy(bytes.data() + at, &x, sizeof(T));
    }
    write(file, bytes);
  }
  // Both tensor ranks have twice the gradient of the last norm; the update is that of the correct gradient.
  void double_norm_gradient() const {
    for (const char* rank : {"0", "1"})
      change<float>(fmt::format("dtensor_tp2/rank_000{}.safetensors", rank), "norm.weight.grad",
                    [](float x) { return 2 * x; });
  }
};

TEST_F(AuditTest, CorrectRecordingExitsWithZero) {
  for (const std::string arguments : {"dtensor_tp2 reference", "fsdp2_dp2_tp2 reference", "pipelining_1f1b reference",
                                      "fsdp2_dp4 reference_clipped", "reference reference"}) {
    const Ran r = run("audit " + arguments);
    EXPECT_EQ(r.status, 0) << arguments << r.out << r.err;
    EXPECT_EQ(r.err, "") << arguments;
    expect_has(r.out, "No divergence: the recorded step is the reference's.\n");
    expect_lacks(r.out, {"First divergence", "Likely cause"});
  }
  expect_has(must("audit fsdp2_dp2_tp2 reference").out,
             {"fsdp2_dp2_tp2: step 1, 4 ranks (dp 2 x tp 2)\n", "reference: reference: step 1, 1 rank, 0 repetitions\n",
              "tolerances assumed: k eps sqrt(depth)\n"});
}

TEST_F(AuditTest, RepetitionsMeasureTolerances) {
  fs::copy(path("reference"), path("reference/repeat_1"));
  expect_has(must("audit dtensor_tp2 reference").out, {"1 rank, 1 repetition\n", "tolerances measured\n"});
}

TEST_F(AuditTest, DivergingRecordingExitsWithOneAndNamesTheTensor) {
  double_norm_gradient();
  fails_in_one_line("audit dtensor_tp2 reference", 1, "audit: dtensor_tp2: grad of norm.weight, ranks 0, 1, ");
  expect_has(run("audit dtensor_tp2 reference").out,
             {"First divergence: grad of norm.weight, ranks 0, 1, ", "factor 2\n", "Likely cause: "});
}

TEST_F(AuditTest, WithoutReferenceChecksOnlyReplicasAndUpdate) {
  const Ran correct = must("audit dtensor_tp2");
  expect_has(correct.out, {"Note: no reference: only replicas, norm and update are checked\n", "updated", "Undecided"});
  expect_lacks(correct.out, {"output", "parameter "});
  change<float>("dtensor_tp2/rank_0001.safetensors", "norm.weight.updated", [](float x) { return x + 0.5F; });
  fails_in_one_line("audit dtensor_tp2", 1, "audit: dtensor_tp2: updated of norm.weight");
}

// The printed values are those of the JSON output.
void expect_same_values(const std::string& text, const Json& json) {
  struct Count {
    int64_t all = 0, wrong = 0, undecided = 0;
    double worst = 0;
  };
  std::map<std::string, Count> counts;
  for (const Json& t : json.at("tensors")) {
    Count& c = counts[t.at("kind")];
    ++c.all, c.wrong += t.at("wrong").get<bool>(), c.undecided += t.at("undecided").get<bool>();
    const double tolerance = t.at("tolerance");
    if (!t.at("undecided").get<bool>() && tolerance > 0)
      c.worst = std::max(c.worst, t.at("distance").get<double>() / tolerance);
  }
  EXPECT_GE(counts.size(), 6U);
  for (const auto& [kind, c] : counts)
    expect_has(text,
               fmt::format("  {:<14} {:>8} {:>6} {:>10} {:>22.3g}\n", kind, c.all, c.wrong, c.undecided, c.worst));
  expect_has(text, fmt::format("tolerances {}", json.at("tolerance").get<std::string>()));
  for (const Json& cause : json.at("causes"))
    expect_has(text, fmt::format("{} ({})\n  {}\n", cause.at("text").get<std::string>(),
                                 cause.at("cause").get<std::string>(), cause.at("evidence").get<std::string>()));
  for (const Json& note : json.at("notes")) expect_has(text, "Note: " + note.get<std::string>() + "\n");
  if (json.at("first").is_null()) return;
  const Json& first = json["first"];
  expect_has(text, fmt::format("First divergence: {}\n  differs by {:.3g} of its norm; tolerance {:.3g}; factor {:.6g}",
                               first.at("where").get<std::string>(), first.at("distance").get<double>(),
                               first.at("tolerance").get<double>(), first.at("factor").get<double>()));
}

TEST_F(AuditTest, JsonHasTheValuesOfTheText) {
  const Ran correct = must("audit pipelining_1f1b reference --format json");
  const Json record = Json::parse(correct.out);
  EXPECT_EQ(record.at("verdict"), "correct");
  EXPECT_TRUE(record.at("first").is_null() && record.at("causes").empty() && record.at("undecided").empty());
  expect_same_values(must("audit pipelining_1f1b reference").out, record);
  double_norm_gradient();
  const Ran wrong = run("audit dtensor_tp2 reference --format json");
  EXPECT_EQ(wrong.status, 1);
  const Json broken = Json::parse(wrong.out);
  EXPECT_EQ(broken.at("verdict"), "diverges");
  test::expect_values(broken.at("first"),
                      {{"name", "norm.weight"}, {"kind", "grad"}, {"layer", nullptr}, {"microbatch", nullptr}});
  EXPECT_NEAR(broken["first"]["factor"].get<double>(), 2, 1e-5);
  EXPECT_EQ(broken["first"]["index"], (Json{{0, 9}}));
  ASSERT_FALSE(broken.at("causes").empty());
  expect_same_values(run("audit dtensor_tp2 reference").out, broken);
  expect_has(wrong.err, broken["first"]["where"].get<std::string>());
}

TEST_F(AuditTest, PageAndFigureAreWellFormed) {
  double_norm_gradient();
  for (const auto& [recording, status] : {std::pair<std::string, int>{"fsdp2_dp2_tp2", 0}, {"dtensor_tp2", 1}}) {
    const Ran r = run("audit " + recording + " reference --format json --html a.html --svg a.svg");
    EXPECT_EQ(r.status, status) << r.err;
    const std::string page = read_file(path("a.html")), figure = read_file(path("a.svg"));
    test::expect_page(page);
    test::expect_balanced(figure);
    EXPECT_TRUE(figure.starts_with("<svg xmlns=")) << figure.substr(0, 40);
    const Json result = Json::parse(r.out);
    expect_has(page, {">" + r.out.substr(0, 40), "Verdict: " + result.at("verdict").get<std::string>()});
    static const std::regex label(
        "role=\"img\" aria-label=\"([^\"]+): (\\d+) of (\\d+) wrong(; first divergence here)?\"");
    size_t panels = 0, wrong = 0, all = 0, first = 0;
    for (std::sregex_iterator it(page.begin(), page.end(), label), end; it != end; ++it) {
      ++panels, wrong += std::stoul((*it)[2]), all += std::stoul((*it)[3]), first += (*it)[4].matched ? 1 : 0;
      expect_has(figure, (*it)[1].str());
    }
    const Json& tensors = result.at("tensors");
    EXPECT_GE(panels, 6U);
    EXPECT_EQ(all, tensors.size());
    EXPECT_EQ(wrong, static_cast<size_t>(
                         std::ranges::count_if(tensors, [](const Json& t) { return t.at("wrong").get<bool>(); })));
    EXPECT_EQ(first, status == 1 ? 1U : 0U);
    // Cells: one per tensor, with a tooltip; the first divergence has a frame.
    static const std::regex cell("<rect class=\"[^\"]*\"[^>]* data-tip=\""), frame("<rect class=\"[^\"]* first\"");
    const auto count = [&](const std::regex& pattern) {
      return static_cast<size_t>(std::distance(std::sregex_iterator(page.begin(), page.end(), pattern), {}));
    };
    EXPECT_EQ(count(cell), tensors.size());
    EXPECT_EQ(count(frame), first);
    EXPECT_EQ(page.find(">wrong tensor<") != std::string::npos, status == 1);
  }
}

TEST_F(AuditTest, RejectsBadInputInOneLine) {
  fails_in_one_line("audit", 2, "PATH: expected a recording and optionally its reference, got none");
  fails_in_one_line("audit reference reference reference", 2,
                    "PATH: expected a recording and its reference, got 3 paths");
  fails_in_one_line("audit reference --colour red", 2, "unknown option '--colour'");
  fails_in_one_line("audit reference --format xml", 2, "--format: expected text, json, got 'xml'");
  fails_in_one_line("audit missing reference", 4, "missing: no such file or directory; expected a recording");
  fails_in_one_line("audit reference missing", 4, "missing: no such file or directory; expected a recording");
  fs::create_directory(path("other"));
  fails_in_one_line("audit other reference", 4, "other: expected rank_0000.safetensors and those of the other ranks");
  fails_in_one_line("audit text.txt reference", 4, "text.txt: not safetensors");
  fails_in_one_line("audit reference --html none/a.html", 6, "cannot write none/a.html: No such file or directory");
  fails_in_one_line("audit reference --svg none/a.svg", 6, "cannot write none/a.svg: No such file or directory");
  fs::remove(path("fsdp2_dp4/rank_0002.safetensors"));
  fails_in_one_line("audit fsdp2_dp4 reference", 4, "rank_0000.safetensors: expected 4 files, one per rank, got 3");
  for (const char* rank : {"0", "1"})
    change<int64_t>(fmt::format("dtensor_tp2/rank_000{}.safetensors", rank), "0/input_ids",
                    [](int64_t x) { return (x + 1) % 27; });
  fails_in_one_line("audit dtensor_tp2 reference", 4, "dtensor_tp2: expected the tokens of reference, got others");
  const std::string torn = read_file(path("dtensor_tp2/rank_0001.safetensors"));
  for (const size_t size : {size_t{0}, size_t{5}, torn.size() / 3, torn.size() - 1}) {
    write("dtensor_tp2/rank_0001.safetensors", torn.substr(0, size));
    fails_in_one_line("audit dtensor_tp2 reference", 4, "rank_0001.safetensors");
  }
}

TEST_F(AuditTest, DumpOfAnyLayoutAgreesWithItsModelDirectory) {
  train("--model llama-nano --layers 2 --out init --quiet");
  must("checkpoint export init --out model");
  for (const std::string plan : {"--dp 2 --microbatches 2", "--tp 2 --sp", "--pp 2 --dp 1 --microbatches 2 --zero 0"}) {
    anew(
        "train --init model --data text.txt --context 16 --batch 4 --steps 2 --threads-per-rank 1 --quiet "
        "--dump 1 " +
        plan + " --out run");
    const Ran r = must("audit run/dump_1.safetensors model");
    expect_has(r.out, {"reference: model on one rank; 5 runs in ", "tolerances measured\n", "No divergence"});
  }
}

TEST_F(AuditTest, DumpOfAFaultyRunDivergesWithItsCause) {
  const std::string sizes =
      "verify --model llama-nano --layers 2 --heads 2 --channels 16 --context 16 --batch 4 --steps 1 --dump 1 "
      "--threads-per-rank 1 ";
  must(sizes + "--dp 2");
  fs::rename(path("dump_1.safetensors"), path("correct.safetensors"));
  const std::vector<std::tuple<std::string, std::string, std::string>> faults{
      {"--dp 2", "local-mean-loss", "summed-twice"},
      {"--dp 2 --microbatches 2", "repeated-microbatch", "microbatch-repeated"},
      {"--dp 2 --zero 1 --clip 0.5", "unclipped-rank", "update-order"}};
  for (const auto& [plan, fault, cause] : faults) {
    run(sizes + plan + " --defect " + fault);
    const Ran r = run("audit dump_1.safetensors correct.safetensors --format json");
    EXPECT_EQ(r.status, 1) << fault << r.err;
    const Json result = Json::parse(r.out);
    ASSERT_FALSE(result.at("causes").empty()) << fault;
    EXPECT_EQ(result["causes"][0].at("cause"), cause) << fault << ": " << result.at("first");
    fs::remove(path("dump_1.safetensors"));
  }
}

TEST_F(AuditTest, InterruptRemovesTemporaryFiles) {
  train("--model llama-nano --layers 4 --channels 128 --context 256 --batch 8 --steps 1 --dump 1 --out init --quiet");
  must("checkpoint export init --out model");
  fs::create_directory(path("tmp"));
  const pid_t child = start("audit init/dump_1.safetensors model --html a.html", "export TMPDIR=tmp;");
  EXPECT_TRUE(test::comes([&] { return !fs::is_empty(path("tmp")); }));
  kill(child, SIGINT);
  EXPECT_EQ(test::wait_for_exit(child), 128 + SIGINT);
  expect_has(log(), "tessera: interrupted (SIGINT)\n");
  EXPECT_TRUE(fs::is_empty(path("tmp")));
  EXPECT_FALSE(fs::exists(path("a.html")));
}

}  // namespace
}  // namespace tessera
