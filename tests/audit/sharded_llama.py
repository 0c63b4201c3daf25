"""A small Llama under hand-written tensor, sequence, context and pipeline parallelism: plain torch over gloo, on CPUs.

Modules have the names of transformers. The collectives are all-gather, all-reduce, send and receive, as torch 1.13 has
them on gloo.
"""
import math
import zlib
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
EPS, THETA = 1e-5, 1e4


@dataclass(frozen=True)
class Options:
    dp: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    sp: bool = False  # shard activations between blocks over the tp ranks
    ddp: bool = False  # DistributedDataParallel instead of an all-reduce after the backward pass; without a pipeline
    zigzag: bool = False  # a context rank holds chunks r and 2 cp - 1 - r
    cp_mode: str = "gather"  # keys and values of all context ranks; or ring, or ulysses: tokens exchanged for heads
    schedule: str = "gpipe"  # or 1f1b
    microbatches: int = 1
    batch: int = 8
    context: int = 16
    layers: int = 2
    channels: int = 32
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    vocab: int = 64
    tied: bool = False
    untrained: bool = False  # a third of the targets is ignored, unevenly
    dtype: str = "fp32"
    wide: bool = False  # compute in fp64 with weights that are rounded to dtype
    optimizer: str = "adamw"  # or sgd
    clip: float = 0.0
    lr: float = 1e-2
    step: int = 1
    checkpoint: bool = False  # recompute each layer in the backward pass
    detail: str = "blocks"
    seed: int = 1

    @property
    def ranks(self):
        return self.dp * self.tp * self.cp * self.pp

    @property
    def compute_dtype(self):
        return torch.float64 if self.wide else DTYPES[self.dtype]


class Mesh:
    """Process groups of the axes; ranks are ordered pp, dp, cp, tp, the last one varies fastest."""

    def __init__(self, options, rank):
        sizes = {axis: getattr(options, axis) for axis in ("pp", "dp", "cp", "tp")}
        self.size, self.rank, self.group, self.peers = sizes, {}, {}, {}
        grid = torch.arange(options.ranks).reshape(*sizes.values())
        for i, axis in enumerate(sizes):
            for line in grid.movedim(i, -1).reshape(-1, sizes[axis]).tolist():
                group = dist.new_group(line) if options.ranks > 1 and sizes[axis] > 1 else None
                if rank in line:
                    self.rank[axis], self.group[axis], self.peers[axis] = line.index(rank), group, line

    def all_reduce(self, tensor, axis, op=dist.ReduceOp.SUM):
        """The sum over an axis, in fp32 for bf16."""
        if self.size[axis] == 1:
            return tensor
        result = tensor.float() if tensor.dtype == torch.bfloat16 else tensor.clone()
        dist.all_reduce(result, op, self.group[axis])
        return result.to(tensor.dtype)

    def all_gather(self, tensor, axis, dim):
        if self.size[axis] == 1:
            return tensor
        sent = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).contiguous()
        received = [torch.empty_like(sent) for _ in range(self.size[axis])]
        dist.all_gather(received, sent, self.group[axis])
        return torch.cat(received, dim).to(tensor.dtype)

    def all_to_all(self, tensor, axis, split, join):
        """Exchanges chunks of dim `split` for those of dim `join`."""
        return self.chunk(self.all_gather(tensor, axis, join), axis, split).contiguous()

    def shift(self, tensor, axis, by):
        """The tensor of the rank that precedes by `by` on the axis."""
        sent = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).contiguous()
        received, peers, rank = torch.empty_like(sent), self.peers[axis], self.rank[axis]
        work = dist.isend(sent, peers[(rank + by) % len(peers)], self.group[axis])
        dist.recv(received, peers[(rank - by) % len(peers)], self.group[axis])
        work.wait()
        return received.to(tensor.dtype)

    def chunk(self, tensor, axis, dim):
        return tensor.chunk(self.size[axis], dim)[self.rank[axis]]


class Conversion(torch.autograd.Function):
    """A collective and its dual: `forward` and `backward` are functions of a tensor."""

    @staticmethod
    def forward(ctx, tensor, forward, backward):
        ctx.dual = backward
        return forward(tensor)

    @staticmethod
    def backward(ctx, grad):
        return ctx.dual(grad), None, None


def identity(tensor):
    return tensor.view_as(tensor)


def copy(x, mesh, axis):
    """Identity; the backward pass sums over the axis."""
    return Conversion.apply(x, identity, lambda grad: mesh.all_reduce(grad, axis))


def reduce(x, mesh, axis):
    """Sum over the axis; identity in the backward pass."""
    return Conversion.apply(x, lambda x: mesh.all_reduce(x, axis), identity)


def gather(x, mesh, axis, dim=1):
    """All-gather; the backward pass reduces and scatters."""
    return Conversion.apply(x, lambda x: mesh.all_gather(x, axis, dim),
                            lambda grad: mesh.chunk(mesh.all_reduce(grad, axis), axis, dim).contiguous())


def reduce_scatter(x, mesh, axis, dim=1):
    return Conversion.apply(x, lambda x: mesh.chunk(mesh.all_reduce(x, axis), axis, dim).contiguous(),
                            lambda grad: mesh.all_gather(grad, axis, dim))


def exchange(x, mesh, axis, split, join):
    """All-to-all; its dual is the inverse exchange."""
    return Conversion.apply(x, lambda x: mesh.all_to_all(x, axis, split, join),
                            lambda grad: mesh.all_to_all(grad, axis, join, split))


def shift(x, mesh, axis):
    return Conversion.apply(x, lambda x: mesh.shift(x, axis, 1), lambda grad: mesh.shift(grad, axis, -1))


class Part(nn.Module):
    """A module with the options and the mesh."""

    def __init__(self, options, mesh):
        super().__init__()
        self.options, self.mesh = options, mesh

    def column_input(self, x):
        return gather(x, self.mesh, "tp") if self.options.sp else copy(x, self.mesh, "tp")

    def row_output(self, x):
        return (reduce_scatter if self.options.sp else reduce)(x, self.mesh, "tp")


class Norm(Part):
    def __init__(self, options, mesh):
        super().__init__(options, mesh)
        self.weight = nn.Parameter(torch.empty(options.channels))

    def forward(self, x):
        wide = x.float() if x.dtype == torch.bfloat16 else x
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype) * self.weight


class Linear(Part):
    """Column-parallel: `outputs` are sharded over tp; row-parallel: inputs are, and the output is summed. Replicated: a
    rank has the gradient of its heads."""

    def __init__(self, options, mesh, inputs, outputs, row=False, replicated=False):
        super().__init__(options, mesh)
        self.row = row
        shape = (outputs, inputs // options.tp) if row else (outputs // (1 if replicated else options.tp), inputs)
        self.weight = nn.Parameter(torch.empty(shape))

    def forward(self, x):
        y = F.linear(x, self.weight)
        return self.row_output(y) if self.row else y


class Embedding(Part):
    """Vocabulary-parallel."""

    def __init__(self, options, mesh):
        super().__init__(options, mesh)
        self.weight = nn.Parameter(torch.empty(options.vocab // options.tp, options.channels))

    def forward(self, ids):
        local = ids - self.mesh.rank["tp"] * len(self.weight)
        elsewhere = (local < 0) | (local >= len(self.weight))
        x = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return self.row_output(x.masked_fill(elsewhere[..., None], 0))


class Attention(Part):
    def __init__(self, options, mesh):
        super().__init__(options, mesh)
        c, d = options.channels, options.channels // options.heads
        self.q_proj = Linear(options, mesh, c, c)
        self.replicated = options.kv_heads < options.tp
        self.k_proj, self.v_proj = (Linear(options, mesh, c, options.kv_heads * d, replicated=self.replicated)
                                    for _ in range(2))
        self.o_proj = Linear(options, mesh, c, c, row=True)

    def forward(self, x):
        options, mesh = self.options, self.mesh
        x, d = self.column_input(x), options.channels // options.heads
        projections = self.q_proj, self.k_proj, self.v_proj
        q, k, v = (project(x).unflatten(-1, (-1, d)).transpose(1, 2) for project in projections)
        own = positions(options, mesh.rank["cp"])
        q, k = rotate(q, own), rotate(k, own)
        k, v = (x.repeat_interleave(options.heads // options.kv_heads, 1) for x in (k, v))
        if self.replicated:
            k, v = mesh.chunk(k, "tp", 1), mesh.chunk(v, "tp", 1)
        return self.o_proj(self.attend(q, k, v, own).to(v.dtype).transpose(1, 2).flatten(2))

    def attend(self, q, k, v, own):
        """Attention over the tokens of all context ranks; q, k and v are (b, heads, t, d) of this rank's tokens."""
        mesh, every = self.mesh, [positions(self.options, rank) for rank in range(self.options.cp)]
        if self.options.cp == 1 or self.options.cp_mode == "gather":
            return attention(q, gather(k, mesh, "cp", 2), gather(v, mesh, "cp", 2), own, torch.cat(every))[0]
        if self.options.cp_mode == "ulysses":
            q, k, v = (exchange(x, mesh, "cp", 1, 2) for x in (q, k, v))
            return exchange(attention(q, k, v, torch.cat(every), torch.cat(every))[0], mesh, "cp", 2, 1)
        outputs, sums, pairs = [], [], torch.stack([k, v])
        for i in range(self.options.cp):
            output, total = attention(q, *pairs, own, every[(mesh.rank["cp"] - i) % self.options.cp])
            outputs.append(output.double() if output.dtype == torch.float64 else output.float())
            sums.append(total)
            if i + 1 < self.options.cp:
                pairs = shift(pairs, mesh, "cp")
        return (torch.stack(sums).softmax(0)[..., None] * torch.stack(outputs)).sum(0)


def attention(q, k, v, own, keys):
    """The output and the log-sum-exp of causal attention of tokens at `own` to those at `keys`, perhaps none."""
    scores = (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
    scores = scores.float() if scores.dtype == torch.bfloat16 else scores
    scores = scores.masked_fill(own[:, None] < keys[None, :], -1e30)
    return scores.softmax(-1).to(v.dtype) @ v, scores.logsumexp(-1)


class Mlp(Part):
    def __init__(self, options, mesh):
        super().__init__(options, mesh)
        self.gate_proj = Linear(options, mesh, options.channels, options.hidden)
        self.up_proj = Linear(options, mesh, options.channels, options.hidden)
        self.down_proj = Linear(options, mesh, options.hidden, options.channels, row=True)

    def forward(self, x):
        x = self.column_input(x)
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(Part):
    def __init__(self, options, mesh):
        super().__init__(options, mesh)
        self.self_attn, self.mlp = Attention(options, mesh), Mlp(options, mesh)
        self.input_layernorm, self.post_attention_layernorm = Norm(options, mesh), Norm(options, mesh)

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Head(Linear):
    def forward(self, x):
        return super().forward(self.column_input(x))


class Stage(Part):
    """The layers of a pipeline rank under their global numbers, the embedding of the first, the head of the last."""

    def __init__(self, options, mesh):
        super().__init__(options, mesh)
        self.first, self.last = mesh.rank["pp"] == 0, mesh.rank["pp"] == options.pp - 1
        count = options.layers // options.pp
        begin = mesh.rank["pp"] * count
        self.model = nn.Module()
        if self.first:
            self.model.embed_tokens = Embedding(options, mesh)
        self.model.layers = nn.ModuleDict({str(i): Layer(options, mesh) for i in range(begin, begin + count)})
        if self.last:
            self.model.norm = Norm(options, mesh)
            self.lm_head = Head(options, mesh, options.channels, options.vocab)
        for name, parameter in self.named_parameters():
            full, dim = initial(options, name), shard_dim(options, name)
            parameter.data = full if dim is None else mesh.chunk(full, "tp", dim).clone()
        if options.tied and self.first and self.last:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, x):
        if self.first:
            x = self.model.embed_tokens(x)
        for layer in self.model.layers.values():
            x = checkpoint(layer, x, use_reentrant=False) if self.options.checkpoint else layer(x)
        return self.lm_head(self.model.norm(x)) if self.last else x


def rotate(x, at):
    d = x.shape[-1]
    angles = at.double()[:, None] * THETA ** (-2 * torch.arange(d // 2, dtype=torch.float64) / d)
    angles = torch.cat([angles, angles], 1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin


def positions(options, rank):
    """The positions of a context rank's tokens."""
    full = torch.arange(options.context)
    if not options.zigzag:
        return full.chunk(options.cp)[rank]
    chunks = full.chunk(2 * options.cp)
    return torch.cat([chunks[rank], chunks[2 * options.cp - 1 - rank]])


def shard_dim(options, name):
    """The dim of a parameter that tp shards, or None."""
    kind = name.split(".")[-2]
    replicated = "norm" in kind or (kind in ("k_proj", "v_proj") and options.kv_heads < options.tp)
    return 1 if kind in ("o_proj", "down_proj") else None if replicated else 0


def initial(options, name):
    """The full initial value of a parameter: a function of its name."""
    c, d = options.channels, options.channels // options.heads
    wide, shared = (options.hidden, c), (options.kv_heads * d, c)
    shapes = {"q_proj": (c, c), "k_proj": shared, "v_proj": shared, "o_proj": (c, c), "gate_proj": wide,
              "up_proj": wide, "down_proj": (c, options.hidden), "embed_tokens": (options.vocab, c),
              "lm_head": (options.vocab, c)}
    kind = "embed_tokens" if options.tied and "lm_head" in name else name.split(".")[-2]
    seed = zlib.crc32(("model.embed_tokens.weight" if kind == "embed_tokens" else name).encode()) + options.seed
    values = torch.randn(shapes.get(kind, (c,)), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    values = 1 + 0.1 * values if "norm" in kind else values / math.sqrt(c)
    return values.to(DTYPES[options.dtype]).to(options.compute_dtype)


def token_losses(logits, targets, mesh):
    """The loss of each token from vocabulary-parallel logits (b, T, V / tp); 0 if it is not trained."""
    wide = logits.float() if logits.dtype == torch.bfloat16 else logits
    highest = mesh.all_reduce(wide.detach().amax(-1), "tp", dist.ReduceOp.MAX)
    total = reduce((wide - highest[..., None]).exp().sum(-1), mesh, "tp")
    local = targets - mesh.rank["tp"] * logits.shape[-1]
    elsewhere = (local < 0) | (local >= logits.shape[-1])
    picked = wide.gather(-1, local.masked_fill(elsewhere, 0)[..., None])[..., 0].masked_fill(elsewhere, 0)
    return (total.log() + highest - reduce(picked, mesh, "tp")).masked_fill(targets == -100, 0)
