// The validation that a run reports, against the weights that it has saved and the text that it was given.
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "data/safetensors.h"
#include "tests/app/program.h"
#include "tests/support/direct_loss.h"
#include "train/checkpoint/state.h"

namespace tessera {
namespace {

using nlohmann::json;

class ValidationOfRunsTest : public test::ProgramTest {
 protected:
  // 'é' has two bytes, so that a token is more than a byte.
  ValidationOfRunsTest() {
    std::string text;
    for (int i = 0; i < 500; ++i)
      text += fmt::format("L'{} é é été {}, {}.\n", i % 13, i * 7 % 31, i % 3 ? "né" : "et");
    std::ofstream(path("text.txt"), std::ios::binary) << text;
    size_t cut = text.size() * 9 / 10;
    while ((static_cast<unsigned char>(text[cut]) & 0xC0) == 0x80) ++cut;
    held_out_ = characters_of(text.substr(cut));
    bytes_ = text.size() - cut;
    const std::vector<std::string> all = characters_of(text);
    vocabulary_ = {all.begin(), all.end()};  // in the order of code points, as UTF-8 is
  }

  static std::vector<std::string> characters_of(const std::string& text) {
    std::vector<std::string> out;
    for (const char c : text)
      if ((static_cast<unsigned char>(c) & 0xC0) == 0x80)
        out.back() += c;
      else
        out.emplace_back(1, c);
    return out;
  }

  // By the weights of a checkpoint, on one rank that knows neither plans nor dropout.
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

TEST_F(ValidationOfRunsTest, IsThatOfTheSavedWeightsOverTheWholeSplit) {
  int run = 0;
  for (const std::string plan :
       {"--ranks 1", "--ranks 2 --microbatches 2", "--ranks 2 --dp-mode dataparallel", "--cp 2 --ranks 2",
        "--tp 2 --ranks 4", "--ranks 2 --dp-mode ps-async --staleness 0"}) {
    SCOPED_TRACE(plan);
    const std::string out = fmt::format("run-{}", run++);
    const test::Ran ran =
        train(fmt::format("--dropout 0.3 --eval-every 6 --save-every 6 --format json --out {} {}", out, plan));
    ASSERT_EQ(ran.status, 0) << ran.err;
    std::istringstream lines(ran.out);
    size_t evaluated = 0;
    double last = 0;
    for (std::string line; std::getline(lines, line);) {
      const json record = json::parse(line);
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
      EXPECT_NEAR(loss, direct, 1e-5 * direct) << line;
    }
    EXPECT_EQ(evaluated, plan.find("async") == std::string::npos ? 2U : 1U);
  }
}

}  // namespace
}  // namespace tessera
