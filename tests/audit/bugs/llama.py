"""A tiny Llama with the module and parameter names of transformers, and the settings of a script's training step.

Modules call methods of `step` (common.py) where a parallel program communicates.
"""
import dataclasses
import math

import torch
from torch import nn
from torch.nn import functional as F

SEED = 7


@dataclasses.dataclass
class Config:
    """The model, the global batch and the update."""
    vocab: int = 32
    hidden: int = 16
    inner: int = 32
    layers: int = 2
    heads: int = 4
    kv_heads: int = 4
    tied: bool = False
    bias: bool = False      # o_proj and down_proj have biases
    qk_norm: bool = False
    q_rank: int = 0         # q_proj is q_b_proj(q_a_norm(q_a_proj(x))) with this inner size
    fused: bool = False     # gate_up_proj instead of gate_proj and up_proj
    experts: int = 0
    top_k: int = 2
    aux: float = 0.0        # coefficient of the load-balancing loss, per sequence
    dropout: float = 0.0
    lora: int = 0           # rank of an adapter of o_proj; the other parameters are frozen
    documents: int = 0      # documents per row, with their own positions and no attention between them
    rows: int = 4
    tokens: int = 16
    shifted: bool = False   # the last token has no target
    ignored: tuple = ()     # leading targets of each row that are not trained
    lr: float = 1e-2
    decay: float = 0.0
    max_norm: float = 0.0
    loss_scale: float = 1.0


class RMSNorm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(1 + 0.2 * torch.randn(size))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


def rotate(x, positions):
    """Rotary embedding of x (b, heads, t, D) at the positions (b, t)."""
    half = x.shape[-1] // 2
    angles = positions[:, None, :, None].float() / 100.0 ** (torch.arange(half) / half)
    x1, x2 = x[..., :half], x[..., half:]
    return torch.cat([x1 * angles.cos() - x2 * angles.sin(), x2 * angles.cos() + x1 * angles.sin()], -1)


def linear(inputs, outputs, bias=False):
    layer = nn.Linear(inputs, outputs, bias=bias)
    nn.init.normal_(layer.weight, std=0.6 / math.sqrt(inputs / 16))
    if bias:
        nn.init.normal_(layer.bias, std=0.3)
    return layer


class Attention(nn.Module):
    def __init__(self, c, step):
        super().__init__()
        self.step, self.size = step, c.hidden // c.heads
        if c.q_rank:
            self.q_a_proj, self.q_a_norm = linear(c.hidden, c.q_rank), RMSNorm(c.q_rank)
            self.q_b_proj = linear(c.q_rank, c.hidden)
        else:
            self.q_proj = linear(c.hidden, c.hidden)
        self.k_proj, self.v_proj = (linear(c.hidden, c.kv_heads * self.size) for _ in range(2))
        self.o_proj = linear(c.hidden, c.hidden, bias=c.bias)
        if c.qk_norm:
            self.q_norm, self.k_norm = RMSNorm(self.size), RMSNorm(self.size)
        if c.lora:
            self.lora_A, self.lora_B = linear(c.hidden, c.lora), linear(c.lora, c.hidden)

    def forward(self, x, batch):
        step, inputs = self.step, x
        x = step.enter(x)
        if hasattr(self, "q_a_proj"):
            q = self.q_b_proj(step.enter_low_rank(self.q_a_norm(self.q_a_proj(inputs))))
        else:
            q = self.q_proj(x)
        q, k, v = (y.view(*y.shape[:2], -1, self.size).transpose(1, 2) for y in (q, self.k_proj(x), self.v_proj(x)))
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, batch.positions), rotate(k, batch.positions)
        y = step.attend(q, k, v, batch).transpose(1, 2).flatten(2)
        out = step.leave(self.o_proj, y)
        return out + step.adapter(self, y) if hasattr(self, "lora_A") else out


def attention(q, k, v, mask):
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(~mask, -math.inf)
    return scores.softmax(-1) @ v


class MLP(nn.Module):
    def __init__(self, c, step):
        super().__init__()
        self.step = step
        if c.fused:
            self.gate_up_proj = linear(c.hidden, 2 * c.inner)
        else:
            self.gate_proj, self.up_proj = linear(c.hidden, c.inner), linear(c.hidden, c.inner)
        self.down_proj = linear(c.inner, c.hidden, bias=c.bias and not c.experts)

    def activations(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, -1) if hasattr(self, "gate_up_proj") else (
            self.gate_proj(x), self.up_proj(x))
        return F.silu(gate) * up

    def forward(self, x):
        return self.step.leave(self.down_proj, self.activations(self.step.enter(x)))


class Experts(nn.Module):
    """Top-k routing; every expert sees all tokens with weight 0 for those that are not routed to it."""

    def __init__(self, c, step):
        super().__init__()
        self.step, self.top_k = step, c.top_k
        self.gate = linear(c.hidden, c.experts)
        self.experts = nn.ModuleDict({str(i): MLP(c, step) for i in range(c.experts)})

    def forward(self, x):
        probabilities = self.gate(x).softmax(-1)
        values, chosen = probabilities.topk(self.top_k, -1)
        weights = torch.zeros_like(probabilities).scatter(-1, chosen, values / values.sum(-1, keepdim=True))
        self.step.balance(probabilities, weights)
        return self.step.mix(self, x, weights)

    def local(self, x, weights):
        return sum(weights[..., int(i):int(i) + 1] * expert.down_proj(expert.activations(x))
                   for i, expert in self.experts.items())


class Layer(nn.Module):
    def __init__(self, c, step, number):
        super().__init__()
        self.step, self.number = step, number
        self.input_layernorm, self.self_attn = RMSNorm(c.hidden), Attention(c, step)
        self.post_attention_layernorm = RMSNorm(c.hidden)
        self.mlp = Experts(c, step) if c.experts else MLP(c, step)

    def forward(self, x, batch):
        x = x + self.step.dropout(self.self_attn(self.input_layernorm(x), batch), 2 * self.number, batch)
        return x + self.step.dropout(self.mlp(self.post_attention_layernorm(x)), 2 * self.number + 1, batch)


class Body(nn.Module):
    def __init__(self, c, step):
        super().__init__()
        self.step, self.embed_tokens = step, nn.Embedding(c.vocab, c.hidden)
        self.layers = nn.ModuleDict({str(i): Layer(c, step, i) for i in range(c.layers)})
        self.norm = RMSNorm(c.hidden)

    def forward(self, x, batch):
        if hasattr(self, "embed_tokens"):
            x = self.step.scatter(self.embed_tokens(x))
        for layer in self.layers.values():
            x = self.step.layer(layer, x, batch)
        return self.norm(x) if hasattr(self, "norm") else x


class Llama(nn.Module):
    """Module and parameter names of transformers; a pipeline stage lacks some of the modules."""

    def __init__(self, c, step):
        super().__init__()
        torch.manual_seed(SEED)
        self.step, self.model, self.lm_head = step, Body(c, step), linear(c.hidden, c.vocab)
        if c.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, x, batch):
        x = self.model(x, batch)
        return self.lm_head(self.step.enter_head(x)) if hasattr(self, "lm_head") else x
