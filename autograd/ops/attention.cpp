// Attention, and norms and rotary embeddings of its heads: forward passes and vjps.
#include <utility>
#include <vector>

#include "autograd/ops.h"

namespace tessera {

Var attention(const Var& q, const Var& k, const Var& v, const AttentionOptions& options) {
  const AttentionResult a = attention(q.value(), k.value(), v.value(), options);
  return record_one("attention", a.out, {q, k, v}, [q = q.saved(), k = k.saved(), v = v.saved(), a, options](Grads& g) {
    const Tensor qt = q.get(), kt = k.get(), vt = v.get();
    Tensor dq = qt.make(qt.shape()), dk = kt.make(kt.shape()), dv = vt.make(vt.shape());
    attention_backward(g.output(), qt, kt, vt, a, options, dq, dk, dv);
    if (g.needs(0)) g.set(0, std::move(dq));
    if (g.needs(1)) g.set(1, std::move(dk));
    if (g.needs(2)) g.set(2, std::move(dv));
  });
}

Var packed_attention(const Var& qkv, const Heads& heads, const AttentionOptions& options) {
  const Tensor& packed = qkv.value();
  const Tensor q = packed_slice(packed, heads, 0);
  const AttentionResult a = attention(q, packed_slice(packed, heads, 1), packed_slice(packed, heads, 2), options);
  return record_one("attention", a.out.reshape({q.dim(0), q.dim(1), -1}), {qkv}, [=](Grads& g) {
    const Tensor gradient = packed.make(packed.shape());
    Tensor dq = packed_slice(gradient, heads, 0), dk = packed_slice(gradient, heads, 1),
           dv = packed_slice(gradient, heads, 2);
    attention_backward(g.output().contiguous().reshape(q.shape()), q, packed_slice(packed, heads, 1),
                       packed_slice(packed, heads, 2), a, options, dq, dk, dv);
    g.set(0, gradient);
  });
}

Var norm_heads(const Var& qkv, const Heads& heads, const Var& gamma_q, const Var& gamma_k, double eps) {
  const Tensor& packed = qkv.value();
  const NormOptions options{.eps = eps, .center = false};
  const Tensor y = packed.make(packed.shape());
  packed_slice(y, heads, 2).copy_from(packed_slice(packed, heads, 2));
  std::vector<Normed> normed;
  for (int i = 0; i < 2; ++i) {
    const Var& gamma = i == 0 ? gamma_q : gamma_k;
    normed.push_back(norm(packed_slice(packed, heads, i), gamma.value(), Tensor(), options));
    packed_slice(y, heads, i).copy_from(std::exchange(normed.back().y, Tensor()));
  }
  return record_one("norm_heads", y, {qkv, gamma_q, gamma_k},
                    [=, packed = qkv.saved(), gammas = std::vector{gamma_q.saved(), gamma_k.saved()}](Grads& g) {
                      const Tensor dy = g.take_output(0), x = packed.get();
                      const Tensor dx = dy.unique() ? dy : dy.make(dy.shape());
                      if (!dy.unique()) packed_slice(dx, heads, 2).copy_from(packed_slice(dy, heads, 2));
                      for (int i = 0; i < 2; ++i) {
                        const Normed& n = normed[static_cast<size_t>(i)];
                        const Tensor given = packed_slice(dy, heads, i).contiguous(),
                                     in = packed_slice(x, heads, i).contiguous();
                        NormSums sums;
                        if (g.needs(1 + i)) sums.gamma.to = in.make({in.dim(3)}, n.rstd.dtype());
                        packed_slice(dx, heads, i)
                            .copy_from(norm_backward(given, in, gammas[static_cast<size_t>(i)].get(), n, {}, sums));
                        if (g.needs(1 + i)) g.set(1 + i, std::move(sums.gamma.to));
                      }
                      if (g.needs(0)) g.set(0, dx);
                    });
}

Var rotate(Var x, const RopeArgs& rope) {
  const Var x_edge = x.edge();
  Tensor y = rotate(std::move(x).take(), rope);
  return record_one("rotate", std::move(y), {x_edge}, [rope](Grads& g) {
    RopeArgs inverse = rope;
    inverse.back = true;
    g.set(0, rotate(g.take_output(0), inverse));
  });
}

}  // namespace tessera
