// Modules on recorded inputs.
#include "verify/audit/local.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "autograd/ops.h"
#include "models/decoder.h"
#include "models/hub_tensors.h"
#include "models/stages.h"
#include "verify/audit/compare.h"
#include "verify/audit/pairs.h"

namespace tessera::audit {

namespace {

constexpr double kLocalMargin = 4;    // of measured rounding errors
constexpr double kTooNoisy = 0.3;     // larger tolerances refute nothing
constexpr double kFindable = 0.02;    // of a factor
constexpr double kRoutingMargin = 8;  // choices of experts by smaller differences of logits are ambiguous
constexpr int64_t kMaxPassElements = int64_t{1} << 22;  // of a pass
constexpr int64_t kMinRows = 8;                         // of a matrix; else elements are independent

// Least squares, with the standard error of the factor if rows are independent.
struct RowFit {
  Sums all = {};
  double ff = 0, fe = 0, ee = 0;  // squares and products of the rows' f.e and e.e
  void add(const double* f, const double* e, int64_t count) {
    Sums row;
    for (int64_t i = 0; i < count; ++i) row.add(f[i], e[i], 1);
    all.add(row);
    ff += row.fe * row.fe, fe += row.fe * row.ee, ee += row.ee * row.ee;
  }
  void add(const RowFit& other) {
    all.add(other.all);
    ff += other.ff, fe += other.fe, ee += other.ee;
  }
  double standard_error() const {
    const double x = all.factor();
    return all.ee > 0 ? std::sqrt(std::max(0.0, ff - 2 * x * fe + x * x * ee)) / all.ee : 0;
  }
};

struct LocalEstimate {
  std::vector<RowFit> found = {};      // by replica, relative to exact values
  RowFit rounded = {};                 // values in the recording's dtype, relative to exact values
  std::map<Batch, Sums> batches = {};  // of the first replica
  bool ambiguous = false;              // depends on ambiguous choices of experts
};

struct SequenceChunk {
  Batch batch;
  int64_t first = 0, count = 0, tokens = 0;  // sequences of the micro-batch; tokens of each
  int64_t rows = 0;                          // of all sequences of the micro-batch
  std::vector<int32_t> ids, targets;
};

std::vector<SequenceChunk> make_chunks(const Recording& found, int64_t width) {
  std::vector<SequenceChunk> out;
  std::map<Batch, int64_t> rows;
  for (const TokenRow& row : found.rows()) {
    const auto tokens = std::ssize(row.ids);
    rows[row.batch] += tokens;
    if (out.empty() || out.back().batch != row.batch || (out.back().count + 1) * tokens * width > kMaxPassElements)
      out.push_back({row.batch, row.row, 0, tokens, 0, {}, {}});
    ++out.back().count;
    for (const int64_t id : row.ids) out.back().ids.push_back(static_cast<int32_t>(id));
    for (const int64_t id : row.targets) out.back().targets.push_back(static_cast<int32_t>(id));
  }
  for (SequenceChunk& c : out) c.rows = rows.at(c.batch);
  return out;
}

struct Precision {
  DType dtype = DType::float64;
  double moved = 0;  // relative change of every other recorded value
  ArenaPtr arena = {};
};

std::vector<double> to_doubles(const Tensor& t) { return t.on_host().to(DType::float64).to_vector<double>(); }

using LocalValues = std::map<Key, std::vector<double>>;

class Recorded {
 public:
  explicit Recorded(const Recording& found) : found_(found) {}
  std::map<Batch, double> factors = {};  // of output gradients, relative to the mean over the global batch

  size_t replicas(const Key& key, Batch batch) const {
    const auto* const all = found_.find(key.kind, key.name);
    return all && all->contains(batch) ? all->at(batch).replicas.size() : 0;
  }
  // The first `width` columns; empty if the recording has no such tensor. NaN where no rank has the element.
  std::vector<double> read(const Key& key, const SequenceChunk& c, int64_t width, size_t replica = 0) const {
    if (replica >= replicas(key, c.batch)) return {};
    const StoredTensor& t = found_.find(key.kind, key.name)->at(c.batch);
    const int64_t first = c.first * c.tokens, rows = c.count * c.tokens;
    if (t.shape.size() < 2 || t.width() < width || t.rows() != c.rows) return {};
    std::vector<double> all, out;
    found_.read(t, replica, {first, first + rows}, all);
    const auto factor = factors.find(c.batch);
    const double scale = key.kind == Kind::output_grad && factor != factors.end() ? 1 / factor->second : 1;
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t i = 0; i < width; ++i) out.push_back(scale * all[static_cast<size_t>(r * t.width() + i)]);
    return out;
  }
  // Undefined if an element is missing.
  Tensor tensor(const Key& key, const SequenceChunk& c, const Shape& shape, const Precision& p) const {
    std::vector<double> values = read(key, c, shape[-1]);
    if (values.empty() || std::ranges::any_of(values, [](double x) { return std::isnan(x); })) return {};
    for (size_t i = 0; i < values.size(); i += 2) values[i] *= 1 + p.moved;
    return Tensor::of<double>(values, shape, make_arena()).to(p.dtype).to(p.arena);
  }

 private:
  const Recording& found_;
};

// A layer, with the embedding before the first and the norm and the head after the last.
class LocalStage {
 public:
  LocalStage(const Recorded& recorded, const ModelConfig& config, int64_t stage, const FullTensors& weights,
             const Precision& precision)
      : recorded_(recorded), names_(module_names(config)), stage_(stage), precision_(precision), model_(config) {
    std::vector<Range> layers;
    for (int64_t i = 0; i < config.layers; ++i) layers.push_back({i, i + 1});
    retain_stages(model_, layers, [stage](int other) { return other == stage; });
    model_.materialize(0, precision.arena, precision.dtype, accum_dtype(precision.dtype));
    read_values(model_.units(), weights);
    DecoderBlock& block = *model_.blocks[static_cast<size_t>(stage)];
    const std::string layer = names_.layer(stage);
    watch(model_.tokens, names_.embedding);
    watch(block.attn, layer + names_.attention);
    watch(block.mlp, layer + names_.feed_forward);
    watch(block, layer);
    watch(model_.norm, names_.norm);
    watch(model_.head, names_.head);
    for (MixtureOfExperts* const mixture : block.all<MixtureOfExperts>())
      mixture->router().wrap([this](const Module::Inner& inner, const Var& x) {
        Var made = inner(x);
        router = to_doubles(made.value());
        return made;
      });
  }

  // The computed outputs and output gradients.
  LocalValues run(const SequenceChunk& c) {
    chunk_ = &c;
    values_.clear();
    const bool last = stage_ + 1 == model_.config.layers;
    const Shape shape{c.count, c.tokens, model_.config.channels};
    Key before{Kind::output, names_.layer(stage_ - 1)};
    root_ = last ? names_.head : names_.layer(stage_);
    Var x;
    if (stage_ > 0) {
      const Tensor input = recorded_.tensor(before, c, shape, precision_);
      if (!input.defined()) return {};
      x = Var::input(input);
    }
    Var y = model_.layer(stage_)(
        stage_ > 0 ? x : model_.embed(Tensor::of<int32_t>(c.ids, {c.count, c.tokens}, precision_.arena)));
    if (last) y = model_.logits(model_.finish(y));
    const Tensor seed = recorded_.tensor({Kind::output_grad, root_}, c, y.shape(), precision_);
    complete = complete && seed.defined();
    if (seed.defined()) backward(y, {.seed = seed});
    before.kind = Kind::output_grad;
    if (seed.defined() && x.defined()) values_[before] = to_doubles(x.grad());
    return std::exchange(values_, {});
  }
  // Adds the gradients of all passes; tied weights are named as one.
  void add_gradients(std::map<std::string, std::vector<double>>& to) {
    for (const Parameter* const p : model_.parameters()) {
      const Tensor gradient = p->var.grad();
      if (!gradient.defined()) continue;
      const std::vector<double> values = to_doubles(gradient);
      std::vector<double>& sum = to[p->source()];
      sum.resize(values.size());
      for (size_t i = 0; i < values.size(); ++i) sum[i] += values[i];
    }
  }
  // Parameters whose gradients depend on the choices of experts.
  std::set<std::string> routed() {
    DecoderBlock& block = *model_.blocks[static_cast<size_t>(stage_)];
    std::set<std::string> out;
    for (Module* const module : {static_cast<Module*>(&block.mlp), static_cast<Module*>(&block.norm2)})
      for (const Parameter* const p : module->parameters()) out.insert(p->source());
    return out;
  }
  std::vector<double> router = {};  // logits of the last pass, if the layer has experts
  bool complete = true;             // every pass had an output gradient

 private:
  void watch(Module& module, const std::string& name) {
    module.wrap([this, name](const Module::Inner& inner, const Var& x) { return replaced(inner(x), name); });
  }
  // The recorded output in place of the computed one, and its recorded gradient.
  Var replaced(const Var& made, const std::string& name) {
    const Key out{Kind::output, name}, grad{Kind::output_grad, name};
    values_[out] = to_doubles(made.value());
    const Tensor value = recorded_.tensor(out, *chunk_, made.shape(), precision_);
    return record_one("recorded", value.defined() ? value : made.value(), {made}, [this, grad](Grads& g) {
      if (grad.name != root_) values_[grad] = to_doubles(g.output());
      const Tensor gradient = recorded_.tensor(grad, *chunk_, g.output().shape(), precision_);
      g.set(0, gradient.defined() ? gradient : g.output());
    });
  }

  const Recorded& recorded_;
  const ModuleNames names_;
  const int64_t stage_;
  const Precision precision_;
  Decoder model_;
  const SequenceChunk* chunk_ = nullptr;
  std::string root_;
  LocalValues values_;
};

// Tokens whose choice of experts rounding errors may change.
std::vector<bool> ambiguous_tokens(const std::vector<double>& exact, const std::vector<double>& rounded,
                                   const ExpertConfig& experts) {
  if (exact.size() != rounded.size() || exact.empty()) return {};
  double squares = 0;
  for (size_t i = 0; i < exact.size(); ++i) squares += (exact[i] - rounded[i]) * (exact[i] - rounded[i]);
  const double least = kRoutingMargin * std::sqrt(squares / static_cast<double>(exact.size()));
  std::vector<bool> out;
  for (auto row = exact.begin(); row != exact.end(); row += experts.count) {
    std::vector<double> sorted(row, row + experts.count);
    std::ranges::sort(sorted, std::greater());
    const auto k = static_cast<size_t>(experts.per_token);
    out.push_back(k < sorted.size() && sorted[k - 1] - sorted[k] < least);
  }
  return out;
}

class LocalComparison {
 public:
  LocalComparison(const Recording& found, const ModelConfig& config, const FullTensors& weights, const ArenaPtr& arena)
      : found_(found), config_(config), weights_(weights), recorded_(found), exact_{.arena = arena} {
    const double eps = found.epsilon();
    rounded_ = {eps > 1e-4   ? DType::bfloat16
                : eps > 1e-9 ? DType::float32
                             : DType::float64,
                eps > 1e-9 ? 0 : eps, arena};
    config_.tie_copies = config.tied;
    chunks_ = make_chunks(found, std::max(config.vocab, 4 * config.channels));
  }

  LocalErrors run() {
    compare_loss();
    for (int64_t stage = config_.layers; stage-- > 0;) compare_stage(stage);
    for (const auto& [key, estimate] : estimates_)
      if (std::ranges::any_of(estimate.found, [](const RowFit& fit) { return fit.all.n > 0; }))
        out_.errors[key] = judge(key, estimate);
    return out_;
  }

 private:
  // Cross-entropy of the recorded logits. Sets the factors of output gradients.
  void compare_loss() {
    const Key grad{Kind::output_grad, "lm_head"};
    double trained = 0;
    for (const SequenceChunk& c : chunks_)
      trained += static_cast<double>(std::ranges::count_if(c.targets, [](int32_t t) { return t >= 0; }));
    std::map<Batch, Sums> sums;
    const auto pass = [&](const SequenceChunk& c, const Precision& p, double& loss) -> LocalValues {
      const Shape shape{c.count * c.tokens, config_.vocab};
      const Tensor logits = recorded_.tensor({Kind::output, "lm_head"}, c, shape, p);
      if (!logits.defined()) return {};
      const Var x = Var::input(logits);
      const Loss made = cross_entropy(x, Tensor::of<int32_t>(c.targets, {shape[0]}, p.arena), 1 / trained);
      backward(made.mean);
      loss += made.loss_sum / trained;
      return {{grad, to_doubles(x.grad())}};
    };
    double exact = 0, rounded = 0, unused = 0;
    for (const SequenceChunk& c : chunks_) {
      const LocalValues expected = pass(c, exact_, unused);
      const std::vector<double> f = recorded_.read(grad, c, config_.vocab);
      for (size_t i = 0; i < f.size() && !expected.empty(); ++i) sums[c.batch].add(f[i], expected.at(grad)[i], 1);
    }
    for (const auto& [batch, s] : sums)
      if (s.factor() != 0 && s.ee > 0) recorded_.factors[batch] = s.factor();
    for (const SequenceChunk& c : chunks_) {
      const LocalValues expected = pass(c, exact_, exact);
      if (expected.empty()) return;
      compare(c, expected, pass(c, rounded_, rounded), {});
    }
    out_.loss = exact;
    out_.loss_tolerance = std::max({kLocalMargin * std::abs(rounded / exact - 1), 2 * found_.epsilon(), 1e-6});
  }

  void compare_stage(int64_t stage) {
    LocalStage exact(recorded_, config_, stage, weights_, exact_),
        rounded(recorded_, config_, stage, weights_, rounded_);
    bool ambiguous = false;
    for (const SequenceChunk& c : chunks_) {
      const LocalValues expected = exact.run(c);
      const LocalValues noisy = rounded.run(c);
      if (expected.empty()) {
        complete_ = false;
        return;
      }
      const std::vector<bool> unclear = ambiguous_tokens(exact.router, rounded.router, config_.experts);
      ambiguous = ambiguous || std::ranges::find(unclear, true) != unclear.end();
      compare(c, expected, noisy, unclear);
    }
    const bool known = exact.complete && std::ranges::all_of(chunks_, [&](const SequenceChunk& c) {
                         return recorded_.factors.contains(c.batch);
                       });
    if (!known) complete_ = false;
    exact.add_gradients(exact_gradients_), rounded.add_gradients(rounded_gradients_);
    const std::set<std::string> routed = ambiguous ? exact.routed() : std::set<std::string>();
    for (const HubTensor& t : hub_tensors(config_)) {
      const bool tied = config_.tied && t.name == "tokens.weight";
      if (!exact_gradients_.contains(t.name) || (tied && stage > 0)) continue;
      if (tied ? complete_ : known) compare_gradient(t, routed.contains(t.name));
      exact_gradients_.erase(t.name), rounded_gradients_.erase(t.name);
    }
  }

  void compare(const SequenceChunk& c, const LocalValues& exact, const LocalValues& rounded,
               const std::vector<bool>& skipped) {
    const int64_t rows = c.count * c.tokens;
    for (const auto& entry : exact) {
      const Key& key = entry.first;
      const std::vector<double>& e = entry.second;
      LocalEstimate& to = estimates_[key];
      const int64_t width = std::ssize(e) / rows;
      const auto fit_rows = [&](const std::vector<double>& f) {
        RowFit fit;
        for (int64_t r = 0; r < rows; ++r)
          if (skipped.empty() || !skipped[static_cast<size_t>(r)])
            fit.add(&f[static_cast<size_t>(r * width)], &e[static_cast<size_t>(r * width)], width);
        return fit;
      };
      for (size_t replica = 0; replica < recorded_.replicas(key, c.batch); ++replica) {
        const std::vector<double> f = recorded_.read(key, c, width, replica);
        if (f.empty()) continue;
        const RowFit fit = fit_rows(f);
        if (to.found.size() <= replica) to.found.resize(replica + 1);
        to.found[replica].add(fit);
        if (replica == 0) to.batches[c.batch].add(fit.all);
      }
      to.rounded.add(fit_rows(rounded.at(key)));
    }
  }

  // Slices of a tensor have published names; a tied head may have a second one.
  void compare_gradient(const HubTensor& t, bool ambiguous) {
    const std::vector<double>&exact = exact_gradients_.at(t.name), &rounded = rounded_gradients_.at(t.name);
    const int64_t columns = t.shape.numel() / t.shape[0];
    int64_t first = 0;
    std::vector<double> f;
    for (const HubTensor::Slice& slice : t.slices) {
      const int64_t size = slice.rows * columns;
      const auto part = [&](const std::vector<double>& all) {
        std::vector<double> out(static_cast<size_t>(size));
        for (int64_t i = 0; i < size; ++i)
          out[static_cast<size_t>(t.transposed ? i % columns * slice.rows + i / columns : i)] =
              all[static_cast<size_t>(first + i)];
        return out;
      };
      const std::vector<double> e = part(exact), m = part(rounded);
      first += size;
      for (const std::string& name : {slice.name, std::string("lm_head.weight")}) {
        const auto* const stored = found_.find(Kind::grad, name);
        if (!stored || (name != slice.name && (!config_.tied || t.name != "tokens.weight"))) continue;
        const StoredTensor& s = stored->begin()->second;
        if (s.shape != t.slice_shape(slice)) continue;
        LocalEstimate& to = estimates_[{Kind::grad, name}];
        to.ambiguous = ambiguous;
        const int64_t row = s.rows() >= kMinRows ? s.width() : 1;
        const auto add = [&](RowFit& fit, const std::vector<double>& x) {
          for (int64_t i = 0; i < size; i += row) fit.add(&x[static_cast<size_t>(i)], &e[static_cast<size_t>(i)], row);
        };
        to.found.resize(s.replicas.size());
        for (size_t replica = 0; replica < s.replicas.size(); ++replica) {
          found_.read(s, replica, {0, s.rows()}, f);
          add(to.found[replica], f);
        }
        add(to.rounded, m);
      }
    }
  }

  LocalError judge(const Key& key, const LocalEstimate& x) const {
    const double eps = found_.epsilon();
    const bool narrow = eps > 1e-4;
    const double sums = key.kind == Kind::grad ? static_cast<double>(recorded_.factors.size()) : 1;
    LocalError out;
    out.tolerance = std::max(kLocalMargin * x.rounded.all.distance(), (narrow ? 2 : 8) * eps * std::sqrt(sums));
    const double error = std::max(std::abs(x.rounded.all.factor() - 1), x.rounded.standard_error());
    for (size_t r = 0; r < x.found.size(); ++r) {
      const RowFit& f = x.found[r];
      if (r > 0 && f.all.distance() <= out.distance) continue;
      out.distance = f.all.distance(), out.factor = f.all.factor(), out.replica = r;
      out.factor_tolerance = kLocalMargin * std::max(error, f.standard_error()) + (narrow ? 0.5 : 8) * eps;
    }
    double largest = -1;
    for (const auto& [batch, s] : x.batches)
      if (s.distance() > largest) largest = s.distance(), out.batch = batch;
    out.wrong = (out.tolerance <= kTooNoisy && out.distance > out.tolerance) ||
                (out.factor_tolerance <= kTooNoisy && std::abs(out.factor - 1) > out.factor_tolerance);
    out.wrong = out.wrong && !x.ambiguous;
    out.undecided = !out.wrong && (x.ambiguous || std::min(out.tolerance, out.factor_tolerance) >= kFindable);
    return out;
  }

  const Recording& found_;
  ModelConfig config_;
  const FullTensors& weights_;
  Recorded recorded_;
  Precision exact_, rounded_;
  std::vector<SequenceChunk> chunks_;
  std::map<Key, LocalEstimate> estimates_;
  std::map<std::string, std::vector<double>> exact_gradients_, rounded_gradients_;  // by parameter, until compared
  bool complete_ = true;  // the gradients of all stages so far
  LocalErrors out_;
};

}  // namespace

LocalErrors find_local_errors(const Recording& found, const ModelConfig& config, const FullTensors& weights,
                              const ArenaPtr& arena) {
  if (found.info("dropout") == true || config.lora.rank > 0 || config.quantize.codec != Codec::none) return {};
  return LocalComparison(found, config, weights, arena).run();
}

void add_local_error(const LocalErrors& local, double loss, TensorResult& t) {
  if (const auto found = local.errors.find(t.key); found != local.errors.end()) t.local = found->second;
  if (t.key.kind == Kind::loss && local.loss > 0 && loss > 0) {
    // Under the convention of the recording, which the factor to the reference's loss includes.
    t.local = LocalError{.factor = t.factor * loss / local.loss};
    t.local->distance = std::abs(t.local->factor - 1);
    t.local->tolerance = t.local->factor_tolerance = local.loss_tolerance;
    t.local->wrong = t.local->distance > t.local->tolerance;
  }
  if (!t.local) return;
  t.only_local = t.local->wrong && !t.wrong;
  t.wrong = t.wrong || t.local->wrong;
  const bool told = !t.undecided && std::min(t.tolerance, t.factor_tolerance) < kFindable;
  t.undecided = !t.wrong && t.local->undecided && !told;
}

}  // namespace tessera::audit
