"""A correct training step of a small Llama under hand-written parallelism, recorded: plain torch over gloo, on CPUs.

correct.py DIRECTORY [--dp 2 --tp 2 --sp --cp 2 --pp 2 --microbatches 4 --dtype bf16 --tied ...]

writes DIRECTORY/recording (a file per rank), DIRECTORY/reference (the same step on one rank, recorded) and
DIRECTORY/model (the weights before the step as a Hugging Face directory). `run` does the same from Python.
"""
import argparse
import contextlib
import json
import os
import struct
import tempfile
from dataclasses import fields, replace
from pathlib import Path

import torch
import torch.distributed as dist
from sharded_llama import EPS, THETA, Mesh, Options, Stage, positions, shard_dim, token_losses
from torch import nn
from torch.nn import functional as F

import tessera.torch
from tessera.torch import Slice


def tokens(options, step):
    """The global batch of a step: ids and targets (B, T)."""
    generator = torch.Generator().manual_seed(1000 * options.seed + step)
    text = torch.randint(options.vocab, (options.batch, options.context + 1), generator=generator)
    ids, targets = text[:, :-1].contiguous(), text[:, 1:].clone()
    if options.untrained:
        length = torch.randint(1, options.context * 2 // 3, (options.batch, 1), generator=generator)
        targets[torch.arange(options.context) < length] = -100
    return ids, targets


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
            dim = shard_dim(options, name)
            return None if dim is None else Slice.shard(tensor, dim, mesh.rank["tp"], options.tp)
        column = name.split(".")[-1] in ("lm_head", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
        sharded = column and shard_dim(options, name + ".weight") is not None
        if options.sp and not column:
            own = mesh.chunk(own, "tp", 0)
        width, first = tensor.shape[-1], mesh.rank["tp"] * tensor.shape[-1] if sharded else 0
        partial = ["tp"] if column and not sharded and kind == "output_grad" else []  # the gradient of a rank's heads
        return Slice((len(tensor), options.context, width * (options.tp if sharded else 1)),
                     ([[0, len(tensor)]], intervals(own), [[first, first + width]]), partial)
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
            x = x.to(options.compute_dtype).requires_grad_()
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
        """Averages over dp and cp; sums norms (under sp) and replicated keys and values over tp, and tied weights over
        the first and last stage."""
        options, mesh = self.options, self.mesh
        for name, parameter in self.stage.named_parameters():
            grad = parameter.grad
            if self.model is self.stage:
                grad = mesh.all_reduce(grad, "dp") / options.dp
            grad = mesh.all_reduce(grad, "cp") / options.cp
            if shard_dim(options, name) is None and (options.sp or "_proj" in name):
                grad = mesh.all_reduce(grad, "tp")
            parameter.grad = grad
        if options.tied and options.pp > 1:
            ends = [stage.weight for stage in (getattr(self.stage.model, "embed_tokens", None),
                                               getattr(self.stage, "lm_head", None)) if stage is not None]
            zero = torch.zeros(options.vocab // options.tp, options.channels, dtype=options.compute_dtype)
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
                squares[int(shard_dim(options, name) is not None)] += parameter.grad.double().pow(2).sum()
        squares[1:] = mesh.all_reduce(squares[1:], "tp")
        norm = mesh.all_reduce(squares, "pp").sum().sqrt()
        if recording:
            recording.clip(norm, options.clip)
        for parameter in self.stage.parameters():
            parameter.grad *= min(1.0, options.clip / (float(norm) + 1e-6))


def wire(options):
    return torch.float32 if options.compute_dtype == torch.bfloat16 else options.compute_dtype


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
              "torch_dtype": str(options.compute_dtype).removeprefix("torch.")}
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


def run(directory, repeats=0, **settings):
    """Records the step under its plan and on one rank, and writes the model; returns the options.

    repeats: further recordings on one rank, to measure tolerances: in float64, then in single sequences.
    """
    options = Options(**settings)
    directory = Path(directory)
    write_model(options, directory / "model")
    spawn(options, directory / "recording")
    alone = replace(options, dp=1, tp=1, cp=1, pp=1, sp=False, ddp=False, zigzag=False, microbatches=1,
                    checkpoint=False)
    spawn(alone, directory / "reference")
    for k in range(repeats):
        again = replace(alone, microbatches=options.batch) if k else replace(alone, wide=True)
        spawn(again, directory / "reference", repeat=k + 1)
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
