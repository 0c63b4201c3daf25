#!/usr/bin/env python3
"""Compares training throughput with PyTorch: same model, batch, clipping and AdamW, alternating rounds, Markdown table.

usage: bench/compare_pytorch.py [--binary build/release/bin/tessera] [--configs A,B,C,L,M] [--dtype fp32|bf16]
       [--rounds 5] [--threads N]

Each round runs Tessera and then PyTorch in separate processes; a run reports the median over its steps after the first
five, the table the median over rounds. PyTorch uses the fastest available setting (plain or fused attention, AdamW variant,
torch.compile; in bf16 autocast or bf16 parameters; with OpenBLAS its default kernels or those for AVX-512), selected by one
trial run each. Memory is the peak resident set of the process, for PyTorch minus that after importing torch.
"""
import argparse
import json
import os
import random
import resource
import statistics
import string
import subprocess
import sys
import tempfile

from gpu_run import model_args

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
WARMUP = 5
TRIAL = 2, 3  # warm-up and timed steps of a trial run

# layers, heads, channels, context, batch, vocab, timed steps; L is A as a Llama, M is moe-nano
CONFIGS = {
    "A": dict(layers=6, heads=6, channels=384, context=256, batch=12, vocab=65, steps=10),
    "B": dict(layers=12, heads=12, channels=768, context=256, batch=4, vocab=50304, steps=4),
    "L": dict(layers=6, heads=6, channels=384, context=256, batch=12, vocab=65, steps=10, kv_heads=2, ffn=1152),
    "C": dict(layers=4, heads=4, channels=128, context=64, batch=12, vocab=65, steps=60),
    "M": dict(layers=4, heads=4, channels=128, context=64, batch=12, vocab=65, steps=60, kv_heads=2, ffn=192, experts=8),
}


def optimizer_kinds(torch):
    """Keyword arguments of AdamW supported by this version on a CPU."""
    kinds = {"AdamW": {}}
    for kind in ("foreach", "fused"):
        try:
            p = torch.nn.Parameter(torch.ones(2))
            p.grad = torch.ones(2)
            torch.optim.AdamW([p], **{kind: True}).step()
            kinds[f"{kind} AdamW"] = {kind: True}
        except (RuntimeError, TypeError):
            pass
    return kinds


def settings(dtype):
    import torch

    attentions = ["plain"] + (["sdpa"] if hasattr(torch.nn.functional, "scaled_dot_product_attention") else [])
    modes = [""] if dtype == "fp32" else [", autocast", ", bf16 parameters"]
    found = [f"{a}, {k}{m}" for a in attentions for k in optimizer_kinds(torch) for m in modes]
    if hasattr(torch, "compile"):
        found.append(found[-1] + ", compile")
    a = torch.ones(256, 256)
    a @ a  # loads the library
    with open("/proc/self/maps") as maps:
        files = sorted({os.path.realpath(line.split()[-1]) for line in maps if ("blas" in line or "libmkl_" in line)
                        and "cublas" not in line and "numpy" not in line})
    with open("/proc/cpuinfo") as cpu:
        wide = "avx512bw" in cpu.read()
    if dtype == "fp32" and wide and any("openblas" in path for path in files):  # OpenBLAS does not detect newer CPUs
        found += [f"{f}, OpenBLAS for {core}" for f in found for core in ("SkylakeX", "Cooperlake")]
    return {"settings": found, "version": torch.__version__, "blas": files,
            "built_with": "; ".join(s.strip(" -") for s in torch.__config__.show().splitlines()
                                    if "Kernel Library Version" in s or "MKL-DNN v" in s)}


def pytorch_step(config, setting):
    """Returns a function that performs one training step."""
    import torch

    from pytorch_peer import training_step

    parts = setting.split(", ")
    torch.manual_seed(1)
    experts = {"grouped": "grouped experts" in parts} if "experts" in config else {}
    step = training_step(config, optimizer_kinds(torch)[parts[1]], "bf16 parameters" in parts, "autocast" in parts,
                         {} if "compile" in parts else None, sdpa=parts[0] == "sdpa", **experts)
    ids = torch.randint(65, (config["batch"], config["context"] + 1))
    return lambda: step(ids[:, :-1], ids[:, 1:].contiguous())


def resident_mb():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize() / 1e6


def child(config, setting, warmup, steps):
    import torch  # noqa: F401  (torch's memory is not the model's)

    before = resident_mb()
    from pytorch_peer import median_time

    seconds = median_time(pytorch_step(config, setting), steps, warmup)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    print(json.dumps({"tokens_per_s": config["batch"] * config["context"] / seconds, "peak_mb": peak - before}))


def environment(threads, setting=""):
    core = setting.partition("OpenBLAS for ")[2]
    chosen = {"OPENBLAS_CORETYPE": core} if core else {}
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), **chosen}


def in_pytorch(args, setting, *more):
    """Output of this script for one setting, in a separate process."""
    command = [args.python, os.path.abspath(__file__), "--child", setting, *more]
    done = subprocess.run(command, env=environment(args.threads, setting), stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def run_pytorch(name, setting, args, warmup=WARMUP, steps=None):
    return in_pytorch(args, setting, "--configs", name, "--child-steps", f"{warmup},{steps or CONFIGS[name]['steps']}")


def run_tessera(config, directory, args):
    text = os.path.join(directory, "text.txt")
    if not os.path.exists(text):
        letters = (string.ascii_letters + string.digits + " .\n")[:65]
        with open(text, "w") as f:
            f.write(letters + "".join(random.Random(1).choices(letters, k=40000)))
    command = [args.binary, "train", "--format", "json", "--data", text, "--tokenizer", "char", "--optimizer", "adamw",
               "--steps", str(WARMUP + config["steps"]), "--clip", "1", "--ranks", "1",
               "--weight-decay", "0.1", "--dtype", args.dtype, "--threads-per-rank", str(args.threads),
               "--no-eval", "--no-save", "--quiet", "--out", tempfile.mkdtemp(dir=directory),
               *model_args({key: size for key, size in config.items() if key != "steps"})]
    process = subprocess.Popen(command, env=environment(args.threads), stdout=subprocess.PIPE, text=True)
    lines = process.stdout.read().splitlines()
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        sys.exit(f"{' '.join(command)} failed")
    return {"tokens_per_s": json.loads(lines[-1])["tokens_per_s"], "peak_mb": usage.ru_maxrss * 1024 / 1e6}


def compare(name, choices, directory, args):
    config = CONFIGS[name]
    if "experts" in config:
        choices = [f"{c}, {how} experts" for c in choices for how in ("looped", "grouped")]
    trial = {s: run_pytorch(name, s, args, *TRIAL)["tokens_per_s"] for s in choices}
    print(name, {s: round(rate) for s, rate in trial.items()}, file=sys.stderr)
    best = max(trial, key=trial.get)
    ours, theirs = [], []
    for round_ in range(args.rounds):
        ours.append(run_tessera(config, directory, args))
        theirs.append(run_pytorch(name, best, args))
        rates = [runs[-1]["tokens_per_s"] for runs in (ours, theirs)]
        print(f"{name} round {round_ + 1}: {rates[0]:.0f} and {rates[1]:.0f} tokens/s", file=sys.stderr)

    def cells(runs):
        rates = [r["tokens_per_s"] for r in runs]
        return (f"{statistics.median(rates):,.0f} | {min(rates):,.0f}-{max(rates):,.0f} "
                f"| {statistics.median(r['peak_mb'] for r in runs):,.0f}")

    ratio = statistics.median(a["tokens_per_s"] / b["tokens_per_s"] for a, b in zip(ours, theirs))
    return f"| {name} | {cells(ours)} | {cells(theirs)} | {best} | {ratio:.2f} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default=os.path.join(ROOT, "build", "release", "bin", "tessera"))
    parser.add_argument("--python", default=sys.executable, help="Python interpreter with torch")
    parser.add_argument("--configs", default="A,B,C")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--child-steps", default=f"{WARMUP},1", help=argparse.SUPPRESS)
    args = parser.parse_args()
    unknown = [name for name in args.configs.split(",") if name not in CONFIGS]
    if unknown:
        parser.error(f"--configs: unknown {unknown[0]}; expected some of {','.join(CONFIGS)}")
    if args.child == "settings":
        print(json.dumps(settings(args.dtype)))
        return
    if args.child:
        child(CONFIGS[args.configs], args.child, *map(int, args.child_steps.split(",")))
        return
    torch = in_pytorch(args, "settings", "--dtype", args.dtype)
    if any("/blas/libblas.so" in path for path in torch["blas"]):
        sys.exit(f"PyTorch's matmuls run on the reference BLAS ({torch['blas'][0]}), several times slower than "
                 "OpenBLAS; install libopenblas0-pthread, or select a different interpreter with --python")
    blas = ", ".join(os.path.basename(path) for path in torch["blas"]) or torch["built_with"]
    with tempfile.TemporaryDirectory() as directory:
        rows = [compare(name, torch["settings"], directory, args) for name in args.configs.split(",")]
    print(f"{args.dtype}; PyTorch {torch['version']} ({blas}), {args.threads} threads each, {args.rounds} rounds; "
          "tokens/s\n")
    print("| config | Tessera | range | MB | PyTorch | range | MB | PyTorch setting | ratio |\n"
          "|---|---|---|---|---|---|---|---|---|")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
