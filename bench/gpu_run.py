"""Runs the programs of a GPU measurement with time limits, and writes their output to separate files.

Every program runs under `timeout -k 5 LIMIT`, which kills it and its children even if this process is gone. A Runner may
have a total time, which limits its programs.

The last record of `tessera train --device cuda --format json` has an object "gpu": attention calls by kernel, steps queued
or launched as a graph, matmuls with fused epilogue. A throughput measured with kernels other than those in the table would
be misleading: why_refused() compares both, and such a run fails as REFUSED.
"""
import array
import itertools
import json
import os
import random
import re
import select
import signal
import site
import subprocess
import sysconfig
import threading
import time

KINDS = ("cudnn", "tensor cores", "plain")
HEADER = [20240520, 1]  # header of llm.c's token file (256 int32): magic, version, number of tokens


class Failed(RuntimeError):
    """A run without a result. `word`: FAILED, CRASHED, HUNG or REFUSED; NOT RUN or NOT FINISHED if time ran out."""

    def __init__(self, word, cause, out=""):
        super().__init__(re.sub(r"\s+", " ", cause).replace("|", "/").strip())
        self.word, self.out = word, out

    def bad(self):
        return not self.word.startswith("NOT ")

    def cell(self):
        return f"{self.word}: {self}"


class Runner:
    """Programs of one measurement. `seconds`: their total time limit."""

    running, stopped, lock = set(), False, threading.Lock()  # process-wide, for end_all()

    def __init__(self, logs, seconds, env=None):
        self.logs, self.end, self.number, self.env = logs, time.monotonic() + seconds, 0, env or {}
        os.makedirs(logs, exist_ok=True)

    def left(self):
        return self.end - time.monotonic()

    def start(self, name, limit, command, env, **streams):
        """A program, and the name of its logs."""
        if limit < 2:
            raise Failed("NOT RUN", "no time left")
        with Runner.lock:
            if Runner.stopped:
                raise Failed("NOT RUN", "the measurement was stopped")
            self.number += 1
            log = os.path.join(self.logs, f"{self.number:03d}-" + re.sub(r"[^A-Za-z0-9.]+", "_", name)[:80].strip("_"))
            with open(log + ".err", "wb") as errors, open(log + ".out", "wb") as out:
                errors.write(f"$ {' '.join(command)}\n".encode())
                errors.flush()
                child = subprocess.Popen(["timeout", "-k", "5", str(int(limit)), *command], stderr=errors,
                                         env={**os.environ, **self.env, **(env or {})}, **({"stdout": out} | streams))
            Runner.running.add(child)
        return child, log

    def run(self, name, command, limit, env=None, cwd=None):
        """Standard output of the program; both outputs are logged. Raises Failed."""
        asked, limit, begin = limit, int(min(limit, self.left())), time.monotonic()
        child, log = self.start(name, limit, command, env, stdin=subprocess.DEVNULL, cwd=cwd)
        try:
            status = child.wait()
        finally:
            Runner.running.discard(child)
        status = 128 - status if status < 0 else status  # `timeout` dies of the signal that killed its program
        took, text = time.monotonic() - begin, read_text(log + ".out")
        with open(log + ".err", "a") as errors:
            errors.write(f"\n$ status {status} after {took:.1f} s\n")
        if status in (124, 137) and took >= limit - 0.5:
            if limit < asked:
                raise Failed("NOT FINISHED", f"{limit} s were left", text)
            raise Failed("HUNG", f"stopped after {limit} s; its messages are in {os.path.basename(log)}.err", text)
        if status != 0:
            word, how = ("CRASHED", f"signal {status - 128}") if status > 128 else ("FAILED", f"status {status}")
            raise Failed(word, f"{how}: {last_message(log, text)}", text)
        return text


class Served:
    """A persistent program that answers lines of JSON with lines of JSON. It prints a first record when it is ready."""

    def __init__(self, runner, name, command, limit):
        self.runner = runner
        self.child, self.log = runner.start(name, runner.left() + 1, command, None, stdin=subprocess.PIPE,
                                            stdout=subprocess.PIPE, bufsize=0)
        self.record = self.answer(limit)

    def ask(self, question, limit):
        try:
            self.child.stdin.write(json.dumps(question).encode() + b"\n")
        except OSError:
            pass  # the program has ended; answer() reports how
        return self.answer(limit)

    def answer(self, limit):
        limit = int(min(limit, self.runner.left()))
        if limit < 2:
            raise Failed("NOT RUN", "no time left")
        end = time.monotonic() + limit
        while (left := end - time.monotonic()) > 0 and select.select([self.child.stdout], [], [], left)[0]:
            line = self.child.stdout.readline()
            if not line:
                status = self.child.wait()
                self.end()
                word = "CRASHED" if status < 0 or status > 128 else "FAILED"
                raise Failed(word, f"status {status}: {last_message(self.log, '')}")
            if records := json_lines(line.decode(errors="replace")):
                return records[-1]
        self.end()
        raise Failed("HUNG", f"no answer in {limit} s; its messages are in {os.path.basename(self.log)}.err")

    def end(self):
        if self.child.poll() is None:
            self.child.terminate()
            self.child.wait()
        Runner.running.discard(self.child)


def end_all():
    """Stops all running programs and prevents new ones."""
    Runner.stopped = True
    for child in list(Runner.running):
        child.send_signal(signal.SIGTERM)  # `timeout` forwards it to the children of its program


def read_text(path):
    if not os.path.exists(path):
        return ""
    with open(path, errors="replace") as f:
        return f.read()


def last_message(log, out):
    """The last line of standard error, or else of standard output."""
    lines = [line.strip() for line in read_text(log + ".err").splitlines() if line.strip() and not line.startswith("$ ")]
    lines = lines or [line.strip() for line in out.splitlines() if line.strip()]
    return lines[-1][:400] if lines else "no message"


def json_lines(text):
    """The records of a program that prints one per line; ignores an incomplete last one."""
    records = []
    for line in text.splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            pass
    return [r for r in records if isinstance(r, dict)]


def option(args, name, otherwise=None):
    """The argument after `name` in a command line."""
    return args[args.index(name) + 1] if name in args else otherwise


def model_args(sizes):
    """Arguments for a model and a batch; a model with kv_heads is a Llama."""
    args = [word for key, value in sizes.items() for word in ("--" + key.replace("_", "-"), str(value))]
    return args + (["--family", "llama", "--untied"] if "kv_heads" in sizes else [])


def requested_kernels(args):
    """{"attention": a kind or None, "graph": "on", "off" or None}: the kernels requested by a `train` command line."""
    attention, graph = option(args, "--attention"), option(args, "--cuda-graph")
    if attention == "own":  # tensor core kernels support bf16 and these head sizes; ring attention has its own tiles
        head = int(option(args, "--channels", 0)) // int(option(args, "--heads", 1))
        tiles = option(args, "--dtype", "fp32") == "bf16" and head in (64, 128)
        attention = "own" if "--cp" in args else "tensor cores" if tiles else "plain"
    return {"attention": attention, "graph": graph if graph in ("on", "off") else None}


def why_refused(gpu, wanted):
    """Why the run does not match the request, or empty."""
    if not isinstance(gpu, dict):
        return "the run does not report its GPU kernels"
    try:
        return attention_refused(gpu["attention"], wanted["attention"]) or graph_refused(gpu["graph"], wanted["graph"])
    except (KeyError, TypeError) as e:
        return f"the GPU record of the run is invalid: {e!r}"


def attention_refused(attention, kind):
    if kind is None:
        return ""
    for direction in ("forward", "backward"):
        counts = attention[direction]
        others = {k: counts[k] for k in KINDS if counts[k] > 0 and k != kind and not (kind == "own" and k != "cudnn")}
        served = sum(counts[k] for k in KINDS) - sum(others.values())
        if others or served == 0:
            found = ", ".join(f"{n} by {k}" for k, n in others.items()) or "none"
            reasons = "; ".join(attention.get("refused", []))
            return f"attention {direction}: requested {kind}, got {found}" + (f" ({reasons})" if reasons else "")
    return ""


def graph_refused(graph, asked):
    if asked == "off" and graph["replays"] > 0:
        return f"graph: requested off, got {graph['replays']} launches"
    if asked == "on":
        if graph["replays"] == 0 or graph["why_not"]:
            return f"graph: requested on, got {graph['replays']} launches ({graph['why_not'] or 'no reason was reported'})"
        if graph["queued"] > graph["replays"]:  # the throughput is the median over steps
            return f"graph: requested on, got {graph['queued']} steps queued and {graph['replays']} launched"
    return ""


def describe(gpu):
    """One line about the kernels of a run, for a table and standard error."""
    if not isinstance(gpu, dict):
        return "not reported"
    try:
        parts = []
        for direction in ("forward", "backward"):
            counts = gpu["attention"][direction]
            parts.append(f"attention {direction} " + (", ".join(f"{counts[k]} {k}" for k in KINDS if counts[k]) or "none"))
        parts += [f"cuDNN refused: {reason}" for reason in gpu["attention"]["refused"]]
        graph = gpu["graph"]
        parts.append(f"graph {graph['captures']} captured, {graph['replays']} launched, {graph['queued']} queued"
                     + (f" ({graph['why_not']})" if graph["why_not"] else ""))
        for name, counts in gpu["epilogues"].items():
            parts.append(f"{name.replace('_', ' ')} {counts['fused']} fused, {counts['apart']} separate")
        parts.append(f"{gpu['padded_products']} padded matmuls")
        return "; ".join(parts).replace("|", "/").replace("\n", " ")
    except (KeyError, TypeError, AttributeError) as e:
        return f"unexpected error: {e!r}"


def write_tokens(directory, vocab, count):
    """Random tokens distributed like BPE text: the probability of token r is proportional to 1 / (r + 2.7)
    (Zipf-Mandelbrot law), with a fixed seed. Writes tokens.bin, an llm.c token file, and the tokenizer's files, in
    which all tokens beyond the 256 bytes are special."""
    cumulated = list(itertools.accumulate(1 / (r + 2.7) for r in range(vocab)))
    tokens = array.array("H", random.Random(1).choices(range(vocab), cum_weights=cumulated, k=count))
    with open(os.path.join(directory, "tokens.bin"), "wb") as f:
        f.write(array.array("i", [*HEADER, count] + [0] * (256 - len(HEADER) - 1)).tobytes() + tokens.tobytes())
    # GPT-2's byte alphabet: bytes visible in Latin-1 map to themselves, the others to U+0100 and following
    visible = [b for b in range(256) if 0x21 <= b <= 0x7E or 0xA1 <= b <= 0xAC or b >= 0xAE]
    spellings = [chr(b) for b in visible] + [chr(0x100 + i) for i in range(256 - len(visible))]
    spellings += [f"<{r}>" for r in range(256, vocab)]
    with open(os.path.join(directory, "vocab.json"), "w", encoding="utf-8") as f:
        json.dump({spelling: r for r, spelling in enumerate(spellings)}, f)
    with open(os.path.join(directory, "merges.txt"), "w", encoding="utf-8") as f:
        f.write("#version: 0.2\n")


def library_path():
    """Library path of a packed build for CUDA, cuDNN and NCCL: PyTorch's packages, so that both programs use the same
    libraries, then the CUDA toolkit."""
    packages = dict.fromkeys([sysconfig.get_path("purelib"), *site.getsitepackages(), site.getusersitepackages()])
    wheels = [os.path.join(directory, "nvidia", name, "lib") for directory in packages
              if os.path.isdir(os.path.join(directory, "nvidia")) for name in sorted(os.listdir(os.path.join(directory, "nvidia")))]
    toolkit = ["/usr/local/cuda/lib64", "/usr/local/cuda/lib"]
    return ":".join(filter(None, [*filter(os.path.isdir, wheels), *toolkit, os.environ.get("LD_LIBRARY_PATH")]))
