// Fixtures of other libraries' models as directories, and the computation of their results.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "hub/folder.h"
#include "tests/data/support.h"

namespace tessera {

using Json = nlohmann::json;
namespace fs = std::filesystem;

inline Json with(Json config, const std::string& key, const Json& value) {
  config[key] = value;
  return config;
}

inline fs::path fixture_path(const std::string& name) {
  return TESSERA_SOURCE_DIR "/tests/models/fixtures/" + name + ".safetensors";
}
inline Safetensors open_fixture(const std::string& name) { return Safetensors(fixture_path(name), true); }

// The weights of a fixture's model.
inline std::vector<TensorBytes> fixture_weights(const Safetensors& fixture) {
  std::vector<TensorBytes> out;
  for (const TensorBytes& t : fixture.tensors())
    if (t.name.starts_with("model.") || t.name.starts_with("transformer.") || t.name == "lm_head.weight")
      out.push_back(t);
  return out;
}

inline std::unique_ptr<LanguageModel> load_model(const ModelConfig& config, const FullTensors& tensors,
                                                 DType dtype = DType::float32) {
  std::unique_ptr<LanguageModel> model = make_model(config);
  model->materialize(0, make_arena(), dtype, accum_dtype(dtype));
  read_values(model->units(), tensors);
  return model;
}
inline std::unique_ptr<LanguageModel> load_model(const HubFolder& folder) {
  return load_model(folder.config(), folder.tensors());
}
// A model of random weights.
inline std::unique_ptr<LanguageModel> random_model(const ModelConfig& config, uint64_t seed = 3) {
  std::unique_ptr<LanguageModel> model = make_model(config);
  model->materialize(seed, make_arena(), DType::float32, DType::float32);
  return model;
}
// The weights of a model, which must outlive the result.
inline FullTensors make_tensors(LanguageModel& model) {
  return [&model](const std::string& name, DType dtype, const Shape&) -> TensorReader {
    for (const Parameter* p : model.parameters())
      if (p->name == name)
        return make_reader({p->var.value().raw(), static_cast<size_t>(p->var.value().nbytes())}, dtype);
    return {};
  };
}

// The rows of a fixture, and a model's mean loss on them.
inline Tensor make_rows(const Safetensors& fixture, const char* name) {
  const TensorBytes& t = fixture.at(name);
  Tensor out = Tensor::empty({t.shape[0], t.shape[1]}, DType::int32, make_arena());
  std::ranges::copy(t.bytes, out.raw());
  return out;
}
inline double compute_loss(LanguageModel& model, const Safetensors& fixture) {
  const Tensor targets = make_rows(fixture, "targets");
  const NoGrad no_grad;
  return model.loss(make_rows(fixture, "ids"), targets, 1).loss_sum / static_cast<double>(targets.numel());
}
template <class T>
std::vector<T> copy_values(const TensorBytes& t) {
  std::vector<T> out(t.bytes.size() / static_cast<size_t>(element_size(t.dtype)));
  convert(t, 0, kDTypeOf<T>, std::as_writable_bytes(std::span(out)));
  return out;
}
inline std::vector<float> floats(const TensorBytes& t) { return copy_values<float>(t); }

// A full tensor by Tessera's name, read in two slices.
inline std::vector<float> floats(const FullTensors& tensors, const std::string& name, const Shape& shape,
                                 int64_t cut = 1) {
  std::vector<float> out(static_cast<size_t>(shape.numel()));
  const TensorReader read = tensors(name, DType::float32, shape);
  const std::span<float> all(out);
  read(0, std::as_writable_bytes(all.first(static_cast<size_t>(cut))));
  read(cut, std::as_writable_bytes(all.subspan(static_cast<size_t>(cut))));
  return out;
}

// Expects values close to those of another library.
inline void expect_near(const std::vector<float>& found, const std::vector<float>& expected,
                        const std::string& what = "") {
  ASSERT_EQ(found.size(), expected.size()) << what;
  for (size_t i = 0; i < found.size(); ++i)
    ASSERT_NEAR(found[i], expected[i], 1e-5 * (1 + std::abs(expected[i]))) << what << " " << i;
}

// A directory of models per test.
class HubTest : public DataTest {
 protected:
  Json json(const std::string& name) const { return Json::parse(read_file(path(name))); }
  void write(const std::string& name, const Json& value) const { file(name, value.dump()); }
  // Expects the directory "" to be rejected with one line.
  void expect_refused(const std::string& message) const {
    expect_error(Status::input, {message}, [&] { HubFolder folder(path("")); });
  }
};

}  // namespace tessera
