#!/usr/bin/env python3
"""Compares predictions of `tessera plan --hardware this` with measured steps of the same plans, as a Markdown table.

usage: bench/predictions.py [--binary build/release/bin/tessera] [--rounds 3] [--quick]

All predictions precede the runs and use the measurement stored by `tessera plan --calibrate`. A round runs each plan once;
the measured time is the median over rounds of the median of 12 steps. Below the table: the median error, and Kendall's tau
of the order of plans per model and dtype, without pairs within 2% of each other.
"""
import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
MODELS = {
    "C": "--model gpt-nano --vocab 65 --batch 12",
    "W": "--layers 4 --heads 6 --channels 384 --context 128 --vocab 256 --batch 8",
}
DEFAULTS = {"cp-mode": "ring", "pp": 1, "dp": 1, "cp": 1, "tp": 1, "microbatches": 1, "zero": 0, "recompute": "none", "schedule": "1f1b"}
PLANS = [  # model, dtype, options
    *((model, dtype, plan) for model in MODELS for dtype in ("fp32", "bf16") for plan in (
        {}, {"dp": 2}, {"dp": 2, "zero": 3}, {"tp": 2}, {"pp": 2, "microbatches": 4}, {"dp": 4})),
    *((model, "fp32", plan) for model in MODELS for plan in (
        {"dp": 2, "zero": 1}, {"tp": 2, "sp": True}, {"cp": 2}, {"dp": 2, "recompute": "block"},
        {"pp": 2, "microbatches": 4, "schedule": "zb-h1"}, {"pp": 2, "microbatches": 2, "schedule": "gpipe"},
        {"dp": 2, "tp": 2}, {"pp": 4, "microbatches": 4}, {"pp": 2, "dp": 2, "microbatches": 2})),
]


def plan_lines(binary, model, dtype, plan, more=()):
    args = f"plan {MODELS[model]} --dtype {dtype} --hardware this --format json".split()
    for key, value in {**DEFAULTS, **plan}.items():
        args += [] if key == "sp" else [f"--{key}", str(value)]
    done = subprocess.run([binary, *args, *more], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(args)}: {done.stderr.strip().splitlines()[-1]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def predicted(binary, model, dtype, plan):
    """(seconds, index in the ranking)"""
    lines = [x for x in plan_lines(binary, model, dtype, plan) if x["event"] == "plan"]
    number = next(i for i, x in enumerate(lines) if x["plan"]["sp"] == plan.get("sp", False))
    return lines[number]["step_s"], number + 1


def measured(binary, row, number):
    line = next(x for x in plan_lines(binary, *row, ("--measure", str(number))) if x["event"] == "measured")
    return next(part["measured"] for part in line["parts"] if part["part"] == "step")


def tau(rows):
    """Kendall's tau of pairs (predicted, measured)."""
    signs = [1 if (p - q) * (m - n) > 0 else -1 for (p, m), (q, n) in itertools.combinations(rows, 2)
             if abs(m - n) > 0.02 * max(m, n)]
    return sum(signs) / max(1, len(signs))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default=os.path.join(ROOT, "build", "release", "bin", "tessera"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="smoke test: four plans, one round")
    options = parser.parse_args()
    binary, rounds = os.path.abspath(options.binary), 1 if options.quick else options.rounds
    plans = PLANS[:4] if options.quick else PLANS
    before, numbers = zip(*(predicted(binary, *row) for row in plans))
    after = [[] for _ in plans]
    for number in range(rounds):
        for row, place, seconds in zip(plans, numbers, after):
            seconds.append(measured(binary, row, place))
        print(f"round {number + 1} of {rounds} done", file=sys.stderr)
    found = [statistics.median(seconds) for seconds in after]
    print("| model | dtype | plan | predicted, ms | measured, ms | error |\n|---|---|---|---|---|---|")
    for (model, dtype, plan), p, m in zip(plans, before, found):
        args = " ".join(f"{key}={value}" for key, value in plan.items()) or "one rank"
        print(f"| {model} | {dtype} | {args} | {1e3 * p:.2f} | {1e3 * m:.2f} | {100 * (p / m - 1):+.1f}% |")
    errors = sorted(abs(p / m - 1) for p, m in zip(before, found))
    print(f"\n{len(plans)} plans: median error {100 * statistics.median(errors):.1f}%, "
          f"90th percentile {100 * errors[int(0.9 * (len(errors) - 1))]:.1f}%; tau of all "
          f"{tau(list(zip(before, found))):.3f}")
    for model, dtype in dict.fromkeys(row[:2] for row in plans):
        rows = [(p, m) for row, p, m in zip(plans, before, found) if row[:2] == (model, dtype)]
        print(f"{model} in {dtype}: tau {tau(rows):.3f} of {len(rows)} plans")


if __name__ == "__main__":
    main()
