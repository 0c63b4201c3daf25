// Audits of recorded steps: recordings are split from a correct dump of one rank into ranks, with one fault each, and
// the audit must name its cause; without a fault it must find no divergence.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "data/safetensors.h"
#include "tests/support/errors.h"
#include "tests/support/python.h"
#include "tests/support/tensors.h"
#include "tests/verify/plans.h"
#include "train/checkpoint/full_state.h"
#include "verify/audit/compare.h"
#include "verify/audit/reference.h"
#include "verify/verify.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using audit::AuditResult;
using audit::Kind;
using audit::Recording;
using audit::Verdict;
using test::Exchange;
using Json = nlohmann::json;

struct Mesh {
  int64_t dp = 1, tp = 1, cp = 1, m = 1;
};

// One tensor of one rank, before it is written.
struct Recorded {
  int rank = 0;
  int64_t dp = 0, tp = 0, cp = 0, microbatch = 0;
  Kind kind{};
  std::string name;
  std::vector<int64_t> shape;  // of the full tensor
  std::vector<Range> index;    // per dim
  std::vector<double> values;
};
using Fault = std::function<void(Recorded&)>;
using InfoFault = std::function<void(Json&)>;

std::vector<double> doubles(const TensorBytes& t) {
  std::vector<double> out;
  const auto read = [&]<class T>(T) {
    for (size_t at = 0; at < t.bytes.size(); at += sizeof(T)) {
      T x;
      std::memcpy(&x, t.bytes.data() + at, sizeof(T));
      out.push_back(static_cast<double>(static_cast<Accumulate<T>>(x)));
    }
  };
  if (t.dtype == DType::int32)
    read(int32_t());
  else
    with_floating(t.dtype, "test", read);
  return out;
}

// Elements of a full row-major tensor in ranges of its dims.
std::vector<double> take(const std::vector<double>& full, const std::vector<int64_t>& shape,
                         const std::vector<Range>& index) {
  std::vector<double> out;
  const std::function<void(size_t, int64_t)> dim = [&](size_t d, int64_t at) {
    if (d == shape.size()) return out.push_back(full[static_cast<size_t>(at)]);
    for (int64_t i = index[d].begin; i < index[d].end; ++i) dim(d + 1, at * shape[d] + i);
  };
  dim(0, 0);
  return out;
}

class Dump {
 public:
  // `only`: targets of other sequences are not trained.
  explicit Dump(const char* options = "", bool masks_targets = false, Range only = {0, 8}) {
    TypedOptions o = test::small_plan(
        std::string("family=llama untied=true dropout=0 dtype=fp64 steps=1 batch=8 warmup=0 optimizer=adamw "
                    "balance_loss=0 z_loss=0 clip=0 dump=1 ") +
        options);
    const TrainConfig job = verifiable(resolve(o));
    Sequences sequences = test::synthetic(job);
    if (masks_targets) {
      const int64_t context = job.model.context;
      sequences.load = [load = sequences.load, context](int64_t step, int64_t first, int64_t count, int32_t* ids,
                                                        int32_t* targets) {
        load(step, first, count, ids, targets);
        for (int64_t r = 0; r < count; ++r)
          if (first + r < 4) std::fill_n(targets + r * context + 4, context - 4, Rows::kIgnored);
      };
      sequences.trained = [context](int64_t) { return 4 * 4 + 4 * context; };
    }
    model = job.model;
    if (only.size() < 8) {
      const int64_t context = job.model.context;
      sequences.load = [load = sequences.load, context, only](int64_t step, int64_t first, int64_t count, int32_t* ids,
                                                              int32_t* targets) {
        load(step, first, count, ids, targets);
        for (int64_t r = 0; r < count; ++r)
          if (first + r < only.begin || first + r >= only.end)
            std::fill_n(targets + r * context, context, Rows::kIgnored);
      };
      sequences.trained = [context, only, masks_targets](int64_t) {
        return only.size() * (masks_targets && only.begin == 0 ? 4 : context);
      };
    }
    test::on_ranks(job, sequences, [&](Trainer& trainer) {
      for (const NamedTensor& t : full_values(trainer.state())) weights_[t.name] = t.tensor.to(DType::float64);
      trainer.dump(1, directory_.path(""));
      trainer.step();
    });
    const Safetensors file(path());
    info_ = Json::parse(file.metadata().at("info"));
    for (const TensorBytes& t : file.tensors()) tensors_[t.name] = {t.shape, doubles(t)};
  }
  ModelConfig model;
  FullTensors weights() const {
    return [this](const std::string& name, DType dtype, const Shape&) -> TensorReader {
      return
          [values = weights_.at(name).to(dtype), size = element_size(dtype)](int64_t begin, std::span<std::byte> to) {
            std::memcpy(to.data(), values.raw() + begin * size, to.size());
          };
    };
  }
  // Coefficients of the micro-batches of all data ranks in the parameter gradients.
  std::map<std::string, std::vector<double>> gradients(const std::vector<double>& weights) const {
    std::map<std::string, std::vector<double>> out;
    const auto parts = static_cast<int64_t>(weights.size());
    for (int64_t i = 0; i < parts; ++i) {
      const Dump part("batch=8", false, chunk_range(8, static_cast<int>(parts), static_cast<int>(i)));
      for (const auto& [name, full] : part.tensors_) {
        if (!is_parameter(name) || !name.ends_with(".grad")) continue;
        std::vector<double>& to = out[name.substr(0, name.size() - 5)];
        to.resize(full.values.size());
        for (size_t k = 0; k < to.size(); ++k)
          to[k] += weights[static_cast<size_t>(i)] * full.values[k] / static_cast<double>(parts);
      }
    }
    return out;
  }
  const std::vector<double>& value(const std::string& name) const { return tensors_.at(name).values; }
  fs::path path() const { return directory_.path("dump_1.safetensors"); }

  // Writes the recording of a mesh to a directory, which `name` identifies.
  fs::path split(const Mesh& mesh, const std::string& name, const Fault& fault = {}, const InfoFault& info = {}) const {
    const fs::path to = directory_.path(name);
    fs::create_directories(to);
    const auto ranks = static_cast<int>(mesh.dp * mesh.cp * mesh.tp);
    for (int rank = 0; rank < ranks; ++rank) write(mesh, rank, to, fault, info);
    return to;
  }

 private:
  struct Full {
    std::vector<int64_t> shape;
    std::vector<double> values;
  };
  static bool is_parameter(const std::string& name) {
    return name.find(".weight") != std::string::npos || name.find(".bias") != std::string::npos;
  }
  void write(const Mesh& mesh, int rank, const fs::path& to, const Fault& fault, const InfoFault& change) const {
    const int64_t tp = rank % mesh.tp, cp = rank / mesh.tp % mesh.cp, dp = rank / (mesh.tp * mesh.cp);
    std::vector<Recorded> all;
    int64_t batch = 8;
    Json losses = Json::array();
    for (const auto& [name, full] : tensors_) {
      Recorded r{rank, dp, tp, cp, 0, Kind::output, name, full.shape, {}, {}};
      for (const int64_t n : full.shape) r.index.push_back({0, n});
      const auto ends = [&r, &name = name](const std::string& suffix, Kind kind) {
        if (!name.ends_with(suffix)) return;
        r.name = name.substr(0, name.size() - suffix.size()), r.kind = kind;
      };
      if (name == "loss" || name == "grad_norm" || name == "lr") continue;
      if (is_parameter(name)) {
        r.kind = Kind::parameter;
        ends(".grad", Kind::grad), ends(".updated", Kind::updated);
        if (name.ends_with(".exp_avg") || name.ends_with(".exp_avg_sq")) r.kind = Kind::state;
        if (full.shape.size() == 2 && name.find("_proj") != std::string::npos)
          r.index[0] = chunk_range(full.shape[0], static_cast<int>(mesh.tp), static_cast<int>(tp));
        r.values = take(full.values, full.shape, r.index);
        all.push_back(r);
        continue;
      }
      if (name == "input_ids") r.kind = Kind::input_ids;
      if (name == "targets") r.kind = Kind::targets;
      ends(".grad", Kind::output_grad);
      const int64_t rows = batch / (mesh.dp * mesh.m), context = full.shape[1];
      for (int64_t m = 0; m < mesh.m; ++m) {
        Recorded piece = r;
        piece.microbatch = m;
        piece.index[0] = {(dp * mesh.m + m) * rows, (dp * mesh.m + m + 1) * rows};
        piece.index[1] = chunk_range(context, static_cast<int>(mesh.cp), static_cast<int>(cp));
        piece.values = take(full.values, full.shape, piece.index);
        piece.shape[0] = rows, piece.index[0] = {0, rows};
        int64_t trained = 0;
        const Full& targets = tensors_.at("targets");
        for (int64_t i = (dp * mesh.m + m) * rows * context; i < (dp * mesh.m + m + 1) * rows * context; ++i)
          trained += targets.values[static_cast<size_t>(i)] >= 0 ? 1 : 0;
        // The loss is a mean per micro-batch, weighted so that the average over data ranks is the global mean.
        if (piece.kind == Kind::output_grad)
          for (double& x : piece.values) x *= static_cast<double>(mesh.dp);
        if (piece.kind == Kind::input_ids)
          losses.push_back({{"microbatch", m},
                            {"value", tensors_.at("loss").values[0]},
                            {"tokens", trained},
                            {"reduction", "mean"},
                            {"scale", 1.0}});
        all.push_back(piece);
      }
    }
    Json info = info_, entries = Json::object();
    info["axes"] = {{"dp", {dp, mesh.dp}}, {"cp", {cp, mesh.cp}}, {"tp", {tp, mesh.tp}}};
    info["microbatches"] = mesh.m;
    info["losses"] = losses;
    info["clip"] = Json();
    if (change) change(info);
    std::vector<std::vector<int32_t>> integers(all.size());
    std::vector<TensorBytes> bytes;
    for (size_t i = 0; i < all.size(); ++i) {
      Recorded& r = all[i];
      if (fault) fault(r);
      std::vector<int64_t> sizes;
      Json index = Json::array();
      for (const Range& range : r.index) {
        sizes.push_back(range.size());
        index.push_back({{range.begin, range.end}});
      }
      const bool tokens = r.kind == Kind::input_ids || r.kind == Kind::targets;
      if (tokens) integers[i].assign(r.values.begin(), r.values.end());
      const TensorBytes& t = bytes.emplace_back(TensorBytes{
          std::to_string(i), tokens ? DType::int32 : DType::float64, sizes,
          tokens ? std::as_bytes(std::span(integers[i])) : std::as_bytes(std::span<const double>(r.values))});
      entries[t.name] = {{"name", r.name},
                         {"kind", to_string(r.kind)},
                         {"microbatch", r.microbatch},
                         {"shape", r.shape},
                         {"index", index}};
    }
    const auto ranks = mesh.dp * mesh.cp * mesh.tp;
    write_safetensors(to / fmt::format("rank_{:04}.safetensors", rank), bytes,
                      {{"tessera_recording", "1"},
                       {"rank", std::to_string(rank)},
                       {"ranks", std::to_string(ranks)},
                       {"step", "1"},
                       {"info", info.dump()},
                       {"tensors", entries.dump()}});
  }

  Exchange directory_;
  Json info_;
  std::map<std::string, Full> tensors_;
  std::map<std::string, Tensor> weights_;
};

AuditResult audit_recording(const fs::path& found, const fs::path& expected) {
  return audit::compare(Recording(found), Recording(expected), {});
}

void scale_by(Recorded& r, double factor) {
  for (double& x : r.values) x *= factor;
}
bool is_norm(const std::string& name) { return name.find("norm.weight") != std::string::npos; }
bool has(const std::string& name, const char* part) { return name.find(part) != std::string::npos; }

const Dump& dump() {
  static const Dump made;
  return made;
}

TEST(Audit, CorrectRecordingsHaveNoDivergence) {
  for (const Mesh& mesh :
       {Mesh{}, Mesh{.dp = 2}, Mesh{.tp = 2}, Mesh{.cp = 2}, Mesh{.m = 2}, Mesh{.dp = 2, .tp = 2, .cp = 2, .m = 2}}) {
    const std::string name = fmt::format("dp{}tp{}cp{}m{}", mesh.dp, mesh.tp, mesh.cp, mesh.m);
    const AuditResult r = audit_recording(dump().split(mesh, name), dump().path());
    EXPECT_EQ(r.verdict, Verdict::correct) << name << ": " << (r.causes.empty() ? "" : r.causes[0].evidence);
    EXPECT_GT(r.tensors.size(), 40u);
    EXPECT_GT(std::ranges::count_if(r.tensors, [](const auto& t) { return t.key.kind == Kind::updated; }), 10);
  }
}

struct Case {
  const char* cause;
  Mesh mesh;
  Fault fault;
  InfoFault info = {};
};

// A rank's fraction of the values, so that the sum over `ranks` is complete.
void make_partial(Recorded& r, int64_t rank, int64_t ranks) {
  for (size_t i = 0; i < r.values.size(); ++i)
    r.values[i] *= static_cast<int64_t>(i) % ranks == rank ? 0.9 : 0.1 / static_cast<double>(ranks - 1);
}

// The input gradient of the last feed-forward layer is wrong; `inside`: also the gradients of its column-parallel
// layers.
Fault change_mlp_backward(bool inside) {
  return [inside](Recorded& r) {
    if ((r.kind == Kind::output_grad && r.name == "model.layers.1.self_attn") ||
        (inside && r.kind == Kind::grad && r.name == "model.layers.1.mlp.up_proj.weight"))
      for (size_t i = 0; i < r.values.size(); ++i) r.values[i] *= std::cos(static_cast<double>(i));
  };
}

// The last block leaves some elements of its input unchanged: the same of each rank, or others; `narrow`: outputs are
// rounded to bf16.
Fault drop_elements(bool same, bool narrow = false) {
  auto inputs = std::make_shared<std::map<std::pair<int, int64_t>, std::vector<double>>>();
  return [same, narrow, inputs](Recorded& r) {
    if (r.kind != Kind::output) return;
    for (double& x : r.values)
      if (narrow) x = static_cast<double>(static_cast<float>(bfloat16(static_cast<float>(x))));
    std::vector<double>& input = (*inputs)[{r.rank, r.microbatch}];
    if (r.name == "model.layers.0") input = r.values;
    if (r.name != "model.layers.1") return;
    for (size_t i = 0; i < input.size(); ++i)
      if ((i * i + (same ? 0 : static_cast<size_t>(r.rank) * i)) % 7 == 2) r.values[i] = input[i];
  };
}

std::vector<Case> cases() {
  const auto grad = [](const Recorded& r) { return r.kind == Kind::grad; };
  const auto factor = [grad](double f) {
    return [grad, f](Recorded& r) {
      if (grad(r)) scale_by(r, f);
    };
  };
  return {
      {"factor-microbatches", {.m = 4}, factor(4)},
      {"factor-microbatches", {.m = 4}, factor(0.25)},
      {"factor-dp", {.dp = 4}, factor(4)},
      {"factor-dp", {.dp = 2, .m = 4}, factor(0.5)},
      {"factor-cp", {.cp = 2, .m = 4}, factor(2)},
      {"factor-dp", {.dp = 2, .cp = 2}, factor(2)},
      // The loss is a mean over the tokens of each context rank.
      {"factor-cp",
       {.dp = 2, .cp = 2},
       [grad](Recorded& r) {
         if (grad(r) || r.kind == Kind::output_grad) scale_by(r, 2);
       }},
      {"factor-tp",
       {.tp = 2},
       [grad](Recorded& r) {
         if (grad(r) && is_norm(r.name)) scale_by(r, 2);
       }},
      {"summed-twice", {.m = 4}, factor(2)},
      {"not-synchronized",
       {.dp = 2},
       [grad](Recorded& r) {
         if (grad(r)) scale_by(r, r.dp == 0 ? 0.7 : 1.3);
       }},
      {"norm-gradient-not-summed",
       {.tp = 2},
       [grad](Recorded& r) {
         if (grad(r) && is_norm(r.name)) make_partial(r, r.tp, 2);
       }},
      {"missing-forward-sum",
       {.tp = 2},
       [](Recorded& r) {
         if (r.kind == Kind::output && r.name == "model.layers.0.mlp") make_partial(r, r.tp, 2);
       }},
      {"input-gradient-not-summed",
       {.tp = 2},
       [](Recorded& r) {
         if (r.kind == Kind::output_grad && r.name == "model.layers.0") make_partial(r, r.tp, 2);
       }},
      {"input-gradient-not-summed", {.tp = 2}, change_mlp_backward(false)},
      {"wrong-slice", {.tp = 2}, change_mlp_backward(true)},
      {"dropout-seeds", {.cp = 2}, drop_elements(true)},
      {"dropout-seeds",
       {.tp = 2},
       [](Recorded& r) {
         if (r.kind == Kind::output && r.name == "model.layers.0.mlp") make_partial(r, r.tp, 2);
       },
       [](Json& info) { info["dropout"] = true; }},
      {"dropout-seeds", {.dp = 2}, drop_elements(true)},
      {"dropout-seeds", {.m = 4}, drop_elements(true, true)},
      {"unknown", {.cp = 2}, drop_elements(false)},
      {"wrong-slice",
       {.tp = 2},
       [values = std::make_shared<std::vector<double>>()](Recorded& r) {
         if (r.kind != Kind::parameter || r.name != "model.layers.0.mlp.up_proj.weight") return;
         r.tp == 0 ? void(*values = r.values) : void(r.values = *values);
       }},
      {"stale-parameters",
       {.dp = 2},
       [](Recorded& r) {
         if (r.kind == Kind::output && r.name == "model.layers.1.mlp" && r.dp == 1)
           for (size_t i = 0; i < r.values.size(); ++i) r.values[i] += 0.1 * std::sin(static_cast<double>(i));
       }},
      {"stale-parameters",
       {.dp = 2},
       [](Recorded& r) {
         if (r.kind == Kind::updated && r.dp == 1 && has(r.name, "up_proj")) scale_by(r, 1.01);
       }},
      {"not-synchronized",
       {.dp = 2},
       [](Recorded& r) {
         if (r.kind == Kind::parameter && r.dp == 1 && has(r.name, "up_proj")) scale_by(r, 1.01);
       }},
      // Without the previous update, whose direction follows from the optimizer state.
      {"stale-parameters",
       {.dp = 2},
       [](Recorded& r) {
         for (size_t i = 0; i < r.values.size(); ++i) {
           const double moment = std::sin(static_cast<double>(i)), square = 1 + std::cos(static_cast<double>(i)) / 2;
           if (r.kind == Kind::state) r.values[i] = r.name.ends_with("_sq") ? square : moment;
           if (r.kind == Kind::parameter && r.dp == 1 && has(r.name, "up_proj"))
             r.values[i] += 0.01 * moment / std::sqrt(square);
         }
       }},
      {"wrong-mask",
       {.cp = 2},
       [](Recorded& r) {
         if (r.kind == Kind::output && r.name == "model.layers.0.self_attn" && r.cp == 1)
           for (size_t i = 0; i < r.values.size(); ++i) r.values[i] *= std::cos(static_cast<double>(i));
       }},
      {"wrong-positions",
       {.cp = 2},
       [](Recorded& r) {
         if (r.kind == Kind::output && r.name == "model.layers.0.self_attn" && r.cp == 1)
           for (size_t i = 0; i < r.values.size(); ++i) r.values[i] *= 1 + 0.02 * std::cos(static_cast<double>(i));
       }},
      {"loss-scale",
       {},
       factor(1024),
       [](Json& info) {
         for (Json& loss : info["losses"]) loss["scale"] = 1024;
       }},
      {"update-order",
       {},
       {},
       [](Json& info) {
         for (Json& group : info["optimizer"]["groups"]) group["lr"] = group["lr"].get<double>() * 0.9;
       }},
      {"weight-decay",
       {},
       {},
       [](Json& info) {
         for (Json& group : info["optimizer"]["groups"]) group["weight_decay"] = 0.1;
       }},
      {"clip-norm",
       {},
       {},
       [](Json& info) {
         info["clip"] = {{"max_norm", 1e9}, {"norm", 1e-3}};
       }},
      {"recomputed-differently",
       {},
       {},
       [](Json& info) {
         info["recomputed"] = {{{"name", "model.layers.1"}}};
       }},
  };
}

TEST(Audit, NamesTheCauseOfEachFault) {
  int at = 0;
  for (const Case& c : cases()) {
    const AuditResult r =
        audit_recording(dump().split(c.mesh, fmt::format("case{}", at++), c.fault, c.info), dump().path());
    EXPECT_EQ(r.verdict, Verdict::diverges) << c.cause;
    ASSERT_FALSE(r.causes.empty()) << c.cause;
    EXPECT_EQ(r.causes[0].cause, c.cause) << at - 1 << ": " << r.causes[0].evidence;
  }
}

TEST(Audit, SumOfTokensIsAConvention) {
  const AuditResult r = audit_recording(dump().split({}, "sum",
                                                     [](Recorded& t) {
                                                       if (t.kind == Kind::grad) scale_by(t, 8 * 16);
                                                     }),
                                        dump().path());
  ASSERT_FALSE(r.causes.empty());
  EXPECT_EQ(r.causes[0].cause, "sum-instead-of-mean");
  EXPECT_EQ(r.verdict, Verdict::correct);
}

TEST(Audit, CoefficientsOfMicrobatchesIdentifyTheCause) {
  struct Weighted {
    const char* cause;
    Mesh mesh;
    std::vector<double> weights;
  };
  for (const Weighted& w :
       {Weighted{"microbatch-dropped", {.m = 4}, {1, 1, 0, 1}}, Weighted{"microbatch-repeated", {.m = 4}, {1, 2, 0, 1}},
        Weighted{"not-synchronized", {.dp = 4}, {2, 2, 2, 0}}}) {
    const auto gradients = dump().gradients(w.weights);
    const AuditResult r = audit_recording(dump().split(w.mesh, w.cause,
                                                       [&](Recorded& t) {
                                                         if (t.kind == Kind::grad) t.values = gradients.at(t.name);
                                                       }),
                                          dump().path());
    ASSERT_FALSE(r.causes.empty()) << w.cause;
    EXPECT_EQ(r.causes[0].cause, w.cause) << r.causes[0].evidence;
    ASSERT_EQ(r.seen.weights.size(), 4u);
    for (size_t i = 0; i < 4; ++i) EXPECT_NEAR(r.seen.weights[i], w.weights[i], 1e-6) << w.cause;
  }
}

// Four sequences have 4 trained targets and four have 16: means over micro-batches have other weights.
TEST(Audit, MeansOfMeansFollowFromUnequalTargets) {
  const Dump unequal("", true);
  EXPECT_EQ(audit_recording(unequal.split({.m = 2}, "right"), unequal.path()).verdict, Verdict::correct);
  const Dump few("", true, {0, 4}), many("", true, {4, 8});  // means over their own targets
  const AuditResult r = audit_recording(unequal.split({.m = 2}, "means",
                                                      [&](Recorded& t) {
                                                        if (t.kind != Kind::grad) return;
                                                        t.values = few.value(t.name + ".grad");
                                                        const std::vector<double>& rest = many.value(t.name + ".grad");
                                                        for (size_t i = 0; i < rest.size(); ++i)
                                                          t.values[i] = (t.values[i] + rest[i]) / 2;
                                                      }),
                                        unequal.path());
  ASSERT_FALSE(r.causes.empty());
  EXPECT_EQ(r.causes[0].cause, "mean-of-means") << r.causes[0].evidence;
}

TEST(Audit, FactorIsFoundInRoundedValues) {
  const auto rounded = [](Recorded& r, double factor) {
    for (double& x : r.values) x = static_cast<double>(static_cast<float>(bfloat16(static_cast<float>(factor * x))));
  };
  const auto fault = [&](double factor) {
    return [&rounded, factor](Recorded& r) {
      if (audit::to_string(r.kind) != "output" && r.kind != Kind::output_grad && r.kind != Kind::grad) return;
      rounded(r, r.kind == Kind::grad && r.name == "model.layers.1.mlp.up_proj.weight" ? factor : 1);
    };
  };
  audit::Repeats repeats;
  repeats.push_back(std::make_unique<Recording>(dump().split({}, "rounded", fault(1))));
  const Recording expected(dump().path());
  EXPECT_EQ(audit::compare(Recording(dump().split({.m = 2}, "right", fault(1))), expected, repeats).verdict,
            Verdict::correct);
  const AuditResult r = audit::compare(Recording(dump().split({.m = 2}, "wrong", fault(1.02))), expected, repeats);
  EXPECT_EQ(r.verdict, Verdict::diverges);
  ASSERT_TRUE(r.first);
  EXPECT_EQ(r.first->tensor.key.name, "model.layers.1.mlp.up_proj.weight");
  EXPECT_NEAR(r.first->tensor.factor, 1.02, 2e-3);
}

TEST(Audit, OneRankOfTesseraIsAReference) {
  const test::Exchange directory;
  for (const char* options : {"dtype=fp32", "dtype=bf16", "dtype=fp32 family=gpt2 untied=false"}) {
    const Dump made(options);
    const Recording found(made.path());
    const fs::path to = directory.path(options);
    const audit::ReferenceRuns runs = audit::run_references(found, {made.model, made.weights()}, to);
    audit::Repeats repeats;
    for (const fs::path& path : runs.repeats) repeats.push_back(std::make_unique<Recording>(path));
    EXPECT_EQ(repeats.size(), 3u);
    const AuditResult r = audit::compare(found, Recording(runs.reference), repeats);
    EXPECT_TRUE(r.measured);
    EXPECT_EQ(std::ranges::count_if(r.tensors, [](const auto& t) { return t.wrong; }), 0)
        << options << ": " << (r.causes.empty() ? "" : r.causes[0].evidence);
  }
}

TEST(Audit, RejectsMalformedRecordings) {
  const auto refused = [](const fs::path& found, const fs::path& expected, const std::string& part) {
    expect_error(Status::input, {part}, [&] { audit_recording(found, expected); });
  };
  const fs::path right = dump().path(), missing = dump().split({.dp = 2}, "missing"), torn = dump().split({}, "torn");
  fs::remove(missing / "rank_0001.safetensors");
  refused(missing, right, "expected 2 files, one per rank, got 1");
  fs::resize_file(torn / "rank_0000.safetensors", fs::file_size(torn / "rank_0000.safetensors") - 8);
  refused(torn, right, "rank_0000.safetensors");
  refused(right / "none", right, "no such file");
  refused(dump().split({}, "nan",
                       [](Recorded& r) {
                         if (r.kind == Kind::grad) r.values[0] = NAN;
                       }),
          right, "expected finite values, got nan");
  refused(dump().split({}, "tokens",
                       [](Recorded& r) {
                         if (r.kind == Kind::input_ids) r.values.assign(r.values.size(), 1);
                       }),
          right, "expected the tokens of");
  refused(dump().split({}, "folder",
                       [](Recorded& r) {
                         if (r.kind == Kind::parameter)
                           for (double& x : r.values) x += 1;
                       }),
          right, "expected the parameters of");
  refused(dump().split({}, "names",
                       [](Recorded& r) {
                         if (r.kind != Kind::input_ids && r.kind != Kind::targets) r.name = "other." + r.name;
                       }),
          right, "got none of the same name");
}

}  // namespace
}  // namespace tessera
