// Random plans, and what each of them must pass.
#pragma once
#include <gtest/gtest.h>

#include <initializer_list>

#include "tests/support/draw.h"
#include "tests/verify/plans.h"
#include "verify/verify.h"

namespace tessera::test {

inline void expect_passes(const TrainOptions& o) {
  const VerifyResult r = verify(job_of(o));
  EXPECT_TRUE(r.passed()) << command_of(o) << "\n" << (r.failures.empty() ? "" : r.failures.front());
  EXPECT_TRUE(r.bitwise || !r.exact) << command_of(o);
  EXPECT_EQ(r.losses.size(), static_cast<size_t>(o.steps));
}

// A family for `o`, which has its heads, channels and context: `unit` is what ranks share heads by.
inline void draw_family(Draw& d, TrainOptions& o, int64_t unit = 1) {
  o.family = d.of<const char*>({"gpt2", "llama"});
  if (d.between(0, 1) == 1) o.kv_heads = unit;
  if (d.between(0, 2) == 0) o.head_dim = 2 * d.between(1, 5);
  if (d.between(0, 2) == 0) o.ffn = d.between(4, 50);
  o.untied = d.between(0, 1) == 1;
  o.document_mask = o.dp_mode != "dataparallel" && d.between(0, 2) == 0;
  if (*o.family == "gpt2") return;
  o.qkv_bias = d.between(0, 2) == 0;
  o.qk_norm = d.between(0, 2) == 0;
  o.rope_theta = d.of({100.0, 10000.0});
  o.rope_scaling = d.of<const char*>({"none", "linear", "llama3"});
  if (*o.rope_scaling != "none") o.rope_factor = 4;
  if (*o.rope_scaling == "llama3") o.rope_original_context = 8;
}

}  // namespace tessera::test
