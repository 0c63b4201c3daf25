"""A correct training step of a small Llama under hand-written parallelism, recorded: plain torch over gloo, on CPUs.

correct.py DIRECTORY [--dp 2 --tp 2 --sp --cp 2 --pp 2 --microbatches 4 --dtype bf16 --tied ...]

writes DIRECTORY/recording (a file per rank), DIRECTORY/reference (the same step on one rank, recorded) and
DIRECTORY/model (the weights before the step as a Hugging Face directory). Modules have the names of transformers. `run`
does the same from Python. The collectives are all-gather, all-reduce, send and receive, as torch 1.13 has them on gloo.
"""
import argparse
import contextlib
import json
import math
import os
import struct
import tempfile
import zlib
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import tessera.torch
from tessera.torch import Slice

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
EPS, THETA = 1e-5, 1e4


@dataclass(frozen=True)
class Options:
    dp: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    sp: bool = False  # shard activations between blocks over the tp ranks
    ddp: bool = False  # DistributedDataParallel instead of an all-reduce after the backward pass
    zigzag: bool = False  # a context rank holds chunks r and 2 cp - 1 - r
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
    """Column-parallel: `outputs` are sharded over tp; row-parallel: inputs are, and the output is summed."""

    def __init__(self, options, mesh, inputs, outputs, row=False):
        super().__init__(options, mesh)
        self.row = row
        shape = (outputs, inputs // options.tp) if row else (outputs // options.tp, inputs)
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
        self.k_proj = Linear(options, mesh, c, options.kv_heads * d)
        self.v_proj = Linear(options, mesh, c, options.kv_heads * d)
        self.o_proj = Linear(options, mesh, c, c, row=True)

    def forward(self, x):
        x, d = self.column_input(x), self.options.channels // self.options.heads
        projections = self.q_proj, self.k_proj, self.v_proj
        q, k, v = (project(x).unflatten(-1, (-1, d)).transpose(1, 2) for project in projections)
        own = positions(self.options, self.mesh.rank["cp"])
        q, k = rotate(q, own), rotate(k, own)
        k, v = gather(k, self.mesh, "cp", 2), gather(v, self.mesh, "cp", 2)
        full = torch.cat([positions(self.options, rank) for rank in range(self.options.cp)])
        shared = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        scores = (q @ k.transpose(-1, -2)) / math.sqrt(d)
        scores = scores.masked_fill(own[:, None] < full[None, :], -math.inf)
        wide = scores.float() if scores.dtype == torch.bfloat16 else scores
        return self.o_proj((wide.softmax(-1).to(v.dtype) @ v).transpose(1, 2).flatten(2))


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
            full = initial(options, name)
            parameter.data = full if shard_dim(name) is None else mesh.chunk(full, "tp", shard_dim(name)).clone()
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


def shard_dim(name):
    """The dim of a parameter that tp shards, or None."""
    kind = name.split(".")[-2]
    return 1 if kind in ("o_proj", "down_proj") else None if "norm" in kind else 0


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
    return (1 + 0.1 * values if "norm" in kind else values / math.sqrt(c)).to(DTYPES[options.dtype])


def tokens(options, step):
    """The global batch of a step: ids and targets (B, T)."""
    generator = torch.Generator().manual_seed(1000 * options.seed + step)
    text = torch.randint(options.vocab, (options.batch, options.context + 1), generator=generator)
    ids, targets = text[:, :-1].contiguous(), text[:, 1:].clone()
    if options.untrained:
        length = torch.randint(1, options.context * 2 // 3, (options.batch, 1), generator=generator)
        targets[torch.arange(options.context) < length] = -100
    return ids, targets


def token_losses(logits, targets, mesh):
    """The loss of each token from vocabulary-parallel logits (b, T, V / tp); 0 if it is not trained."""
    wide = logits.float() if logits.dtype == torch.bfloat16 else logits
    highest = mesh.all_reduce(wide.detach().amax(-1), "tp", dist.ReduceOp.MAX)
    total = reduce((wide - highest[..., None]).exp().sum(-1), mesh, "tp")
    local = targets - mesh.rank["tp"] * logits.shape[-1]
    elsewhere = (local < 0) | (local >= logits.shape[-1])
    picked = wide.gather(-1, local.masked_fill(elsewhere, 0)[..., None])[..., 0].masked_fill(elsewhere, 0)
    return (total.log() + highest - reduce(picked, mesh, "tp")).masked_fill(targets == -100, 0)


def intervals(indices):
    """The maximal ranges [start, stop) of a list of indices, in their order."""
    ranges = []
    for i in indices.tolist():
        if ranges and ranges[-1][1] == i:
            ranges[-1][1] += 1
        else:
            ranges.append([i, i + 1])
    return ranges


def make_layout(options, mesh):
    """The slice of each tensor of a rank; rows are those of its data rank."""
    def layout(name, kind, tensor):
        own = positions(options, mesh.rank["cp"])
        if kind in ("input_ids", "targets"):
            return Slice((len(tensor), options.context), ([[0, len(tensor)]], intervals(own)))
        if kind not in ("output", "output_grad"):
            dim = shard_dim(name)
            return None if dim is None else Slice.shard(tensor, dim, mesh.rank["tp"], options.tp)
        column = name.split(".")[-1] in ("lm_head", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
        if options.sp and not column:
            own = mesh.chunk(own, "tp", 0)
        width, first = tensor.shape[-1], mesh.rank["tp"] * tensor.shape[-1] if column else 0
        return Slice((len(tensor), options.context, width * (options.tp if column else 1)),
                     ([[0, len(tensor)]], intervals(own), [[first, first + width]]))
    return layout


class Trainer:
    """One rank: its stage, its optimizer and its micro-batches."""

    def __init__(self, options, rank):
        self.options, self.mesh = options, Mesh(options, rank)
        self.stage = Stage(options, self.mesh)
        self.model = nn.parallel.DistributedDataParallel(self.stage, process_group=self.mesh.group["dp"]) if (
            options.ddp and options.dp > 1) else self.stage
        parameters = self.stage.parameters()
        self.optimizer = (torch.optim.SGD(parameters, options.lr, momentum=0.9) if options.optimizer == "sgd" else
                          torch.optim.AdamW(parameters, options.lr, (0.9, 0.95), 1e-8, weight_decay=0.1))

    def record(self, directory, **more):
        axes = {axis: (self.mesh.rank[axis], size) for axis, size in self.mesh.size.items()}
        return tessera.torch.record(self.model, directory, optimizer=self.optimizer, step=self.options.step, axes=axes,
                                    layout=make_layout(self.options, self.mesh), detail=self.options.detail, **more)

    def step(self, number, recording=None):
        options, mesh = self.options, self.mesh
        ids, targets = (mesh.chunk(x, "dp", 0)[:, positions(options, mesh.rank["cp"])] for x in tokens(options, number))
        trained = int((tokens(options, number)[1] != -100).sum())
        batches = list(zip(ids.chunk(options.microbatches), targets.chunk(options.microbatches), strict=True))
        if recording and options.tp > 1 and self.stage.last:  # the loss is hand-written: targets cannot be observed
            for _, target in batches:
                recording.batch(targets=target)
        self.optimizer.zero_grad(set_to_none=True)
        self.inputs, self.outputs, self.sent = {}, {}, []
        warmup = options.pp - 1 - mesh.rank["pp"] if options.schedule == "1f1b" else options.microbatches
        for i in range(options.microbatches):
            if i >= warmup:
                self.forward(i, *batches[i], trained)
                self.backward(i - warmup)
            else:
                self.forward(i, *batches[i], trained)
                if options.pp == 1:
                    self.backward(i)
        for i in range(max(0, options.microbatches - warmup), options.microbatches) if options.pp > 1 else ():
            self.backward(i)
        for work in self.sent:
            work.wait()
        self.reduce_gradients()
        if options.clip:
            self.clip(recording)
        self.optimizer.step()

    def forward(self, i, ids, targets, trained):
        options, mesh = self.options, self.mesh
        x = ids
        if not self.stage.first:
            shape = (len(ids), ids.shape[1] // (options.tp if options.sp else 1), options.channels)
            x = torch.empty(shape, dtype=wire(options))
            dist.recv(x, mesh.peers["pp"][mesh.rank["pp"] - 1], tag=2 * i)
            x = x.to(DTYPES[options.dtype]).requires_grad_()
        last = i == options.microbatches - 1
        with contextlib.nullcontext() if last or self.model is self.stage else self.model.no_sync():
            y = self.model(x)
        if not self.stage.last:
            self.send(y.detach(), 1, 2 * i)
        elif not options.untrained and options.tp == 1:
            y = F.cross_entropy(y.flatten(0, 1), targets.flatten()) / options.microbatches
        else:  # sum over trained tokens; DDP and reduce_gradients average over dp and cp
            if options.tp > 1:
                losses = token_losses(y, targets, mesh).sum()
            else:
                losses = F.cross_entropy(y.flatten(0, 1), targets.flatten(), reduction="sum")
            y = losses * (options.dp * options.cp / trained)
        self.inputs[i], self.outputs[i] = x, y

    def send(self, tensor, to, tag):
        tensor = tensor.to(wire(self.options)).contiguous()
        self.sent.append(dist.isend(tensor, self.mesh.peers["pp"][self.mesh.rank["pp"] + to], tag=tag))
        self.inputs["sent", tag] = tensor  # alive until it is sent

    def backward(self, i):
        x, y = self.inputs[i], self.outputs[i]
        if self.stage.last:
            y.backward()
        else:
            grad = torch.empty(y.shape, dtype=wire(self.options))
            dist.recv(grad, self.mesh.peers["pp"][self.mesh.rank["pp"] + 1], tag=2 * i + 1)
            torch.autograd.backward(y, grad.to(y.dtype))
        if not self.stage.first:
            self.send(x.grad, -1, 2 * i + 1)

    def reduce_gradients(self):
        """Averages over dp and cp; sums norms over tp under sp, and tied weights over the first and last stage."""
        options, mesh = self.options, self.mesh
        for name, parameter in self.stage.named_parameters():
            grad = parameter.grad
            if self.model is self.stage:
                grad = mesh.all_reduce(grad, "dp") / options.dp
            grad = mesh.all_reduce(grad, "cp") / options.cp
            if options.sp and shard_dim(name) is None:
                grad = mesh.all_reduce(grad, "tp")
            parameter.grad = grad
        if options.tied and options.pp > 1:
            ends = [stage.weight for stage in (getattr(self.stage.model, "embed_tokens", None),
                                               getattr(self.stage, "lm_head", None)) if stage is not None]
            zero = torch.zeros(options.vocab // options.tp, options.channels, dtype=DTYPES[options.dtype])
            total = mesh.all_reduce(ends[0].grad if ends else zero, "pp")
            for weight in ends:
                weight.grad = total

    def clip(self, recording):
        options, mesh = self.options, self.mesh
        if options.tp == options.pp == 1:
            torch.nn.utils.clip_grad_norm_(self.stage.parameters(), options.clip)
            return
        squares = torch.zeros(2, dtype=torch.float64)  # replicated over tp, sharded over tp
        for name, parameter in self.stage.named_parameters():
            if not (options.tied and options.pp > 1 and name == "lm_head.weight"):
                squares[int(shard_dim(name) is not None)] += parameter.grad.double().pow(2).sum()
        squares[1:] = mesh.all_reduce(squares[1:], "tp")
        norm = mesh.all_reduce(squares, "pp").sum().sqrt()
        if recording:
            recording.clip(norm, options.clip)
        for parameter in self.stage.parameters():
            parameter.grad *= min(1.0, options.clip / (float(norm) + 1e-6))


def wire(options):
    return torch.float32 if options.dtype == "bf16" else DTYPES[options.dtype]


def train(options, rank, directory, store=None, **more):
    """The steps of one rank; the last one is recorded."""
    torch.set_num_threads(1)
    if store:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=options.ranks)
    trainer = Trainer(options, rank)
    for number in range(1, options.step):
        trainer.step(number)
    with trainer.record(directory, **more) as recording:
        trainer.step(options.step, recording)
    if store:
        dist.barrier()
        dist.destroy_process_group()


def spawn(options, directory, **more):
    """Runs all ranks as forked processes; raises if one fails."""
    if options.ranks == 1:
        train(options, 0, directory, **more)
        return
    with tempfile.TemporaryDirectory() as scratch:
        context = torch.multiprocessing.get_context("fork")
        ranks = [context.Process(target=train, args=(options, rank, directory, f"{scratch}/store"), kwargs=more)
                 for rank in range(options.ranks)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    if failed := [rank for rank, process in enumerate(ranks) if process.exitcode]:
        raise RuntimeError(f"ranks {failed} failed")


def write_model(options, directory):
    """The initial weights as a Hugging Face directory: config.json and model.safetensors."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": options.vocab,
              "hidden_size": options.channels, "intermediate_size": options.hidden, "rms_norm_eps": EPS,
              "num_hidden_layers": options.layers, "num_attention_heads": options.heads, "rope_theta": THETA,
              "num_key_value_heads": options.kv_heads, "max_position_embeddings": options.context,
              "hidden_act": "silu", "tie_word_embeddings": options.tied, "attention_bias": False, "mlp_bias": False,
              "torch_dtype": str(DTYPES[options.dtype]).removeprefix("torch.")}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    alone = replace(options, dp=1, tp=1, cp=1, pp=1, sp=False)
    header, data = {}, b""
    for name, parameter in Stage(alone, Mesh(alone, 0)).named_parameters():
        values = parameter.detach().contiguous().view(torch.uint8).numpy().tobytes()
        header[name] = {"dtype": tessera.torch.DTYPES[parameter.dtype], "shape": list(parameter.shape),
                        "data_offsets": [len(data), len(data) + len(values)]}
        data += values
    text = json.dumps(header).encode()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)


def run(directory, **settings):
    """Records the step under its plan and on one rank, and writes the model; returns the options."""
    options = Options(**settings)
    directory = Path(directory)
    write_model(options, directory / "model")
    spawn(options, directory / "recording")
    alone = replace(options, dp=1, tp=1, cp=1, pp=1, sp=False, ddp=False, zigzag=False, microbatches=1,
                    checkpoint=False)
    spawn(alone, directory / "reference")
    return options


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("directory")
    for field in fields(Options):
        flag = {"action": "store_true"} if field.type is bool else {"type": field.type, "default": field.default}
        parser.add_argument("--" + field.name.replace("_", "-"), **flag)
    settings = vars(parser.parse_args())
    run(settings.pop("directory"), **settings)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
