// Whole numbers and others, by a formula.
#include "lab/grade/inputs.h"

#include <fmt/format.h>

#include "lab/compare.h"
#include "tensor/random.h"

namespace tessera::lab {

double Inputs::at(int rank, int64_t i) const {
  if (whole_numbers) return static_cast<double>((rank * 37 + i * 11 + rank * i) % 41 - 13);
  return static_cast<float>(Philox(static_cast<uint64_t>(rank)).uniform(static_cast<uint64_t>(i)) - 0.5);
}

std::vector<double> Inputs::of(int rank, Range r) const {
  std::vector<double> out;
  for (int64_t i = r.begin; i < r.end; ++i) out.push_back(at(rank, i));
  return out;
}

std::string Inputs::where(const char* operation, int rank) const {
  return fmt::format("{} of {} number{} on {} ranks, rank {}", operation, count, count == 1 ? "" : "s", ranks, rank);
}

std::vector<Inputs::Result> Inputs::run(const Body& body, Op op, Algorithm algorithm) const {
  std::vector<Result> out(static_cast<size_t>(ranks));
  on_ranks(
      ranks,
      [&](Communicator& world) {
        const ArenaPtr arena = make_arena();
        const std::vector<double> mine = of(world.rank(), {0, count});
        const std::vector<float> narrow(mine.begin(), mine.end());
        const Tensor whole = Tensor::of<float>(narrow, {count}, arena);
        const int64_t size = range(world.rank()).size();
        Tensor room = Tensor::empty({size + 1}, DType::float32, arena);  // a piece is at most one longer than another
        room.fill(kUntouched);
        const std::vector<double> values = numbers(body(world, whole, room.narrow(0, 0, size)));
        out[static_cast<size_t>(world.rank())] = {values, world.counts()[static_cast<size_t>(op)].sent,
                                                  numbers(whole) == mine, numbers(room).back() == kUntouched};
      },
      algorithm);
  return out;
}

void Inputs::expect_kept(const std::string& where, const Result& result) const {
  if (!result.within)
    throw Wrong{"values", where + ": more than a piece was written to `out`; expected this rank's piece alone",
                "`out` has room for one piece: the sum that travels needs memory of its own"};
  if (!result.in_kept)
    throw Wrong{"values", where + ": the array at `in` has changed; expected it as it was",
                "a sum is added to `in`, or a message is received there: this needs memory of its own"};
}

std::vector<Guess> Inputs::guesses_of_sum(int r) const {
  std::vector<double> sum(static_cast<size_t>(range(r).size()));
  for (int q = 0; q < ranks; ++q) sum = sum + of_piece(q, r);
  std::vector<Guess> out{
      {"nothing was written there", std::vector<double>(sum.size(), kUntouched)},
      {"it is this rank's own piece: nothing that came from others was added", of_piece(r, r)},
      {"this rank's own piece is added once for each rank: what the others sent is not used", of_piece(r, r) * ranks}};
  for (int q = 0; q < ranks; ++q) {
    const std::vector<double> theirs = of_piece(q, r);
    out.push_back(
        {fmt::format("it is the piece of rank {} alone: the message replaced the sum, and was not added to it", q),
         theirs});
    out.push_back({fmt::format("the numbers of rank {} are missing in the sum", q), sum + theirs * -1});
    out.push_back({fmt::format("the numbers of rank {} are in the sum twice", q), sum + theirs});
  }
  for (int p = 0; p < ranks; ++p) {
    std::vector<double> other(static_cast<size_t>(range(p).size()));
    for (int q = 0; q < ranks; ++q) other = other + of_piece(q, p);
    out.push_back({fmt::format("it is the sum of piece {0}; rank {1} must end with piece {1}", p, r), other});
  }
  return out;
}

void Inputs::expect_gathered(const std::string& where, const std::vector<double>& found) const {
  for (int p = 0; p < ranks; ++p) {
    const Range r = range(p);
    const auto begin = found.begin();
    std::vector<Guess> guesses{{"nothing was written there: a piece never arrived, or went to another place",
                                std::vector<double>(static_cast<size_t>(r.size()), kUntouched)}};
    for (int q = 0; q < ranks; ++q)
      guesses.push_back({fmt::format("it is the piece of rank {}: pieces are at the wrong places", q), of_piece(q, q)});
    guesses.push_back(
        {"a piece is sent from a wrong place, or written to one: piece p begins range(p).begin * element "
         "bytes behind the beginning",
         {begin + r.begin, begin + r.end}});
    expect_values(fmt::format("{}, the piece of rank {}", where, p), {begin + r.begin, begin + r.end}, of_piece(p, p),
                  guesses, ranks);
  }
}

void for_inputs(const std::function<void(const Inputs&)>& check) {
  for (const bool whole_numbers : {true, false})
    for (const int n : {3, 2, 5})
      for (const int64_t count : {int64_t{8 * n}, int64_t{n}, int64_t{7}, int64_t{1}, int64_t{1003}})
        check({n, count, whole_numbers});
}

// One rank, one micro-batch after another.

namespace {

constexpr uint64_t kSeed = 5;

std::vector<float> floats(const Tensor& t) { return t.contiguous().to_vector<float>(); }

class GptWithIdle : public Decoder {
 public:
  explicit GptWithIdle(const ModelConfig& c) : Decoder(c) { child<Embedding>("idle", 30, c.channels).make_unit(); }
};

}  // namespace

std::string DataCase::where(int rank) const {
  return fmt::format("{} on {} ranks, {} micro-batch{} each{}, rank {}",
                     zero == 0 ? "ddp" : fmt::format("zero-{}", zero), ranks, microbatches,
                     microbatches == 1 ? "" : "es", idle ? ", a parameter without a gradient" : "", rank);
}

std::unique_ptr<Decoder> small_model(const DataCase& c) {
  const ModelConfig sizes{.layers = 2, .heads = 2, .channels = 24, .context = 8, .vocab = 37};
  if (c.idle) return std::make_unique<GptWithIdle>(sizes);
  return std::make_unique<Decoder>(sizes);
}

void learn(Decoder& model, const DataCase& c, int rank, int64_t microbatch, const ArenaPtr& arena) {
  const ModelConfig& m = model.config;
  const int64_t batch = c.ranks * c.microbatches * kSequences,
                first = (rank * c.microbatches + microbatch) * kSequences;
  const Sequences source = counted_sequences(m.vocab, m.context, batch, kSeed);
  const Shape shape{kSequences, m.context};
  const Tensor ids = Tensor::empty(shape, DType::int32, arena), targets = Tensor::empty(shape, DType::int32, arena);
  source.load(0, first, kSequences, ids.data<int32_t>(), targets.data<int32_t>());
  model.set_step({.seed = kSeed, .step = 0, .first_sequence = first, .training = true});
  backward(model.loss(ids, targets, 1.0 / static_cast<double>(batch * m.context)).mean);
}

void add(Gradients& to, const Gradients& more) {
  if (to.empty()) {
    to = more;
    return;
  }
  for (size_t p = 0; p < to.size(); ++p)
    for (size_t i = 0; i < to[p].size(); ++i) to[p][i] += more[p][i];
}

Gradients MicroGradients::of_rank(int r) const {
  Gradients sum;
  for (const Gradients& one : parts[static_cast<size_t>(r)]) add(sum, one);
  return sum;
}

Gradients MicroGradients::of_microbatch(int64_t j) const {
  Gradients sum;
  for (const auto& rank : parts) add(sum, rank[static_cast<size_t>(j)]);
  return sum;
}

Gradients MicroGradients::summed() const {
  Gradients sum;
  if (of.zero >= 2)
    for (int64_t j = 0; j < of.microbatches; ++j) add(sum, of_microbatch(j));
  else
    for (int r = 0; r < of.ranks; ++r) add(sum, of_rank(r));
  return sum;
}

MicroGradients micro_gradients(const DataCase& c) {
  MicroGradients out{.of = c, .names = {}, .values = {}, .parts = {}};
  out.parts.resize(static_cast<size_t>(c.ranks));
  on_ranks(1, [&](Communicator&) {
    const ArenaPtr arena = make_arena();
    const std::unique_ptr<Decoder> made = small_model(c);
    Decoder& model = *made;
    std::vector<FlatUnit> units;
    for (const Module::Unit& unit : model.layout())
      units.push_back(make_unit(unit, arena, DType::float32, DType::float32, kSeed));
    for (const FlatUnit& unit : units)
      for (const Slot& slot : unit.slots) {
        out.names.push_back(slot.parameter->name);
        out.values.push_back(floats(unit.values.narrow(0, slot.begin, slot.size)));
      }
    for (int r = 0; r < c.ranks; ++r)
      for (int64_t j = 0; j < c.microbatches; ++j) {
        model.clear_gradients();
        learn(model, c, r, j, arena);
        model.zero_missing_gradients();
        Gradients one;
        for (const FlatUnit& unit : units)
          for (const Slot& slot : unit.slots) one.push_back(floats(unit.grads.narrow(0, slot.begin, slot.size)));
        out.parts[static_cast<size_t>(r)].push_back(std::move(one));
      }
  });
  return out;
}

// The model, and its ranks.

Job small_job(const Plan& plan) {
  Job job{
      .model = {.layers = 2, .heads = 6, .channels = 48, .context = 16, .vocab = 42},
      .optim =
          {.optimizer = OptimizerKind::sgd, .momentum = 0, .lr = 0.1, .warmup = 0, .steps = 10, .clip = 0, .batch = 12},
      .plan = plan};
  job.plan.threads_per_rank = 1;
  job.plan.deterministic = true;
  return job;
}

Job one_rank(Job job) {
  Plan plan{.microbatches = job.plan.dp * job.plan.microbatches};
  plan.threads_per_rank = 1;
  plan.deterministic = true;
  job.plan = plan;
  return job;
}

void on_ranks_of(const Job& job, const std::function<void(Trainer& trainer, int rank)>& body) {
  check(job);
  on_ranks(
      static_cast<int>(job.plan.ranks()),
      [&](Communicator& world) {
        const Sequences sequences = counted_sequences(job.model.vocab, job.model.context, job.optim.batch,
                                                      static_cast<uint64_t>(job.optim.seed));
        Trainer trainer(job, sequences, world);
        body(trainer, world.rank());
      },
      job.plan.all_reduce);
}

}  // namespace tessera::lab
