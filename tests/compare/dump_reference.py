"""Compares a dumped step with PyTorch: modules with the hub's names, implemented from the papers, with hooks on each.

usage: dump_reference.py, in a directory with `weights` (float64 parameters by Tessera's names) and dump_1.safetensors
Fails if names differ, or an output or its gradient by more than 1e-12 (2-norms, relative).
"""
import math
import sys

import torch
from llama_reference import norm, read_tensors, rotate
from torch import nn
from torch.nn import functional as F

EPS, THETA = 1e-5, 1e4


class Part(nn.Module):
    def __init__(self, forward, **parts):
        super().__init__()
        self.forward = forward
        for name, part in parts.items():
            self.add_module(name, part)


def make_model(w, heads, shared, llama):
    def linear(x, name):
        return F.linear(x, w[name + ".weight"], w.get(name + ".bias"))

    def normed(x, name):
        if llama:
            return norm(x, w[name + ".weight"], EPS)
        return F.layer_norm(x, x.shape[-1:], w[name + ".weight"], w[name + ".bias"], EPS)

    def attention(x, at):
        d = x.shape[-1] // heads
        q, k, v = linear(x, at + "qkv").unflatten(-1, (-1, d)).split([heads, shared, shared], 2)
        if llama:
            f = THETA ** (-2 * torch.arange(d // 2, dtype=torch.float64) / d)
            q, k = rotate(q, f, 1), rotate(k, f, 1)
        scores = torch.einsum("btkgd,bskd->bkgts", q.unflatten(2, (shared, heads // shared)), k) / math.sqrt(d)
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        y = torch.einsum("bkgts,bskd->btkgd", scores.masked_fill(hidden, -math.inf).softmax(-1), v)
        return linear(y.flatten(2), at + "proj")

    def feed_forward(x, at):
        if not llama:
            return linear(F.gelu(linear(x, at + "up"), approximate="tanh"), at + "down")
        gate, up = linear(x, at + "gate_up").chunk(2, -1)
        return linear(F.silu(gate) * up, at + "down")

    def layer(i):
        at = f"blocks.{i}."
        attn = Part(lambda x: attention(x, at + "attn."))
        mlp = Part(lambda x: feed_forward(x, at + "mlp."))

        def forward(x):
            x = x + attn(normed(x, at + "norm1"))
            return x + mlp(normed(x, at + "norm2"))

        return Part(forward, **{"self_attn" if llama else "attn": attn, "mlp": mlp})

    layers = nn.ModuleList(layer(i) for i in range(sum(name.endswith("norm1.weight") for name in w)))
    table = Part(lambda ids: w["tokens.weight"][ids])
    last = Part(lambda x: normed(x, "norm"))
    head = Part(lambda x: F.linear(x, w.get("head.weight", w["tokens.weight"])))

    def forward(ids):
        x = table(ids)
        if not llama:
            x = x + w["positions.weight"][: ids.shape[1]]
        for one in layers:
            x = one(x)
        return head(last(x))

    names = ("embed_tokens", "layers", "norm") if llama else ("wte", "h", "ln_f")
    body = Part(None, **dict(zip(names, (table, layers, last))))
    return Part(forward, **{"model" if llama else "transformer": body, "lm_head": head})


def main():
    about, weights = read_tensors("weights")
    dumped, found = read_tensors("dump_1.safetensors")
    w = {name: t.requires_grad_() for name, t in weights.items()}
    model = make_model(w, int(about["heads"]), int(about["shared"]), dumped["family"] == "llama")
    seen = {}

    def watch(name):
        def hook(module, given, out):
            out.retain_grad()
            seen[name] = out

        return hook

    for name, module in model.named_modules():
        if isinstance(module, Part) and name and module.forward:
            module.register_forward_hook(watch(name))
    logits = model(found["input_ids"])
    loss = F.cross_entropy(logits.flatten(0, 1), found["targets"].flatten())
    loss.backward()
    expected = {"loss": loss, **seen, **{name + ".grad": t.grad for name, t in seen.items()}}
    if set(expected) | {"input_ids", "targets"} != set(found):
        sys.exit(f"names differ: {sorted(set(expected) ^ set(found))}")
    for name, t in expected.items():
        if not (found[name] - t).norm() <= 1e-12 * t.norm():
            sys.exit(f"{name}: {((found[name] - t).norm() / t.norm()).item():.1e} from PyTorch's")


if __name__ == "__main__":
    main()
