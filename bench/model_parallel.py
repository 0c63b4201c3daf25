#!/usr/bin/env python3
"""The model-parallel family side by side: step time, bytes and memory per rank, as Markdown tables.

usage: bench/model_parallel.py [--binary build/release/bin/tessera] [--part tp|cp|mesh]... [--rounds 5] [--steps 12]
       [--only times|counts] [--quick]

tp: tensor and sequence parallel ranks of a narrow and a wide model. cp: ring attention and Ulysses by context length.
mesh: every way to lay 8 ranks out as pp x dp x cp x tp. One thread per rank, fp32.

Every round trains each plan of a table once, in turn, on the same work; a number is the median over the steps of a run
after the first five, the table's the median over rounds. Where ranks are more than processors they share them: a time
then says what the work costs in total, not what a machine with a processor for each rank would take. Bytes are what
`tessera verify` counts, means of ranks and steps, after it has held them against the closed forms and the training
against one rank's; peak memory is of a training step, by the same command. --only leaves out one of the two: counts do
not care how busy the machine is.
"""
import argparse
import os
import statistics
import sys
import tempfile

from strategies import ROOT, last_object

TEXT_LINES = 1500
COUNTED_STEPS = 2  # the first one has not packed all weights yet when its memory is at its peak
TP_MODELS = {
    "narrow": dict(layers=4, heads=4, channels=128, context=64, batch=12, vocab=256),
    "wide": dict(layers=4, heads=8, channels=512, context=128, batch=4, vocab=256),
}
CP_TOKENS = 2048  # of a step, whatever the context
CP_CONTEXTS = 64, 256, 1024
MESH_MODEL = dict(layers=8, heads=8, channels=128, context=64, batch=16, vocab=256)
MESH_RANKS, MESH_MICROBATCH = 8, 2  # sequences of a micro-batch, in a pipeline
COLUMNS = ["tokens/s", "ms per step", "MB sent per rank", "by axis", "peak MB, most", "least"]


class Plan:
    """A row of a table: its first cells, and the options of `train` and `verify`."""

    def __init__(self, cells, model, **plan):
        self.cells = cells
        self.tokens = model["batch"] * model["context"]
        self.words = ["--threads-per-rank", "1", "--dtype", "fp32"]
        for key, value in {**model, **plan}.items():
            flag = "--" + key.replace("_", "-")
            self.words += [flag] if value is True else [flag, str(value)] if value is not False else []
        self.rates, self.counts = [], None

    def time(self, options, cwd, number):
        command = [options.binary, "train", "--data", "text.txt", "--tokenizer", "bytes", "--steps", str(options.steps),
                   "--no-eval", "--no-save", "--quiet", "--format", "json", "--out", f"run-{number}"]
        self.rates.append(last_object(command + self.words, cwd)["tokens_per_s"])

    def count(self, options, cwd):
        command = [options.binary, "verify", "--steps", str(COUNTED_STEPS), "--format", "json"]
        self.counts = last_object(command + self.words, cwd)

    def time_cells(self):
        if not self.rates:
            return ["", ""]
        rate = statistics.median(self.rates)
        return [f"{rate:,.0f}", f"{1e3 * self.tokens / rate:.1f}"]

    def count_cells(self):
        if not self.counts:
            return [""] * 4
        shares = self.counts["plan"]["ranks"] * COUNTED_STEPS
        axes = {axis: sum(op["sent"] for op in ops.values()) / shares for axis, ops in self.counts["bytes"].items()}
        each = ", ".join(f"{axis} {sent / 1e6:.3f}" for axis, sent in axes.items() if sent >= 500)
        peaks = self.counts["memory"]["peak"]["measured"]
        return [f"{sum(axes.values()) / 1e6:.3f}", each, f"{max(peaks) / 1e6:.1f}", f"{min(peaks) / 1e6:.1f}"]


def tp_tables(options):
    for name, model in TP_MODELS.items():
        if options.quick and name != "narrow":
            continue
        head = ", ".join(f"{key} {value}" for key, value in model.items())
        plans = [Plan(["one rank"], model, ranks=1)]
        for tp in (2, 4):
            plans += [Plan([f"TP {tp}" + (" with SP" if sp else "")], model, ranks=tp, tp=tp, sp=sp)
                      for sp in (False, True)]
        yield f"Tensor parallel, the {name} model ({head})", ["plan"], plans


def cp_tables(options):
    plans = []
    for context in CP_CONTEXTS[:1] if options.quick else CP_CONTEXTS:
        model = dict(layers=4, heads=4, channels=128, context=context, batch=CP_TOKENS // context, vocab=256)
        plans.append(Plan([str(context), "one rank"], model, ranks=1))
        plans += [Plan([str(context), f"{mode} {cp}"], model, ranks=cp, cp=cp, cp_mode=mode)
                  for cp in (2, 4) for mode in ("ring", "ulysses")]
    title = f"Context parallel, {CP_TOKENS} tokens per step (4 layers of 128 channels, 4 heads)"
    yield title, ["context", "plan"], plans


def meshes(ranks):
    """All (pp, dp, cp, tp) of which the product is `ranks`."""
    sizes = [n for n in range(1, ranks + 1) if ranks % n == 0]
    return [(pp, dp, cp, tp) for pp in sizes for dp in sizes for cp in sizes for tp in sizes
            if pp * dp * cp * tp == ranks]


def mesh_tables(options):
    plans = [Plan(["", "", "", "", "1", "one rank"], MESH_MODEL, ranks=1)]
    for pp, dp, cp, tp in meshes(MESH_RANKS)[:: 5 if options.quick else 1]:
        parts = MESH_MODEL["batch"] // (dp * MESH_MICROBATCH) if pp > 1 else 1
        plans.append(Plan([str(n) for n in (pp, dp, cp, tp, parts)] + ["1f1b" if pp > 1 else ""], MESH_MODEL,
                          ranks=MESH_RANKS, pp=pp, dp=dp, cp=cp, tp=tp, microbatches=parts))
    head = ", ".join(f"{key} {value}" for key, value in MESH_MODEL.items())
    yield f"{MESH_RANKS} ranks ({head})", ["pp", "dp", "cp", "tp", "micro-batches", ""], plans


PARTS = {"tp": tp_tables, "cp": cp_tables, "mesh": mesh_tables}


def time_plans(plans, options, cwd):
    for round_ in range(options.rounds):
        for i, plan in enumerate(plans):
            plan.time(options, cwd, f"{round_}-{i}-{id(plan)}")
        print(f"round {round_ + 1} of {options.rounds} is done", file=sys.stderr)


def print_table(title, columns, plans, options, cwd):
    print(f"\n{title}\n")
    print("| " + " | ".join(columns + COLUMNS) + " |\n" + "|---" * len(columns + COLUMNS) + "|")
    for plan in plans:
        if options.only != "times":
            plan.count(options, cwd)
        print("| " + " | ".join(plan.cells + plan.time_cells() + plan.count_cells()) + " |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default=os.path.join(ROOT, "build", "release", "bin", "tessera"))
    parser.add_argument("--part", choices=PARTS, action="append")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--only", choices=("times", "counts"))
    parser.add_argument("--quick", action="store_true", help="one round of two steps, few rows: to see that it works")
    options = parser.parse_args()
    options.binary = os.path.abspath(options.binary)
    if options.quick:
        options.rounds, options.steps = 1, 2
    cores = os.cpu_count()
    print(f"{cores} processors; where ranks are more they share them: times say what the work costs in total, not what "
          f"a cluster would take. Median of {options.rounds} rounds of {options.steps} steps.")
    with tempfile.TemporaryDirectory() as cwd:
        with open(os.path.join(cwd, "text.txt"), "w") as text:
            text.write("A line of a text that says little, over and over again.\n" * TEXT_LINES)
        for part in options.part or PARTS:
            for title, columns, plans in PARTS[part](options):
                if options.only != "counts":
                    time_plans(plans, options, cwd)
                print_table(title, columns, plans, options, cwd)


if __name__ == "__main__":
    main()
