// The search for configurations that need less memory, and the table of ranks.
#include "train/memory_refusal.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "train/memory.h"

namespace tessera {

namespace {

constexpr double kGigabyte = 1e9;
constexpr int64_t kMaxParts = 1 << 14;

std::string gigabytes(double bytes) { return fmt::format("{:.3g} GB", bytes / kGigabyte); }

double memory_fraction(const TrainConfig& job, int64_t local_world_size) {
  return static_cast<double>(local_world_size) / static_cast<double>(job.plan.ranks());
}

// Empty if the local ranks need several times `max_bytes`, or one exceeds the address space.
std::optional<std::vector<RankMemory>> local_rank_memory(const TrainConfig& job, const HostMemory& here,
                                                         int64_t max_bytes) {
  constexpr double kFarOff = 4;
  const MinimumMemory bound = minimum_memory(job);
  if ((bound.held + bound.activations) * memory_fraction(job, here.ranks) > kFarOff * static_cast<double>(max_bytes))
    return {};
  try {
    std::vector<RankMemory> all = memory_of_ranks(job);
    const auto begin = all.begin() + here.first;
    return std::vector<RankMemory>(begin, begin + std::min<int64_t>(here.ranks, all.end() - begin));
  } catch (const OutOfMemory&) {
    return {};
  }
}

int64_t total_memory(const std::vector<RankMemory>& ranks, const HostMemory& here) {
  int64_t sum = here.more;
  for (const RankMemory& r : ranks) sum += r.total();
  return sum + (here.first == 0 ? std::max<int64_t>(0, here.gathered - ranks[0].activations) : 0);
}

std::string row(const std::string& who, const RankMemory& m) {
  return fmt::format("  {:<10} {:>14} {:>14} {:>14} {:>14} {:>14} {:>15}\n", who, m.held.parameters, m.held.gradients,
                     m.held.optimizer, m.activations, m.communication, m.total());
}

// One row per run of ranks with equal memory.
std::string memory_table(const std::vector<RankMemory>& ranks, const HostMemory& here) {
  std::string out = fmt::format("  {:<10} {:>14} {:>14} {:>14} {:>14} {:>14} {:>15}   bytes\n", "rank", "parameters",
                                "gradients", "optimizer", "activations", "communication", "in all");
  const auto count = static_cast<int64_t>(ranks.size());
  const auto at = [&](int64_t i) -> const RankMemory& { return ranks[static_cast<size_t>(i)]; };
  for (int64_t i = 0, end = 0; i < count; i = end) {
    while (end < count && at(end) == at(i)) ++end;
    const int64_t first = here.first + i, last = here.first + end - 1;
    out += row(first == last ? fmt::format("{}", first) : fmt::format("{}-{}", first, last), at(i));
  }
  if (here.gathered > ranks[0].activations)
    out += fmt::format("  {:<30} {:>69}\n", "gathered by rank 0 for saving", here.gathered - ranks[0].activations);
  if (here.more > 0) out += fmt::format("  {:<30} {:>69}\n", here.more_is, here.more);
  return out;
}

std::string minimum_row(const MinimumMemory& minimum) {
  return fmt::format(
      "  {:<12} {:>22}   bytes, at least\n  {:<12} {:>22.0f}   (of {:.4g} parameters)\n  {:<12} {:>22.0f}\n", "",
      "all ranks", "held", minimum.held, minimum.parameters, "activations", minimum.activations);
}

// Ascending, up to a practical number of micro-batches.
std::vector<int64_t> divisors_above(int64_t n, int64_t min_value) {
  std::vector<int64_t> out;
  for (int64_t d = 1; d <= n / d; ++d)
    if (n % d == 0)
      for (const int64_t one : {d, n / d})
        if (one > min_value && one <= kMaxParts && std::ranges::find(out, one) == out.end()) out.push_back(one);
  std::ranges::sort(out);
  return out;
}

class Search {
 public:
  Search(const TrainConfig& job, const HostMemory& here, int64_t max_bytes)
      : job_(job), here_(here), max_bytes_(max_bytes) {}

  // "`microbatches` 4 (3.1 GB) or `recompute` block (2 GB)"
  std::string result() {
    const std::vector<int64_t> counts = divisors_above(job_.optim.batch / job_.plan.dp, job_.plan.microbatches);
    const auto cut = [&](TrainConfig& j, int64_t i) { return j.plan.microbatches = counts[static_cast<size_t>(i)]; };
    first_fitting("`microbatches` {}", std::ssize(counts), cut);
    const auto again = [](TrainConfig& j, int64_t) {
      j.plan.recompute = Recompute::block;
      return int64_t{0};
    };
    if (job_.plan.recompute != Recompute::block && !first_fitting("`recompute` block", 1, again) && found_.empty())
      first_fitting("`recompute` block with `microbatches` {}", std::ssize(counts),
                    [&](TrainConfig& j, int64_t i) { return again(j, i) + cut(j, i); });
    const int64_t unit = job_.plan.dp * job_.plan.microbatches, units = job_.optim.batch / unit;
    first_fitting("`batch` {}", units - 1,
                  [&](TrainConfig& j, int64_t i) { return j.optim.batch = (units - 1 - i) * unit; });
    return found_;
  }

 private:
  // Finds the first of `count` changes, in order of decreasing memory, with which the job fits; `change` returns the
  // number to insert into `format`.
  bool first_fitting(const char* format, int64_t count, const std::function<int64_t(TrainConfig&, int64_t)>& change) {
    int64_t bytes = 0, number = 0;  // memory and value of the last job
    const auto fits = [&](int64_t i) {
      TrainConfig changed = job_;
      number = change(changed, i);
      const auto ranks = local_rank_memory(changed, here_, max_bytes_);
      bytes = ranks ? total_memory(*ranks, here_) : std::numeric_limits<int64_t>::max();
      return bytes <= max_bytes_;
    };
    if (count < 1 || !fits(count - 1)) return false;
    int64_t first = 0;
    for (int64_t end = count - 1; first < end;) {
      const int64_t middle = first + (end - first) / 2;
      if (fits(middle))
        end = middle;
      else
        first = middle + 1;
    }
    fits(first);
    found_ += fmt::format("{}{} ({})", found_.empty() ? "" : " or ", fmt::format(fmt::runtime(format), number),
                          gigabytes(static_cast<double>(bytes)));
    return true;
  }

  const TrainConfig& job_;
  const HostMemory& here_;
  int64_t max_bytes_;
  std::string found_;
};

std::string to_line(const std::string& bytes, int64_t ranks, const MemoryLimit& limit, const std::string& found) {
  return fmt::format("out of memory before the run: {} {}; expected at most the {} that {}; {}",
                     ranks == 1 ? "one rank needs" : fmt::format("{} ranks on this host need", ranks), bytes,
                     gigabytes(static_cast<double>(limit.bytes)), limit.of,
                     found.empty()
                         ? "no other `batch`, `microbatches` or `recompute` fits; a smaller model or more hosts may"
                         : "nearest configuration that fits: " + found);
}

// `values`: bytes of all parameters.
struct Counted {
  double parameters = 0, values = 0, trained = 0;
};

Counted count(const ModelConfig& config, const ModelFactory& make, int64_t value) {
  const auto of_layers = [&](int64_t layers) {  // from shapes; one layer represents all
    ModelConfig sized = config;
    sized.layers = layers;
    sized.vocab = std::max<int64_t>(config.vocab, 1);
    const std::unique_ptr<LanguageModel> model = make(sized);
    Counted out;
    for (const Parameter* p : model->parameters()) {
      const auto elements = static_cast<double>(p->full_shape.numel());
      out.parameters += elements;
      out.values += p->packed ? static_cast<double>(p->stored_here()) : elements * static_cast<double>(value);
      out.trained += p->trainable ? elements : 0;
    }
    return out;
  };
  const Counted one = of_layers(1), two = of_layers(2);
  const auto follow = [&](double Counted::*field) {
    return one.*field + static_cast<double>(config.layers - 1) * (two.*field - one.*field);
  };
  return {follow(&Counted::parameters), follow(&Counted::values), follow(&Counted::trained)};
}

}  // namespace

MinimumMemory minimum_memory(const TrainConfig& job) {
  const auto number = [](int64_t n) { return static_cast<double>(n); };
  const Optimisation& o = job.optim;
  const int64_t value = element_size(o.dtype);
  const double state = job.plan.offload == Offload::optimizer ? 0 : number(state_bytes(o));
  const Counted counted = count(job.model, job.make, value);
  MinimumMemory out{.parameters = counted.parameters,
                    .trained = counted.trained,
                    .values = job.plan.offload == Offload::parameters ? 0 : counted.values,
                    .state = counted.trained * state};
  out.held = out.values + out.trained * number(element_size(data_options(job).grad_dtype)) + out.state;
  out.activations = number(o.batch / job.plan.microbatches) * number(job.model.context) * number(job.model.channels) *
                    number(job.model.layers) * number(value);
  return out;
}

std::optional<MemoryRefusal> minimum_refusal(const TrainConfig& job, int64_t local_world_size,
                                             const MemoryLimit& limit) {
  const MinimumMemory minimum = minimum_memory(job);
  const double held = minimum.held * memory_fraction(job, local_world_size);
  if (held <= static_cast<double>(limit.bytes)) return {};
  return MemoryRefusal{minimum_row(minimum), to_line("at least " + gigabytes(held), local_world_size, limit, "")};
}

std::optional<MemoryRefusal> memory_refusal(const TrainConfig& job, const HostMemory& here, const MemoryLimit& limit) {
  if (auto refusal = minimum_refusal(job, here.ranks, limit)) return refusal;
  const std::optional<std::vector<RankMemory>> ranks = local_rank_memory(job, here, limit.bytes);
  if (ranks && total_memory(*ranks, here) <= limit.bytes) return {};
  const std::string found = Search(job, here, limit.bytes).result();
  if (ranks)
    return MemoryRefusal{memory_table(*ranks, here),
                         to_line(gigabytes(static_cast<double>(total_memory(*ranks, here))), here.ranks, limit, found)};
  const MinimumMemory bound = minimum_memory(job);
  const double at_least =
      std::max(static_cast<double>(limit.bytes), (bound.held + bound.activations) * memory_fraction(job, here.ranks));
  return MemoryRefusal{minimum_row(bound), to_line("more than " + gigabytes(at_least), here.ranks, limit, found)};
}

}  // namespace tessera
