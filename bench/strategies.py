#!/usr/bin/env python3
"""The data-parallel family side by side: step time, bytes and memory per rank, as a Markdown table.

usage: bench/strategies.py [--binary build/release/bin/tessera] [--ranks 2] [--config A|C] [--dtype fp32|bf16]
       [--rounds 5] [--steps N]

Every round trains one rank and each strategy once, in turn, on the same sequences, one thread per rank; a number is the
median over the steps of a run after the first five, the table's the median over rounds. "of n ranks" is the rate beside
that many times one rank's. Bytes are what `tessera verify` counts in one step over all ranks, which it holds against the
closed form; memory is what a rank holds between steps, by the same command.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CONFIGS = {
    "A": "--layers 6 --heads 6 --channels 384 --context 256 --batch 12 --vocab 65".split(),
    "C": "--layers 4 --heads 4 --channels 128 --context 64 --batch 12 --vocab 65".split(),
}
STRATEGIES = {
    "DDP": [],
    "ZeRO-1": ["--zero", "1"],
    "ZeRO-2": ["--zero", "2"],
    "ZeRO-3": ["--zero", "3"],
    "DataParallel": ["--dp-mode", "dataparallel"],
    "parameter server, 1": ["--dp-mode", "ps-sync"],
    "parameter server, n": ["--dp-mode", "ps-sync", "--servers", "RANKS"],
    "asynchronous server": ["--dp-mode", "ps-async"],
}


def last_object(command, cwd):
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def rate(options, strategy, ranks, cwd, number):
    out = f"run-{number}"
    command = [options.binary, "train", "--data", "text.txt", "--tokenizer", "bytes", "--ranks", str(ranks),
               "--threads-per-rank", "1", "--steps", str(options.steps), "--dtype", options.dtype, "--format", "json",
               "--no-eval", "--no-save", "--out", out] + options.sizes + strategy
    return last_object(command, cwd)["tokens_per_s"]


def counted(options, strategy, ranks, cwd):
    """(bytes sent in one step over all ranks, what theory says, bytes held per rank: most and least)"""
    command = [options.binary, "verify", "--ranks", str(ranks), "--threads-per-rank", "1", "--steps", "1", "--dtype",
               options.dtype, "--format", "json"] + options.sizes + strategy
    result = last_object(command, cwd)
    operations = [op for axis in result["bytes"].values() for op in axis.values()]
    held = [sum(x) for x in zip(*(result["memory"][c]["measured"] for c in ("parameters", "gradients", "optimizer")))]
    return sum(op["sent"] for op in operations), sum(op["expected"] for op in operations), max(held), min(held)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default=os.path.join(ROOT, "build", "release", "bin", "tessera"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--config", choices=CONFIGS, default="C")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    options.binary = os.path.abspath(options.binary)
    options.sizes = [s if s != "65" else "256" for s in CONFIGS[options.config]]  # the text is bytes
    strategies = {k: [str(options.ranks) if w == "RANKS" else w for w in v] for k, v in STRATEGIES.items()}
    with tempfile.TemporaryDirectory() as cwd:
        with open(os.path.join(cwd, "text.txt"), "w") as text:
            text.write("A line of a text that says little, over and over again.\n" * 20000)
        rates = {name: [] for name in ["one rank", *strategies]}
        number = 0
        for _ in range(options.rounds):
            for name in rates:
                ranks = 1 if name == "one rank" else options.ranks
                number += 1
                rates[name].append(rate(options, strategies.get(name, []), ranks, cwd, number))
        one = statistics.median(rates["one rank"])
        print(f"config {options.config}, {options.dtype}, {options.ranks} thread ranks of one thread, "
              f"{options.rounds} rounds of {options.steps} steps\n")
        print(f"| strategy | tokens/s | of {options.ranks} ranks | MB sent per step | in theory | MB held, most | least |")
        print("|---|---|---|---|---|---|---|")
        for name, values in rates.items():
            ranks = 1 if name == "one rank" else options.ranks
            if name == "asynchronous server":
                cells = "| - | - | - | - |"
            else:
                sent, theory, most, least = counted(options, strategies.get(name, []), ranks, cwd)
                cells = f"| {sent / 1e6:.2f} | {theory / 1e6:.2f} | {most / 1e6:.2f} | {least / 1e6:.2f} |"
            now = statistics.median(values)
            print(f"| {name} | {now:,.0f} | {100 * now / (one * ranks):.0f}% {cells}")


if __name__ == "__main__":
    main()
