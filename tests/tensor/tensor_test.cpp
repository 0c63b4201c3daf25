// Views, copies and arenas: memory of ops, memory regions, watchers; error messages.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "tensor/cpu/loops.h"
#include "tensor/ops/attention/attention.h"
#include "tensor/ops/cross_entropy.h"
#include "tensor/ops/elementwise.h"
#include "tensor/ops/experts/experts.h"
#include "tensor/ops/reduce.h"
#include "tests/support/tensors.h"

namespace tessera {
namespace {

Tensor iota(const Shape& shape) {
  return test::made(shape, DType::float32, make_arena(), [](size_t i) { return i; });
}

TEST(Tensor, ViewsShareStorage) {
  const Tensor t = iota({2, 3, 4});
  const Tensor v = t.transpose(0, 2).narrow(0, 1, 2);  // (2, 3, 2)
  EXPECT_EQ(v.shape(), (Shape{2, 3, 2}));
  EXPECT_EQ(v.to_vector<float>(), (std::vector<float>{1, 13, 5, 17, 9, 21, 2, 14, 6, 18, 10, 22}));
  EXPECT_EQ(v.storage(), t.storage());
  EXPECT_EQ(t.select(1, 2).to_vector<float>(), (std::vector<float>{8, 9, 10, 11, 20, 21, 22, 23}));
  EXPECT_EQ(t.narrow(2, 0, 4).reshape({6, -1}).shape(), (Shape{6, 4}));
  EXPECT_EQ(t.reshape({2, 12}).narrow(1, 0, 8).reshape({2, 4, 2}).to_vector<float>(),
            (std::vector<float>{0, 1, 2, 3, 4, 5, 6, 7, 12, 13, 14, 15, 16, 17, 18, 19}));
  EXPECT_THROW(t.transpose(0, 2).reshape({24}), Error);
  EXPECT_THROW(t.reshape({5, 5}), Error);
  EXPECT_THROW(t.narrow(0, 1, 2), Error);
}

TEST(Tensor, ExpandRepeatsValues) {
  const Tensor t = iota({3, 1}).expand({2, 3, 2});
  EXPECT_EQ(t.to_vector<float>(), (std::vector<float>{0, 0, 1, 1, 2, 2, 0, 0, 1, 1, 2, 2}));
  EXPECT_THROW(iota({3}).expand({2}), Error);
}

TEST(Tensor, BroadcastAddAndGradientMatchHandComputation) {
  const Tensor a = iota({2, 3}), b = iota({2, 1});
  EXPECT_EQ(binary<Add>(a, b).to_vector<float>(), (std::vector<float>{0, 1, 2, 4, 5, 6}));
  EXPECT_EQ(sum_to(a, {2, 1}).to_vector<float>(), (std::vector<float>{3, 12}));
  EXPECT_EQ(sum_to(a, {3}).to_vector<float>(), (std::vector<float>{3, 5, 7}));
  EXPECT_EQ(sum(a).item<float>(), 15);
  EXPECT_EQ(unary<Gelu>(a).numel(), 6);
}

TEST(Arena, CountsByCategoryAndReusesMemory) {
  const ArenaPtr arena = make_arena();
  {
    const Tensor p = Tensor::empty({10}, DType::float32, arena, Category::parameters);
    EXPECT_EQ(arena->usage(Category::parameters).live, 40);
    for (int i = 0; i < 100; ++i) (void)Tensor::empty({1000}, DType::float64, arena);
    EXPECT_EQ(arena->usage(Category::activations).live, 0);
    EXPECT_EQ(arena->usage(Category::activations).peak, 8000);
    EXPECT_EQ(arena->total().peak, 8040);
  }
  EXPECT_LE(arena->footprint(), 8256);  // AddressSanitizer adds two gaps
  EXPECT_EQ(arena->total().live, 0);
}

TEST(Arena, SupportsFileBacking) {
  const ArenaPtr arena = make_file_arena(std::filesystem::temp_directory_path());
  Tensor t = Tensor::empty({3'000'000}, DType::float32, arena, Category::optimizer);
  t.fill(2.5);
  EXPECT_EQ(t.data<float>()[2'999'999], 2.5F);
  EXPECT_EQ(arena->usage(Category::optimizer).live, 12'000'000);
  EXPECT_THROW(make_file_arena("/no/such/directory"), OutputError);
}

TEST(Arena, ThrowsBeyondCapacityAndStaysUsable) {
  Arena arena(host_region(int64_t{1} << 30));
  std::byte* const a = arena.allocate(1000, Category::workspace);
  arena.release(a, 1000, Category::workspace);
  EXPECT_THROW(arena.allocate(int64_t{1} << 31, Category::workspace), OutOfMemory);
  EXPECT_THROW(arena.allocate(INT64_MAX - 1000, Category::workspace), OutOfMemory);
  EXPECT_EQ(arena.total().live, 0);
  EXPECT_EQ(arena.allocate(1000, Category::workspace), a);
  arena.release(a, 1000, Category::workspace);
}

std::vector<char> ended;  // names appended by the destructors below, which cannot capture a variable
template <char kName>
struct Ends {
  ~Ends() { ended.push_back(kName); }
};

TEST(Arena, DestroysLocalsInReverseOrder) {
  {
    const ArenaPtr arena = make_arena();
    arena->local<Ends<'b'>>();
    arena->local<Ends<'c'>>();
    arena->local<Ends<'a'>>();
    EXPECT_EQ(&arena->local<Ends<'c'>>(), &arena->local<Ends<'c'>>());
  }
  EXPECT_EQ(ended, (std::vector<char>{'a', 'c', 'b'}));
}

TEST(Tensor, MetaTensorHasNoMemory) {
  const Tensor t = Tensor::meta({1000000, 1000000}, DType::float32);
  EXPECT_EQ(t.numel(), 1000000000000);
  EXPECT_THROW(t.data<float>(), Error);
}

// Memory that ops allocate from a host arena that represents a GPU, compared with a CPU arena.

constexpr int64_t kRows = 64, kIn = 32, kOut = 48;

struct Operands {
  Tensor x, w, dy, dw;
};

// Peak bytes that `op` allocates on `device`, in addition to its operands.
template <class F>
int64_t taken(Device device, const F& op) {
  const cpu::DryRun nothing_is_computed;
  const ArenaPtr arena = make_arena();
  arena->local<DryRunDevice>().device = device;
  const auto matrix = [&](int64_t rows, int64_t columns, DType dtype = DType::bfloat16) {
    return Tensor::empty({rows, columns}, dtype, arena);
  };
  const Operands operands{matrix(kRows, kIn), matrix(kOut, kIn), matrix(kRows, kOut),
                          matrix(kOut, kIn, DType::float32)};
  const int64_t before = arena->total().live;
  arena->reset_peaks();
  op(operands);
  return arena->total().peak - before;
}

TEST(DryRunDevice, GpuMatmulsAllocateOnlyTheirResult) {
  const auto product = [](const Operands& t) {
    PackedWeights packs;
    linear(t.x, t.w, {}, &packs);
  };
  EXPECT_EQ(taken(Device::cuda, product), 2 * kRows * kOut);
  EXPECT_GE(taken(Device::cpu, product), 2 * kRows * kOut + 2 * kIn * kOut);  // plus a packed weight
}

TEST(DryRunDevice, GpuGroupedGemmAllocatesOnlyItsResult) {
  const auto product = [](const Operands& t) { grouped_linear(t.x, {{t.w, kRows / 2}, {t.w, kRows / 2}}); };
  const auto gradient = [](const Operands& t) { grouped_linear_weight_grads({{t.dw, kRows}}, t.dy, t.x); };
  EXPECT_EQ(taken(Device::cuda, product), 2 * kRows * kOut);
  EXPECT_EQ(taken(Device::cuda, gradient), 0);
  EXPECT_GT(taken(Device::cpu, product), 2 * kRows * kOut);  // plus operands in float32
  EXPECT_GT(taken(Device::cpu, gradient), 0);
}

TEST(DryRunDevice, GpuAttentionAllocatesOnlyItsResult) {
  const auto attend = [](const Operands& t) {
    Tensor q = t.x.reshape({1, kRows, 1, kIn});
    const AttentionResult forward = attention(q, q, q, {});
    attention_backward(q, q, q, q, forward, {}, q, q, q);
  };
  const int64_t result = 2 * kRows * kIn + 4 * kRows;  // plus a log-sum-exp for each row
  EXPECT_EQ(taken(Device::cuda, attend), result);
  EXPECT_GT(taken(Device::cpu, attend), result);  // plus tiles of threads
}

TEST(DryRunDevice, GpuLogitsAreComputedInOneBlock) {
  const auto blocks = [](Device device) {
    bool one = false;
    taken(device, [&](const Operands& t) { one = row_blocks(t.x, t.w, 32 * kOut).one(); });
    return one;
  };
  EXPECT_TRUE(blocks(Device::cuda));
  EXPECT_FALSE(blocks(Device::cpu));
}

// Regions on a system that refuses a terabyte of addresses.

// Runs in a separate process and checks that regions are disjoint, map only what is used, and release their addresses.
[[noreturn]] void use_regions_under_a_limit() {
  const rlimit limit{int64_t{2} << 30, int64_t{2} << 30};
  const int64_t tera = int64_t{1} << 40, part = int64_t{3} << 20;
  if (setrlimit(RLIMIT_AS, &limit) != 0) std::_Exit(1);
  auto first = host_region(tera);
  const auto second = host_region(tera);
  if (first->capacity() != int64_t{64} << 30 || second->base() - first->base() != first->capacity()) std::_Exit(2);
  for (Region* region : {first.get(), second.get()}) {
    region->commit(part);
    region->commit(2 * part);
    std::memset(region->base(), 7, static_cast<size_t>(2 * part));
  }
  const std::byte* const place = first->base();
  first.reset();
  if (host_region(tera)->base() != place) std::_Exit(3);
  if (second->base()[2 * part - 1] != std::byte{7}) std::_Exit(4);
  std::_Exit(0);
}

TEST(AddressSpace, RegionsShareLimit) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer wants more addresses";
#endif
  EXPECT_EXIT(use_regions_under_a_limit(), testing::ExitedWithCode(0), "");
}

// The message of an error: one line of limited length, whatever it quotes.

TEST(Error, MessageIsOneLine) {
  EXPECT_STREQ(Error("a\nb\x1b[2J\t\x7f").what(), "a\\x0ab\\x1b[2J\\x09\\x7f");
  EXPECT_STREQ(Error("\u009b2J\u0085 \u00e9").what(), "\\x9b2J\\x85 \u00e9");  // control characters above ASCII
  EXPECT_STREQ(Error("caf\xe9 \xe2\x82 \xf0\x9f\x98\x80").what(),
               "caf\\xe9 \\xe2\\x82 \xf0\x9f\x98\x80");                           // invalid UTF-8
  EXPECT_STREQ(InputError("caf\u00e9 \\x0a 'x'").what(), "caf\u00e9 \\x0a 'x'");  // unchanged, also if escaped twice
}

TEST(Error, ElidesTheMiddleOfLongMessages) {
  std::string text = "begin ";
  while (text.size() < 100'000) text += "\u20ac";
  const std::string shown = Error(text + " end").what();
  EXPECT_LE(shown.size(), 1000U);
  EXPECT_GT(shown.size(), 900U);
  EXPECT_TRUE(shown.starts_with("begin \u20ac") && shown.ends_with("\u20ac end")) << shown.substr(0, 20);
  const size_t cut = shown.find(" [...] ");
  ASSERT_NE(cut, std::string::npos);
  EXPECT_EQ((cut - 6) % 3, 0U);  // between characters, on both sides
  EXPECT_EQ((shown.size() - 4 - (cut + 7)) % 3, 0U);
  EXPECT_EQ(Error(std::string(1000, 'a')).what(), std::string(1000, 'a'));
}

}  // namespace
}  // namespace tessera
