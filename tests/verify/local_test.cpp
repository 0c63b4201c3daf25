// Local errors of audits: a factor of 1.02 in one late layer of a bf16 recording is found in its forward and its
// backward pass, although the accumulated rounding errors of 12 layers hide it; correct recordings have none.
#include "verify/audit/local.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "autograd/ops.h"
#include "models/decoder.h"
#include "tensor/random.h"
#include "tests/support/python.h"
#include "tests/support/tensors.h"
#include "tests/verify/plans.h"
#include "train/checkpoint/full_state.h"
#include "verify/audit/compare.h"
#include "verify/audit/reference.h"
#include "verify/verify.h"

namespace tessera {
namespace {

using audit::AuditResult;
using audit::Kind;
using audit::Recording;
using audit::Verdict;
using ModelFault = std::function<void(Decoder&)>;

constexpr double kFactor = 1.02;
constexpr size_t kLayer = 10;  // of 12

// Matrices of deviation gain / sqrt(columns), so that rounding errors grow from layer to layer.
FullTensors sample_weights(double gain) {
  return [gain](const std::string& name, DType dtype, const Shape& shape) -> TensorReader {
    const Philox random = Philox::named(1, name);
    std::vector<double> values;
    for (int64_t i = 0; i < shape.numel(); ++i) {
      const double x = random.normal(static_cast<uint64_t>(i));
      const bool is_norm = shape.ndim() == 1 && name.ends_with("weight");
      values.push_back(shape.ndim() > 1 ? gain * x / std::sqrt(static_cast<double>(shape[1]))
                                        : 0.1 * x + (is_norm ? 1 : 0));
    }
    const Tensor made = Tensor::of<double>(values, shape, make_arena()).to(dtype);
    return [made, size = element_size(dtype)](int64_t begin, std::span<std::byte> to) {
      std::memcpy(to.data(), made.raw() + begin * size, to.size());
    };
  };
}

// Recorded steps of Tessera over two tensor ranks, and their audits.
class LocalStep {
 public:
  explicit LocalStep(const std::string& options, double gain = 1.5, const ModelFault& fault = {})
      : weights_(sample_weights(gain)) {
    TypedOptions o = test::small_plan(
        "family=llama layers=12 heads=4 kv_heads=2 dropout=0 dtype=bf16 steps=1 batch=4 warmup=0 tp=2 microbatches=2 "
        "balance_loss=0 z_loss=0 clip=0 dump=1 " +
        options);
    const TrainConfig job = verifiable(resolve(o));
    model = job.model;
    test::on_ranks(job, [&](Trainer& trainer) {
      begin_with(trainer.state().strategy().resident_units(), trainer.state().optimizer(), weights_);
      if (fault) fault(dynamic_cast<Decoder&>(trainer.state().model()));
      trainer.dump(1, directory_.path(""));
      trainer.step();
    });
    found_.emplace(directory_.path("dump_1.safetensors"));
    runs_ = audit::run_references(*found_, {model, weights_}, directory_.path("reference"));
    for (const std::filesystem::path& path : runs_.repeats) repeats_.push_back(std::make_unique<Recording>(path));
  }
  AuditResult audit(bool local = true) const {
    return audit::compare(*found_, Recording(runs_.reference), repeats_, local ? runs_.local : audit::LocalErrors());
  }
  const audit::LocalErrors& local() const { return runs_.local; }
  ModelConfig model;

 private:
  FullTensors weights_;
  test::Exchange directory_;
  std::optional<Recording> found_;
  audit::ReferenceRuns runs_;
  audit::Repeats repeats_;
};

// The layer's output, and so its input gradient, are multiplied.
void scale_output(Decoder& model) {
  model.blocks[kLayer]->wrap([](const Module::Inner& inner, const Var& x) { return scale(inner(x), kFactor); });
}
// Only the gradient of its input.
void scale_gradient(Decoder& model) {
  model.blocks[kLayer]->wrap([](const Module::Inner& inner, const Var& x) {
    return inner(
        record_one("scaled", x.value(), {x}, [](Grads& g) { g.set(0, scale(Var(g.output()), kFactor).value()); }));
  });
}

struct FaultCase {
  void (*inject)(Decoder&);
  Kind kind;
  size_t layer;  // of the first divergence
};
constexpr FaultCase kFaults[] = {{scale_output, Kind::output, kLayer}, {scale_gradient, Kind::output_grad, kLayer - 1}};

std::string wrong_names(const AuditResult& r) {
  std::string out;
  for (const audit::TensorResult& t : r.tensors)
    if (t.wrong) out += std::string(to_string(t.key.kind)) + " of " + t.key.name + "; ";
  return out;
}

const char* const kFamilies[] = {"", "family=gpt2", "kv_heads=4 untied=true qkv_bias=true", "qk_norm=true experts=4",
                                 "experts=4 dtype=fp32"};

TEST(LocalErrors, CorrectRecordingsHaveNoDivergence) {
  for (const char* options : kFamilies) {
    const LocalStep step(options);
    const AuditResult r = step.audit();
    EXPECT_EQ(r.verdict, Verdict::correct) << options << ": " << wrong_names(r);
    const auto has_local = [](const auto& t) { return t.local.has_value(); };
    EXPECT_EQ(
        std::ranges::count_if(r.tensors, [&](const auto& t) { return t.key.kind == Kind::output && has_local(t); }),
        3 * 12 + 3)
        << options;
    for (const audit::TensorResult& t : r.tensors)
      if (t.key.kind == Kind::output || t.key.kind == Kind::output_grad || t.key.kind == Kind::grad ||
          t.key.kind == Kind::loss) {
        EXPECT_TRUE(t.local) << options << ": " << to_string(t.key.kind) << " of " << t.key.name;
      }
  }
}

// With a gain of 3 the accumulated comparison cannot find the factor.
TEST(LocalErrors, FactorOfALateLayerIsFound) {
  for (const FaultCase& fault : kFaults) {
    const LocalStep step("", 3, fault.inject);
    EXPECT_NE(step.audit(false).verdict, Verdict::diverges) << wrong_names(step.audit(false));
    const AuditResult r = step.audit();
    EXPECT_EQ(r.verdict, Verdict::diverges);
    ASSERT_TRUE(r.first);
    const audit::TensorResult& first = r.first->tensor;
    EXPECT_EQ(first.key, (audit::Key{fault.kind, "model.layers." + std::to_string(fault.layer)})) << wrong_names(r);
    EXPECT_TRUE(first.only_local);
    EXPECT_NEAR(first.local->factor, kFactor, 2e-3);
    EXPECT_LT(first.local->factor_tolerance, (kFactor - 1) / 2);
    EXPECT_EQ(r.causes.at(0).cause, "module-factor");
  }
}

TEST(LocalErrors, FactorIsFoundInAllFamilies) {
  for (const char* options : kFamilies)
    for (const FaultCase& fault : kFaults) {
      const LocalStep step(options, 1.5, fault.inject);
      const AuditResult r = step.audit();
      ASSERT_TRUE(r.first) << options;
      const audit::TensorResult& first = r.first->tensor;
      EXPECT_EQ(first.key.kind, fault.kind) << options << ": " << wrong_names(r);
      EXPECT_EQ(audit::layer_index(first.key.name), static_cast<int64_t>(fault.layer))
          << options << ": " << wrong_names(r);
      ASSERT_TRUE(first.local) << options;
      EXPECT_TRUE(first.local->wrong) << options;
      EXPECT_NEAR(first.local->factor, kFactor, 4e-3) << options;
    }
}

// The exact gradient of the bias of keys is zero; ambiguous choices of experts change gradients of experts.
TEST(LocalErrors, NoiseIsUndecided) {
  const auto undecided = [](const LocalStep& step, const std::string& name) {
    const AuditResult r = step.audit();
    for (const audit::TensorResult& t : r.tensors)
      if (t.key == audit::Key{Kind::grad, name}) return t.undecided && t.local && t.local->undecided && !t.wrong;
    ADD_FAILURE() << "no gradient of " << name;
    return false;
  };
  const LocalStep biases("qkv_bias=true");
  EXPECT_TRUE(undecided(biases, "model.layers.11.self_attn.k_proj.bias"));
  EXPECT_FALSE(undecided(biases, "model.layers.11.self_attn.v_proj.bias"));
  const LocalStep experts("qk_norm=true experts=4"), exact("qk_norm=true experts=4 dtype=fp32");
  EXPECT_TRUE(undecided(experts, "model.layers.11.mlp.gate.weight"));
  EXPECT_FALSE(undecided(exact, "model.layers.11.mlp.gate.weight"));
}

TEST(LocalErrors, DropoutHasNone) { EXPECT_TRUE(LocalStep("layers=2 dropout=0.1").local().errors.empty()); }

}  // namespace
}  // namespace tessera
