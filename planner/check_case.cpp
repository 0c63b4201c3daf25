// What sizes, layouts and numbers must be.
#include "planner/check_case.h"

#include <fmt/format.h>

#include <cmath>

#include "planner/pipeline.h"
#include "tensor/error.h"

namespace tessera::planner {
namespace {

double real(int64_t x) { return static_cast<double>(x); }

void positive(const char* field, int64_t value, int64_t most) {
  if (value < 1 || value > most) throw FieldError(field, fmt::format("expected 1 to {}, found {}", most, value));
}

void divides(const char* field, int64_t part, const char* what, int64_t whole) {
  if (whole % part != 0)
    throw FieldError(field,
                     fmt::format("{} do not divide {} {}; {} do", part, whole, what, divisors_near(whole, part)));
}

}  // namespace

Case checked_case(const Case& given) {
  Case c = given;
  ModelShape& m = c.model;
  Plan& p = c.layout.plan;
  constexpr int64_t kMost = 1'000'000, kMany = 1'000'000'000;
  positive("layers", m.layers, 100'000), positive("channels", m.channels, kMost), positive("heads", m.heads, kMost);
  positive("context", m.context, kMany), positive("vocab", m.vocab, kMany);
  positive("kv_heads", m.key_heads(), kMost), positive("ffn", m.hidden(), 10'000'000);
  if (m.head_dim == 0) divides("heads", m.heads, "channels", m.channels);
  positive("head_dim", m.head_size(), kMost);
  divides("kv_heads", m.key_heads(), "heads", m.heads);
  if (m.experts > 0) positive("experts_per_token", m.experts_per_token, m.experts);
  positive("dp", p.dp, kMost), positive("tp", p.tp, kMost), positive("pp", p.pp, kMost), positive("cp", p.cp, kMost);
  positive("ep", c.layout.ep, kMost), positive("microbatches", p.microbatches, kMost);
  positive("sequences", c.layout.sequences, kMost);
  divides("tp", p.tp, "heads", m.heads), divides("tp", p.tp, "hidden channels", m.hidden());
  divides("cp", p.cp, "tokens of the context", m.context);
  constexpr int64_t kMostRanks = 1 << 17;
  if (static_cast<double>(p.dp) * real(p.tp) * real(p.pp) * real(p.cp) > kMostRanks)
    throw FieldError("dp", fmt::format("expected at most {} ranks of all axes", kMostRanks));
  if (real(p.dp) * real(p.microbatches) * real(c.layout.sequences) * real(m.context) > 1e15)
    throw FieldError("sequences", "expected at most 1e15 tokens in a step");
  if (c.layout.ep > 1 && m.experts == 0)
    throw FieldError("ep", fmt::format("expected 1 without experts, found {}", c.layout.ep));
  if (c.layout.ep > 1) {
    divides("ep", c.layout.ep, "experts", m.experts);
    divides("ep", c.layout.ep, "ranks of dp x cp", p.dp * p.cp);
  }
  if (p.schedule != ScheduleKind::interleaved && p.chunks == 1) p.chunks = 0;
  if (p.pp == 1 && p.schedule != ScheduleKind::interleaved) p.chunks = 0;
  if (const int64_t stages = std::ssize(rank_of_stages(p));
      stages > m.layers + (c.software.fewer_layers_at_ends ? 2 : 0))
    throw FieldError("pp",
                     fmt::format("{} stages for {} layers; expected at most one for each layer", stages, m.layers));
  if (p.pp > 1 && p.schedule == ScheduleKind::interleaved && p.microbatches % p.pp != 0)
    throw FieldError("microbatches",
                     fmt::format("{} are no multiple of {} pipeline ranks, as interleaved needs; {} are",
                                 p.microbatches, p.pp, multiples_near(p.pp, p.microbatches)));
  check(c.hardware);
  check(c.software);
  return c;
}

}  // namespace tessera::planner
