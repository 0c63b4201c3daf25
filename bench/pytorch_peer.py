"""PyTorch side of a comparison: an optimized Llama in plain PyTorch, and training steps of it and of GPT-2."""
import os
import statistics
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "tests", "compare"))
from gpt_pytorch import GPT  # noqa: E402

SIZES = ("layers", "heads", "channels", "context", "vocab", "kv_heads", "ffn", "experts")


class RMSNorm(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))

    def forward(self, x):
        if hasattr(F, "rms_norm"):
            return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), 1e-5)
        return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5).to(x.dtype) * self.weight


class Attention(nn.Module):
    def __init__(self, channels, heads, kv_heads, sdpa, grouped_heads=False):
        super().__init__()
        d = channels // heads
        self.sizes, self.sdpa, self.grouped = [heads, kv_heads, kv_heads], sdpa, grouped_heads
        self.qkv = nn.Linear(channels, sum(self.sizes) * d, bias=False)
        self.proj = nn.Linear(channels, channels, bias=False)

    def forward(self, x, cos, sin):
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, sum(self.sizes), -1).transpose(1, 2).split(self.sizes, dim=1)

        def turned(y):
            low, high = y.chunk(2, -1)
            return y * cos + torch.cat((-high, low), -1) * sin

        q, k = turned(q).to(v.dtype), turned(k).to(v.dtype)
        if self.grouped:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return self.proj(y.transpose(1, 2).reshape(b, t, c))
        k, v = (y.repeat_interleave(self.sizes[0] // self.sizes[1], 1) for y in (k, v))
        if self.sdpa:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            future = torch.ones(t, t, dtype=torch.bool).triu(1)
            y = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).masked_fill(future, -torch.inf).softmax(-1) @ v
        return self.proj(y.transpose(1, 2).reshape(b, t, c))


class FeedForward(nn.Module):
    def __init__(self, channels, ffn):
        super().__init__()
        self.gate_up = nn.Linear(channels, 2 * ffn, bias=False)
        self.down = nn.Linear(ffn, channels, bias=False)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Experts(nn.Module):
    """Top-2 experts; rows are sorted by expert, matmuls are grouped or run in a loop."""

    def __init__(self, channels, ffn, experts, grouped):
        super().__init__()
        self.experts, self.grouped = experts, grouped
        self.router = nn.Linear(channels, experts, bias=False)
        self.gate_up = nn.Parameter(torch.randn(experts, channels, 2 * ffn) * 0.02)
        self.down = nn.Parameter(torch.randn(experts, ffn, channels) * 0.02)

    def product(self, rows, weights, counts):
        if self.grouped:
            return F.grouped_mm(rows, weights, offs=counts.cumsum(0).to(torch.int32))
        return torch.cat([part @ w for part, w in zip(rows.split(counts.tolist()), weights)])

    def losses(self, logits, chosen):
        shares = F.one_hot(chosen, self.experts).to(logits.dtype).mean((1, 2))
        balance = self.experts * (shares * logits.softmax(-1).mean(1)).sum(-1).mean()
        return 0.01 * balance + 0.001 * logits.logsumexp(-1).square().mean()

    def forward(self, x):
        logits = self.router(x).float()
        best, chosen = logits.topk(2, -1)
        self.loss = self.losses(logits, chosen)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=self.experts)
        tokens = order // 2
        gate, up = self.product(x.flatten(0, 1)[tokens], self.gate_up, counts).chunk(2, -1)
        rows = self.product(F.silu(gate) * up, self.down, counts)
        rows = rows * best.softmax(-1).flatten()[order][:, None].to(rows.dtype)
        return torch.zeros_like(x.flatten(0, 1)).index_add(0, tokens, rows.to(x.dtype)).view_as(x)


class Block(nn.Module):
    def __init__(self, channels, heads, kv_heads, ffn, sdpa, experts, grouped, grouped_heads):
        super().__init__()
        self.norm1, self.attn = RMSNorm(channels), Attention(channels, heads, kv_heads, sdpa, grouped_heads)
        self.norm2 = RMSNorm(channels)
        self.mlp = Experts(channels, ffn, experts, grouped) if experts else FeedForward(channels, ffn)

    def forward(self, x, cos, sin):
        x = x + self.attn(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    def __init__(self, layers, heads, channels, context, vocab, kv_heads, ffn, sdpa=False, experts=0, grouped=False,
                 grouped_heads=False):
        super().__init__()
        self.tokens = nn.Embedding(vocab, channels)
        self.blocks = nn.ModuleList(Block(channels, heads, kv_heads, ffn, sdpa, experts, grouped, grouped_heads) for _ in range(layers))
        self.norm = RMSNorm(channels)
        self.head = nn.Linear(channels, vocab, bias=False)
        d = channels // heads
        angles = torch.arange(context)[:, None] * 10000.0 ** (-torch.arange(0, d, 2) / d)
        self.register_buffer("cos", angles.cos().repeat(1, 2))
        self.register_buffer("sin", angles.sin().repeat(1, 2))
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, ids, targets):
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        loss = F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())
        return loss + sum(block.mlp.loss for block in self.blocks if isinstance(block.mlp, Experts))


def training_step(config, adamw, bf16=False, autocast=False, compiled=None, device="cpu", **how):
    """Returns a function (tokens, targets) that runs a step of a GPT-2 or, with "kv_heads", of a Llama. `adamw`, `compiled`:
    keyword arguments of AdamW and torch.compile (None: not compiled); `how`: further arguments of the model."""
    model = (Llama if "kv_heads" in config else GPT)(**{k: config[k] for k in SIZES if k in config}, **how)
    model = model.to(device, torch.bfloat16 if bf16 else torch.float32)
    groups = [{"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
              {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), **adamw)
    forward = model if compiled is None else torch.compile(model, **compiled)

    def step(ids, targets):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
            loss = forward(ids, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss.item()

    return step


def median_time(f, count, warmup, ready=lambda: None):
    """Median seconds of calls after warm-up calls; each call ends when ready() returns."""
    times = []
    for _ in range(warmup + count):
        ready()
        start = time.perf_counter()
        f()
        times.append(time.perf_counter() - start)
    return statistics.median(times[warmup:])
