"""Training parts of gpu.py, each a function of a Bench that prints a Markdown table, and kernel breakdowns of their steps."""
import csv
import glob
import json
import os
import re
import shutil
import statistics
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor

from gpu_run import Failed, Served, describe, json_lines, model_args, read_text, requested_kernels, why_refused, write_tokens

HERE = os.path.dirname(os.path.abspath(__file__))
CONTEXT, VOCAB, TOKENS, WARMUP = 1024, 50304, 1 << 21, 5
MODEL_KEYS = ("layers", "heads", "channels", "batch", "context", "vocab", "kv_heads", "ffn", "experts")
MODELS = {name: dict(zip(MODEL_KEYS, sizes)) for name, sizes in {
    "gpt2": (12, 12, 768, 32, CONTEXT, VOCAB),
    "gpt2-medium": (24, 16, 1024, 16, CONTEXT, VOCAB),
    "gpt2-xl": (48, 25, 1600, 8, CONTEXT, VOCAB),
    "gpt2-8k": (12, 12, 768, 4, 8192, VOCAB),
    "gpt2-32k": (12, 12, 768, 1, 32768, VOCAB),
    # Models with kv_heads are Llamas; llama-experts: top-2 experts of half the width.
    "llama": (12, 12, 768, 32, CONTEXT, VOCAB, 4, 2048),
    "llama-experts": (12, 12, 768, 32, CONTEXT, VOCAB, 4, 1024, 8),
    "llama-8k": (12, 12, 768, 4, 8192, VOCAB, 4, 2048),
    "llama-1b": (16, 32, 2048, 4, CONTEXT, VOCAB, 8, 8192),
    "small": (4, 4, 256, 8, 128, 512),
}.items()}
MODELS["llama-8k-window"] = MODELS["llama-8k"] | {"window": 1024}  # Tessera's own attention; not requested from cuDNN
PEAK_BF16 = {"H200": 989e12, "H100": 989e12, "A100": 312e12}  # dense, from data sheets
LIKE = {"own": "own attention", "cudnn": "cuDNN"}
ONE_RANK = ["--ranks", "1", "--dtype", "bf16"]
ADAPTERS = ONE_RANK + ["--lora-rank", "16", "--lora-targets", "all"]
STRATEGIES = {  # options in addition to --ranks; R: number of ranks
    "DDP": "",
    **{f"ZeRO-{stage}": f"--zero {stage}" for stage in (1, 2, 3)},
    "ZeRO-2, state in the host's memory": "--zero 2 --offload optimizer",
    "DataParallel": "--dp-mode dataparallel",
    "parameter server": "--dp-mode ps-sync",
    "tensor": "--tp R",
    "tensor and sequence": "--tp R --sp",
    "context, ring": "--cp R",
    "context, Ulysses": "--cp R --cp-mode ulysses",
    "one of 4 experts": "--experts 4 --experts-per-token 1 --ep R",  # the work of one rank plus the router
    "naive model parallel": "--pp R --schedule naive --microbatches 4",
    **{name: f"--pp R --schedule {name.lower()} --microbatches 4" for name in (
        "GPipe", "1F1B", "interleaved", "ZB-H1", "ZB-H2", "ZB-V")},
}
PRODUCTS = {  # combinations with fixed ranks; verified but not timed
    "ZeRO-3 in two groups": "--ranks 4 --zero 3 --shard-ranks 2",
    "ZeRO-1, tensor and pipeline": "--ranks 8 --zero 1 --tp 2 --sp --pp 2 --schedule 1f1b --microbatches 4",
    "DDP, ring and pipeline": "--ranks 8 --cp 2 --pp 2 --schedule gpipe --microbatches 2",
    "a window, by a ring": "--ranks 2 --family llama --window 24 --cp 2",
    "a window, by Ulysses": "--ranks 2 --family llama --window 24 --cp 2 --cp-mode ulysses",
    "exact GELU, tensor and sequence": "--ranks 2 --gelu erf --tp 2 --sp",
    "a Llama with YaRN and biases, tensor": "--ranks 2 --family llama --kv-heads 2 --rope-scaling yarn --rope-factor 4 "
                                            "--rope-original-context 16 --qkv-bias --proj-bias --mlp-bias --tp 2",
}


class Bench:
    """A running part: options, output, programs, and whether one failed."""

    making_data = threading.Lock()

    def __init__(self, options, runner, said):
        self.options, self.runner, self.said, self.notes = options, runner, said, []
        self.models = options.models.split(",")
        self.bad, self.trained, self.go = False, False, threading.Event()

    def say(self, *lines):
        print(*lines, sep="\n", file=self.said, flush=True)

    def note(self, line):
        self.notes.append(line)
        print(line, file=sys.stderr, flush=True)

    def failed(self, name, e):
        """Reports a failed run and sets the exit status. Returns the table cell."""
        self.bad = self.bad or e.bad()
        self.note(f"{name}: {e.cell()}")
        return e.cell()

    def program(self, name, args, limit=None, **how):
        return self.runner.run(name, [self.options.binary, *args], limit or self.options.limit, **how)

    def args(self, model, batch=None):
        return model_args(MODELS[model] | ({"batch": batch} if batch else {}))

    def named(self, model):
        return f"{model}, batch {MODELS[model]['batch']}"

    def data(self, model):
        """Token file of a vocabulary and the dataset built from it, used by all runs."""
        vocab = MODELS[model]["vocab"]
        directory = os.path.join(self.options.work, f"vocab{vocab}")
        tokens, data = (os.path.join(directory, name) for name in ("tokens.bin", "data"))
        with Bench.making_data:  # other parts may need it concurrently
            if not os.path.exists(directory):
                os.makedirs(directory + ".part", exist_ok=True)
                write_tokens(directory + ".part", vocab, TOKENS if vocab == VOCAB else TOKENS // 16)
                part = [os.path.join(directory + ".part", os.path.basename(path)) for path in (tokens, data)]
                self.program("data", ["data", part[0], "--tokenizer", directory + ".part", "--out", part[1]], 60)
                os.rename(directory + ".part", directory)
        return tokens, data

    def training(self, model, device="cuda"):
        return ["train", "--device", device, "--data", self.data(model)[1], "--no-eval"]

    def train(self, name, model, args, steps, device="cuda", env=None, limit=None, batch=None, init=None):
        """The last record of a run, with its losses; raises Failed, also if it used other kernels."""
        args = (["--init", init, "--batch", str(MODELS[model]["batch"])] if init else self.args(model, batch)) + args
        with tempfile.TemporaryDirectory(dir=self.options.work) as out:
            command = self.training(model, device) + ["--format", "json", "--no-save", "--optimizer", "adamw", "--weight-decay",
                                                      "0.1", "--clip", "1", "--steps", str(steps), "--out", out]
            records = json_lines(self.program(name, command + args, limit, env=env))
        summary = records[-1] if records and records[-1].get("event") == "summary" else None
        if not summary or not summary.get("tokens_per_s"):
            raise Failed("FAILED", "the run ended without its summary")
        summary["losses"] = collect_losses(records)
        if device == "cuda":
            self.note(f"{name}: {summary['tokens_per_s']:,.0f} tokens/s; {describe(summary.get('gpu'))}")
            if reason := why_refused(summary.get("gpu"), requested_kernels(args)):
                raise Failed("REFUSED", reason)
        return summary

    def rounds(self):
        """0, 1, ...: up to --rounds, limited to those that fit into the remaining time, at least one."""
        longest = 0
        for made in range(self.options.rounds):
            begin = self.runner.left()
            if made > 0 and begin < longest:
                self.note(f"{made} of {self.options.rounds} rounds: no time left")
                return
            yield made
            longest = max(longest, begin - self.runner.left())

    def shares(self, model, rate):
        """Utilization (fraction of the GPU's peak) for full and causal attention."""
        try:
            card = self.runner.run("card", ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], 20).split("\n")[0]
        except Failed:
            card = ""
        peak = next((peak for name, peak in PEAK_BF16.items() if name in card), None)
        m = MODELS.get(model, {"window": None})
        if not peak or "window" in m:  # the conventions do not cover windows
            return "- | -"
        channels, head = m["channels"], m["channels"] // m["heads"]
        layer = 12 * channels * channels + 13 * channels
        if "kv_heads" in m:
            layer = 2 * channels * (channels + m["kv_heads"] * head) + 3 * channels * m["ffn"] * (2 if "experts" in m else 1)
        parameters = m["layers"] * layer + m["vocab"] * channels
        attention = 12 * m["layers"] * channels * m["context"]
        return " | ".join(f"{100 * rate * (6 * parameters + a) / peak:.1f}%" for a in (attention, attention / 2))


def collect_losses(records):
    return [r["loss"] for r in records if r.get("event") == "step"]


def asking(attention, graph, deterministic=False):
    return ["--attention", attention, "--cuda-graph", graph] + (["--deterministic"] if deterministic else [])


class Row:
    """A table row. `tries`: the requested mode and fallbacks, each a function that returns the last record of a run; `model`:
    for the utilization."""

    def __init__(self, name, model, tries):
        self.name, self.model, self.tries = name, model, list(tries.items())
        self.runs, self.failures = [], {}

    def label(self):
        return ", ".join(filter(None, (self.name, self.tries[0][0])))

    def rate(self):
        return statistics.median(run["tokens_per_s"] for run in self.runs)

    def round(self, bench):
        """One more run. A failed row retains its previous runs, except those with other kernels, and is not rerun."""
        while self.tries and not (self.runs and self.failures.get(self.label())):
            try:
                self.runs.append(self.tries[0][1](f"{self.label()}, round {len(self.runs) + 1}"))
                bench.trained = True
                return
            except Failed as e:
                if self.runs and not e.bad():
                    return
                if e.word == "REFUSED":
                    self.runs = []
                self.failures[self.label()] = len(self.runs), bench.failed(self.label(), e)
                if self.runs or not e.bad():
                    return
                del self.tries[0]


def timed(bench, rows, columns=()):
    """Runs rows alternately and prints a table. `columns`: additional (heading, function of a row)."""
    for _ in bench.rounds():
        for row in rows:
            row.round(bench)
    for row in rows:
        format_row(bench, row, columns)


def headings(bench, columns=()):
    names = ["run", "rounds", "tokens/s", "range", "utilization, full attention", "causal", "peak MB", *(name for name, _ in columns), "kernels"]
    bench.say(f"| {' | '.join(names)} |", "|" + "---|" * len(names))


def format_row(bench, row, columns):
    for label, (made, cell) in row.failures.items():
        bench.say(f"| {label} | {made} | {cell} |" + " - |" * (5 + len(columns)))
    if row.runs:
        rates, last = [run["tokens_per_s"] for run in row.runs], row.runs[-1]
        peaks = [max(run["peak_bytes"]) / 1e6 for run in row.runs if run.get("peak_bytes")]
        cells = [row.label(), len(rates), f"{row.rate():,.0f}", f"{min(rates):,.0f}-{max(rates):,.0f}", bench.shares(row.model, row.rate()),
                 f"{statistics.median(peaks):,.0f}" if peaks else "-", *(column(row) for _, column in columns),
                 last.get("said") or describe(last.get("gpu"))]
        bench.say(f"| {' | '.join(map(str, cells))} |")
    elif not row.failures:
        bench.say(f"| {row.label()} | 0 | NOT RUN |" + " - |" * (5 + len(columns)))


def one_run(bench, model, args, init=None):
    """A run for `tries` of a row."""
    return lambda label: bench.train(label, model, args, WARMUP + bench.options.steps, init=init)


def trained_by(bench, name, model, args):
    """The row of a model with one mode."""
    return Row(name, model, {"": one_run(bench, model, args)})


def trained(bench, model, name=None):
    """The row of a model on one rank with the requested mode, or the first fallback that works."""
    attention = bench.options.attention
    ways = {f"{LIKE[attention]}, graph": asking(attention, "on"), "own attention, graph": asking("own", "on"),
            f"{LIKE[attention]}, no graph": asking(attention, "off"), "own attention, no graph": asking("own", "off"),
            "own attention, no graph, deterministic": asking("own", "off", True)}
    captured, windows = "experts" not in MODELS[model], "window" in MODELS[model]  # steps with experts cannot be captured
    return Row(name or bench.named(model), model, {way: one_run(bench, model, ONE_RANK + args) for way, args in ways.items()
                                                   if (captured or "on" not in args) and not (windows and "cudnn" in args)})


def ladder(bench):
    """Tiny runs with one more feature each (fp32, bf16, cuDNN, captured graph), then the first throughput of a model."""
    columns = [("loss, first and last", lambda row: f"{row.runs[0]['losses'][0]:.4f}, {row.runs[0]['losses'][-1]:.4f}")]
    attention, expected = bench.options.attention, []
    rungs = {"fp32, own attention, no graph, blocking launches": ("fp32", "own", "off", {"CUDA_LAUNCH_BLOCKING": "1"}),
             "bf16, own attention, no graph": ("bf16", "own", "off", {}),
             f"bf16, {LIKE[attention]}, no graph": ("bf16", attention, "off", {}),
             f"bf16, {LIKE[attention]}, graph": ("bf16", attention, "on", {})}

    def rung(dtype, attention, graph, env):
        def run(label):
            args = ["--ranks", "1", "--dtype", dtype] + asking(attention, graph)
            found = bench.train(label, "small", args, 2 * WARMUP, env=env, limit=min(bench.options.limit, 40))
            losses = found["losses"][0], found["losses"][-1]
            expected.append(losses)
            if not all(abs(a - b) <= 0.02 * b for a, b in zip(losses, expected[0])):
                raise Failed("FAILED", "losses {:.4f} to {:.4f}; fp32 had {:.4f} to {:.4f}".format(*losses, *expected[0]))
            return found
        return run

    headings(bench, columns)
    for row in [Row("tiny", "small", {name: rung(*asked)}) for name, asked in rungs.items()] + [trained(bench, bench.models[0])]:
        row.round(bench)
        format_row(bench, row, columns)


def ways(bench):
    """One rank: {cuDNN, own attention} x {graph on, off} x {free, deterministic}."""
    model, rows = bench.models[0], []
    for attention in dict.fromkeys((bench.options.attention, "own")):
        for graph in ("on", "off"):
            for how in ("", ", deterministic"):
                rows.append(trained_by(bench, f"{LIKE[attention]}, graph {graph}{how}", model, ONE_RANK + asking(attention, graph, how != "")))
    bench.say(f"{bench.named(model)}, bf16, one rank", "")
    headings(bench)
    timed(bench, rows)


def pytorch(bench):
    """Training in rounds alternating with PyTorch on the same tokens. PyTorch compiles all models in parallel before its
    first round. Finally, the kernels of a step of PyTorch's first model, from its profiler."""
    o, settings = bench.options, dict(word.partition("=")[::2] for word in bench.models)
    servers = {(model, setting): None for model, own in settings.items() for setting in (own or o.settings).split(",")}

    def compile_all(model):  # sequentially: a step needs memory, which a waiting PyTorch releases
        for setting in (setting for of, setting in servers if of == model):
            dtype, mode = setting.split("/")
            asked = MODELS[model] | dict(dtype=dtype, mode=mode, warmup=WARMUP, tokens=bench.data(model)[0])
            try:
                servers[model, setting] = Served(bench.runner, f"PyTorch {model} {setting}", [
                    o.python, os.path.join(HERE, "gpu_torch.py"), json.dumps(asked)], o.compile_limit)
                bench.note(f"{model}, PyTorch {setting}: compiled")
            except Failed as e:
                servers[model, setting] = e

    with ThreadPoolExecutor(len(settings)) as pool:
        list(pool.map(compile_all, settings))
    bench.go.wait(max(bench.runner.left(), 0))
    for model in settings:
        ours = trained(bench, model, f"{bench.named(model)}, Tessera")
        theirs = [Row(f"{bench.named(model)}, PyTorch, {setting}", model, {"": asker(bench, served)})
                  for (of, setting), served in servers.items() if of == model]

        def ratio(row):
            pairs = [a["tokens_per_s"] / b["tokens_per_s"] for a, b in zip(ours.runs, row.runs)]
            return f"{statistics.median(pairs):.2f}" if pairs and row is not ours else "-"

        columns = [("Tessera / row", ratio)]
        headings(bench, columns)
        timed(bench, [ours, *theirs], columns)
        bench.say("")
    working = [(name, served) for name, served in servers.items() if isinstance(served, Served)]
    for (model, setting), served in working[:1]:
        try:
            launches = answer(bench, served, {"profile": True})["kernels"]
            bench.say(f"{bench.named(model)}, one step of PyTorch ({setting}), from its profiler", "", *table([tuple(row) for row in launches]))
        except Failed as e:
            bench.say(f"{model}, one step of PyTorch: {bench.failed('profile', e)}")
    for _, served in working:
        served.end()


def answer(bench, served, question):
    if isinstance(served, Failed):
        raise served
    return served.ask(question, bench.options.limit)


def asker(bench, served):
    def run(_):
        found = answer(bench, served, {"steps": bench.options.steps})
        return {"tokens_per_s": found["rate"], "peak_bytes": [found["peak"]], "said": f"torch {served.record.get('version')}"}
    return run


def strategies_given(bench):
    """The options of each selected strategy."""
    names = bench.options.only.split(";") if bench.options.only else list(STRATEGIES)
    for name in names:
        if name not in STRATEGIES:
            raise Failed("FAILED", f"--only: unknown strategy '{name}'; expected some of {'; '.join(STRATEGIES)}")
    ranks = str(bench.options.ranks)
    return {name: ["--ranks", ranks] + [ranks if w == "R" else w for w in STRATEGIES[name].split()] for name in names}


def verify(bench):
    """`tessera verify` of every strategy with all ranks on one GPU, of combinations, and of features of other models."""
    def verdict(name):
        try:
            result = json_lines(bench.program(f"verify {name}", [
                "verify", "--device", "cuda", "--format", "json", "--layers", "4", "--heads", "4", "--channels", "64",
                "--context", "64", "--batch", "8", *asked[name]]))[-1]
            return "bitwise identical" if result["bitwise"] else f"gradients within {result['grad_max_rel']:.1e}"
        except Failed as e:
            return bench.failed(f"verify, {name}", e)

    asked = strategies_given(bench)
    if not bench.options.only:
        asked |= {name: args.split() for name, args in PRODUCTS.items()}
    with ThreadPoolExecutor(bench.options.jobs) as pool:
        verdicts = list(pool.map(verdict, asked))
    bench.say("| strategy | verified |", "|---|---|", *(f"| {name} | {args} |" for name, args in zip(asked, verdicts)))


def strategies(bench):
    """The same batch trained by one rank and by each strategy, alternately."""
    model, attention = bench.models[0], bench.options.attention
    one = trained_by(bench, "one rank", model, ONE_RANK + asking(attention, "on"))
    rows = [one]
    for name, args in strategies_given(bench).items():  # kernels of ring attention are reported, not requested
        asked = [] if name == "context, ring" else ["--attention", attention]
        rows.append(trained_by(bench, name, model, ["--dtype", "bf16"] + asked + args))
    columns = [("relative to one rank's time", lambda row: f"{one.rate() / row.rate():.3f}" if one.runs else "-")]
    bench.say(f"{bench.named(model)}, bf16, {bench.options.ranks} thread ranks on one GPU, {bench.options.steps} steps", "")
    headings(bench, columns)
    timed(bench, rows, columns)


def shapes(bench):
    """One rank of each model, with memory predicted by `tessera plan`, and the error of a full GPU."""
    columns = [("predicted MB and tokens/s", lambda row: predicted(bench, row.model))]
    headings(bench, columns)
    for model in bench.models:
        timed(bench, [trained(bench, model)], columns)
    model = bench.models[0]
    batch, failure = 64 * MODELS[model]["batch"], Failed("FAILED", "the run succeeded")
    try:
        bench.train("a full GPU", model, ONE_RANK, 2, batch=batch)
    except Failed as e:
        failure = e
    said = f"as expected, {failure}" if str(failure).startswith("status 3:") else (
        f"{bench.failed('a full GPU', failure)}; expected status 3")
    bench.say("", f"batch {batch}, which exceeds the memory of any GPU: {said}")


def predicted(bench, model):
    """Peak MB and tokens/s of one rank, predicted for one H100."""
    try:
        found = json_lines(bench.program(f"plan {model}", [
            "plan", "--hardware", "h100", "--ranks", "1", "--dtype", "bf16", "--top", "1", "--recompute", "none", "--microbatches",
            "1", "--format", "json", *bench.args(model)], 60))[0]
        return f"{found['memory']['peak'] / 1e6:,.0f} and {found['tokens_per_s']:,.0f}"
    except Failed as e:
        return e.cell()


def base_directory(bench, model):
    return os.path.join(bench.options.work, f"base-{model}")


def bases(bench):
    """Creates a run directory of each model (one step) for part tuning."""
    for model in bench.models:
        args = ["--quiet", *ONE_RANK, "--optimizer", "sgd", "--lr", "0", "--steps", "1", "--out", base_directory(bench, model)]
        try:
            bench.program(f"base {model}", bench.training(model) + args + bench.args(model, 1))
            bench.say(f"{model}: created")
        except Failed as e:
            bench.say(f"{model}: {bench.failed(f'base {model}', e)}")


def tuning(bench):
    """Adapters on unquantized and 4-bit weights, and tokens/s of generation at batch 1."""
    def generation(model):  # the last line of standard error contains the throughput
        def run(label):
            text = bench.runner.run(label, ["sh", "-c", 'exec "$0" "$@" 2>&1', bench.options.binary, "generate", base_directory(bench, model),
                                            "--device", "cuda", "--dtype", "bf16", "--prompt", "tokens", "--tokens", "256",
                                            "--temperature", "0", "--ignore-end"], bench.options.limit)
            found = re.search(r"tokens from .*, ([0-9.]+)([KMB]?) tokens/s; time to first token ([0-9.]+) s", text)
            if not found:
                raise Failed("FAILED", "no throughput was printed")
            return {"tokens_per_s": float(found[1]) * 1000 ** " KMB".index(found[2] or " "), "said": f"time to first token {found[3]} s"}
        return run

    headings(bench)
    for model in bench.models:
        for name, args in (("adapters of rank 16", []), ("adapters of rank 16 on NF4", ["--quantize", "nf4"])):
            timed(bench, [Row(f"{bench.named(model)}, {name}", None, {
                "": one_run(bench, model, ADAPTERS + args, base_directory(bench, model))})])
        timed(bench, [Row(f"{model}, batch 1, generation of 256", None, {"": generation(model)})])


def curve(bench):
    """The first fp32 losses of a model on the GPU compared with the CPU. Rounding differences grow during a run; the bound
    holds for 20 steps."""
    model, bound, steps, enough = bench.models[0], 1e-3, 20, 5
    args, losses = ["--dtype", "fp32", "--ranks", "1"], {}
    for device, limit in (("cuda", bench.options.limit), ("cpu", bench.options.cpu_limit)):
        try:
            losses[device] = bench.train(f"curve, {device}", model, args, steps, device, limit=limit, batch=1)["losses"]
        except Failed as e:
            losses[device] = collect_losses(json_lines(e.out))
            if device == "cuda" or len(losses[device]) < enough:  # the first losses of a slow CPU are sufficient
                bench.say(f"{model} on {device}: {bench.failed(f'curve, {device}', e)}")
                return
    apart = [abs(a - b) / abs(a) for a, b in zip(losses["cpu"], losses["cuda"])]
    good = len(losses["cuda"]) == steps and max(apart) <= bound
    bench.bad = bench.bad or not good
    bench.say(f"{model} in fp32, {len(apart)} steps of {steps}: {'as expected' if good else 'FAILED'}; relative difference of GPU and CPU losses: "
              f"at most {max(apart):.1e}, in the first step {apart[0]:.1e}; expected at most {bound:.0e}")


MAX_ROWS, MIN_STEP = 30, 30  # kernels in the table; minimum launches of a step


def parse_launches(text):
    """(kernel, nanoseconds) of each launch in ncu's CSV, in order."""
    lines = text.splitlines()
    begin = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    scale = {"ns": 1, "nsecond": 1, "us": 1e3, "usecond": 1e3, "ms": 1e6, "msecond": 1e6, "s": 1e9, "second": 1e9}
    return [(row["Kernel Name"], float(row["Metric Value"].replace(",", "")) * scale[row["Metric Unit"]])
            for row in csv.DictReader(lines[begin:])
            if row.get("Metric Name") == "gpu__time_duration.sum" and row.get("Metric Unit") in scale]


def last_step(launches):
    """The launches of the last step: the longest kernel sequence repeated consecutively near the end, or empty."""
    names = [name for name, _ in launches]
    for size in range(len(names) // 2, MIN_STEP, -1):
        for behind in range(min(100, len(names) - 2 * size) + 1):
            end = len(names) - behind
            if names[end - size:end] == names[end - 2 * size:end - size]:
                return launches[end - size:end]
    return []


def table(launches, steps=1):
    """Rows of a Markdown table: launches averaged over steps."""
    total, rows = sum(ns for _, ns in launches) / steps, {}
    for name, ns in launches:
        short = re.sub(r"\(anonymous namespace\)::|tessera::|^void ", "", name).replace("|", "/")[:110]
        count, time = rows.get(f"`{short}`", (0, 0))
        rows[f"`{short}`"] = (count + 1 / steps, time + ns / steps)
    ordered = sorted(rows.items(), key=lambda row: -row[1][1])
    if rest := ordered[MAX_ROWS:]:
        ordered[MAX_ROWS:] = [(f"{len(rest)} others", tuple(sum(x) for x in zip(*(row for _, row in rest))))]
    return ["| kernel | launches | ms | fraction |", "|---|---|---|---|",
            *(f"| {name} | {count:.0f} | {time / 1e6:.3f} | {100 * time / total:.1f}% |" for name, (count, time) in ordered),
            f"| all | {len(launches) / steps:.0f} | {total / 1e6:.3f} | |"]


def kernels(bench):
    """The kernels of one queued step by ncu or, if not permitted, separately timed ops."""
    model = bench.models[0]
    for attention in dict.fromkeys((bench.options.attention, "own")):
        if says_kernels(bench, f"attention {attention}", ONE_RANK + ["--attention", attention]):
            return
    bench.say(f"{model}: timings of separate ops, because its kernels could not be profiled", "")
    ops(bench)


def strategy_kernels(bench):
    """The kernels of one step of each strategy, all ranks together; each kernel has the GPU to itself. ncu takes 10 ms per
    launch, so there is only one step."""
    for name, args in strategies_given(bench).items():
        says_kernels(bench, f"{name}, {bench.options.ranks} ranks together", ["--dtype", "bf16", *args], 1)


def says_kernels(bench, name, args, steps=3):
    """Prints the table of the last step, or of all launches divided by the steps if none repeats; returns success."""
    model, args = bench.models[0], args + ["--cuda-graph", "off"]
    try:
        # Selects and caches matmul algorithms without ncu, whose overhead would distort the choice.
        bench.train(f"{name} before ncu", model, args, 3)
        launches = profiled(bench, model, args, steps)
    except Failed as e:
        bench.say(f"{model}, {name}: {bench.failed(f'{name} by ncu', e)}", "")
        return False
    step = last_step(launches)
    bench.say(f"{bench.named(model)}, bf16, {name}, {'one queued step' if step else f'one step of {steps}'}, profiled by ncu without clock control",
              "", *(table(step) if step else table(launches, steps)), "")
    return True


def profiled(bench, model, args, steps):
    """The launches of the given steps and the few kernels before them."""
    paths = [os.environ.get("PATH", ""), "/usr/local/cuda/bin", *sorted(glob.glob("/opt/nvidia/nsight-compute/*"), reverse=True)]
    ncu = shutil.which("ncu", path=os.pathsep.join(paths))
    if not ncu:
        raise Failed("NOT RUN", "ncu is not on PATH")
    with tempfile.TemporaryDirectory(dir=bench.options.work) as out:
        file = os.path.join(bench.runner.logs, "ncu.csv")
        command = [ncu, "--clock-control", "none", "--metrics", "gpu__time_duration.sum", "--csv", "--print-units", "base", "--log-file",
                   file, bench.options.binary, *bench.training(model), "--quiet", "--no-save", "--optimizer", "adamw", "--weight-decay",
                   "0.1", "--clip", "1", "--steps", str(steps), "--out", os.path.join(out, "run"), *bench.args(model), *args]
        try:
            bench.runner.run("ncu", command, bench.options.limit)
        except Failed as e:
            raise Failed(e.word, f"{e}; ncu: {(read_text(file).strip() or 'no output').splitlines()[-1]}") from e
    launches = parse_launches(read_text(file))
    if not launches:
        raise Failed("FAILED", "ncu reported no times")
    return launches


# The ops of a GPT-2 step.
STEP_OPS = "linear|gelu_mlp|packed_attention|cross_entropy|layer_norm|add_norm|embedding|add in place|bias_gelu"


def ops(bench):
    """The ops of a step separately in bf16, compared with the ceilings of the GPU."""
    try:
        found = bench.program("ops", ["bench", "--device", "cuda", f"--benchmark_filter=^op/({STEP_OPS})/.*bf16", "--benchmark_min_time=0.05"])
    except Failed as e:
        found = f"ops: {bench.failed('ops', e)}\n{e.out}"
    bench.say("Separate ops in bf16, compared with the ceilings of the GPU:", "", "```", found.rstrip(), "```")
