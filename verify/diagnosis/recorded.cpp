// Rules for recorded steps of other programs (verify/audit).
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "verify/diagnosis/diagnosis.h"

namespace tessera {
namespace {

constexpr double kNearFactor = 0.03;

bool is_near(double x, double y) { return std::abs(x - y) <= kNearFactor * std::abs(y); }

// Axes over which losses are means, and over which reductions average; preferred ones first.
struct AveragedAxis {
  std::string_view cause;
  int64_t RecordedStep::*size;
};
constexpr auto kAveraged = std::to_array<AveragedAxis>({{"factor-dp", &RecordedStep::dp},
                                                        {"factor-cp", &RecordedStep::cp},
                                                        {"factor-microbatches", &RecordedStep::microbatches}});

struct RecordedSymptoms {
  explicit RecordedSymptoms(const RecordedStep& r) : step(r) {
    for (const RecordedTensor& t : r.wrong)
      if (t.kind == "grad") gradients.push_back(&t);
  }
  const RecordedTensor* first() const { return step.wrong.empty() ? nullptr : &step.wrong.front(); }
  // A wrong loss shows only that something is wrong if a later tensor is.
  const RecordedTensor& main() const {
    static const RecordedTensor none{.kind = "", .name = ""};
    const bool later = first() && first()->kind == "loss" && step.wrong.size() > 1;
    return later ? step.wrong[1] : first() ? *first() : none;
  }
  bool wrong_loss() const { return first() && first()->kind == "loss"; }
  bool all_gradients() const { return !gradients.empty() && std::ssize(gradients) >= step.gradients; }
  template <class F>
  bool only(const F& f) const {
    return !gradients.empty() && std::ranges::all_of(gradients, [&](const auto* g) { return f(*g); });
  }
  // Common factor of the wrong gradients; 0 if there is none.
  double factor() const {
    if (gradients.empty() || !gradients[0]->factor) return 0;
    const double f = *gradients[0]->factor;
    return only([&](const auto& g) { return g.factor && is_near(*g.factor, f); }) ? f : 0;
  }
  // Of the first divergence, if it is an output or its gradient, else of all wrong parameter gradients.
  double first_factor() const {
    return main().kind.starts_with("output") ? main().factor.value_or(0) : main().kind == "grad" ? factor() : 0;
  }
  bool is_factor(int64_t size) const {
    const double f = first_factor();
    return size > 1 && (is_near(f, static_cast<double>(size)) || is_near(f, 1.0 / static_cast<double>(size)));
  }
  // The first set of averaged axes, as a bit mask, whose sizes have this product.
  std::optional<unsigned> axes(double product) const {
    for (unsigned set = 0; set < 1U << kAveraged.size(); ++set) {
      double sizes = 1;
      for (size_t i = 0; i < kAveraged.size(); ++i)
        if ((set >> i & 1U) != 0) sizes *= static_cast<double>(step.*kAveraged.at(i).size);
      if (is_near(sizes, product)) return set;
    }
    return {};
  }
  // Whether the factor of the gradients follows from this axis: the loss of a micro-batch is a mean over it, which
  // output gradients show, and the reductions do not average over it, or the reverse. A factor of some gradients only
  // is that of tensor ranks, because losses and data ranks are common to all parameters.
  bool explains(std::string_view cause) const {
    if (cause == "factor-tp") return !all_gradients();
    const double loss = step.output_factor, excess = factor();
    if (loss <= 0 || excess <= 0) return false;
    const std::optional<unsigned> means = axes(loss), averages = axes(loss / excess);
    if (!means || !averages) return false;
    const unsigned left = excess > 1 ? *means & ~*averages : *averages & ~*means;
    for (size_t i = 0; i < kAveraged.size(); ++i)
      if ((left >> i & 1U) != 0 && kAveraged.at(i).cause == cause) return true;
    return false;
  }
  // Wrong gradients of weights although the gradients of the outputs after them are right.
  std::vector<const RecordedTensor*> downstream() const {
    std::vector<const RecordedTensor*> out;
    for (const RecordedTensor* const g : gradients)
      if (g->downstream && g->ndim > 1) out.push_back(g);
    return out;
  }
  const RecordedStep& step;
  std::vector<const RecordedTensor*> gradients;
};

bool has(std::string_view name, std::string_view part) { return name.find(part) != std::string_view::npos; }
bool is_expert(const RecordedTensor& t) { return has(t.name, "expert"); }
// The module that chooses experts, and its weight.
bool is_router(const RecordedTensor& t) {
  return has(t.name, "router") || has(t.name, ".gate.") || t.name.ends_with(".gate");
}
bool is_routed(const RecordedTensor& t) { return is_expert(t) || is_router(t) || has(t.name, "moe"); }
bool is_column(const RecordedTensor& t) {
  return std::ranges::any_of(
      std::array{"q_proj", "k_proj", "v_proj", "qkv", "c_attn", "gate_proj", "up_proj", "gate_up_proj", "c_fc", "fc1"},
      [&](const char* module) { return t.name.ends_with(module); });
}
bool is_key_or_value(const RecordedTensor& t) {
  return std::ranges::any_of(std::array{"k_proj", "v_proj", "qkv", "c_attn", "query_key_value"},
                             [&](const char* module) { return has(t.name, module); });
}
bool is_head(const RecordedTensor& t) { return has(t.name, "lm_head"); }
bool is_attention(const RecordedTensor& t) { return has(t.name, "attn") || has(t.name, "attention"); }
bool is_update(const RecordedTensor& t) { return t.kind == "updated" || t.kind == "lr"; }
bool is_norm_or_bias(const RecordedTensor& t) { return t.ndim <= 1; }
bool is_tied(const RecordedTensor& t) {
  return has(t.name, "embed") || has(t.name, "wte") || has(t.name, "lm_head") || has(t.name, "tok");
}

bool varies(const std::vector<double>& weights) {
  if (weights.size() < 2) return false;
  const auto [low, high] = std::ranges::minmax(weights);
  return high - low > 0.02 * std::abs(high);
}
double largest_weight(const RecordedStep& s) { return s.weights.empty() ? 0 : *std::ranges::max_element(s.weights); }
bool has_zero_weight(const RecordedStep& s) {
  return s.weights.size() > 1 &&
         std::ranges::any_of(s.weights, [&](double w) { return std::abs(w) < 0.05 * largest_weight(s); });
}
bool has_double_weight(const RecordedStep& s) {
  if (s.weights.size() < 2) return false;
  std::vector<double> sorted = s.weights;
  std::ranges::sort(sorted);
  const double low = sorted.front() < 0.05 * sorted.back() ? sorted[1] : sorted.front();
  return is_near(low, 1) && is_near(sorted.back(), 2) && (sorted.size() > 2 || !is_near(sorted.front(), sorted.back()));
}
// Weights are inversely proportional to the numbers of targets.
bool means_of_means(const RecordedStep& s) {
  if (!varies(s.weights) || s.targets.size() != s.weights.size()) return false;
  const double first = s.weights[0] * static_cast<double>(s.targets[0]);
  for (size_t i = 1; i < s.weights.size(); ++i)
    if (!is_near(s.weights[i] * static_cast<double>(s.targets[i]), first)) return false;
  return true;
}

// Some micro-batches with as many targets as others have a multiple of their coefficient.
bool scaled_microbatches(const RecordedStep& s) {
  if (!varies(s.weights) || std::ranges::any_of(s.targets, [&](int64_t t) { return t != s.targets[0]; })) return false;
  const auto [low, high] = std::ranges::minmax(s.weights);
  return low > 0 && is_near(high / low, std::round(high / low));
}
bool is_power_of_two(double x) { return x >= 256 && std::abs(std::log2(x) - std::round(std::log2(x))) < 1e-3; }

// `kind`: of the first wrong tensor `t`, apart from the loss; empty: any, or none.
struct RecordedRule {
  std::string_view cause, text, kind;
  bool (*fits)(const RecordedSymptoms& f, const RecordedTensor& t);
};
using Wrong = RecordedTensor;
// More specific rules come first.
constexpr auto kRecordedRules = std::to_array<RecordedRule>({
    {"wrong-sequences", "ranks compute sequences other than the reference's", "",
     [](const RecordedSymptoms& f, const Wrong&) { return f.step.foreign > 0; }},
    {"microbatch-repeated", "a micro-batch or a rank's rows occur twice, in place of others", "",
     [](const RecordedSymptoms& f, const Wrong&) { return f.step.repeated > 0; }},
    {"microbatch-dropped", "rows of the global batch are missing", "",
     [](const RecordedSymptoms& f, const Wrong&) { return f.step.dropped > 0 && f.step.repeated == 0; }},
    {"wrong-targets", "the targets are not the tokens that follow, for example at the boundaries of context ranks",
     "targets", [](const RecordedSymptoms&, const Wrong&) { return true; }},
    {"wrong-slice", "the slices of the ranks do not cover a tensor", "",
     [](const RecordedSymptoms& f, const Wrong&) { return !f.step.gaps.empty(); }},
    {"wrong-slice", "a rank has another rank's slice of a parameter", "parameter",
     [](const RecordedSymptoms&, const Wrong& t) { return t.elsewhere; }},
    {"stale-parameters", "a rank has the values of a parameter from before the previous update: it was not gathered",
     "parameter", [](const RecordedSymptoms&, const Wrong& t) { return t.of_update > 0; }},
    {"not-synchronized", "parameters of replicas differ before the step: they are not synchronized over the axis",
     "parameter", [](const RecordedSymptoms&, const Wrong& t) { return !t.axis.empty(); }},
    {"stale-parameters", "a rank has old values of a parameter", "parameter",
     [](const RecordedSymptoms&, const Wrong&) { return true; }},
    {"dropout-seeds", "dropout masks are equal where they must differ", "",
     [](const RecordedSymptoms& f, const Wrong&) { return f.step.same_masks; }},
    {"dropout-seeds", "dropout masks differ where they must be equal", "output",
     [](const RecordedSymptoms& f, const Wrong& t) {
       return f.step.dropout &&
              (t.axis.starts_with("tp") || t.first_token > 0 || t.some_samples || t.some_data_ranks);
     }},
    {"recomputed-differently", "the recomputed forward pass differs from the first, for example in its random numbers",
     "", [](const RecordedSymptoms& f, const Wrong&) { return !f.step.recomputed.empty(); }},
    {"missing-forward-sum", "the outputs of a row-parallel layer are not reduced over the tensor axis", "output",
     [](const RecordedSymptoms& f, const Wrong& t) { return t.axis.starts_with("tp") && !f.step.dropout; }},
    {"document-boundary", "attention or positions do not respect the boundaries of documents", "output",
     [](const RecordedSymptoms& f, const Wrong& t) { return f.step.document && !is_tied(t); }},
    {"wrong-positions", "tokens have wrong positions", "output",
     [](const RecordedSymptoms& f, const Wrong& t) {
       if (has(t.name, "pos") || has(t.name, "wpe") || has(t.name, "rotary")) return true;
       // Positions of another partition begin at multiples of its chunks; inside of a chunk of the recording's
       // partition, no mask of context ranks begins. Rotations by wrong positions change less than masks.
       const int64_t chunk = f.step.sequence / (2 * f.step.cp), at = t.first_token;
       return f.step.cp > 1 && f.step.chunk > 0 && at > 0 && chunk > 0 && at % chunk == 0 &&
              (at % f.step.chunk != 0 || t.distance < 0.15);
     }},
    {"rotary-rounding", "angles of rotary embeddings are rounded, for example in a table of a 16-bit dtype", "output",
     [](const RecordedSymptoms& f, const Wrong& t) {
       return is_attention(t) && t.first_token == 1 && f.step.cp == 1 && !t.factor && t.distance < 0.02;
     }},
    {"wrong-mask", "attention has a wrong mask, such as one that does not respect documents or windows", "output",
     [](const RecordedSymptoms& f, const Wrong& t) {
       if (t.first_token > 0) return !t.factor && (f.step.cp > 1 || is_attention(t));
       // Without a causal mask only the last token is right.
       return is_attention(t) && t.first_token == 0 && t.end_token == f.step.sequence - 1 && !t.same_shift && !t.factor;
     }},
    {"bias-added-per-rank", "every tensor rank adds the bias of a row-parallel layer", "output",
     [](const RecordedSymptoms&, const Wrong& t) { return t.same_shift && !t.factor; }},
    {"wrong-slice", "a rank looks up or computes another rank's slice", "output",
     [](const RecordedSymptoms&, const Wrong& t) { return is_tied(t) && !t.factor && !t.some_data_ranks; }},
    {"wrong-slice", "ranks compute with slices that do not belong together, such as those of a fused weight", "output",
     [](const RecordedSymptoms& f, const Wrong& t) {
       return f.step.tp > 1 && !f.step.dropout && !t.factor && t.axis.empty() && t.first_token <= 0 &&
              !t.some_samples && !t.same_shift && !t.some_data_ranks;
     }},
    {"stale-parameters", "some ranks compute with other values of a parameter than the recorded ones", "output",
     [](const RecordedSymptoms&, const Wrong& t) { return !t.factor && t.some_data_ranks; }},
    {"factor-tp", "the softmax of the loss counts the vocabulary once per tensor rank", "output_grad",
     [](const RecordedSymptoms& f, const Wrong& t) {
       return f.step.tp > 1 && is_head(t) &&
              is_near(f.step.loss_difference, std::log(static_cast<double>(f.step.tp)));
     }},
    {"vocabulary-padding", "the softmax includes padded columns of the vocabulary", "",
     [](const RecordedSymptoms& f, const Wrong& t) {
       if (f.step.padded_vocabulary && (f.wrong_loss() || t.kind == "output" || t.kind == "output_grad")) return true;
       return t.kind == "output_grad" && is_head(t) && f.step.logits_sum > 1e-3 && f.step.loss_difference > 0;
     }},
    {"auxiliary-loss", "a further term of the loss, such as the balancing loss of routers, has a wrong weight",
     "output_grad",
     [](const RecordedSymptoms& f, const Wrong& t) {
       return f.wrong_loss() && !is_head(t) &&
              std::ranges::any_of(f.gradients, [](const Wrong* g) { return is_router(*g); });
     }},
    {"wrong-message", "a pipeline stage receives the activation or gradient of a different micro-batch", "",
     [](const RecordedSymptoms& f, const Wrong& t) {
       return f.step.pp > 1 && (t.kind == "output" || t.kind == "output_grad") && t.some_samples;
     }},
    {"router-gradient", "the gradient through the routing weights is missing, or has terms of other ranks' experts",
     "output_grad",
     [](const RecordedSymptoms& f, const Wrong& t) {
       const auto weights = f.downstream();
       const bool only_routers =
           !weights.empty() && std::ranges::all_of(weights, [](const Wrong* g) { return is_router(*g); });
       return !f.wrong_loss() && !t.factor && t.axis.empty() && (is_router(t) || only_routers);
     }},
    {"context-gradient-not-summed",
     "gradients of keys and values are not returned to the context ranks that have these tokens", "output_grad",
     [](const RecordedSymptoms& f, const Wrong& t) {
       const auto weights = f.downstream();
       return f.step.cp > 1 && !f.wrong_loss() && !t.factor && t.axis.empty() && !weights.empty() &&
              std::ranges::all_of(weights, [](const Wrong* g) { return is_key_or_value(*g); });
     }},
    {"wrong-slice", "the backward pass of a row-parallel layer computes with slices that do not belong together",
     "output_grad",
     [](const RecordedSymptoms& f, const Wrong& t) {
       return f.step.tp > 1 && !f.wrong_loss() && !t.factor && t.axis.empty() &&
              (!f.downstream().empty() || is_column(t));
     }},
    {"input-gradient-not-summed",
     "the input gradient of a column-parallel layer or of experts is not reduced over the tensor or expert axis",
     "output_grad",
     [](const RecordedSymptoms& f, const Wrong& t) {
       if (f.wrong_loss() || t.axis.starts_with("tp")) return !f.wrong_loss();
       return !t.factor && f.downstream().empty() && (f.step.tp > 1 || f.step.ep > 1);
     }},
    {"loss-scale", "gradients are not divided by the loss scale, or are clipped before they are", "",
     [](const RecordedSymptoms& f, const Wrong&) {
       const double scale = f.step.loss_scale;
       if (scale == 1) return f.all_gradients() && (is_power_of_two(f.factor()) || is_power_of_two(1 / f.factor()));
       return is_near(f.factor(), scale) || is_near(f.factor(), 1 / scale) ||
              (f.gradients.empty() && is_near(f.step.norm_ratio, scale));
     }},
    {"sum-instead-of-mean", "the loss is a sum over tokens instead of a mean; not a fault if the learning rate accounts for it",
     "", [](const RecordedSymptoms& f, const Wrong&) {
       return f.all_gradients() && f.step.tokens > 1 && is_near(f.factor(), static_cast<double>(f.step.tokens));
     }},
    {"tied-not-summed", "the replicas of the tied weight do not reduce their gradients", "grad",
     [](const RecordedSymptoms& f, const Wrong& t) {
       return f.only(is_tied) && f.factor() == 0 &&
              (f.step.pp > 1 || t.axis.starts_with("pp") || t.axis.starts_with("ranks"));
     }},
    {"norm-gradient-not-summed",
     "gradients of norms or biases are not reduced over the tensor axis, whose ranks have different tokens", "grad",
     [](const RecordedSymptoms& f, const Wrong&) {
       return f.step.tp > 1 && f.only([](const Wrong& g) {
         return is_norm_or_bias(g) && (g.axis.starts_with("tp") || (g.axis.empty() && !g.factor));
       });
     }},
    {"wrong-expert-group", "gradients of experts or routers are reduced over the wrong group", "grad",
     [](const RecordedSymptoms& f, const Wrong&) { return f.only(is_routed) && f.factor() == 0; }},
    {"factor-ep", "gradients of experts are multiplied or divided by the size of the expert-parallel group", "grad",
     [](const RecordedSymptoms& f, const Wrong&) { return f.only(is_routed) && (f.is_factor(f.step.ep) || f.is_factor(f.step.dp)); }},
    {"not-synchronized", "gradients are not reduced over the axis", "grad",
     [](const RecordedSymptoms&, const Wrong& t) { return !t.axis.empty(); }},
    {"microbatch-repeated", "a micro-batch is accumulated twice", "grad",
     [](const RecordedSymptoms& f, const Wrong&) { return has_double_weight(f.step) && !means_of_means(f.step); }},
    {"microbatch-dropped", "the gradient of a micro-batch is not accumulated", "grad",
     [](const RecordedSymptoms& f, const Wrong&) { return has_zero_weight(f.step) && f.step.microbatches > 1; }},
    {"not-synchronized", "the gradient of a data rank is missing from the reduction", "grad",
     [](const RecordedSymptoms& f, const Wrong&) { return has_zero_weight(f.step); }},
    {"mean-of-means", "means over micro-batches or ranks with different numbers of targets are averaged", "grad",
     [](const RecordedSymptoms& f, const Wrong&) { return means_of_means(f.step); }},
    {"factor-dp", "gradients are multiplied or divided by the number of data ranks once too often", "",
     [](const RecordedSymptoms& f, const Wrong&) { return f.is_factor(f.step.dp) && (f.all_gradients() || f.step.dp > 2); }},
    {"factor-cp", "gradients are multiplied or divided by the size of the context axis once too often", "",
     [](const RecordedSymptoms& f, const Wrong&) { return f.is_factor(f.step.cp); }},
    {"factor-microbatches", "gradients are multiplied or divided by the number of micro-batches once too often", "",
     [](const RecordedSymptoms& f, const Wrong&) { return f.is_factor(f.step.microbatches); }},
    {"factor-tp", "gradients are multiplied or divided by the size of the tensor axis once too often", "",
     [](const RecordedSymptoms& f, const Wrong&) { return f.is_factor(f.step.tp); }},
    {"summed-twice", "gradients are accumulated or reduced twice", "",
     [](const RecordedSymptoms& f, const Wrong&) {
       const double factor = f.first_factor();
       return is_near(factor, 2) || (f.step.dp > 1 && is_near(factor, static_cast<double>(f.step.dp * f.step.dp)));
     }},
    {"factor-microbatches", "the gradients of some micro-batches are multiplied or divided once too often", "grad",
     [](const RecordedSymptoms& f, const Wrong&) { return scaled_microbatches(f.step); }},
    {"mean-of-means", "means over ranks with different numbers of targets are averaged", "grad",
     [](const RecordedSymptoms& f, const Wrong&) { return varies(f.step.weights); }},
    {"stale-buffer", "a buffer with values of the parameter is added to its gradient", "grad",
     [](const RecordedSymptoms&, const Wrong& t) { return t.of_parameter != 0; }},
    {"clip-norm", "the norm for clipping counts replicas, omits shards, or is not that of the gradients", "",
     [](const RecordedSymptoms&, const Wrong& t) { return t.kind == "norm" || t.kind == "clipped_grad"; }},
    {"weight-decay", "weight decay applies to the wrong parameters, or not to the right ones", "",
     [](const RecordedSymptoms& f, const Wrong& t) { return !f.step.decay.empty() && is_update(t); }},
    {"stale-parameters", "updated parameters are not gathered by all ranks", "updated",
     [](const RecordedSymptoms&, const Wrong& t) { return !t.axis.empty(); }},
    {"update-order", "clipping, the learning-rate schedule and the update are in the wrong order", "",
     [](const RecordedSymptoms& f, const Wrong& t) { return !f.step.order.empty() && is_update(t); }},
    {"wrong-weight-gradient",
     "the gradient of a parameter is computed wrongly from right outputs and output gradients", "grad",
     [](const RecordedSymptoms& f, const Wrong& t) {
       return !f.wrong_loss() && !f.all_gradients() && f.factor() == 0 && t.axis.empty() && t.of_parameter == 0 &&
              !varies(f.step.weights) && !f.only(is_routed) && !f.only(is_tied);
     }},
    {"module-factor", "a module multiplies its output, or the gradient of its input, by a constant", "",
     [](const RecordedSymptoms&, const Wrong& t) { return t.local && t.factor; }},
});

std::string evidence(const RecordedSymptoms& f) {
  const RecordedStep& s = f.step;
  std::string out;
  const auto add = [&](const std::string& text) { out += (out.empty() ? "" : "; ") + text; };
  if (const RecordedTensor* const t = f.first()) {
    std::string text =
        fmt::format("first: {} of {} differs by {:.3g}, tolerance {:.3g}", t->kind, t->name, t->distance, t->tolerance);
    if (t->factor) text += fmt::format(", all {:.4g} times the expected values", *t->factor);
    if (t->local) text += ", computed from the recorded values of its neighbours";
    if (!t->axis.empty()) text += fmt::format("; replicas on {} differ", t->axis);
    if (t->sum_factor) text += fmt::format(", and their sum is {:.4g} times the expected values", *t->sum_factor);
    if (t->of_update != 0)
      text += fmt::format("; the difference is {:.3g} times the direction of the previous update", t->of_update);
    if (t->of_parameter != 0) text += fmt::format("; the difference is {:.4g} times the parameter", t->of_parameter);
    if (t->same_shift) text += "; all tokens differ by the same vector";
    if (t->some_samples) text += "; only some sequences are wrong";
    if (t->first_token > 0) text += fmt::format("; tokens before {} are right", t->first_token);
    add(text);
  }
  if (!f.gradients.empty()) add(fmt::format("{} of {} parameter gradients are wrong", f.gradients.size(), s.gradients));
  if (s.output_factor > 0 && f.factor() > 0 && f.main().kind == "grad")
    add(fmt::format(
        "output gradients are {:.4g} times those of the mean over all tokens, and the reductions divide them by {:.4g}",
        s.output_factor, s.output_factor / f.factor()));
  if (f.main().kind == "output_grad" && !f.wrong_loss()) {
    const auto weights = f.downstream();
    add(weights.empty() ? "gradients of the weights after it are right"
                        : fmt::format("gradients of {} weights after it are wrong, such as {}", weights.size(),
                                      weights.front()->name));
  }
  if (s.same_masks) add("ranks or micro-batches with different tokens drop the same elements");
  if (varies(s.weights))
    add(fmt::format("coefficients of the micro-batches in the gradients: {:.3g}; their targets: {}",
                    fmt::join(s.weights, ", "), fmt::join(s.targets, ", ")));
  if (s.dropped > 0 || s.repeated > 0 || s.foreign > 0)
    add(fmt::format("{} sequences of the reference are missing, {} occur twice, {} are others", s.dropped, s.repeated,
                    s.foreign));
  if (s.document && s.tokens_from > 0)
    add(fmt::format("sequences are wrong from a separator on, token {}", s.tokens_from));
  else if (s.document)
    add("sequences are wrong from different tokens on");
  if (!is_near(s.norm_ratio, 1)) add(fmt::format("the norm is {:.4g} times that of the gradients", s.norm_ratio));
  if (!is_near(s.clip_ratio, 1)) add(fmt::format("clipped gradients are {:.4g} times the expected ones", s.clip_ratio));
  for (const std::string& text : {s.decay, s.order})
    if (!text.empty()) add(text);
  if (!s.gaps.empty()) add(s.gaps.front());
  if (!s.recomputed.empty()) add("recomputed: " + s.recomputed.front());
  return out;
}

}  // namespace

std::string_view text_of_recorded_cause(std::string_view cause) {
  const auto found = std::ranges::find(kRecordedRules, cause, &RecordedRule::cause);
  return found == kRecordedRules.end() ? "" : found->text;
}

std::vector<Diagnosis> diagnose(const RecordedStep& step) {
  const RecordedSymptoms facts(step);
  std::vector<Diagnosis> out;
  if (step.wrong.empty() && step.dropped == 0 && step.repeated == 0 && step.recomputed.empty() && !step.same_masks &&
      step.gaps.empty())
    return out;
  for (const RecordedRule& rule : kRecordedRules)
    if ((rule.kind.empty() || rule.kind == facts.main().kind) && rule.fits(facts, facts.main()) &&
        std::ranges::find(out, rule.cause, &Diagnosis::cause) == out.end())
      out.push_back({rule.cause, rule.text, evidence(facts)});
  // Of factors of the same size, those that the loss and the reductions explain come first.
  const auto is_axis = [](const Diagnosis& d) { return d.cause.starts_with("factor-"); };
  const auto begin = std::ranges::find_if(out, is_axis), end = std::find_if_not(begin, out.end(), is_axis);
  std::stable_partition(begin, end, [&](const Diagnosis& d) { return facts.explains(d.cause); });
  if (out.empty()) out.push_back({"unknown", "no rule matches", evidence(facts)});
  return out;
}

}  // namespace tessera
