#!/usr/bin/env python3
"""What one GPU does with Tessera, as Markdown tables: beside PyTorch, under every strategy, and against the CPU.

usage: bench/gpu.py ladder|ways|pytorch|strategies|curve|kernels|ops|torch_kernels|compile [OPTIONS]; --help lists them

  ladder      first contact: tiny runs that each ask for one thing more (fp32, bf16, cuDNN, the captured graph), then the
              first number of gpt2. Where a rung fails it is run once more, simpler, and a bad access under memcheck
  ways        one rank: {cuDNN, own attention} x {graph on, off} x {free, deterministic}
  pytorch     training of each model in bf16 (fp32 master weights and moments), 1,024 tokens, vocabulary 50304, in
              alternating rounds with PyTorch on the same tokens (zipf_tokens.py): torch.compile, fused AdamW, scaled dot
              product attention, the best of {autocast, bf16 parameters} x {default, max-autotune, reduce-overhead},
              chosen by one run of each
  strategies  `tessera verify` of every strategy with its ranks on the one card, then the same batch trained by one rank
              and by each strategy in turns
  curve       the first losses (up to 20) of gpt2 in fp32 on the GPU beside those on the CPU
  kernels     the kernels of one queued step, by ncu, or where it may not be used the ops by themselves
  ops         those of which a step is made, by themselves in bf16, beside what the card can do at most
  torch_kernels  the kernels of a step of PyTorch's, by its profiler, as part kernels has them of ours
  compile     PyTorch's compiler alone, whose caches later calls find

A run's rate is the median over its steps after the first five, a table's the median over rounds. The share of the peak
is given in both conventions: attention counted whole, 6 N + 12 L C T FLOP per token (Chowdhery et al. 2022, appendix B),
and as a causal model needs it, with half of that attention; N are the parameters without positions. No run validates or
leaves a checkpoint.

Every run says which kernels it asks for. One that was served by others is REFUSED: its row says why and shows no rate.
Each run has a limit; one that does not end is HUNG, and the table goes on. Where a run fails as it was asked for, parts
ladder and pytorch try it without the graph, with our own attention, and deterministic, and say so in the row. All that
runs write is kept under --logs. Ends with 1 when any row is FAILED, CRASHED, HUNG or REFUSED.
"""
import argparse
import json
import os
import sys
import tempfile

import gpu_parts
from gpu_run import Failed, Runner, end_with_children, json_lines
from gpu_facts import describe, wanted_of, why_refused
from zipf_tokens import write_tokens

HERE = os.path.dirname(os.path.abspath(__file__))
MODELS = {  # layers, heads, channels, micro-batch
    "gpt2": (12, 12, 768, 64),
    "gpt2-medium": (24, 16, 1024, 32),
    "gpt2-xl": (48, 25, 1600, 16),
    "small": (4, 4, 256, 8),
}
CONTEXT, VOCAB, TOKENS = 1024, 50304, 1 << 21
SETTINGS = [f"{dtype}/{mode}" for dtype in ("autocast", "bf16") for mode in ("default", "max-autotune", "reduce-overhead")]
PEAK_BF16 = {"H200": 989e12, "H100": 989e12, "A100": 312e12}  # dense, as printed by the maker


class Bench:
    """The runs of one call, and whether one of them was bad."""

    def __init__(self, options):
        self.options, self.bad, self.tokens = options, False, {}
        self.runner = Runner(options.logs, options.seconds)

    def shape(self, model):
        """Layers, heads, channels, context, vocabulary, batch."""
        layers, heads, channels, batch = MODELS[model]
        small = model == "small"
        if self.options.batch and not small:
            batch = self.options.batch
        return layers, heads, channels, (128 if small else CONTEXT), (512 if small else VOCAB), batch

    def words(self, model, batch=None):
        names = ("--layers", "--heads", "--channels", "--context", "--vocab", "--batch")
        values = (*self.shape(model)[:5], batch or self.shape(model)[5])
        return [word for name, value in zip(names, values) for word in (name, str(value))]

    def data(self, model):
        """The token file of a model's vocabulary and the dataset made of it, on which all runs train."""
        vocab = self.shape(model)[4]
        folder = os.path.join(self.options.work, f"vocab{vocab}")
        tokens, data, done = (os.path.join(folder, name) for name in ("tokens.bin", "data", "done"))
        if not os.path.exists(done):
            os.makedirs(folder, exist_ok=True)
            write_tokens(folder, vocab, TOKENS if vocab == VOCAB else TOKENS // 16)
            self.runner.run("data", [self.options.binary, "data", tokens, "--tokenizer", folder, "--out", data], 60)
            open(done, "w").close()
        return tokens, data

    def train(self, name, model, words, steps, device="cuda", env=None, limit=None, batch=None):
        """The last record of a run, with its losses; raises Failed, also where other kernels served it."""
        words = self.words(model, batch) + words
        with tempfile.TemporaryDirectory(dir=self.options.work) as out:
            command = [self.options.binary, "train", "--device", device, "--data", self.data(model)[1], "--format", "json",
                       "--no-save", "--no-eval", "--optimizer", "adamw", "--weight-decay", "0.1", "--clip", "1",
                       "--steps", str(steps), "--out", out] + words
            records = json_lines(self.runner.run(name, command, limit or self.options.limit, env=env))
        summary = records[-1] if records and records[-1].get("event") == "summary" else None
        if not summary or not summary.get("tokens_per_s"):
            raise Failed("FAILED", "the run ended without its summary")
        summary["losses"] = gpu_parts.losses_of(records)
        if device == "cuda":
            gpu = summary.get("gpu")
            self.note(f"{name}: {describe(gpu)}")
            if reason := why_refused(gpu, wanted_of(words)):
                raise Failed("REFUSED", reason)
        return summary

    def pytorch(self, model, setting, steps, profile=False):
        names = ("layers", "heads", "channels", "context", "vocab", "batch")
        dtype, mode = setting.split("/")
        run = dict(zip(names, self.shape(model)), dtype=dtype, mode=mode, steps=steps, warmup=gpu_parts.WARMUP,
                   tokens=self.data(model)[0], profile=profile)
        command = [self.options.python, os.path.join(HERE, "gpu_torch.py"), json.dumps(run)]
        records = json_lines(self.runner.run(f"PyTorch {model} {setting}", command, self.options.compile_limit))
        if not records or "rate" not in records[-1]:
            raise Failed("FAILED", "PyTorch's run ended without its record")
        return records[-1]

    def failed(self, name, e):
        """A run that failed: said now, and by the exit status. Gives the table's cell."""
        self.bad = self.bad or e.bad()
        self.note(f"{name}: {e.cell()}")
        return e.cell()

    def note(self, line):
        print(line, file=sys.stderr, flush=True)

    def rounds(self):
        """0, 1, ...: --rounds of them, or as many as are likely to end in time, the first always."""
        longest = 0
        for made in range(self.options.rounds):
            begin = self.runner.left()
            if made > 0 and begin < longest:
                self.note(f"{made} of {self.options.rounds} rounds: no time was left for another")
                return
            yield made
            longest = max(longest, begin - self.runner.left())

    def peak_of_card(self):
        try:
            names = self.runner.run("card", ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], 20)
        except Failed:
            return None
        return next((peak for card, peak in PEAK_BF16.items() if card in names.split("\n")[0]), None)

    def shares(self, model, rate):
        """The share of the card's peak, attention counted whole and causal."""
        layers, _, channels, context, vocab, _ = self.shape(model)
        parameters = 12 * layers * channels * channels + 13 * layers * channels + 2 * channels + vocab * channels
        peak = self.peak_of_card()
        if not peak:
            return "- | -"
        attention = 12 * layers * channels * context
        return " | ".join(f"{100 * rate * (6 * parameters + a) / peak:.1f}%" for a in (attention, attention / 2))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=sorted(gpu_parts.PARTS))
    parser.add_argument("--binary", default=os.path.join(os.path.dirname(HERE), "build", "cuda", "bin", "tessera"))
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has torch")
    parser.add_argument("--models", default="gpt2,gpt2-medium,gpt2-xl", help="all of them for part pytorch, the first "
                        "for the others")
    parser.add_argument("--batch", type=int, default=0, help="sequences of a step, in place of each model's own")
    parser.add_argument("--attention", choices=("cudnn", "own"), default="cudnn", help="what runs ask for (default cudnn)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30, help="that are timed, after five that are not (default 30)")
    parser.add_argument("--ranks", type=int, default=2, help="of the part strategies")
    parser.add_argument("--only", help="some of its strategies, with ; between them, in the order in which they are to run")
    parser.add_argument("--untrained", action="store_true", help="its strategies are verified and not timed")
    parser.add_argument("--unverified", action="store_true", help="its strategies are timed and not verified")
    parser.add_argument("--jobs", type=int, default=1, help="plans that are verified side by side (default 1)")
    parser.add_argument("--settings", default=",".join(SETTINGS), help="of PyTorch's, such as bf16/default,autocast/default")
    parser.add_argument("--seconds", type=float, default=0, help="that the part has; what does not fit is NOT RUN")
    parser.add_argument("--limit", type=int, default=120, help="seconds of one run of Tessera (default 120)")
    parser.add_argument("--cpu-limit", type=int, default=900, help="seconds of the curve's run on the CPU (default 900)")
    parser.add_argument("--compile-limit", type=int, default=900, help="seconds of one run of PyTorch (default 900)")
    parser.add_argument("--logs", default="gpu-logs", help="a folder for what the runs write (default gpu-logs)")
    parser.add_argument("--work", help="a folder that keeps the tokens for the next call (default: a temporary one)")
    parser.add_argument("--small", action="store_true", help="tiny models, to see that everything works")
    options = parser.parse_args()
    options.binary, options.logs = os.path.abspath(options.binary), os.path.abspath(options.logs)
    if options.small:
        options.models = "small"
    for name, known in (("models", list(MODELS)), ("settings", SETTINGS)):
        for word in getattr(options, name).split(","):
            if word not in known:
                parser.error(f"--{name}: unknown {word}; expected some of {', '.join(known)}")
    end_with_children()
    with tempfile.TemporaryDirectory() as temporary:
        options.work = os.path.abspath(options.work or temporary)
        os.makedirs(options.work, exist_ok=True)
        bench = Bench(options)
        try:
            gpu_parts.PARTS[options.part](bench)
        except Failed as e:  # the data, without which nothing runs
            print(f"{options.part}: {e.cell()}")
            return 1
    return 1 if bench.bad else 0


if __name__ == "__main__":
    sys.exit(main())
