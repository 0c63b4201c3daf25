#!/usr/bin/env python3
"""What one GPU does with Tessera, as Markdown tables: beside PyTorch, under every strategy, and against the CPU.

usage: bench/gpu.py PART [OPTIONS]; --help lists them

  ladder      first contact: tiny runs that each ask for one thing more (fp32, bf16, cuDNN, the captured graph), then the
              first number of gpt2
  ways        one rank: {cuDNN, own attention} x {graph on, off} x {free, deterministic}
  pytorch     training of each model in bf16 (fp32 master weights and moments), vocabulary 50304, in alternating rounds with
              PyTorch on the same tokens (zipf_tokens.py): torch.compile, fused AdamW, scaled dot product attention, in each
              of --settings. PyTorch compiles all models side by side; with --go FILE the first round waits for that file.
              Last, the kernels of a step of PyTorch's first model, by its profiler
  strategies  `tessera verify` of every strategy with its ranks on the one card, then the same batch trained by one rank
              and by each strategy in turns
  curve       the first losses (up to 20) of gpt2 in fp32 on the GPU beside those on the CPU
  kernels     the kernels of one queued step, by ncu, or where it may not be used the ops by themselves
  strategy_kernels  the same of each strategy (--only), of all ranks together
  ops         those of which a step is made, by themselves in bf16, beside what the card can do at most
  shapes      one rank of each model, with its memory as `tessera plan` predicts it, and the error of a card that is full
  bases       a run directory of each model in --work, of one step, which part tuning needs
  tuning      of each of these: adapters on its weights as they are and in 4 bits, and tokens/s of generation at batch 1

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
import fcntl
import json
import os
import sys
import tempfile

import gpu_parts
from gpu_run import Failed, Runner, Served, end_with_children, json_lines
from gpu_facts import describe, wanted_of, why_refused
from zipf_tokens import write_tokens

HERE = os.path.dirname(os.path.abspath(__file__))
CONTEXT, VOCAB, TOKENS = 1024, 50304, 1 << 21
MODEL_KEYS = ("layers", "heads", "channels", "batch", "context", "vocab", "kv_heads", "ffn", "experts")


def sizes(*given):
    return dict(zip(MODEL_KEYS, given))


MODELS = {  # those with heads of keys are Llamas; two of the experts, each half as wide, are for a token
    "gpt2": sizes(12, 12, 768, 32, CONTEXT, VOCAB),
    "gpt2-medium": sizes(24, 16, 1024, 16, CONTEXT, VOCAB),
    "gpt2-xl": sizes(48, 25, 1600, 8, CONTEXT, VOCAB),
    "gpt2-8k": sizes(12, 12, 768, 4, 8192, VOCAB),
    "gpt2-32k": sizes(12, 12, 768, 1, 32768, VOCAB),
    "llama": sizes(12, 12, 768, 32, CONTEXT, VOCAB, 4, 2048),
    "llama-experts": sizes(12, 12, 768, 32, CONTEXT, VOCAB, 4, 1024, 8),
    "llama-1b": sizes(16, 32, 2048, 4, CONTEXT, VOCAB, 8, 8192),
    "small": sizes(4, 4, 256, 8, 128, 512),
}
SETTINGS = [f"{dtype}/{mode}" for dtype in ("bf16", "autocast") for mode in ("default", "max-autotune", "reduce-overhead")]
PEAK_BF16 = {"H200": 989e12, "H100": 989e12, "A100": 312e12}  # dense, as printed by the maker


class Bench:
    """The runs of one call, and whether one of them was bad."""

    def __init__(self, options):
        self.options, self.bad, self.tokens = options, False, {}
        self.runner = Runner(options.logs, options.seconds)

    def words(self, model, batch=None):
        given = MODELS[model] | ({"batch": batch} if batch else {})
        words = [word for key, value in given.items() for word in ("--" + key.replace("_", "-"), str(value))]
        return words + (["--family", "llama", "--untied"] if "kv_heads" in given else [])

    def batch(self, model):
        return MODELS[model]["batch"]

    def data(self, model):
        """The token file of a model's vocabulary and the dataset made of it, on which all runs train."""
        vocab = MODELS[model]["vocab"]
        folder = os.path.join(self.options.work, f"vocab{vocab}")
        tokens, data, done = (os.path.join(folder, name) for name in ("tokens.bin", "data", "done"))
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, "lock"), "w") as lock:  # other parts may want it at the same time
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not os.path.exists(done):
                write_tokens(folder, vocab, TOKENS if vocab == VOCAB else TOKENS // 16)
                self.runner.run("data", [self.options.binary, "data", tokens, "--tokenizer", folder, "--out", data], 60)
                open(done, "w").close()
        return tokens, data

    def train(self, name, model, words, steps, device="cuda", env=None, limit=None, batch=None, init=None):
        """The last record of a run, with its losses; raises Failed, also where other kernels served it."""
        words = (["--init", init, "--batch", str(MODELS[model]["batch"])] if init else self.words(model, batch)) + words
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

    def pytorch(self, model, setting):
        """A PyTorch that has compiled the model and waits to be asked."""
        dtype, mode = setting.split("/")
        run = MODELS[model] | dict(dtype=dtype, mode=mode, warmup=gpu_parts.WARMUP, tokens=self.data(model)[0])
        command = [self.options.python, os.path.join(HERE, "gpu_torch.py"), json.dumps(run)]
        return Served(self.runner, f"PyTorch {model} {setting}", command, self.options.compile_limit)

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
        m = MODELS[model]
        channels, head = m["channels"], m["channels"] // m["heads"]
        layer = 12 * channels * channels + 13 * channels
        if "kv_heads" in m:
            layer = 2 * channels * (channels + m["kv_heads"] * head) + 3 * channels * m["ffn"] * (2 if "experts" in m else 1)
        peak = self.peak_of_card()
        if not peak:
            return "- | -"
        parameters = m["layers"] * layer + m["vocab"] * channels
        attention = 12 * m["layers"] * channels * m["context"]
        return " | ".join(f"{100 * rate * (6 * parameters + a) / peak:.1f}%" for a in (attention, attention / 2))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=sorted(gpu_parts.PARTS))
    parser.add_argument("--binary", default=os.path.join(os.path.dirname(HERE), "build", "cuda", "bin", "tessera"))
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has torch")
    parser.add_argument("--models", default="gpt2", help="several for parts pytorch, shapes, bases and tuning; the others take "
                        f"the first (default gpt2); gpt2=bf16/default has a setting of its own: {', '.join(MODELS)}")
    parser.add_argument("--attention", choices=("cudnn", "own"), default="cudnn", help="what runs ask for (default cudnn)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30, help="that are timed, after five that are not (default 30)")
    parser.add_argument("--ranks", type=int, default=2, help="of the part strategies")
    parser.add_argument("--only", help="some of its strategies, with ; between them, in the order in which they are to run")
    parser.add_argument("--untrained", action="store_true", help="its strategies are verified and not timed")
    parser.add_argument("--unverified", action="store_true", help="its strategies are timed and not verified")
    parser.add_argument("--jobs", type=int, default=1, help="plans that are verified side by side (default 1)")
    parser.add_argument("--settings", default="bf16/default,autocast/default", help="of PyTorch's: " + ", ".join(SETTINGS))
    parser.add_argument("--go", help="a file: PyTorch compiles at once, and the first round of part pytorch waits for it")
    parser.add_argument("--seconds", type=float, default=0, help="that the part has; what does not fit is NOT RUN")
    parser.add_argument("--limit", type=int, default=120, help="seconds of one run of Tessera (default 120)")
    parser.add_argument("--cpu-limit", type=int, default=900, help="seconds of the curve's run on the CPU (default 900)")
    parser.add_argument("--compile-limit", type=int, default=900, help="seconds in which PyTorch compiles (default 900)")
    parser.add_argument("--logs", default="gpu-logs", help="a folder for what the runs write (default gpu-logs)")
    parser.add_argument("--work", help="a folder that keeps the tokens for the next call (default: a temporary one)")
    parser.add_argument("--small", action="store_true", help="tiny models, to see that everything works")
    options = parser.parse_args()
    options.binary, options.logs = os.path.abspath(options.binary), os.path.abspath(options.logs)
    if options.small:
        options.models = "small"
    options.settings_of = dict(word.partition("=")[::2] for word in options.models.split(","))
    options.models = ",".join(options.settings_of)
    options.settings_of = {model: [own] if own else options.settings.split(",") for model, own in options.settings_of.items()}
    for name, known, words in (("models", list(MODELS), options.settings_of),
                               ("settings", SETTINGS, sum(options.settings_of.values(), []))):
        for word in words:
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
