#!/usr/bin/env python3
"""Trains random models under random layouts with --layout-invariant and compares the tensors of the last checkpoint
(parameters and optimizer state) bitwise with those of one tensor-parallel rank (docs/layout_invariant.md).

    tests/campaign/layouts.py PROGRAM [--count 100] [--dtype fp32|bf16] [--seed 1] [--steps 20]

Prints one line per combination and exits with 1 if any differs. Set TESSERA_MAX_CPU_ISA to compare code paths:
--other-isa avx2 runs the second layout under that limit.
"""
import argparse
import json
import os
import random
import subprocess
import sys
import tempfile


def tensors(path):
    """Name -> (dtype, shape, bytes) of a safetensors file."""
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        data = file.read()
    header.pop("__metadata__", None)
    return {name: (x["dtype"], tuple(x["shape"]), data[slice(*x["data_offsets"])]) for name, x in header.items()}


def checkpoint(directory):
    """All tensors of the newest checkpoint of a run."""
    root = os.path.join(directory, "checkpoints")
    newest = max((name for name in os.listdir(root) if os.path.isdir(os.path.join(root, name))),
                 key=lambda name: int("".join(filter(str.isdigit, name)) or 0))
    out = {}
    for name in sorted(os.listdir(os.path.join(root, newest))):
        if name.endswith(".safetensors"):
            out.update({f"{name}:{key}": value for key, value in tensors(os.path.join(root, newest, name)).items()})
    return out


def sample(rng, dtype):
    """Options of a model and batch, then of its layout."""
    heads = rng.choice([2, 4, 8])
    llama = rng.random() < 0.5
    head_size = rng.choice([4, 8, 16])
    context = rng.choice([16, 32, 48, 64])
    model = ["--layers", rng.choice([1, 2, 3]), "--heads", heads, "--channels", heads * head_size, "--context", context,
             "--vocab", 264, "--ffn", 8 * rng.randint(5, 40), "--dropout", rng.choice([0, 0.1]), "--dtype", dtype,
             "--seed", rng.randint(1, 10 ** 6), "--clip", rng.choice([0, 0.1, 1]),
             "--optimizer", rng.choice(["adamw", "sgd"])]
    if llama:
        model += ["--family", "llama", "--kv-heads", rng.choice([h for h in (1, 2, 4, 8) if heads % h == 0])]
    if rng.random() < 0.5:
        model += ["--untied"]
    if llama and rng.random() < 0.3:
        model += ["--window", rng.choice([5, 16])]
    groups = rng.choice([1, 2])  # data ranks or micro-batches
    kv_heads = model[model.index("--kv-heads") + 1] if llama else heads
    tp = rng.choice([t for t in (1, 2, 4, 8) if kv_heads % t == 0])
    layout = ["--tp", tp]
    if tp > 1 and context % (2 * tp) == 0 and rng.random() < 0.6:
        layout += ["--sp"]
    if groups > 1 and rng.random() < 0.5:
        layout += ["--dp", groups, "--zero", rng.choice([0, 1, 2, 3])]
    else:
        layout += ["--dp", 1, "--microbatches", groups]
    if rng.random() < 0.4:
        layout += ["--recompute", rng.choice(["block", "activation", "attention"])]
    if "--untied" in model and model[1] > 1 and rng.random() < 0.3:
        layout += ["--pp", 2, "--schedule", rng.choice(["1f1b", "zb-h1", "gpipe"])]
    return model, groups, layout


def train(program, options, out, isa=None):
    env = dict(os.environ, GOMP_SPINCOUNT="1000")
    if isa:
        env["TESSERA_MAX_CPU_ISA"] = isa
    command = [program, "train", "--layout-invariant", "--threads-per-rank", 1, "--no-eval", "--quiet", "--out", out,
               *options]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, env=env, check=False)
    if done.returncode != 0:
        return " ".join(map(str, options)) + ": " + (done.stderr.strip().splitlines() or ["failed"])[-1]
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])  # fp64: `tessera verify`
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--other-isa")
    args = parser.parse_args()
    rng, failed = random.Random(args.seed), 0
    for trial in range(args.count):
        model, groups, layout = sample(rng, args.dtype)
        model += ["--steps", args.steps, "--batch", 4 * groups, "--warmup", 2, "--lr", 0.003]
        with tempfile.TemporaryDirectory() as home:
            first, second = os.path.join(home, "one"), os.path.join(home, "two")
            error = train(args.program, [*model, "--dp", 1, "--tp", 1, "--microbatches", groups], first) or \
                train(args.program, [*model, *layout], second, args.other_isa)
            if error is None:
                one, two = checkpoint(first), checkpoint(second)
                differ = sorted(name for name in one.keys() | two.keys() if one.get(name) != two.get(name))
                error = f"{len(differ)} of {len(one)} tensors differ, first {differ[0]}" if differ else None
        failed += error is not None
        print(f"{trial}: {' '.join(map(str, layout))} | {' '.join(map(str, model))}: {error or 'equal'}", flush=True)
    print(f"{args.count - failed} of {args.count} combinations are bitwise identical to one rank")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
