"""GPT-2 in plain PyTorch, independent of this library, as an oracle for its loss and gradients.

Radford et al., "Language models are unsupervised multitask learners", 2019: pre-norm blocks, learned positions, tanh
GELU, biases, the head tied to the token embedding.

usage: gpt_pytorch.py, in a directory with
  model.json    {"layers", "heads", "channels", "context", "vocab", "batch", "tokens": N,
                 "tensors": [{"name", "shape", "offset"}]}, offsets in elements; names as in GPT.state_dict() below
  weights.bin   float32, the tensors at their offsets
  inputs.bin, targets.bin   int32 (batch, tokens)
Writes gradients.float32.bin and gradients.float64.bin (tensors at the same offsets, in that dtype) and loss.bin
(two float64: the mean cross-entropy computed in float32 and in float64).
"""
import json
import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, channels, heads, sdpa):
        super().__init__()
        self.heads, self.sdpa = heads, sdpa
        self.qkv = nn.Linear(channels, 3 * channels)
        self.proj = nn.Linear(channels, channels)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(x).split(c, dim=2))
        if self.sdpa:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            future = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
            scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
            y = scores.masked_fill(future, -math.inf).softmax(-1) @ v
        return self.proj(y.transpose(1, 2).reshape(b, t, c))


class Mlp(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.up = nn.Linear(channels, 4 * channels)
        self.down = nn.Linear(4 * channels, channels)

    def forward(self, x):
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, channels, heads, sdpa):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(channels), Attention(channels, heads, sdpa)
        self.norm2, self.mlp = nn.LayerNorm(channels), Mlp(channels)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, layers, heads, channels, context, vocab, sdpa=False):
        super().__init__()
        self.tokens = nn.Embedding(vocab, channels)
        self.positions = nn.Embedding(context, channels)
        self.blocks = nn.ModuleList(Block(channels, heads, sdpa) for _ in range(layers))
        self.norm = nn.LayerNorm(channels)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, ids, targets):
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main():
    with open("model.json") as f:
        c = json.load(f)
    flat = np.fromfile("weights.bin", dtype="<f4")
    weights = {t["name"]: torch.from_numpy(flat[t["offset"] :][: math.prod(t["shape"])].reshape(t["shape"]))
               for t in c["tensors"]}  # fmt: skip
    ids, targets = (
        torch.from_numpy(np.fromfile(name, dtype="<i4").reshape(c["batch"], c["tokens"]).astype(np.int64))
        for name in ("inputs.bin", "targets.bin")
    )
    losses = []
    for dtype in (torch.float32, torch.float64):
        model = GPT(c["layers"], c["heads"], c["channels"], c["context"], c["vocab"])
        model.load_state_dict(weights)  # fails unless the names match
        model = model.to(dtype)
        loss = model(ids, targets)
        loss.backward()
        losses.append(loss.item())
        gradients = np.zeros(flat.shape, dtype="<f4" if dtype == torch.float32 else "<f8")
        for t in c["tensors"]:
            g = model.get_parameter(t["name"]).grad.numpy()
            gradients[t["offset"] : t["offset"] + g.size] = g.ravel()
        gradients.tofile(f"gradients.{str(dtype).split('.')[1]}.bin")
    np.array(losses, dtype="<f8").tofile("loss.bin")


if __name__ == "__main__":
    main()
