// Layout-invariant sums over tokens (docs/layout_invariant.md), for gradients of biases and norms.
//
// Token p and its mirror, token T - 1 - p, belong together. With P = ceil(T / 2) = 2^h m and m odd, leaf i has the
// pairs from i m to (i + 1) m - 1 of every sequence, and a binary tree adds the 2^h leaves. A rank that has chunks r
// and 2 n - 1 - r of the 2 n chunks of each sequence holds one subtree of the tree over n ranks, and computes it by the
// same rule from its tokens alone.
#pragma once
#include <cstdint>

namespace tessera::cpu {

struct TokenRows {
  int64_t batch = 1, tokens = 1;
};

// Adds `width` columns, at most kStrip: add(sums, row) adds a row (b T + t) to A[kSums][kStrip]; done(sums) receives
// the total.
template <class A, int kSums, int64_t kStrip>
class TokenTree {
 public:
  using Sums = A[kSums][kStrip];

  template <class Add, class Done>
  static void run(const TokenRows& rows, int64_t width, const Add& add, const Done& done) {
    Sums pending[kMaxLevels];
    Sums sums = {};
    const int64_t t = rows.tokens, pairs = (t + 1) / 2;
    int64_t of_leaf = pairs, leaves = 1;
    for (; of_leaf > 0 && of_leaf % 2 == 0; of_leaf /= 2) leaves *= 2;
    for (int64_t leaf = 0; leaf < leaves; ++leaf) {
      for (auto& sum : sums)
        for (int64_t j = 0; j < width; ++j) sum[j] = A(0);
      for (int64_t p = leaf * of_leaf; p < (leaf + 1) * of_leaf; ++p)
        for (int64_t b = 0; b < rows.batch; ++b) {
          add(sums, b * t + p);
          if (t - 1 - p != p) add(sums, b * t + t - 1 - p);
        }
      int level = 0;
      for (; (leaf >> level & 1) != 0; ++level) combine(sums, pending[level], width);
      if (leaf + 1 < leaves) copy(pending[level], sums, width);
    }
    done(sums);
  }

 private:
  static constexpr int kMaxLevels = 40;
  static void combine(Sums& sums, const Sums& left, int64_t width) {
    for (int s = 0; s < kSums; ++s)
#pragma GCC ivdep
      for (int64_t j = 0; j < width; ++j) sums[s][j] = left[s][j] + sums[s][j];
  }
  static void copy(Sums& to, const Sums& from, int64_t width) {
    for (int s = 0; s < kSums; ++s)
#pragma GCC ivdep
      for (int64_t j = 0; j < width; ++j) to[s][j] = from[s][j];
  }
};

}  // namespace tessera::cpu
