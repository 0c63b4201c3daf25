// Ring attention, Ulysses and a vocabulary that ranks share, where scores and logits of different ranks are far apart;
// against plain loops in float64.

#include "parallel/comm/launch.h"
#include "parallel/context_parallel.h"
#include "parallel/tensor_parallel.h"
#include "tests/support/gpu.h"
#include "tests/support/plain_attention.h"

namespace tessera {
namespace {

using namespace test;  // NOLINT

std::vector<double> doubles(const Tensor& t) { return t.to(DType::float64).to_vector<double>(); }

// q, k and v of some tokens as (1, T, (H + 2 K) D).
std::vector<double> packed(const AttentionShape& s, const std::vector<int64_t>& tokens, const std::vector<double>& q,
                           const std::vector<double>& k, const std::vector<double>& v) {
  std::vector<double> out;
  const auto add = [&](const std::vector<double>& from, int64_t t, int64_t width) {
    out.insert(out.end(), from.begin() + t * width, from.begin() + (t + 1) * width);
  };
  for (const int64_t t : tokens) {
    add(q, t, s.h * s.d);
    if (k.empty()) continue;
    add(k, t, s.k * s.d);
    add(v, t, s.k * s.d);
  }
  return out;
}

enum class Way : uint8_t { zigzag, contiguous, ulysses };

void expect_plain(const AttentionShape& s, Extreme extreme, Way way, DType dtype, Communicator& cp,
                  const ArenaPtr& arena) {
  const AttentionValues x = draw_extreme(s, extreme, 11);
  const PlainAttention expected = attend_plainly(s, x);
  const Balance balance = way == Way::zigzag ? Balance::zigzag : Balance::contiguous;
  const std::vector<int64_t> mine = context_positions(s.tk, cp.size(), cp.rank(), balance);
  const auto tensor = [&](const std::vector<double>& values) {
    const int64_t tokens = std::ssize(mine);
    return Tensor::of<double>(values, {1, tokens, std::ssize(values) / tokens}, make_arena()).to(dtype).to(arena);
  };
  const Heads heads{s.h, s.k};
  const AttentionOptions options{.causal = s.causal};
  const Var qkv(tensor(packed(s, mine, x.q, x.k, x.v)), true);
  const Var y = way == Way::ulysses ? ulysses_attention(qkv, heads, options, cp)
                                    : ring_attention(qkv, heads, options, cp, balance);
  backward(y, {.seed = tensor(packed(s, mine, x.dout, {}, {}))});
  const double bound = dtype == DType::float64 ? 1e-11 : 5e-4;
  const std::string what = "rank " + std::to_string(cp.rank()) + " of " + std::to_string(cp.size()) + ", extreme " +
                           std::to_string(static_cast<int>(extreme)) + ", way " + std::to_string(static_cast<int>(way));
  EXPECT_LE(row_difference(doubles(y.value()), packed(s, mine, expected.out, {}, {}), s.d, 0.05), bound) << what;
  EXPECT_LE(
      row_difference(doubles(qkv.grad()), packed(s, mine, expected.dq, expected.dk, expected.dv), heads.packed() * s.d,
                     0.1, packed(s, mine, expected.dq_terms, expected.dk_terms, expected.dv)),
      2 * bound)
      << what;
}

void expect_plain_of(int ranks, std::initializer_list<DType> dtypes, Device device) {
  launch({.ranks = ranks, .threads_per_rank = 1, .timeout_s = 60}, [&](Communicator& world) {
    for (const DType dtype : dtypes)
      for (const Way way : {Way::zigzag, Way::contiguous, Way::ulysses})
        for (const bool causal : {true, false})
          for (const Extreme extreme : kExtremes) {
            const ArenaPtr arena = device == Device::cpu ? world.make_arena() : make_arena(device);
            const int64_t tokens = 24 * ranks;
            expect_plain({.tq = tokens, .tk = tokens, .h = 2 * ranks, .k = ranks, .d = 4, .causal = causal}, extreme,
                         way, dtype, world, arena);
          }
  });
}

TEST(Extremes, OfAContextThatRanksShareAreThoseOfPlainLoops) {
  for (const int ranks : {1, 2, 3, 4}) expect_plain_of(ranks, {DType::float64, DType::float32}, Device::cpu);
}

// The largest logit is any rank's, the target's too.
void expect_loss(int ranks, DType dtype) {
  constexpr int64_t kRows = 12, kVocab = 25;
  const Philox random = Philox::named(2, "logits");
  std::vector<double> logits, losses, gradient;
  std::vector<int32_t> targets;
  for (int64_t i = 0; i < kRows; ++i) {
    double largest = -INFINITY, sum = 0;
    for (int64_t j = 0; j < kVocab; ++j) {
      const double by = i == 0 ? 0 : 150.0 * static_cast<double>((j * (i % 4) / 6 + i) % 4);  // from rank to rank
      logits.push_back(nearest_bf16(i == 1 ? 7 : by + random.normal(static_cast<uint64_t>(i * kVocab + j))));
      largest = std::max(largest, logits.back());
    }
    targets.push_back(static_cast<int32_t>(i == 2 ? -1 : i * 5 % kVocab));
    const double* const row = logits.data() + i * kVocab;
    for (int64_t j = 0; j < kVocab; ++j) sum += std::exp(row[j] - largest);
    losses.push_back(targets.back() < 0 ? 0 : largest + std::log(sum) - row[targets.back()]);
    for (int64_t j = 0; j < kVocab; ++j)
      gradient.push_back(targets.back() < 0 ? 0 : std::exp(row[j] - largest) / sum - (j == targets.back() ? 1 : 0));
  }
  double total = 0;
  for (const double one : losses) total += one;
  launch({.ranks = ranks, .threads_per_rank = 1, .timeout_s = 60}, [&](Communicator& world) {
    const Range own = piece(kVocab, ranks, world.rank());
    const ArenaPtr arena = world.make_arena();
    const auto columns = [&](const std::vector<double>& from) {
      return Tensor::of<double>(from, {kRows, kVocab}, arena).narrow(1, own.begin, own.size()).contiguous();
    };
    const Var x(columns(logits).to(dtype), true);
    const Loss loss = vocab_parallel_cross_entropy(x, Tensor::of<int32_t>(targets, {kRows}, arena), 1, world, kVocab);
    backward(loss.mean);
    const double bound = dtype == DType::float64 ? 1e-11 : 1e-4;
    EXPECT_NEAR(double{loss.loss_sum}, total, bound * total);
    EXPECT_LE(row_difference(doubles(x.grad()), columns(gradient).to_vector<double>(), own.size(), 1), bound);
  });
}

TEST(Extremes, OfAVocabularyThatRanksShareAreThoseOfPlainLoops) {
  for (const int ranks : {1, 2, 3, 4})
    for (const DType dtype : {DType::float64, DType::float32}) expect_loss(ranks, dtype);
}

using ExtremesGpu = test::OnGpu;

TEST_F(ExtremesGpu, OfAContextThatRanksShareAreThoseOfPlainLoops) {
  expect_plain_of(2, {DType::float32}, Device::cuda);
}

}  // namespace
}  // namespace tessera
