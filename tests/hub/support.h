// Fixtures of models that other libraries made, as folders, and what is computed with them.
#pragma once

#include "hub/folder.h"
#include "tests/data/support.h"

namespace tessera {

using Json = nlohmann::json;
namespace fs = std::filesystem;

inline Json with(Json config, const std::string& key, const Json& value) {
  config[key] = value;
  return config;
}

// The fixture of a model (tests/models/fixtures/make.py).
inline Safetensors fixture_of(const std::string& name) {
  return Safetensors(fs::path(TESSERA_SOURCE_DIR) / "tests/models/fixtures" / (name + ".safetensors"), true);
}

inline std::unique_ptr<LanguageModel> model_of(const ModelConfig& config, const WholeTensors& tensors,
                                               DType dtype = DType::float32) {
  std::unique_ptr<LanguageModel> model = make_model(config);
  model->materialize(0, make_arena(), dtype, wide_of(dtype));
  read_values(model->units(), tensors);
  return model;
}
inline std::unique_ptr<LanguageModel> model_of(const HubFolder& folder) {
  return model_of(folder.config(), folder.tensors());
}
// A model of drawn weights.
inline std::unique_ptr<LanguageModel> drawn_model(const ModelConfig& config, uint64_t seed = 3) {
  std::unique_ptr<LanguageModel> model = make_model(config);
  model->materialize(seed, make_arena(), DType::float32, DType::float32);
  return model;
}
// The weights of a model that lives as long as this.
inline WholeTensors tensors_of(LanguageModel& model) {
  return [&model](const std::string& name, DType dtype, const Shape&) -> TensorReader {
    for (const Parameter* p : model.parameters())
      if (p->name == name)
        return reader_of({p->var.value().raw(), static_cast<size_t>(p->var.value().nbytes())}, dtype);
    return {};
  };
}

// The rows of a fixture, and a model's mean loss on them.
inline Tensor rows_of(const Safetensors& fixture, const char* name) {
  const TensorBytes& t = fixture.at(name);
  Tensor out = Tensor::empty({t.shape[0], t.shape[1]}, DType::int32, make_arena());
  std::ranges::copy(t.bytes, out.raw());
  return out;
}
inline double loss_of(LanguageModel& model, const Safetensors& fixture) {
  const Tensor targets = rows_of(fixture, "targets");
  const NoGrad no_grad;
  return model.loss(rows_of(fixture, "ids"), targets, 1).loss_sum / static_cast<double>(targets.numel());
}
inline std::vector<float> floats(const TensorBytes& t) {
  std::vector<float> out(t.bytes.size() / static_cast<size_t>(size_of(t.dtype)));
  convert(t, 0, DType::float32, std::as_writable_bytes(std::span(out)));
  return out;
}

// A folder of models, each test's own.
class HubTest : public DataTest {
 protected:
  Json json(const std::string& name) const { return Json::parse(read_file(path(name))); }
  void write(const std::string& name, const Json& value) const { file(name, value.dump()); }
  // Expects the folder "" to be refused in one line.
  void expect_refused(const std::string& words) const {
    expect_error(Status::input, {words}, [&] { HubFolder folder(path("")); });
  }
};

}  // namespace tessera
