// Long texts: encoded chunk by chunk they have the tokens of the whole, and little memory is enough for them.
#include "data/examples.h"
#include "data/tokenizer/described.h"
#include "tests/data/bpe_texts.h"
#include "tests/data/support.h"

namespace tessera {
namespace {

using LongText = DataTest;

constexpr size_t kChunk = size_t{8} << 10;

// The tokens of a text that comes in pieces of drawn sizes, and how often it was cut.
std::pair<std::vector<int32_t>, int> streamed(const Tokenizer& tokenizer, std::string_view text, bool ends,
                                              uint64_t seed) {
  std::vector<int32_t> out;
  int chunks = 0;
  TextEncoder encoder(
      tokenizer, "text",
      [&](std::span<const int32_t> more) {
        out.insert(out.end(), more.begin(), more.end());
        ++chunks;
      },
      ends, kChunk);
  const Philox random = Philox::named(seed, "pieces");
  for (uint64_t i = 0; !text.empty(); ++i) {
    const size_t size = std::min<size_t>(1 + random.below(3 * kChunk, i), text.size());
    encoder.add(text.substr(0, size));
    text.remove_prefix(size);
  }
  encoder.finish();
  return {out, chunks};
}

TEST_F(LongText, ChunksHaveTheTokensOfTheWhole) {
  const std::string text = test::mixed_text() + test::unseen_text() + test::mixed_text();
  std::vector<std::unique_ptr<Tokenizer>> all;
  all.push_back(make_tokenizer({"bytes"}, "t"));
  all.push_back(std::make_unique<CharTokenizer>(CharTokenizer::of_text(text, "t")));
  all.push_back(std::make_unique<BpeTokenizer>(train_bpe(test::mixed_text(), {.vocab_size = 500})));
  for (const char* const name : {"gpt2", "roberta", "llama3", "qwen", "smollm", "llama2", "mistral", "words"})
    all.push_back(Tokenizer::open_folder(TESSERA_SOURCE_DIR "/tests/data/fixtures/tokenizers/" + std::string(name)));
  for (size_t t = 0; t < all.size(); ++t)
    for (const bool ends : {false, true}) {
      const auto [tokens, chunks] = streamed(*all[t], text, ends, 2 * t + (ends ? 1 : 0));
      EXPECT_EQ(tokens, all[t]->encode_with(text, {.add_ends = ends})) << t;
      EXPECT_GT(chunks, 10) << t;
    }
}

TEST_F(LongText, ATextThatCannotBeCutIsRefused) {
  const auto tokenizer = Tokenizer::open_folder(TESSERA_SOURCE_DIR "/tests/data/fixtures/tokenizers/llama3");
  expect_error(Status::input, {"text", "no place in", "documents"},
               [&] { streamed(*tokenizer, std::string(20 * kChunk, 'x'), false, 1); });
}

TEST_F(LongText, AnUnknownCharacterIsNamedByItsPlaceInTheText) {
  const CharTokenizer tokenizer = CharTokenizer::of_text("ab", "t");
  const std::string text = std::string(5 * kChunk, 'a') + "c";
  expect_error(Status::usage, {"'c'", "at byte " + std::to_string(5 * kChunk)},
               [&] { streamed(tokenizer, text, false, 2); });
}

// A tokenizer learns the same from chunks: no piece of GPT-2's pattern crosses a cut.
TEST_F(LongText, WordsAreCountedAsOfTheWhole) {
  const std::string one = test::mixed_text() + test::unseen_text();
  std::string text;
  while (text.size() < size_t{9} << 20) text += one;
  const TextWalk walk = [&](const PartPiece& f) { f(text, false); };
  const auto learnt = make_tokenizer({.name = "bpe", .vocab_size = 600}, "t", walk);
  EXPECT_EQ(learnt->to_json(), train_bpe(text, {.vocab_size = 600, .least_count = 16}).to_json());
}

TEST_F(LongText, RareWordsAreForgottenAndItIsSaid) {
  WordCounts counts;
  const size_t words = WordCounts::kMost + 2;
  std::string text;
  for (size_t i = 0; i < words; ++i) text += " the x" + std::to_string(i);
  counts.add(text);
  EXPECT_EQ(counts.forgotten(), 1);
  EXPECT_LT(counts.all().size(), WordCounts::kMost);
  EXPECT_EQ(counts.all().at(" the"), static_cast<int64_t>(words));
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)

// The most memory that the process has had since the last call, in MB.
int64_t peak() {
  std::ifstream status("/proc/self/status");
  int64_t kilobytes = 0;
  for (std::string line; std::getline(status, line);)
    if (line.starts_with("VmHWM:")) kilobytes = std::stoll(line.substr(6));
  std::ofstream("/proc/self/clear_refs") << "5";
  return kilobytes / 1024;
}

TEST_F(LongText, TakesLittleMemory) {
  std::string lines, documents;
  for (int i = 0; i < 20'000; ++i) lines += "line " + std::to_string(i) + " of a long text, word by word\n";
  {
    std::ofstream text(path("text.txt")), jsonl(path("text.jsonl"));
    for (int i = 0; i < 50; ++i) {
      text << lines;
      jsonl << "{\"text\": \"" << std::string(800'000, static_cast<char>('a' + i % 26)) << "\"}\n";
    }
  }
  const auto megabytes = [&](const auto& f) {
    peak();
    const int64_t before = peak();
    f();
    return peak() - before;
  };
  const std::string text = path("text.txt");
  EXPECT_LT(megabytes([&] { dataset_for(text, {"char"}); }), 120);
  std::string said;
  const TokenizerChoice bpe{
      .name = "bpe", .vocab_size = 300, .progress = [&](const std::string& line) { said = line; }};
  EXPECT_LT(megabytes([&] { make_dataset_of({text}, bpe, path("bpe")); }), 120);
  EXPECT_EQ(said, text + ": 37 MiB read for its tokens");
  EXPECT_LT(megabytes([&] {
              make_dataset_of({path("text.jsonl").string(), text}, {"bytes"}, path("both"), 10'000'000);
            }),
            120);
  EXPECT_LT(megabytes([&] { evaluation_text(text, *make_tokenizer({"bytes"}, text), {.context = 8}); }), 240);
  EXPECT_EQ(Dataset::open(path("both")).train.size(), 7u);
}

#endif

}  // namespace
}  // namespace tessera
