"""A game: one step of a data-parallel program with a hidden fault, to be found from the audit of its recording.

    python3 find_the_fault.py start DIRECTORY [--seed N]    records the step and its one-process reference
    python3 find_the_fault.py check DIRECTORY CAUSE         grades the answer, a cause of docs/audit.md

The exit status of `check` is 0 for the right cause and 1 otherwise. Requires PyTorch 1.13 or newer.
"""
from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import shutil
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import tessera.torch

VOCAB, CHANNELS, ROWS, TOKENS, MICROBATCHES = 32, 16, 8, 12, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(CHANNELS)
        self.mlp = nn.Sequential(nn.Linear(CHANNELS, 4 * CHANNELS), nn.GELU(), nn.Linear(4 * CHANNELS, CHANNELS))

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, CHANNELS)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(CHANNELS), nn.Linear(CHANNELS, VOCAB, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Step:
    """A correct step of the ranks; each fault overrides one method."""

    def __init__(self, rank, ranks):
        self.rank, self.ranks = rank, ranks

    def batches(self, ids, targets):
        """The micro-batches of this rank."""
        rows = torch.arange(ROWS).chunk(self.ranks)[self.rank].chunk(MICROBATCHES)
        return [(ids[each], targets[each]) for each in rows]

    def loss(self, logits, targets, trained):
        """The term of this micro-batch in the mean over the trained tokens of the global batch."""
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
        return loss / trained

    def after_microbatch(self, model):
        pass

    def reduce(self, name, gradient):
        dist.all_reduce(gradient)

    def clip(self, model):
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)

    def decayed(self, name):
        return name.endswith("weight") and "norm" not in name

    def optimizer(self, model):
        groups = [{"params": [p for name, p in model.named_parameters() if self.decayed(name) == decayed],
                   "weight_decay": 0.1 * decayed} for decayed in (True, False)]
        return torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-2)

    def run(self, directory):
        torch.manual_seed(0)
        model, ids = Model(), torch.randint(VOCAB, (ROWS, TOKENS + 1))
        ids, targets = ids[:, :-1].contiguous(), ids[:, 1:].clone()
        for row in range(ROWS):
            targets[row, row + 3:] = -100
        optimizer = self.optimizer(model)
        with tessera.torch.record(model, directory, optimizer=optimizer, axes={"dp": (self.rank, self.ranks)}):
            for own, expected in self.batches(ids, targets):
                self.loss(model(own), expected, (targets != -100).sum()).backward()
                self.after_microbatch(model)
            for name, parameter in model.named_parameters():
                self.reduce(name, parameter.grad)
            self.clip(model)
            optimizer.step()


class ScaledLoss(Step):
    def loss(self, logits, targets, trained):
        return super().loss(logits, targets, trained) * MICROBATCHES


class MeanOfMeans(Step):
    def loss(self, logits, targets, trained):
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        return loss / (MICROBATCHES * self.ranks)


class ForgottenNorms(Step):
    def reduce(self, name, gradient):
        if "norm" not in name:
            super().reduce(name, gradient)


class Restarted(Step):
    def batches(self, ids, targets):
        self.done = 0
        return super().batches(ids, targets)

    def after_microbatch(self, model):
        self.done += 1
        if self.done < MICROBATCHES:
            model.zero_grad()


class SameRows(Step):
    def batches(self, ids, targets):
        first = super().batches(ids, targets)[0]
        return [first] * MICROBATCHES


class DecayedNorms(Step):
    def decayed(self, name):
        return True


# The cause that the audit must find, and the step.
FAULTS = {"factor-microbatches": ScaledLoss, "mean-of-means": MeanOfMeans, "not-synchronized": ForgottenNorms,
          "microbatch-dropped": Restarted, "microbatch-repeated": SameRows, "weight-decay": DecayedNorms}


def record(step, ranks, directory):
    """Runs a step in forks of this process; raises RuntimeError if one fails."""
    context, store = multiprocessing.get_context("fork"), tempfile.mkdtemp()

    def process(rank):
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{store}/store", rank=rank, world_size=ranks)
        step(rank, ranks).run(directory)

    processes = [context.Process(target=process, args=(rank,)) for rank in range(ranks)]
    for each in processes:
        each.start()
    for each in processes:
        each.join()
    shutil.rmtree(store)
    if any(each.exitcode for each in processes):
        raise RuntimeError(f"{directory}: a process failed")


def start(directory, seed):
    """Records a step with the fault of this seed, and its reference."""
    cause = random.Random(seed).choice(sorted(FAULTS))
    record(Step, 1, directory / "reference")
    record(FAULTS[cause], 2, directory / "recording")
    (directory / "task.json").write_text(json.dumps({"seed": seed}))


def check(directory, answer):
    """Whether the answer is the cause of the fault in this directory."""
    seed = json.loads((directory / "task.json").read_text())["seed"]
    return answer == random.Random(seed).choice(sorted(FAULTS))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("start", "check"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("cause", nargs="?", help=f"for check: one of {', '.join(sorted(FAULTS))}")
    parser.add_argument("--seed", type=int, help="for start: selects the fault; default: a random one")
    options = parser.parse_args()
    if options.action == "start":
        start(options.directory, random.randrange(10**6) if options.seed is None else options.seed)
        print(f"{options.directory}: recording and reference; grade the answer with: check {options.directory} CAUSE")
        return 0
    if options.cause not in FAULTS:
        parser.error(f"CAUSE: expected one of {', '.join(sorted(FAULTS))}, got {options.cause}")
    if not (options.directory / "task.json").is_file():
        parser.error(f"{options.directory}: expected a directory written by start")
    solved = check(options.directory, options.cause)
    print("solved" if solved else "not yet: another fault")
    return int(not solved)


if __name__ == "__main__":
    sys.exit(main())
