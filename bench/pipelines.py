#!/usr/bin/env python3
"""What the schedules of a pipeline cost a GPT, from runs of `tessera train --trace`, as Markdown tables.

usage: bench/pipelines.py [--binary build/release/bin/tessera] [--ranks 2 4 8] [--layers 16] [--heads 4]
       [--channels 128] [--context 64] [--vocab 256] [--microbatch 4] [--rounds 3] [--steps 12] [--quick]

Each schedule runs on p ranks with p, 2 p and 4 p micro-batches, one thread per rank, fp32. A round trains each of them
once, in turn; a figure is what `tessera report` says of the median step of a run, the table's the median over rounds.

On the simulated clock: all ranks take turns on one processor, so the report replays the schedule with the time of the
processor that each pass took, and with messages that take no time: what a machine with a processor like this one for
each rank would do. In earnest, where there is a processor for each rank: the same runs on all of them, beside what the
first table predicts and a replay with the time that each pass took there. Optimizers are in no figure.
"""
import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile

from strategies import ROOT

SCHEDULES = "naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v"
SIZES = dict(layers=16, heads=4, channels=128, context=64, vocab=256, microbatch=4)
KINDS = "forward", "backward", "input", "weight"
TEXT_LINES = 1500


class Report:
    """What the text of `tessera report` says of a pipeline."""

    def __init__(self, text):
        self.bubble = {name: float(share.rstrip("%")) if share.endswith("%") else None
                       for name, share in re.findall(r"^  (formula|planned|replayed|measured) +(\S+)$", text, re.M)}
        self.ms = {name: float(ms) for name, ms in re.findall(r"^(replayed|measured): .*; ([\d.]+) ms$", text, re.M)}
        kinds = re.search(r"^mean, ms (.*)$", text, re.M)[1].split()
        self.stages = [dict(zip(kinds, map(float, row.split())))
                       for row in re.findall(r"^  stage \d+ (.*)$", text, re.M)]
        self.messages, self.sent = map(int, re.search(r"^pp +send +(\d+) +(\d+)", text, re.M).groups())
        self.peak = max(int(row.split()[-1]) for row in text.split("most bytes at one time")[1].splitlines()[2:])

    def total(self, *kinds):
        return sum(stage[kind] for stage in self.stages for kind in kinds)


def output_of(command, cwd, processors):
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True,
                          preexec_fn=lambda: os.sched_setaffinity(0, processors))
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout


def traced(options, plan, processors, cwd, number):
    p, m, schedule = plan
    out = f"run-{number}"
    command = [options.binary, "train", "--data", "text.txt", "--tokenizer", "bytes", "--dtype", "fp32", "--pp", str(p),
               "--ranks", str(p), "--schedule", schedule, "--microbatches", str(m), "--threads-per-rank", "1",
               "--batch", str(m * options.microbatch), "--steps", str(options.steps), "--trace", "--no-eval",
               "--no-save", "--quiet", "--out", out]
    for size in SIZES:
        command += [] if size == "microbatch" else [f"--{size}", str(getattr(options, size))]
    output_of(command, cwd, processors)
    return Report(output_of([options.binary, "report", out, "--format", "text"], cwd, processors))


def trace_all(options, plans, processors, cwd):
    """The reports of each plan, one for each round."""
    reports = {plan: [] for plan in plans}
    for round_ in range(options.rounds):
        for plan in plans:
            number = "-".join(map(str, (len(processors), round_, *plan)))
            reports[plan].append(traced(options, plan, processors, cwd, number))
        print(f"round {round_ + 1} of {options.rounds} is done", file=sys.stderr)
    return reports


def median(reports, figure):
    return statistics.median(figure(report) for report in reports)


def percent(reports, name):
    return "" if reports[0].bubble[name] is None else f"{median(reports, lambda r: r.bubble[name]):.1f}%"


def print_row(*cells):
    print("| " + " | ".join(map(str, cells)) + " |")


def print_head(*cells):
    print()
    print_row(*cells)
    print("|---" * len(cells) + "|")


def print_stages(options, reports):
    """Schedules with whole backward passes and with split ones, of as many stages."""
    print("\nMilliseconds of the processor for a micro-batch, means of a step: forward F, backward B, or its halves I "
          "(gradients of the input) and W (of the weights).")
    print_head("stages", "stage", "F", "B", "I", "W", "(I + W) / B")
    for p in options.ranks:
        for whole, split in (("1f1b", "zb-h1"), ("interleaved", "zb-v")):
            whole, split = reports[p, 4 * p, whole], reports[p, 4 * p, split]
            stages = range(len(whole[0].stages))
            for name, chosen in (("first", stages[:1]), ("last", stages[-1:]), ("all", stages)):
                f, b, i, w = (median(of, lambda r: sum(r.stages[s][kind] for s in chosen))
                              for kind, of in zip(KINDS, (whole, whole, split, split)))
                print_row(len(stages), name, f"{f:.2f}", f"{b:.2f}", f"{i:.2f}", f"{w:.2f}", f"{(i + w) / b:.2f}")


def print_simulated(reports):
    print("\nOn the simulated clock. A bubble is a share of the step, the mean of ranks. The ideal step has no bubble "
          "and 1F1B's times. Messages and MB (1e6 bytes) are of one step; the peak is the fullest rank's.")
    print_head("p", "m", "schedule", "bubble, equal times", "by formula", "measured times", "step / ideal", "messages",
               "MB", "peak MB")
    for (p, m, schedule), of in reports.items():
        ideal = m * median(reports[p, m, "1f1b"], lambda r: r.total("forward", "backward")) / p
        print_row(p, m, schedule, percent(of, "planned"), percent(of, "formula"), percent(of, "replayed"),
                  f"{median(of, lambda r: r.ms['replayed']) / ideal:.2f}", of[0].messages, f"{of[0].sent / 1e6:.2f}",
                  f"{of[0].peak / 1e6:.1f}")


def print_in_earnest(reports, alone):
    print("\nIn earnest, a processor for each rank. Predicted: as above; replayed: with the time that each pass took.")
    print_head("p", "m", "schedule", "step predicted, ms", "measured", "ratio", "bubble predicted", "replayed",
               "measured")
    for (p, m, schedule), of in reports.items():
        predicted = median(alone[p, m, schedule], lambda r: r.ms["replayed"])
        measured = median(of, lambda r: r.ms["measured"])
        print_row(p, m, schedule, f"{predicted:.1f}", f"{measured:.1f}", f"{measured / predicted:.2f}",
                  percent(alone[p, m, schedule], "replayed"), percent(of, "replayed"), percent(of, "measured"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default=os.path.join(ROOT, "build", "release", "bin", "tessera"))
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    for size, default in SIZES.items():
        parser.add_argument(f"--{size}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--quick", action="store_true", help="one round of two steps on 2 ranks: to see that it works")
    options = parser.parse_args()
    options.binary = os.path.abspath(options.binary)
    if options.quick:
        options.ranks, options.rounds, options.steps = [2], 1, 2
    processors = os.sched_getaffinity(0)
    sizes = ", ".join(f"{size} {getattr(options, size)}" for size in SIZES)
    print(f"{len(processors)} processors; {sizes}; medians of {options.rounds} rounds of {options.steps} steps.")
    plans = [(p, m, schedule) for p in options.ranks for m in (p, 2 * p, 4 * p) for schedule in SCHEDULES]
    with tempfile.TemporaryDirectory() as cwd:
        with open(os.path.join(cwd, "text.txt"), "w") as text:
            text.write("A line of a text that says little, over and over again.\n" * TEXT_LINES)
        alone = trace_all(options, plans, {min(processors)}, cwd)
        print_stages(options, alone)
        print_simulated(alone)
        earnest = [plan for plan in plans if plan[0] <= len(processors)]
        if earnest:
            print_in_earnest(trace_all(options, earnest, processors, cwd), alone)


if __name__ == "__main__":
    main()
