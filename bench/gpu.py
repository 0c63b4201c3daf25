#!/usr/bin/env python3
"""What one GPU does with Tessera, as Markdown tables: beside PyTorch, under every strategy, and against the CPU.

usage: bench/gpu.py pytorch|strategies|curve [--binary build/cuda/bin/tessera] [--models gpt2,gpt2-medium,gpt2-xl]
       [--rounds 5] [--seconds 0] [--steps 30] [--ranks 2] [--settings bf16/default,...] [--small]

  pytorch     training of each model in bf16 (fp32 master weights and moments), 1,024 tokens, vocabulary 50304, in
              alternating rounds with PyTorch on the same tokens (zipf_tokens.py): torch.compile, fused AdamW, scaled dot
              product attention, the best of {autocast, bf16 parameters} x {default, max-autotune, reduce-overhead},
              chosen by one run of each
  strategies  `tessera verify` of every strategy with its ranks on the one card, then the same batch trained by one rank
              and by each strategy in turns; of one rank also without the captured graph, with our own attention, and
              deterministic
  curve       the first 20 losses of gpt2 in fp32 on the GPU beside those on the CPU

Where time is lent in pieces: when --seconds have passed since the start no further round begins, the table says how many
there were, and each figure goes to standard error as it comes; --settings tries only those of PyTorch's that it names.

A run's rate is the median over its steps after the first five, a table's the median over rounds. The share of the peak
is given in both conventions: attention counted whole, 6 N + 12 L C T FLOP per token (Chowdhery et al. 2022, appendix B),
and as a causal model needs it, with half of that attention; N are the parameters without positions. No run validates or
leaves a checkpoint. --small makes all of it a matter of minutes on any GPU, to see that it works.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

from zipf_tokens import HEADER_BYTES, write_tokens

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
WARMUP = 5
MODELS = {  # layers, heads, channels, micro-batch
    "gpt2": (12, 12, 768, 64),
    "gpt2-medium": (24, 16, 1024, 32),
    "gpt2-xl": (48, 25, 1600, 16),
    "small": (4, 4, 128, 8),
}
CONTEXT, VOCAB, TOKENS = 1024, 50304, 1 << 22
SETTINGS = [f"{dtype}/{mode}" for dtype in ("autocast", "bf16") for mode in ("default", "max-autotune", "reduce-overhead")]
PEAK_BF16 = {"H200": 989e12, "H100": 989e12, "A100": 312e12}  # dense, as printed by the maker
ALONE = {  # one rank: what its step is compared in
    "one rank": [],
    "one rank, step not captured": ["--cuda-graph", "off"],
    "one rank, our own attention": ["--attention", "own"],
    "one rank, deterministic": ["--deterministic"],
}
STRATEGIES = {  # what is given beside the ranks; R stands for their number
    "DDP": [],
    "ZeRO-1": ["--zero", "1"],
    "ZeRO-2": ["--zero", "2"],
    "ZeRO-3": ["--zero", "3"],
    "ZeRO-2, state in the host's memory": ["--zero", "2", "--offload", "optimizer"],
    "DataParallel": ["--dp-mode", "dataparallel"],
    "parameter server": ["--dp-mode", "ps-sync"],
    "tensor": ["--tp", "R"],
    "tensor and sequence": ["--tp", "R", "--sp"],
    "context, ring": ["--cp", "R"],
    "context, Ulysses": ["--cp", "R", "--cp-mode", "ulysses"],
    "naive model parallel": ["--pp", "R", "--schedule", "naive", "--microbatches", "4"],
    "GPipe": ["--pp", "R", "--schedule", "gpipe", "--microbatches", "4"],
    "1F1B": ["--pp", "R", "--schedule", "1f1b", "--microbatches", "4"],
    "interleaved": ["--pp", "R", "--schedule", "interleaved", "--microbatches", "4"],
    "ZB-H1": ["--pp", "R", "--schedule", "zb-h1", "--microbatches", "4"],
    "ZB-H2": ["--pp", "R", "--schedule", "zb-h2", "--microbatches", "4"],
    "ZB-V": ["--pp", "R", "--schedule", "zb-v", "--microbatches", "4"],
}


def shape_of(model, options):
    layers, heads, channels, batch = MODELS[model]
    return layers, heads, channels, (128 if options.small else CONTEXT), (512 if options.small else VOCAB), batch


def model_options(model, options):
    layers, heads, channels, context, vocab, batch = shape_of(model, options)
    return ["--layers", str(layers), "--heads", str(heads), "--channels", str(channels), "--context", str(context),
            "--vocab", str(vocab), "--batch", str(batch)]


def output_of(command, cwd):
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"{' '.join(command)}: {last}")
    return done.stdout


def run_lines(command, cwd):
    return [json.loads(line) for line in output_of(command, cwd).splitlines()]


def make_data(options, cwd):
    """Writes the tokens that all runs of this call train on: as a file for PyTorch, as a dataset for Tessera."""
    options.tokens = write_tokens(cwd, 512 if options.small else VOCAB, TOKENS // 16 if options.small else TOKENS)
    options.data = os.path.join(cwd, "data")
    output_of([options.binary, "data", options.tokens, "--tokenizer", cwd, "--out", options.data], cwd)


def train(options, extra, cwd, steps, device="cuda"):
    with tempfile.TemporaryDirectory(dir=cwd) as out:
        return run_lines([options.binary, "train", "--device", device, "--data", options.data, "--format", "json",
                          "--quiet", "--no-save", "--no-eval", "--optimizer", "adamw", "--weight-decay", "0.1",
                          "--clip", "1", "--steps", str(steps), "--out", out] + extra, cwd)


def pytorch_child(model, setting, options):
    import numpy
    import torch
    sys.path.insert(0, os.path.join(ROOT, "tests", "compare"))
    from gpt_pytorch import GPT

    dtype, mode = setting.split("/")
    layers, heads, channels, context, vocab, batch = shape_of(model, options)
    torch.manual_seed(1)
    torch.set_float32_matmul_precision("high")
    net = GPT(layers, heads, channels, context, vocab, sdpa=True).cuda()
    if dtype == "bf16":
        net = net.bfloat16()
    groups = [{"params": [p for p in net.parameters() if p.dim() == 2], "weight_decay": 0.1},
              {"params": [p for p in net.parameters() if p.dim() != 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), fused=True)
    forward = torch.compile(net, mode=None if mode == "default" else mode)
    tokens = numpy.fromfile(options.tokens, dtype="<u2", offset=HEADER_BYTES).astype(numpy.int64)
    batches = torch.from_numpy(tokens[:len(tokens) // (batch * (context + 1)) * batch * (context + 1)])
    batches = batches.view(-1, batch, context + 1).pin_memory()
    times = []
    for step in range(WARMUP + options.steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        ids = batches[step % len(batches)].cuda(non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=dtype == "autocast"):
            loss = forward(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        loss.item()
        times.append(time.perf_counter() - start)
    print(json.dumps({"rate": batch * context / statistics.median(times[WARMUP:]),
                      "peak": torch.cuda.max_memory_allocated(), "version": torch.__version__}))


def pytorch(model, setting, options, steps):
    command = [options.python, os.path.abspath(__file__), "pytorch", "--child", setting, "--tokens", options.tokens,
               "--models", model, "--steps", str(steps)] + (["--small"] if options.small else [])
    return run_lines(command, ROOT)[-1]


def peak_of_card():
    names = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True)
    name = names.stdout.splitlines()[0]
    return name, next((peak for card, peak in PEAK_BF16.items() if card in name), None)


def shares(model, rate, options):
    """The share of the card's peak, attention counted whole and causal."""
    layers, _, channels, context, vocab, _ = shape_of(model, options)
    parameters = 12 * layers * channels * channels + 13 * layers * channels + 2 * channels + vocab * channels
    peak = peak_of_card()[1]
    if not peak:
        return "- | -"
    attention = 12 * layers * channels * context
    return " | ".join(f"{100 * rate * (6 * parameters + a) / peak:.1f}%" for a in (attention, attention / 2))


def rounds_of(options):
    """0, 1, ...: --rounds of them, or as many as begin within --seconds, the first always."""
    for made in range(options.rounds):
        if made > 0 and 0 < options.seconds < time.monotonic() - options.start:
            return
        yield made


def compare_pytorch(options, cwd):
    print("| model | Tessera tokens/s | range | MB | peak, whole | causal | PyTorch tokens/s | range | MB | its setting | "
          "ratio |\n|---|---|---|---|---|---|---|---|---|---|---|")
    for model in ["small"] if options.small else options.models.split(","):
        trial = {}
        for setting in options.settings.split(","):
            try:
                trial[setting] = pytorch(model, setting, options, 5)["rate"]
            except RuntimeError as e:
                print(f"{model}, {setting}: {e}", file=sys.stderr)
        if not trial:
            sys.exit(f"{model}: PyTorch ran with none of its settings")
        best = max(trial, key=trial.get)
        ours, theirs = [], []
        for _ in rounds_of(options):
            summary = train(options, model_options(model, options) + ["--ranks", "1", "--dtype", "bf16"], cwd,
                            WARMUP + options.steps)[-1]
            ours.append((summary["tokens_per_s"], summary["peak_bytes"][0]))
            run = pytorch(model, best, options, options.steps)
            theirs.append((run["rate"], run["peak"]))
            print(f"{model}, round {len(ours)}: {ours[-1][0]:,.0f} and PyTorch ({best}) {theirs[-1][0]:,.0f}", file=sys.stderr,
                  flush=True)
        cells = []
        for runs in (ours, theirs):
            rates = [rate for rate, _ in runs]
            cells.append((statistics.median(rates), f"{statistics.median(rates):,.0f} | {min(rates):,.0f}-"
                          f"{max(rates):,.0f} | {statistics.median(m for _, m in runs) / 1e6:,.0f}"))
        ratio = statistics.median(a / b for (a, _), (b, _) in zip(ours, theirs))
        print(f"| {model}, {len(ours)} rounds | {cells[0][1]} | {shares(model, cells[0][0], options)} | {cells[1][1]} | {best}, torch "
              f"{run['version']} | {ratio:.2f} |", flush=True)


def compare_strategies(options, cwd):
    ranks = str(options.ranks)
    given = {name: [ranks if w == "R" else w for w in words] for name, words in STRATEGIES.items()}
    verdicts = {}
    for name, words in given.items():
        verify = [options.binary, "verify", "--device", "cuda", "--ranks", ranks, "--format", "json", "--layers", "4",
                  "--heads", "4", "--channels", "64", "--context", "64", "--batch", "8"] + words
        try:
            result = run_lines(verify, cwd)[-1]
            verdicts[name] = "to the bit" if result["bitwise"] else f"gradients within {result['grad_max_rel']:.1e}"
        except RuntimeError as e:
            verdicts[name] = "FAILED"
            print(e, file=sys.stderr)
    model = "small" if options.small else "gpt2"
    common = model_options(model, options) + ["--dtype", "bf16"]
    rates = {name: [] for name in [*ALONE, *given]}
    for made in rounds_of(options):
        for name, values in rates.items():
            words = ["--ranks", "1"] + ALONE[name] if name in ALONE else ["--ranks", ranks] + given[name]
            try:
                values.append(train(options, common + words, cwd, WARMUP + options.steps)[-1])
                print(f"{name}, round {made + 1}: {values[-1]['tokens_per_s']:,.0f} tokens/s", file=sys.stderr, flush=True)
            except RuntimeError as e:  # the others are still worth their time
                verdicts[name] = "FAILED"
                print(e, file=sys.stderr)
    if not rates["one rank"]:
        return 1
    one = statistics.median(r["tokens_per_s"] for r in rates["one rank"])
    print(f"{model}, bf16, {ranks} thread ranks on one card, {made + 1} rounds of {options.steps} steps\n\n"
          "| strategy | verified | tokens/s | one rank's time x | peak MB, most |\n|---|---|---|---|---|")
    for name, runs in rates.items():
        if not runs:
            print(f"| {name} | FAILED | - | - | - |")
            continue
        now = statistics.median(r["tokens_per_s"] for r in runs)
        print(f"| {name} | {verdicts.get(name, '')} | {now:,.0f} | {one / now:.3f} | "
              f"{max(runs[-1]['peak_bytes']) / 1e6:,.0f} |")
    return 1 if "FAILED" in verdicts.values() else 0


def compare_curve(options, cwd):
    """Both curves have rounding of their own, which grows as a run goes on; the bound is of the whole 20 steps."""
    model, bound = ("small" if options.small else "gpt2"), 1e-3
    extra = model_options(model, options)[:-1] + ["2", "--dtype", "fp32", "--ranks", "1"]
    losses = {device: [e["loss"] for e in train(options, extra, cwd, 20, device) if e["event"] == "step"]
              for device in ("cpu", "cuda")}
    apart = [abs(a - b) / abs(a) for a, b in zip(losses["cpu"], losses["cuda"])]
    if len(apart) != 20:
        sys.exit(f"expected 20 losses of each device, found {len(losses['cpu'])} and {len(losses['cuda'])}")
    print(f"{model} in fp32, 20 steps: losses of the GPU are at most {max(apart):.1e} (relative) from the CPU's, the first "
          f"{apart[0]:.1e}; expected at most {bound:.0e}")
    return 0 if max(apart) <= bound else 1


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("pytorch", "strategies", "curve"))
    parser.add_argument("--binary", default=os.path.join(ROOT, "build", "cuda", "bin", "tessera"))
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has torch")
    parser.add_argument("--models", default="gpt2,gpt2-medium,gpt2-xl")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0)
    parser.add_argument("--settings", default=",".join(SETTINGS))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--tokens", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.start, options.binary = time.monotonic(), os.path.abspath(options.binary)
    unknown = [m for m in options.models.split(",") if m not in MODELS]
    if unknown:
        parser.error(f"--models: unknown {unknown[0]}; expected some of {', '.join(MODELS)}")
    unknown = [s for s in options.settings.split(",") if s not in SETTINGS]
    if unknown:
        parser.error(f"--settings: unknown {unknown[0]}; expected some of {', '.join(SETTINGS)}")
    if options.child:
        pytorch_child(options.models, options.child, options)
        return 0
    parts = {"pytorch": compare_pytorch, "strategies": compare_strategies, "curve": compare_curve}
    with tempfile.TemporaryDirectory() as cwd:
        try:
            make_data(options, cwd)
            return parts[options.part](options, cwd) or 0
        except RuntimeError as e:
            sys.exit(str(e))


if __name__ == "__main__":
    sys.exit(main())
