"""Shared code of the scripts in this directory: process groups, seeded tokens, one recorded training step.

A script derives from `Step`, overrides the method that a public thread describes as wrong and calls `main`. `Step`
itself is correct under every grid; with an empty grid it is the one-process reference. Collectives are built from
all_reduce, all_gather, send and recv, because gloo of torch 1.13 has no others.
"""
import argparse
import contextlib
import dataclasses
import math
import multiprocessing
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from llama import SEED, Config, Llama, attention
from torch import nn
from torch.nn import functional as F

sys.path.append(str(Path(__file__).resolve().parents[3] / "python"))
import tessera.torch
from tessera.torch import Slice

REFERENCE = {"grid": (), "sequence": False, "expert_parallel": False, "zigzag": False, "microbatches": 1}
PARAMETERS = {"parameter", "grad", "clipped_grad", "updated", "state"}


@dataclasses.dataclass
class Batch:
    """One micro-batch of a rank: tokens (b, t) at the global columns, and which keys each of them may attend to."""
    ids: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor  # (b, 1, t, T)
    rows: list
    columns: list


class Axis:
    """A mesh axis of a rank; with size 1 every method returns its argument."""

    def __init__(self, name, rank=0, size=1, group=None, members=(0,)):
        self.name, self.rank, self.size, self.group, self.members = name, rank, size, group, members

    def sum(self, x):
        if self.size > 1:
            x = x.detach().clone().contiguous()
            dist.all_reduce(x, group=self.group)
        return x

    def mean(self, x):
        return self.sum(x) / self.size

    def gather(self, x, dim=0):
        if self.size == 1:
            return x
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, x.detach().contiguous(), group=self.group)
        return torch.cat(parts, dim)

    def part(self, x, dim=0):
        return x.chunk(self.size, dim)[self.rank].contiguous() if self.size > 1 else x

    def reduce_scatter(self, x, dim=0):
        return self.part(self.sum(x), dim)


class Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.operation = backward
        return forward(x) if forward else x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return (ctx.operation(grad) if ctx.operation else grad), None, None


def collective(x, forward=None, backward=None):
    """forward(x), whose gradient is backward(gradient); None is the identity."""
    return Collective.apply(x, forward, backward)


class Step:
    """One training step; `fixed` selects the corrected twin."""
    config = Config()
    grid = ()                # ((axis, size), ...), the last axis fastest
    sequence = False         # sequence parallelism: activations between the matmuls are sharded over tp
    expert_parallel = False  # experts are sharded over the dp ranks
    vocab_parallel = True    # lm_head is sharded over tp
    zigzag = False           # context ranks hold chunks i and 2n-1-i
    microbatches = 1
    steps = 1                # the last of them is recorded

    def __init__(self, rank=0, fixed=True):
        self.fixed, self.rank, c = fixed, rank, self.config
        ranks = torch.arange(world_size(self)).view([size for _, size in self.grid])
        for name in ("dp", "cp", "tp", "pp"):
            setattr(self, name, Axis(name))
        for dim, (name, size) in enumerate(self.grid):
            for members in ranks.movedim(dim, -1).reshape(-1, size).tolist():
                group = dist.new_group(members)
                if rank in members:
                    setattr(self, name, Axis(name, members.index(rank), size, group, members))
        self.ep = Axis("ep")
        if self.expert_parallel:
            self.ep = Axis("ep", self.dp.rank, self.dp.size, self.dp.group, self.dp.members)
        self.first, self.last = self.pp.rank == 0, self.pp.rank == self.pp.size - 1
        generator = torch.Generator().manual_seed(SEED)
        tokens = torch.randint(c.vocab, (c.rows, c.tokens + 1), generator=generator)
        self.ids, self.targets = tokens[:, :-1].contiguous(), tokens[:, 1:].clone()
        for row, count in enumerate(c.ignored):
            self.targets[row, :count] = -100
        if c.shifted:
            self.targets[:, -1] = -100
        width = -(-c.tokens // c.documents) - 1 if c.documents else c.tokens
        self.documents = (torch.arange(c.tokens) // width).clamp(max=max(c.documents - 1, 0)).expand(c.rows, -1)
        self.positions = (torch.arange(c.tokens) - self.documents * width) if c.documents else (
            torch.arange(c.tokens).expand(c.rows, -1))
        self.aux, self.done = [], 0

    # The data of this rank.

    def rows(self):
        """Rows of each micro-batch of this data rank."""
        return [part.tolist() for part in self.dp.part(torch.arange(self.config.rows)).chunk(self.microbatches)]

    def columns(self):
        """Global columns of this context rank's tokens."""
        if not self.zigzag:
            return self.cp.part(torch.arange(self.config.tokens)).tolist()
        chunks = torch.arange(self.config.tokens).chunk(2 * self.cp.size)
        return torch.cat([chunks[self.cp.rank], chunks[2 * self.cp.size - 1 - self.cp.rank]]).tolist()

    def key_columns(self):
        return self.cp.gather(torch.tensor(self.columns())).tolist()

    def allowed(self, rows, columns, keys):
        """(b, t, T): whether a token may attend to a key."""
        documents = self.documents[rows]
        causal = torch.tensor(keys)[None] <= torch.tensor(columns)[:, None]
        return causal[None] & (documents[:, columns][:, :, None] == documents[:, keys][:, None])

    def batch(self, rows):
        columns, keys = self.columns(), self.key_columns()
        return Batch(self.ids[rows][:, columns], self.targets[rows][:, columns], self.positions[rows][:, columns],
                     self.allowed(rows, columns, keys)[:, None], rows, columns)

    # The model and its slices.

    def sharded_dim(self, name):
        """The dim that tensor parallelism shards, or None."""
        module = name.split(".")[-2]
        if self.tp.size > 1 and ".experts." not in name:
            if module == "lm_head":
                return 0 if self.vocab_parallel else None
            if module in ("q_proj", "q_b_proj", "gate_proj", "up_proj", "gate_up_proj"):
                return 0
            if module in ("k_proj", "v_proj"):
                return 0 if self.config.kv_heads >= self.tp.size else None
            if (module in ("o_proj", "down_proj") and name.endswith("weight")) or module == "lora_A":
                return 1
        return None

    def index(self, name, shape):
        """For each dim the ranges of a parameter that this rank stores, or None for all of it."""
        dim = self.sharded_dim(name)
        if dim is None:
            return None
        ranges = [[[0, size]] for size in shape]
        if name.split(".")[-2] == "gate_up_proj":
            half = shape[0] // 2
            size = half // self.tp.size
            ranges[0] = [[start + self.tp.rank * size, start + (self.tp.rank + 1) * size] for start in (0, half)]
        else:
            size = shape[dim] // self.tp.size
            ranges[dim] = [[self.tp.rank * size, (self.tp.rank + 1) * size]]
        return ranges

    def build(self):
        model, c = Llama(self.config, self), self.config
        self.shapes = {name: list(p.shape) for name, p in model.named_parameters()}
        self.shapes["lm_head.weight"] = [c.vocab, c.hidden]
        if self.pp.size > 1:
            if c.tied:
                model.lm_head.weight = nn.Parameter(model.lm_head.weight.data.clone())
            bounds = [i * c.layers // self.pp.size for i in range(self.pp.size + 1)]
            for i in range(c.layers):
                if not bounds[self.pp.rank] <= i < bounds[self.pp.rank + 1]:
                    del model.model.layers[str(i)]
            if not self.first:
                del model.model.embed_tokens
            if not self.last:
                del model.model.norm, model.lm_head
        for layer in model.model.layers.values():
            if self.ep.size > 1:
                kept = self.ep.part(torch.arange(c.experts)).tolist()
                for i in range(c.experts):
                    if i not in kept:
                        del layer.mlp.experts[str(i)]
        for name, p in model.named_parameters():
            p.requires_grad_(not c.lora or "lora" in name)
            p.data = self.stored(name, p.data)
        return model

    def wrap(self, model):
        return model

    def stored(self, name, full):
        """This rank's values of a parameter."""
        for dim, ranges in enumerate(self.index(name, full.shape) or []):
            full = torch.cat([full.narrow(dim, start, stop - start) for start, stop in ranges], dim)
        return full.clone()

    def layout(self, name, kind, tensor):
        if kind in PARAMETERS:
            return self.parameter_slice(name, tensor)
        if not self.grid or kind not in ("input_ids", "targets", "output", "output_grad"):
            return None
        shape, columns = list(tensor.shape), contiguous_ranges(self.columns())
        shape[1] = self.config.tokens
        index = [[[0, size]] for size in shape]
        index[1] = columns
        if kind.startswith("output"):
            if self.sequence and name not in ("lm_head", "model.embed_tokens"):
                index[1] = contiguous_ranges(self.tp.part(torch.tensor(self.columns()), 0).tolist())
            if name == "lm_head" and self.sharded_dim("lm_head.weight") is not None:
                shape[2] = self.config.vocab
                index[2] = self.index("lm_head.weight", self.shapes["lm_head.weight"])[0]
        return Slice(shape, index)

    def parameter_slice(self, name, tensor):
        shape = self.shapes[name]
        index, tied = self.index(name, shape), self.config.tied and name == "lm_head.weight"
        if index is None and not tied:
            return None
        return Slice(shape, index, name="model.embed_tokens.weight" if tied else None)

    # The forward pass: correct under tensor, sequence and context parallelism.

    def layer(self, layer, x, batch):
        return layer(x, batch)

    def scatter(self, x):
        """The embedding's output, sharded over the tokens under sequence parallelism."""
        if self.sequence:
            x = collective(x, lambda y: self.tp.part(y, 1), lambda g: self.tp.gather(g, 1))
        return x

    def enter(self, x):
        """The input of column-parallel layers."""
        if self.sequence:
            return collective(x, lambda y: self.tp.gather(y, 1), lambda g: self.tp.reduce_scatter(g, 1))
        return collective(x, None, self.tp.sum)

    def enter_low_rank(self, x):
        return collective(x, None, self.tp.sum)

    def enter_head(self, x):
        if self.vocab_parallel:
            return self.enter(x)
        return collective(x, lambda y: self.tp.gather(y, 1), lambda g: self.tp.part(g, 1)) if self.sequence else x

    def leave(self, layer, x):
        """A row-parallel layer; its bias is added once, after the reduction."""
        y = self.reduce(F.linear(x, layer.weight))
        return y if layer.bias is None else y + layer.bias

    def reduce(self, y):
        if self.sequence:
            return collective(y, lambda z: self.tp.reduce_scatter(z, 1), lambda g: self.tp.gather(g, 1))
        return collective(y, self.tp.sum)

    def adapter(self, attention, y):
        """lora_A is sharded like o_proj, lora_B is replicated."""
        return attention.lora_B(self.reduce(attention.lora_A(y)))

    def attend(self, q, k, v, batch):
        return attention(q, self.keys(k), self.values(v), batch.mask)

    def keys(self, k):
        """Keys (b, heads, t, D) of all context ranks."""
        return collective(k, lambda y: self.cp.gather(y, 2), lambda g: self.cp.reduce_scatter(g, 2))

    def values(self, v):
        return self.keys(v)

    def mix(self, moe, x, weights):
        """Routed experts: every rank runs its experts on the tokens of all expert ranks and returns the results."""
        x, weights = (self.exchange(y) for y in (x, weights))
        return collective(moe.local(x, weights), self.ep.reduce_scatter, self.ep.gather)

    def exchange(self, x):
        return collective(x, self.ep.gather, self.ep.reduce_scatter)

    def balance(self, probabilities, weights):
        """The load-balancing loss of each sequence: E sum_e f_e p_e, f over all of its tokens."""
        if self.config.aux:
            routed = self.fraction((weights > 0).float().mean(1))
            self.aux.append(self.config.experts * (routed * probabilities.mean(1)).sum(-1).mean())

    def fraction(self, routed):
        return self.tp.mean(self.cp.mean(routed)) if self.sequence else self.cp.mean(routed)

    def dropout(self, x, site, batch):
        if not self.config.dropout:
            return x
        keep = self.mask(x, site, batch)
        return x * keep / (1 - self.config.dropout)

    def mask(self, x, site, batch):
        """A mask that is a function of the site and of the token's row and column in the global batch."""
        columns = self.tp.part(torch.tensor(batch.columns)).tolist() if self.sequence else batch.columns
        generator = torch.Generator().manual_seed(1000 + site)
        full = torch.rand(self.config.rows, self.config.tokens, x.shape[-1], generator=generator)
        return (full[batch.rows][:, columns] >= self.config.dropout).float()

    # Loss and backward pass.

    def cross_entropy(self, logits, batch):
        if self.sharded_dim("lm_head.weight") is not None:
            logits = self.gather_logits(logits)
        return F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=-100)

    def token_sum(self, logits, batch):
        """The sum over this rank's tokens divided by the number of tokens of the global batch."""
        return self.cross_entropy(logits, batch) * self.trained(batch.targets) / self.trained(self.targets)

    def trained(self, targets):
        return int((targets != -100).sum())

    def gather_logits(self, logits):
        return collective(logits, lambda y: self.tp.gather(y, -1), lambda g: self.tp.part(g, -1))

    def loss(self, logits, batch, number):
        """The mean over this rank's tokens, divided by the number of micro-batches."""
        return (self.cross_entropy(logits, batch) + self.auxiliary()) / self.microbatches

    def auxiliary(self):
        total, self.aux = sum(self.aux), []
        return self.config.aux * total / (self.tp.size if self.sequence else 1)

    def run_microbatch(self, model, batch, number):
        if self.pp.size == 1:
            self.backward(self.loss(model(batch.ids, batch), batch, number) * self.config.loss_scale, model, number)
        else:
            self.run_stage(model, batch, number)

    def backward(self, loss, model, number):
        loss.backward()

    def run_stage(self, model, batch, number):
        """One micro-batch on a pipeline stage: forward pass, then backward pass."""
        shape = (len(batch.rows), self.config.tokens, self.config.hidden)
        peers, rank = self.pp.members, self.pp.rank
        x = batch.ids
        if not self.first:
            x = torch.empty(shape)
            dist.recv(x, peers[rank - 1])
            x.requires_grad_()
        y = model(x, batch)
        if self.last:
            self.backward(self.loss(y, batch, number), model, number)
        else:
            dist.send(y.detach(), peers[rank + 1])
            grad = torch.empty(shape)
            dist.recv(grad, peers[rank + 1])
            self.backward_stage(y, grad, number)
        if not self.first:
            dist.send(self.input_grad(x.grad, number), peers[rank - 1])

    def backward_stage(self, y, grad, number):
        y.backward(grad)

    def input_grad(self, grad, number):
        return grad

    def accumulate(self, model, number):
        """Called after each micro-batch."""

    # Reductions, clipping, update.

    def reduce_gradients(self, model):
        for name, p in model.named_parameters():
            if p.requires_grad:
                p.grad = self.reduced(name, torch.zeros_like(p) if p.grad is None else p.grad)
                p.grad /= self.config.loss_scale

    def reduced(self, name, grad):
        if self.ep.size > 1 and ".experts." in name:
            return grad / self.ep.size  # already the sum over the tokens of all data ranks
        for axis in (self.dp, self.cp):
            grad = axis.mean(grad) if axis.size > 1 else grad
        if self.summed_over_tp(name):
            grad = self.tp.sum(grad)
        return self.pp.sum(grad) if self.is_shared(name) else grad

    def summed_over_tp(self, name):
        """Replicated parameters whose gradient on a rank is that of its tokens or heads."""
        tokens = self.sequence and (name == "model.norm.weight" or name.endswith(".bias") or any(
            part in name for part in ("layernorm", ".q_a_", "lora_B", ".experts.", ".mlp.gate.")))
        heads = self.config.kv_heads < self.tp.size and (".k_proj." in name or ".v_proj." in name)
        return self.tp.size > 1 and (tokens or heads or ".q_norm." in name or ".k_norm." in name)

    def is_shared(self, name):
        return self.pp.size > 1 and self.config.tied and name in ("model.embed_tokens.weight", "lm_head.weight")

    def norm(self, model):
        """The norm of the global gradient; replicas count once."""
        total = torch.zeros(())
        for name, p in model.named_parameters():
            if p.requires_grad and not (self.is_shared(name) and not self.first):
                total += self.square(name, p.grad.pow(2).sum())
        return self.pp.sum(total).sqrt()

    def square(self, name, square):
        if self.sharded_dim(name) is not None:
            square = self.tp.sum(square)
        return self.ep.sum(square) if ".experts." in name else square

    def clip(self, model, recording):
        total = self.norm(model)
        recording.clip(total, self.config.max_norm)
        self.scale(model, min(1.0, self.config.max_norm / (float(total) + 1e-6)))

    def scale(self, model, factor):
        for p in model.parameters():
            if p.grad is not None:
                p.grad *= factor

    def optimizer(self, model):
        groups = [(self.config.decay, [p for p in model.parameters() if p.requires_grad and p.dim() > 1]),
                  (0.0, [p for p in model.parameters() if p.requires_grad and p.dim() <= 1])]
        return torch.optim.AdamW([{"params": group, "weight_decay": decay} for decay, group in groups if group],
                                 lr=self.config.lr)

    def update(self, model, optimizer):
        optimizer.step()

    # The step.

    def axes(self):
        axes = {name: (getattr(self, name).rank, getattr(self, name).size) for name, _ in self.grid}
        return {**axes, "ep": (self.ep.rank, self.ep.size)} if self.ep.size > 1 else axes

    def run(self, directory):
        model = self.wrap(self.build())
        optimizer = self.optimizer(model)
        for done in range(self.steps):
            self.done = done
            for p in model.parameters():
                p.grad = None
            recorder = contextlib.nullcontext(Unrecorded())
            if done == self.steps - 1:
                recorder = tessera.torch.record(model, directory, optimizer=optimizer, step=self.steps,
                                                axes=self.axes(), layout=self.layout)
            with recorder as recording:
                self.train(model, optimizer, recording)

    def train(self, model, optimizer, recording):
        for number, rows in enumerate(self.rows()):
            batch = self.batch(rows)
            recording.batch(batch.ids, batch.targets)
            self.run_microbatch(model, batch, number)
            self.accumulate(model, number)
        self.reduce_gradients(model)
        if self.config.max_norm:
            self.clip(model, recording)
        self.update(model, optimizer)


class Unrecorded:
    def batch(self, ids, targets):
        pass

    def clip(self, norm, max_norm):
        pass


def world_size(step):
    return math.prod(size for _, size in step.grid)


def contiguous_ranges(columns):
    """[0, 1, 2, 8, 9] -> [[0, 3], [8, 10]]"""
    ranges = []
    for column in columns:
        if ranges and ranges[-1][1] == column:
            ranges[-1][1] += 1
        else:
            ranges.append([column, column + 1])
    return ranges


def _work(cls, rank, world, fixed, directory, store):
    torch.set_num_threads(1)
    if world:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    cls(rank, fixed).run(directory)
    if world:
        dist.barrier()
        dist.destroy_process_group()


def main(script, reference=Step):
    """NAME.py OUT [--fixed]: writes OUT/recording (the script's step) and OUT/reference (one process)."""
    parser = argparse.ArgumentParser(description=sys.modules[script.__module__].__doc__)
    parser.add_argument("out")
    parser.add_argument("--fixed", action="store_true", help="the corrected twin")
    options = parser.parse_args()
    torch.set_num_threads(1)
    world, fork = world_size(script), multiprocessing.get_context("fork")
    plain = type("Reference", (reference,), {"config": script.config, "steps": script.steps, **REFERENCE})
    with tempfile.TemporaryDirectory() as directory:
        store = f"{directory}/store"
        jobs = [(script, rank, world, options.fixed, f"{options.out}/recording", store) for rank in range(world)]
        jobs.append((plain, 0, 0, True, f"{options.out}/reference", store))
        processes = [fork.Process(target=_work, args=job) for job in jobs]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    sys.exit(any(process.exitcode for process in processes))
