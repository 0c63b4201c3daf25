"""A mixture of experts in plain PyTorch and float64, implemented from the papers, independent of this library, as an oracle.

Jiang et al. 2024 (Mixtral: softmax over the selected experts), Fedus et al. 2021 (balance loss), Zoph et al. 2022 (z-loss),
Shazeer 2020 (SwiGLU); GELU by its tanh formula. Losses are means over sequences.

usage: experts_pytorch.py B,T,C,E,K,HIDDEN,GATED,SOFTMAX_FIRST,SHARED,BALANCE,Z ...
Reads float32 values from in.bin, per layer: x, gradient of y, router, two matrices per expert, and two of the shared layer.
Writes float64 values to out.bin: y, then the gradients of x and of the weights in that order.
"""
import sys

import numpy as np
import torch
from torch.nn import functional as F

numbers = torch.from_numpy(np.fromfile("in.bin", "<f4").astype("f8"))


def take(*shape):
    global numbers
    size = int(np.prod(shape))
    out, numbers = numbers[:size].reshape(shape).clone().requires_grad_(), numbers[size:]
    return out


def layer(x, up, down, gated):
    h = F.linear(x, up)
    if gated:
        gate, value = h.chunk(2, -1)
        h = F.silu(gate) * value
    else:
        h = F.gelu(h, approximate="tanh")
    return F.linear(h, down)


def mixture(b, t, c, experts, k, hidden, gated, first, shared, balance, z):
    x, dy, router = take(b, t, c), take(b, t, c), take(experts, c)
    pairs = [(take((1 + gated) * hidden, c), take(c, hidden)) for _ in range(experts)]
    shared_experts = [(take((1 + gated) * hidden * shared, c), take(c, hidden * shared))] if shared else []
    logits = F.linear(x, router)
    chosen = logits.topk(k, -1).indices
    weights = logits.softmax(-1).gather(-1, chosen)
    if not first:
        weights = weights / weights.sum(-1, keepdim=True)
    y = torch.zeros_like(x)
    for e, (up, down) in enumerate(pairs):
        share = (weights * (chosen == e)).sum(-1, keepdim=True)
        y = y + share * layer(x, up, down, gated)
    for up, down in shared_experts:
        y = y + layer(x, up, down, gated)
    choices = F.one_hot(chosen, experts).double().mean((1, 2))  # (B, E): fractions of the choices
    losses = balance * experts * (choices * logits.softmax(-1).mean(1)).sum(-1) + z * logits.logsumexp(-1).square().mean(-1)
    ((y * dy.detach()).sum() + losses.mean()).backward()
    return [y.detach(), x.grad, router.grad] + [w.grad for pair in pairs + shared_experts for w in pair]


out = []
for words in sys.argv[1:]:
    sizes = words.split(",")
    out += mixture(*(int(a) for a in sizes[:9]), *(float(a) for a in sizes[9:]))
np.concatenate([o.numpy().ravel() for o in out]).tofile("out.bin")
