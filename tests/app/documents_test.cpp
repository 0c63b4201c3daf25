// --document-mask: what it refuses, and runs on tokens with <|endoftext|> under several plans.
#include <array>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "data/tokenizer/bpe.h"
#include "data/tokenizer/described.h"
#include "tensor/random.h"
#include "tests/app/program.h"

namespace tessera {
namespace {

using test::Ran;

// A tokenizer of bytes and <|endoftext|> in the folder "tokenizer", and a file of llm.c's with documents of its tokens.
class DocumentsTest : public test::ProgramTest {
 protected:
  DocumentsTest() {
    constexpr uint16_t kEnd = 256;
    std::vector<std::string> tokens;
    for (const uint8_t b : bpe::bytes_in_order()) tokens.emplace_back(1, static_cast<char>(b));
    tokens.emplace_back("<|endoftext|>");
    const BpeTokenizer tokenizer(tokens, {}, "the test's");
    std::filesystem::create_directory(path("tokenizer"));
    std::ofstream(path("tokenizer/vocab.json")) << tokenizer.vocab_json();
    std::ofstream(path("tokenizer/merges.txt")) << tokenizer.merges_txt();
    const Philox random = Philox::named(1, "documents");
    std::vector<uint16_t> written;
    for (uint64_t i = 0; i < 4000; ++i)
      written.push_back(random.below(9, i) == 0 ? kEnd : static_cast<uint16_t>(60 + random.below(20, i, 1)));
    std::array<int32_t, 256> header{20240520, 1, static_cast<int32_t>(written.size())};
    std::ofstream file(path("documents.bin"), std::ios::binary);
    file.write(reinterpret_cast<const char*>(header.data()), sizeof(header));
    file.write(reinterpret_cast<const char*>(written.data()), static_cast<std::streamsize>(2 * written.size()));
  }
  Ran train_on_documents(const std::string& more) const {
    return train(" --data documents.bin --tokenizer ./tokenizer --steps 4 " + more);
  }
};

TEST_F(DocumentsTest, TokensWithoutAnEndOfDocumentAreRefused) {
  for (const char* tokenizer : {"char", "bytes", "bpe"})
    expect_failure(
        "train " + kSmall + "--document-mask --out run --tokenizer " + tokenizer, 2,
        "--document-mask: the tokenizer has no token that ends documents; expected tokens with <|endoftext|>");
  expect_failure("train --document-mask --dp-mode dataparallel --ranks 2 --batch 4", 2,
                 "--document-mask: the ranks of");
  EXPECT_FALSE(std::filesystem::exists(path("run")));
}

TEST_F(DocumentsTest, EveryPlanTrainsTheSame) {
  for (const std::string family : {"gpt2", "llama"}) {
    const std::string model = "--layers 2 --tie-copies --family " + family;
    ASSERT_EQ(train_on_documents(model + " --document-mask --ranks 1 --out one-" + family).status, 0);
    ASSERT_EQ(train_on_documents(model + " --ranks 1 --out crossed-" + family).status, 0);
    const std::string expected = weights("one-" + family + "/checkpoints/step-4");
    EXPECT_NE(weights("crossed-" + family + "/checkpoints/step-4"), expected);
    const Ran pipeline = train_on_documents(model + " --document-mask --pp 2 --out pp-" + family);
    ASSERT_EQ(pipeline.status, 0) << pipeline.err;
    EXPECT_EQ(weights("pp-" + family + "/checkpoints/step-4"), expected);
    const Ran context = train_on_documents(model + " --document-mask --cp 2 --tp 2 --sp --out cp-" + family);
    EXPECT_EQ(context.status, 0) << context.err;
    const Ran alone = train_on_documents("--document-mask --dp-mode ps-async --ranks 2 --out async-" + family);
    EXPECT_EQ(alone.status, 0) << alone.err;
  }
  expect_failure("train --resume --out crossed-gpt2 --document-mask --steps 8", 2,
                 "document_mask is true and was as usual");
}

}  // namespace
}  // namespace tessera
