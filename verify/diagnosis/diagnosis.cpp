// Rules of the diagnosis, and verification with diagnosis.
#include "verify/diagnosis/diagnosis.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <cstdlib>
#include <map>
#include <set>

#include "base/error.h"
#include "verify/verify.h"

namespace tessera {
namespace {

constexpr double kSameFactor = 1e-2;
constexpr size_t kNamed = 3;  // tensors named in a message

using Without = Probe::Without;

// A traffic pattern: fewer or more bytes than predicted, on an axis ("data": dp including cp; empty: any), in these
// operations (empty: any).
using Operations = std::array<std::string_view, 3>;
constexpr Operations kSums{"all_reduce", "reduce_scatter", "reduce"}, kGathers{"all_gather", "broadcast", "gather"};
enum class Are : uint8_t { not_asked_for, fewer, more };
struct Bytes {
  Are are = Are::not_asked_for;
  std::string_view axis = {};
  Operations in = {};

  bool fit(const SentDifference& s) const {
    const bool is_data = s.axis.starts_with("dp") || s.axis == "edp", is_it = axis.empty() || s.axis == axis;
    return (axis == "data" ? is_data : is_it) && (in[0].empty() || std::ranges::count(in, s.operation) > 0) &&
           (are == Are::fewer  ? s.bytes < s.expected_bytes
            : are == Are::more ? s.bytes > s.expected_bytes
                               : false);
  }
};
constexpr Bytes kAnyBytes;
constexpr Bytes fewer(std::string_view axis, Operations in = {}) { return {Are::fewer, axis, in}; }
constexpr Bytes more(std::string_view axis, Operations in = {}) { return {Are::more, axis, in}; }

// Symptoms of the first differing step; later steps differ as a consequence.
struct Symptoms {
  explicit Symptoms(const Observations& o) : seen(o) {
    const auto note = [&](const auto& d) { step = step == 0 ? d.step : std::min(step, d.step); };
    std::ranges::for_each(o.scalars, note);
    std::ranges::for_each(o.tensors, note);
    for (const ScalarDifference& n : o.scalars)
      if (n.step == step) scalars.push_back(&n);
    using Kind = TensorDifference::Kind;
    for (const TensorDifference& t : o.tensors)
      if (t.step == step)
        (t.kind == Kind::gradient ? gradients : t.kind == Kind::parameter ? parameters : state).push_back(&t);
  }
  bool wrong(std::string_view what) const {
    return std::ranges::any_of(scalars, [&](const auto* n) { return n->what == what; });
  }
  bool wrong_loss() const { return wrong("loss"); }
  bool right_gradients() const { return !wrong_loss() && gradients.empty(); }
  bool right_but_parameters() const { return right_gradients() && scalars.empty() && !parameters.empty(); }
  bool right_values() const { return step == 0 && seen.copies.empty() && seen.stopped.empty(); }
  const SentDifference* first(const Bytes& bytes) const {
    const auto found = std::ranges::find_if(seen.sent, [&](const SentDifference& s) { return bytes.fit(s); });
    return found == seen.sent.end() ? nullptr : &*found;
  }

  const Observations& seen;
  int64_t step = 0;  // 0: no step differs
  std::vector<const ScalarDifference*> scalars;
  std::vector<const TensorDifference*> gradients, parameters, state;
  const SentDifference* sent = nullptr;  // traffic selected by the current rule
};

// Gradients, loss and norm differ only within rounding.
bool only_rounding(const Symptoms& s) {
  return std::ranges::all_of(s.gradients, [&](const auto* g) { return g->distance < s.seen.rounding; }) &&
         std::ranges::all_of(s.scalars, [&](const auto* n) {
           return std::abs(n->found - n->expected) / std::abs(n->expected) < s.seen.rounding;
         });
}

// The factor common to all gradients; 0 if there is none.
double common_factor(const Symptoms& s) {
  if (s.gradients.empty() || std::ssize(s.gradients) < s.seen.trained) return 0;
  const double first = s.gradients[0]->factor.value_or(0);
  for (const TensorDifference* g : s.gradients)
    if (!g->factor || std::abs(*g->factor - first) > kSameFactor * std::abs(first)) return 0;
  return first;
}

// Common factor of most wrong moments; 0 if there is none.
double moment_factor(const Symptoms& s) {
  std::vector<double> factors;
  size_t moments = 0;
  for (const TensorDifference* t : s.state) {
    if (!t->name.ends_with(".m") && !t->name.ends_with(".momentum")) continue;
    ++moments;
    if (t->factor) factors.push_back(*t->factor);
  }
  if (factors.empty() || 3 * factors.size() < moments) return 0;
  std::ranges::sort(factors);
  const double middle = factors[factors.size() / 2];
  const auto alike =
      std::ranges::count_if(factors, [&](double f) { return std::abs(f - middle) < kSameFactor * std::abs(middle); });
  return 2 * static_cast<size_t>(alike) > factors.size() && std::abs(middle - 1) > kSameFactor ? middle : 0;
}

// Names the axis whose size or inverse size is the factor.
std::string axis_text(const Observations& o, double factor) {
  for (const auto& [n, axis] : {std::pair{o.dp * o.cp, "data"}, {o.tp, "tensor"}})
    for (const double f : {static_cast<double>(n), 1.0 / static_cast<double>(n)})
      if (n > 1 && std::abs(factor / f - 1) < 1e-2) return fmt::format(", and the {} axis has {} ranks", axis, n);
  return "";
}

// Factor of all gradients; taken from the norm if wide tolerances blur the factor of single gradients.
double scale(const Symptoms& s) {
  double factor = common_factor(s);
  for (const ScalarDifference* n : s.scalars)
    if (factor == 0 && n->what == "gradient norm" && !axis_text(s.seen, n->found / n->expected).empty())
      factor = n->found / n->expected;
  return factor;
}

bool norm(Symptoms& s) {
  if (!s.right_gradients()) return false;
  s.sent = s.first(fewer("pp", kSums));  // pp has no other reductions
  if (!s.sent && !s.parameters.empty()) s.sent = s.first(fewer("tp", kSums));
  return s.sent || s.wrong("gradient norm");
}

bool narrow_sums(Symptoms& s) {
  const auto bytes = static_cast<double>(s.sent->bytes), expected = static_cast<double>(s.sent->expected_bytes);
  return s.sent->calls == s.sent->expected_calls && bytes != 0 && std::abs(2 * bytes / expected - 1) < 0.1 &&
         std::ranges::all_of(s.gradients, [](const auto* g) { return g->distance < 0.02; });  // none if bf16
}

// A shard is reduced over ranks that do not hold its replicas, so the groups differ immediately.
bool wrong_group(Symptoms& s) {
  return s.seen.groups > 1 && !s.gradients.empty() && s.seen.copies_step == s.step && !s.first(fewer("dp.shard")) &&
         !s.first(more("dp.shard"));
}

// The wrong values identify a missing tensor-axis reduction. If wide tolerances hide them, the size of the missing
// calls does: a weight has fewer elements than an activation.
bool on_tensor_axis(const Symptoms& s) { return !s.right_gradients() || s.parameters.empty(); }
bool one_weight(const Symptoms& s) {
  const int64_t missing = s.sent->expected_calls - s.sent->calls;
  if (s.right_gradients())
    return missing > 0 && s.sent->calls > 0 &&
           (s.sent->expected_bytes - s.sent->bytes) / missing < s.sent->bytes / s.sent->calls;
  std::set<std::string> blocks;
  for (const TensorDifference* g : s.gradients)
    blocks.insert(g->name.substr(0, g->name.find('.', g->name.find('.') + 1)));
  return blocks.size() == 1 && std::ranges::all_of(s.gradients, [](const auto* g) { return g->shape.size() == 1; });
}

// Stale replicas of parameters that other ranks update: the owners' copies are right, and later everything is wrong.
bool stale_copies(Symptoms& s) {
  const int64_t since = s.seen.copies_step;
  return since != 0 && (s.step == 0 || s.step > since);
}

bool wrong_targets(Symptoms& s) {
  const Observations& o = s.seen;
  return !o.given.empty() && o.pp > 1 &&
         std::ranges::all_of(o.given, [&](const GivenDifference& g) { return g.pipeline_rank == o.pp - 1; });
}

// Sequences with wrong gradient coefficients, if these explain the difference.
struct SequenceWeights {
  std::vector<int64_t> none, twice;
  bool complete = true;  // they form complete micro-batches
  bool empty() const { return none.empty() && twice.empty(); }
};
SequenceWeights observed_fractions(const Observations& o) {
  // Different dropout or attention masks make coefficients meaningless, unless tokens are known to differ.
  if (!o.mixture || o.mixture->residual > (o.given.empty() ? 0.05 : 0.6)) return {};
  constexpr double kNone = 0.35, kTwice = 1.5, kOne = 0.45;
  const int64_t size = std::max<int64_t>(1, o.batch / (o.dp * o.microbatches));
  SequenceWeights found;
  std::vector<int> kinds;
  for (const double weight : o.mixture->weights) {
    const int64_t i = std::ssize(kinds);
    if (weight < kNone) found.none.push_back(i);
    if (weight > kTwice) found.twice.push_back(i);
    if (weight >= kNone && weight <= kTwice && std::abs(weight - 1) > kOne) return {};
    kinds.push_back(weight < kNone ? 0 : weight > kTwice ? 2 : 1);
    found.complete = found.complete && (i % size == 0 || kinds[static_cast<size_t>(i - 1)] == kinds.back());
  }
  return found.none.size() == kinds.size() || found.twice.size() == kinds.size() ? SequenceWeights{} : found;
}
bool integer_weights(const Symptoms& s, bool twice) {
  const SequenceWeights found = observed_fractions(s.seen);
  return !found.empty() && found.complete && twice != found.twice.empty();
}

const Probe* passing(const Observations& o) {
  const auto found = std::ranges::find_if(o.probes, [](const Probe& p) { return p.passes; });
  return found == o.probes.end() ? nullptr : &*found;
}
bool right(const Symptoms& s, Without without) {
  const Probe* const found = passing(s.seen);
  return found && found->without == without && !s.right_gradients();
}

// Other faults of the forward pass match earlier rules.
bool wrong_expert(Symptoms& s) {
  return s.seen.experts > 0 && s.wrong_loss() && !passing(s.seen) && s.seen.given.empty();
}

// Parameters with the values from before the step, although gradients and norm are right.
bool unchanged(const Symptoms& s) {
  return s.right_but_parameters() && !s.seen.permuted &&
         std::ranges::all_of(s.parameters, [](const auto* p) { return p->unchanged; });
}
bool skipped(const Symptoms& s) {
  return !s.state.empty() && std::ssize(s.parameters) >= s.seen.trained / 2 &&
         std::ranges::all_of(s.parameters, [](const auto* p) { return p->wrong == p->elements; });
}

const HeldDifference* retained_memory(const Observations& o) {
  const auto found = std::ranges::find_if(o.held, [](const HeldDifference& h) { return h.found > h.expected; });
  return found == o.held.end() ? nullptr : &*found;
}

struct Change {
  Without without;
  const char* text;
  bool (*there)(const TrainConfig& job);
  void (*change)(TrainConfig& job);
};
constexpr auto kChanges = std::to_array<Change>({
    {Without::dropout, "without dropout",
     [](const TrainConfig& j) { return j.model.dropout > 0 || j.model.lora.dropout > 0; },
     [](TrainConfig& j) { j.model.dropout = j.model.lora.dropout = 0; }},
    {Without::documents, "without the document mask", [](const TrainConfig& j) { return j.optim.document_mask; },
     [](TrainConfig& j) { j.optim.document_mask = false; }},
    {Without::context_axis, "on one context rank", [](const TrainConfig& j) { return j.plan.cp > 1; },
     [](TrainConfig& j) { j.plan.cp = 1; }},
    {Without::pipeline, "without a pipeline", [](const TrainConfig& j) { return j.plan.pp > 1; },
     [](TrainConfig& j) {
       j.plan.pp = 1;
       j.plan.schedule = ScheduleKind::one_f_one_b;
       j.plan.schedule_file.clear();
       j.plan.chunks = 0;
     }},
});

std::string probe_text(const Observations& o) {
  const Probe* const found = passing(o);
  return found ? std::ranges::find(kChanges, found->without, &Change::without)->text : "";
}

std::string bytes_text(const SentDifference& s) {
  return fmt::format("{} bytes {} than the formula in {} on the {} axis ({} instead of {})",
                     std::abs(s.bytes - s.expected_bytes), s.bytes < s.expected_bytes ? "fewer" : "more", s.operation,
                     s.axis, s.bytes, s.expected_bytes);
}

// "2 of 28 gradients are wrong (blocks.0.norm1.weight, ...)"
std::string gradients_text(const Symptoms& s) {
  if (s.gradients.empty()) return "all gradients are right";
  std::vector<std::string> names;
  for (size_t i = 0; i < std::min(kNamed, s.gradients.size()); ++i) names.push_back(s.gradients[i]->name);
  return fmt::format("{} of {} gradients are wrong ({}{})", s.gradients.size(), s.seen.trained, fmt::join(names, ", "),
                     s.gradients.size() > kNamed ? ", ..." : "");
}

// " of blocks 0 to 1"
std::string blocks_text(const Symptoms& s) {
  std::set<int64_t> blocks;
  for (const TensorDifference* g : s.gradients)
    if (const size_t dot = g->name.find('.'); dot != std::string::npos && std::isdigit(g->name[dot + 1]) != 0)
      blocks.insert(std::strtoll(g->name.c_str() + dot + 1, nullptr, 10));
  if (blocks.empty()) return "";
  if (blocks.size() == 1) return fmt::format(" of block {}", *blocks.begin());
  return fmt::format(" of blocks {} to {}", *blocks.begin(), *blocks.rbegin());
}

std::string scalars_text(const Symptoms& s) {
  std::vector<std::string> out;
  for (const ScalarDifference* n : s.scalars)
    out.push_back(fmt::format("the {} is {:.6g} instead of {:.6g}", n->what, n->found, n->expected));
  return out.empty() ? "loss and gradient norm are right" : fmt::format("{}", fmt::join(out, ", "));
}

std::string wrong_ranks_text(const Symptoms& s) {
  std::set<int> ranks;
  for (const auto* all : {&s.parameters, &s.state})
    for (const TensorDifference* t : *all) ranks.insert(t->rank);
  return ranks_text(ranks);
}

std::string given_text(const Observations& o) {
  if (o.given.empty()) return "";
  std::set<int> ranks;
  for (const GivenDifference& g : o.given) ranks.insert(g.rank);
  return fmt::format("{} {} given tokens that differ from the plan's (step {}: first in place of sequence {})",
                     ranks_text(ranks), ranks.size() == 1 ? "is" : "are", o.given[0].step, o.given[0].sequence);
}

std::string weights_text(const Observations& o) {
  const SequenceWeights found = observed_fractions(o);
  if (found.empty()) return "";
  std::string text = fmt::format("step {}: the gradient is that of the batch", o.mixture->step);
  if (!found.none.empty()) text += fmt::format(" without sequences {}", fmt::join(found.none, ", "));
  if (!found.twice.empty())
    text += fmt::format("{} with sequences {} twice", found.none.empty() ? "" : " and", fmt::join(found.twice, ", "));
  return text;
}

std::string retained_text(const Observations& o) {
  const HeldDifference* const h = retained_memory(o);
  return h ? fmt::format("rank {} holds {} bytes of {} instead of {}", h->rank, h->found, h->what, h->expected) : "";
}

std::string filled(std::string_view text, const Symptoms& s) {
  using fmt::arg;
  const Observations& o = s.seen;
  const std::string bytes = s.sent ? bytes_text(*s.sent) : "", copies = o.copies.empty() ? "" : o.copies.front(),
                    gradients = gradients_text(s), blocks = blocks_text(s), scalars = scalars_text(s),
                    given = given_text(o), weights = weights_text(o);
  const std::string updated = fmt::format("step {}: gradients and norm are right, but {} parameters of {} are not",
                                          s.step, s.parameters.size(), wrong_ranks_text(s));
  const double factor = common_factor(s);
  double worst = 0;
  for (const TensorDifference* g : s.gradients) worst = std::max(worst, g->distance);
  return fmt::format(
      fmt::runtime(text), arg("step", s.step), arg("stopped", o.stopped), arg("bytes", bytes),
      arg("and_bytes", s.sent ? "; " + bytes : ""), arg("copies", copies),
      arg("and_copies", copies.empty() ? "" : "; " + copies), arg("gradients", gradients), arg("blocks", blocks),
      arg("scalars", scalars), arg("parameters", s.parameters.size()),
      arg("times", factor == 0 ? gradients : fmt::format("all gradients are too large by a factor of {:.3g}", factor)),
      arg("on_tensor_axis", s.right_gradients() ? "computed values are within the tolerance of the dtype"
                                                : fmt::format("step {}: {}, {}{}", s.step, scalars, gradients, blocks)),
      arg("given", given), arg("weights", weights), arg("sequences", observed_fractions(o).complete ? given : weights),
      arg("worst", worst), arg("scale", scale(s)), arg("axis", axis_text(o, scale(s))), arg("experts", o.experts),
      arg("moment", moment_factor(s)), arg("updated", updated), arg("probe", probe_text(o)),
      arg("in_flight", fmt::join(o.in_flight, " ")), arg("expected_in_flight", fmt::join(o.expected_in_flight, " ")),
      arg("kept", retained_text(o)));
}

constexpr std::string_view kStale = "some parameters retain their old values",
                           kOld = "{updated}: they have the values from before the step",
                           kProbed =
                               "step {step}: {scalars}, {gradients}; bytes are right; the same run {probe} is right";

struct Rule {
  std::string_view cause, text;
  Bytes bytes;                // required traffic pattern
  bool (*fits)(Symptoms& s);  // further required symptoms
  std::string_view evidence;
};
// More specific rules come first: their symptoms include those of later rules.
constexpr auto kRules = std::to_array<Rule>({
    {"lost-call", "a rank did not participate in a collective, or a message was lost", kAnyBytes,
     [](auto& s) { return !s.seen.stopped.empty() && s.seen.out_of_step; }, "{stopped}"},
    {"failed-rank", "a rank failed with an error", kAnyBytes,
     [](auto& s) { return !s.seen.stopped.empty() && !s.seen.out_of_step; }, "{stopped}"},
    {"norm", "the gradient norm omits the shards of some ranks", kAnyBytes, norm,
     "step {step}: all gradients are right, {scalars}{and_bytes}"},
    {"narrow-sums", "gradients are reduced in a narrower dtype", fewer("data", kSums), narrow_sums,
     "the same number of calls and about half the bytes: {bytes}; gradients differ at most in the third digit"},
    {"tied-copies", "the two replicas of the tied weight do not reduce their gradients", fewer("tied"),
     [](auto&) { return true; }, "{bytes}; {gradients}"},
    {"group-not-summed", "gradient shards are reduced within each sharding group, but not across groups",
     fewer("dp.replicate", kSums), [](auto& s) { return s.sent->bytes == 0 && !s.gradients.empty(); },
     "{bytes}; {gradients}"},
    {"wrong-group", "gradient shards are reduced over ranks that have different shards", kAnyBytes, wrong_group,
     "step {step}: {gradients}; after this step the sharding groups have different values: {copies}"},
    {"outer-step", "ranks with local updates skip a synchronization", fewer("data", {"all_reduce"}),
     [](auto& s) { return s.right_but_parameters(); },
     "{bytes}; step {step}: all gradients are right, and {parameters} parameters are not synchronized"},
    {"silent-owner", "the owner of a matrix does not send its update to the other ranks", fewer("data", {"broadcast"}),
     [](auto& s) { return !s.seen.copies.empty(); }, "{bytes}; {copies}"},
    {"wrong-expert-sum", "gradients of experts are reduced over ranks that do not have these experts", kAnyBytes,
     [](auto& s) {
       return !s.wrong_loss() && !s.gradients.empty() &&
              std::ranges::all_of(s.gradients, [](const auto* g) { return g->of_expert; });
     },
     "step {step}: the loss is right, and only gradients of experts are wrong: {gradients}"},
    {"missing-gradient-sum", "gradients are not reduced over the data axis", fewer("data", kSums),
     [](auto& s) { return !s.gradients.empty(); }, "{bytes}; {gradients}"},
    {"summed-twice", "gradients are reduced over the data axis twice", more("data", kSums),
     [](auto& s) { return !s.gradients.empty(); }, "{bytes}; {times}"},
    {"missing-gather", "updated shards are not gathered: ranks continue with stale ones", fewer("data", kGathers),
     [](auto& s) { return s.sent->operation != "broadcast" || !s.seen.copies.empty(); }, "{bytes}{and_copies}"},
    {"missing-forward-sum", "the outputs of a row-parallel layer are not reduced over the tensor axis", fewer("tp"),
     [](auto& s) { return on_tensor_axis(s) && s.wrong_loss(); }, "{bytes}; {on_tensor_axis}"},
    {"weight-not-summed",
     "the gradient of one replicated weight is not reduced over the tensor axis: R and I are swapped", fewer("tp"),
     [](auto& s) { return on_tensor_axis(s) && !s.wrong_loss() && one_weight(s); }, "{bytes}; {on_tensor_axis}"},
    {"missing-backward-sum", "the input gradient of a column-parallel layer is not reduced over the tensor axis",
     fewer("tp"), [](auto& s) { return on_tensor_axis(s) && !s.wrong_loss() && !one_weight(s); },
     "{bytes}; {on_tensor_axis}"},
    {"needless-communication", "unnecessary communication", more(""), [](auto& s) { return s.right_values(); },
     "{bytes}; all computed values are right"},
    {"stale-part", kStale, kAnyBytes, stale_copies, "{copies}; everything before was right"},
    {"wrong-targets", "the last stage uses the targets of different sequences", kAnyBytes, wrong_targets,
     "{given}, all of them of the last pipeline stage; {scalars}"},
    {"microbatch-skipped", "a micro-batch is skipped", kAnyBytes, [](auto& s) { return integer_weights(s, false); },
     "{weights}"},
    {"microbatch-repeated", "a micro-batch is computed twice, in place of another", kAnyBytes,
     [](auto& s) { return integer_weights(s, true); }, "{weights}"},
    {"wrong-sequences", "ranks compute sequences other than the plan's", kAnyBytes,
     [](auto& s) { return !s.seen.given.empty() || !observed_fractions(s.seen).complete; }, "{sequences}"},
    {"order-of-sums", "gradients are summed in a different order", kAnyBytes,
     [](auto& s) { return !s.gradients.empty() && only_rounding(s); },
     "gradients differ only in their last bits, by {worst:.2g} of their norm"},
    {"wrong-scale", "gradients are multiplied or divided once too often", kAnyBytes,
     [](auto& s) { return !s.wrong_loss() && scale(s) != 0; },
     "step {step}: all gradients are {scale:.4g} times the expected value{axis}; loss and bytes are right"},
    {"dropout-masks", "ranks or micro-batches use wrong dropout masks", kAnyBytes,
     [](auto& s) { return right(s, Without::dropout); }, kProbed},
    {"document-mask", "attention includes another document, or excludes some of its own", kAnyBytes,
     [](auto& s) { return right(s, Without::documents); }, kProbed},
    {"context-positions", "attention over context ranks has wrong positions or a wrong mask", kAnyBytes,
     [](auto& s) { return right(s, Without::context_axis); }, kProbed},
    {"wrong-message", "a pipeline stage computes with the activations of a different micro-batch", kAnyBytes,
     [](auto& s) { return right(s, Without::pipeline); }, kProbed},
    {"wrong-expert", "tokens are processed by experts that the router did not choose", kAnyBytes, wrong_expert,
     "step {step}: {scalars}, {gradients}{blocks}; the layers have {experts} experts, and every rank had the plan's "
     "tokens"},
    {"misplaced-gather", "gathered shards are swapped", kAnyBytes,
     [](auto& s) { return s.right_but_parameters() && s.seen.permuted; },
     "{updated}: all values are present, but at different positions"},
    {"update-skipped", "the update is not applied", kAnyBytes, [](auto& s) { return unchanged(s) && skipped(s); },
     kOld},
    {"stale-part", kStale, kAnyBytes, [](auto& s) { return unchanged(s) && !skipped(s); }, kOld},
    {"clipping", "gradients are not clipped, or are clipped with a wrong norm", kAnyBytes,
     [](auto& s) { return s.right_but_parameters() && !s.seen.permuted && !unchanged(s) && moment_factor(s) != 0; },
     "{updated}; the optimizer's first moments are too large by a factor of {moment:.4g}"},
    {"schedule", "the pipeline executes a schedule other than the plan's", kAnyBytes,
     [](auto& s) { return !s.seen.in_flight.empty() && s.right_values(); },
     "micro-batches in flight by pipeline rank: {in_flight} instead of {expected_in_flight}; all computed values are "
     "right"},
    {"kept-memory", "memory is retained that should be sharded or freed", kAnyBytes,
     [](auto& s) { return s.right_values() && retained_memory(s.seen); }, "{kept}; all computed values are right"},
});
constexpr std::string_view kUnknown = "unknown", kNoRule = "no rule matches";

// Whether traffic, tokens and factors leave the cause ambiguous.
bool asks_for_probes(const Symptoms& s) {
  const Observations& o = s.seen;
  return s.step > 0 && !s.right_gradients() && o.sent.empty() && o.given.empty() && o.stopped.empty() &&
         !only_rounding(s) && common_factor(s) == 0;
}

}  // namespace

std::string_view text_of_cause(std::string_view cause) {
  const auto found = std::ranges::find(kRules, cause, &Rule::cause);
  if (found != kRules.end()) return found->text;
  return cause == kUnknown ? kNoRule : text_of_recorded_cause(cause);
}

std::vector<Diagnosis> diagnose(const Observations& seen) {
  if (seen.empty()) return {};
  if (seen.recorded) return diagnose(*seen.recorded);
  Symptoms symptoms(seen);
  std::vector<Diagnosis> out;
  for (const Rule& rule : kRules) {
    symptoms.sent = symptoms.first(rule.bytes);
    if ((symptoms.sent || rule.bytes.are == Are::not_asked_for) && rule.fits(symptoms))
      out.push_back({rule.cause, rule.text, filled(rule.evidence, symptoms)});
  }
  if (out.empty()) out.push_back({kUnknown, kNoRule, scalars_text(symptoms)});
  return out;
}

VerifyResult explain(const TrainConfig& job, const HooksOf& hooks) {
  VerifyResult r = verify(job, hooks(job));
  if (!r.known || r.passed()) return r;
  if (asks_for_probes(Symptoms(r.seen)))
    for (const Change& change : kChanges) try {
        if (!change.there(job)) continue;
        TrainConfig changed = job;
        change.change(changed);
        changed.optim.steps = Symptoms(r.seen).step;
        const VerifyResult again = verify(changed, hooks(changed));
        r.seen.probes.push_back({change.without, again.wrong_steps.empty() && again.seen.stopped.empty()});
      } catch (const Error&) {  // an invalid plan
        continue;
      }
  r.diagnosis = diagnose(r.seen);
  return r;
}

}  // namespace tessera
