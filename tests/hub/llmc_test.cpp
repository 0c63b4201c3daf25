// Models of llm.c: the tensors of a folder in its order are the folder's model.
#include "hub/llmc.h"

#include <fmt/format.h>

#include "tests/data/support.h"

namespace tessera {
namespace {

class LlmcModelTest : public DataTest {
 protected:
  // As train_gpt2.py writes it: each kind for all layers, the table filled up to a multiple of 128 with zeros.
  std::string written(LanguageModel& model, int version) const {
    const ModelConfig& c = model.config;
    std::vector<int32_t> header(256);
    const int64_t rows = version == 1 ? c.vocab : 128;
    const int64_t sizes[] = {20240326, version, c.context,  c.vocab,
                             c.layers, c.heads, c.channels, version == 1 ? 0 : rows};
    for (size_t i = 0; i < std::size(sizes); ++i) header[i] = static_cast<int32_t>(sizes[i]);
    std::string out(reinterpret_cast<const char*>(header.data()), 1024);
    const auto add = [&](const std::string& name) {
      for (const Parameter* p : model.parameters()) {
        if (p->name != name) continue;
        const Tensor value = version == 5 ? p->var.value().to(DType::bfloat16) : p->var.value();
        out.append(reinterpret_cast<const char*>(value.raw()), static_cast<size_t>(value.nbytes()));
        return;
      }
      FAIL() << name;
    };
    add("tokens.weight");
    out.append(static_cast<size_t>((rows - c.vocab) * c.channels * (version == 5 ? 2 : 4)), '\0');
    add("positions.weight");
    for (const char* part : {"norm1", "attn.qkv", "attn.proj", "norm2", "mlp.up", "mlp.down"})
      for (const char* kind : {"weight", "bias"})
        for (int64_t i = 0; i < c.layers; ++i) add(fmt::format("blocks.{}.{}.{}", i, part, kind));
    add("norm.weight"), add("norm.bias");
    return out;
  }
};

TEST_F(LlmcModelTest, HasTheTensorsOfItsHeader) {
  const ModelConfig config{.layers = 3, .heads = 2, .channels = 8, .context = 5, .vocab = 90};
  const auto model = make_model(config), again = make_model(config);
  model->materialize(3, make_arena(), DType::float32, DType::float32);
  again->materialize(4, make_arena(), DType::float32, DType::float32);
  for (const int version : {1, 3, 5}) {
    SCOPED_TRACE(version);
    const auto file = this->file("model.bin", written(*model, version));
    EXPECT_TRUE(is_llmc_model(file));
    const LlmcModel read(file);
    EXPECT_EQ(read.dtype(), version == 5 ? DType::bfloat16 : DType::float32);
    read_values(again->units(), read.tensors());
    for (size_t i = 0; i < model->parameters().size(); ++i) {
      const Tensor ours = model->parameters()[i]->var.value(), theirs = again->parameters()[i]->var.value();
      EXPECT_EQ(theirs.to_vector<float>(),
                (version == 5 ? ours.to(DType::bfloat16).to(DType::float32) : ours).to_vector<float>());
    }
  }
  const std::string whole = written(*model, 3);
  const auto refused = [&](const std::string& bytes, const std::string& words) {
    expect_error(Status::input, {"model.bin: ", words}, [&] { LlmcModel(file("model.bin", bytes)); });
  };
  refused(whole.substr(0, 1000), "1000 bytes; expected a header of 1024");
  refused(whole + "x", fmt::format("{} bytes; expected {} by its header", whole.size() + 1, whole.size()));
  const auto with = [&](size_t at, int32_t value) {
    std::string bytes = whole;
    bytes.replace(4 * at, 4, reinterpret_cast<const char*>(&value), 4);
    return bytes;
  };
  refused(with(1, 2), "of version 2; expected 1, 3 or 5");
  refused(with(4, -1), "a size of -1");
  refused(with(5, 3), "3 heads, 8 channels and 128 rows for 90 tokens are no model");
  refused(with(7, 64), "64 rows for 90 tokens are no model");
}

}  // namespace
}  // namespace tessera
