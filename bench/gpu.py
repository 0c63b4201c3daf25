#!/usr/bin/env python3
"""Tests and measures a build (bench/pack.sh, or any other) on a machine with a GPU, in one run of eight minutes. Parts are
independent: each reports its failures, and steps without remaining time are NOT RUN. Tests run in parallel, measurements
run alone.

usage: bench/first_contact.sh all|A|B|C|PART[,PART...] [OUT [FILE...]] [OPTIONS]
  all (480 s)  first runs; then in parallel all GPU tests, verify of every strategy, losses compared with the CPU, the base
               models for tuning, and PyTorch compilation; then sequentially the measurements: rounds alternating with
               PyTorch, the kernels of a step, strategies, long contexts, experts and 1B with their memory, tuning and
               generation, combinations of attention and graph (ways), ops; finally compute-sanitizer
  A B C        one third each, for machines that are available only for minutes: correctness (240 s); PyTorch, kernels,
               ways and ops (270 s); strategies, shapes and tuning (200 s)
  PART         first_runs right pytorch kernels strategies strategy_kernels shapes tuning ways ops sanitizer, or one step of
               first_runs and right: versions libraries ladder tests verify curve bases
  OUT          (default first_contact) receives report_WHAT.md and first_contact_WHAT.tar.gz with report, logs and, except for
               `all`, caches; an archive above 15 MB is split into at most 6 files
  FILE...      the archive of an earlier call, or its files, whose caches save a minute or two
TESSERA_PYTHON is the interpreter with torch (default python3), TESSERA_PACKED the build (default ../build),
FIRST_CONTACT_SECONDS the total time. Exit status: 1 failure, 2 no GPU, 3 no model could be trained, 143 terminated.

The throughput of a run is the median over its steps after the first five, that of a table the median over rounds. Utilization
is reported in both conventions: full attention, 6 N + 12 L C T FLOP per token (Chowdhery et al. 2022, appendix B), and
causal attention with half of that; N excludes position embeddings. Every run specifies its kernels; a run with other
kernels is REFUSED and has no throughput. A run that does not end is HUNG. If a run fails, the parts ladder, pytorch and
shapes retry it without CUDA graph, with Tessera's own attention, and deterministic, one row each.

Each GPU test (GoogleTest's --filter in suites with the ctest label `gpu`) runs in a separate process, several in parallel;
the first crashing test of a suite is rerun under memcheck. The sanitizer (--tools over --over) checks only Tessera's kernels
(namespace tessera), except initcheck, which must also observe the writes of library kernels.
"""
import argparse
import glob
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import gpu_parts
from gpu_run import Failed, Runner, end_all, library_path, read_text

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
OPTIONS = {  # defaults; overridden by the steps of the table below, and by the command line
    "models": ("gpt2", "several for pytorch, shapes, bases and tuning; other parts use the first: " + ", ".join(gpu_parts.MODELS)
               + "; for pytorch, gpt2=bf16/default sets the setting of a model"),
    "attention": ("cudnn", "attention kernels: cudnn or own"),
    "rounds": (5, "alternating rounds"),
    "steps": (30, "timed steps after five warm-up steps"),
    "ranks": (2, "ranks of strategies"),
    "only": ("", "semicolon-separated list of strategies to run, in this order"),
    "settings": ("bf16/default,autocast/default", "PyTorch settings: bf16 or autocast, and a torch.compile mode"),
    "limit": (120, "time limit of a run, seconds"),
    "cpu_limit": (900, "time limit of the CPU run of curve, seconds"),
    "compile_limit": (900, "time limit of PyTorch compilation, seconds"),
    "jobs": (6, "parallel tests, checks or plans"),
    "filter": ("*Gpu*:GpusTest.*", "GoogleTest filter of the tests"),
    "tools": ("memcheck,racecheck,synccheck,initcheck", "compute-sanitizer tools"),
    "over": ("tensor,autograd,nn", "test groups checked by the tools"),
}
GROUPS = {  # sanitizer groups: (suite, tests); MatmulGpu.* uses cuBLASLt kernels
    "tensor": ("tensor", "*Gpu*-MatmulGpu.*"),
    "autograd": ("autograd", "*Gpu*-MatmulGpu.*"),
    "nn": ("nn", "*Gpu*-MatmulGpu.*"),
    "attention": ("tensor", "AttentionGpu.SmallShapes*"),
    "norms": ("tensor", "StructuredGpu.Norms*:StructuredGpu.WeightGradients*"),
    "experts": ("tensor", "ExpertsGpu.*"),
    "cross-entropy": ("tensor", "StructuredGpu.CrossEntropy*:StructuredGpu.Losses*"),
}
# Sticky errors: all later calls of the process fail with them.
STICKY = re.compile(r"illegal memory access|misaligned address|unspecified launch failure|device-side assert|"
                    r"illegal instruction|illegal address|hardware stack error|invalid program counter", re.I)


def shell(bench, name, text, limit):
    bench.say("```", bench.runner.run(name, ["bash", "-c", text], limit).rstrip(), "```")


def versions(bench):
    shell(bench, "versions", f"""
nvidia-smi && nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit --format=csv
nvcc --version | tail -n 2
uname -srm && ldd --version | head -n 1 && nproc && grep -m 1 'model name' /proc/cpuinfo && free -g | head -n 2
{bench.options.python} -c 'import torch; print("torch", torch.__version__, "CUDA", torch.version.cuda, "cuDNN",
  torch.backends.cudnn.version(), "NCCL", torch.cuda.nccl.version(), torch.cuda.get_device_properties(0))' 2>&1
command -v ncu compute-sanitizer || true""", 30)


def libraries(bench):
    """Locations of the program's libraries; fails if one is missing."""
    shell(bench, "libraries", f"""cd {bench.options.build}; found=$(ldd bin/tessera tests/test_*)
printf '%s\\n' "$found" | grep -E 'libcu|libnccl|libnv|not found' | sed 's/ (0x.*//' | sort -u
! grep -q 'not found' <<<"$found" && bin/tessera --help >/dev/null""", 20)


def tests(bench):
    o, suites = bench.options, {}
    for program in sorted(glob.glob(os.path.join(o.build, "tests", "test_*"))):
        fixture = listed = ""
        try:
            listed = bench.runner.run("list", [program, "--gtest_list_tests", f"--gtest_filter={o.filter}"], 30)
        except Failed as e:  # other programs may start
            bench.say(f"- {os.path.basename(program)[5:]}: {bench.failed('its list', e)}")
        for line in listed.splitlines():
            line = line.split("#")[0].rstrip()
            if line.endswith(".") and not line.startswith(" "):
                fixture = line
            elif line.startswith("  ") and fixture:
                suites.setdefault(program, []).append(fixture + line.strip())
    if not suites:
        raise Failed("FAILED", f"no test in {o.build}/tests matches {o.filter}")

    def verdict(test):
        program, name = test
        try:
            text = gtest(bench, program, name, f"{os.path.basename(program)} {name}")
            how = "skipped" if "[  SKIPPED ]" in text else "passed" if "[       OK ]" in text else "FAILED: it did not run"
        except Failed as e:
            found = re.search(r"(?:: Failure|C\+\+ exception)(.*\n(?:.*\n){0,4})", e.out)
            text, how = e.out, e.cell() if e.word != "FAILED" else re.sub(r"\s+", " ", "FAILED: " + found[1] if found else "FAILED")[:400]
        if error := STICKY.search(text):
            how = f"CRASHED: {error[0]}"
        if re.search("this machine has no GPU|a build without CUDA", text):
            how = "FAILED: no GPU found"
        return how

    # cuDNN compiles a plan per shape (0.1 to 0.5 s each), so these tests start first.
    ordered = sorted(((program, name) for program in suites for name in suites[program]), key=lambda test: "Cudnn" not in test[1])
    with ThreadPoolExecutor(o.jobs) as pool:
        verdicts = dict(zip(ordered, pool.map(verdict, ordered)))
    for program, names in suites.items():
        found = {name: verdicts[program, name] for name in names}
        for name in [name for name, how in found.items() if how.startswith("CRASHED")][:1]:
            found[name] += f"; under memcheck: {first_finding(bench, program, name)}"
        failures = [f"  - {name}: {how}" for name, how in found.items() if how not in ("passed", "skipped")]
        count = {word: list(found.values()).count(word) for word in ("passed", "skipped")}
        bench.say(f"- {os.path.basename(program)[5:]}: {count['passed']} passed, {count['skipped']} skipped, {len(failures)} failed", *failures)
        bench.bad = bench.bad or bool(failures)


def gtest(bench, program, wanted, name, before=()):
    with tempfile.TemporaryDirectory(dir=bench.options.work) as scratch:
        return bench.runner.run(name, [*before, program, f"--gtest_filter={wanted}", "--gtest_color=no"], bench.options.limit, cwd=scratch)


def sanitized(bench, tool, program, wanted, name, *more):
    """Output of compute-sanitizer and the tests, and the failure or None."""
    path = shutil.which("compute-sanitizer", path=os.environ.get("PATH", "") + ":/usr/local/cuda/bin")
    if not path:
        raise Failed("FAILED", "compute-sanitizer is not on PATH")
    try:
        return gtest(bench, program, wanted, name, (path, "--tool", tool, "--error-exitcode", "9", *more)), None
    except Failed as e:
        return e.out, e


def first_finding(bench, program, test):
    try:
        text, ended = sanitized(bench, "memcheck", program, test, f"memcheck {test}")
    except Failed as e:
        return e.cell()
    found = [line for line in text.splitlines() if line.startswith("========= ") and "COMPUTE-SAN" not in line]
    return re.sub(r"\s+", " ", found[0][10:]) if found else ended.cell() if ended else "nothing found"


def sanitizer(bench):
    def check(pair):
        tool, group = pair
        suite, wanted = GROUPS[group]
        only = () if tool == "initcheck" else ("--kernel-name", "kns=tessera")
        text, ended = sanitized(bench, tool, os.path.join(bench.options.build, "tests", f"test_{suite}"), wanted, f"{tool} {group}",
                                "--report-api-errors", "no", *only)
        passed, found = text.count("[       OK ]"), findings(tool, text)
        failures = re.findall(r"^\[  FAILED  \] ([^\s,]+).* \(\d+ ms\)$", text, re.M)
        if found or failures:
            how = f"FAILED, {found} findings" + (f", failed tests: {', '.join(failures)}" if failures else "")
        elif ended and ended.word in ("HUNG", "NOT RUN", "NOT FINISHED"):
            how = f"NOT FINISHED ({ended.cell()}), no findings so far"
        elif ended or passed == 0:
            how = f"FAILED ({ended.cell() if ended else 'no test passed'})"
        else:
            how = "clean except library kernels" if tool == "initcheck" and "ninitialized" in text else "clean"
        bench.bad = bench.bad or how.startswith("FAILED")
        return f"- {tool}, {group}: {how}; {passed} tests passed"

    o = bench.options
    with ThreadPoolExecutor(o.jobs) as pool:
        bench.say(*pool.map(check, [(tool, group) for tool in o.tools.split(",") for group in o.over.split(",")]))


def findings(tool, text):
    """Number of findings in a log; for initcheck only in Tessera's kernels and copies, because libraries may read unused memory."""
    if tool != "initcheck":
        return sum(not re.search("COMPUTE-SANIT|SUMMARY|process didn|Target appl", line) for line in re.findall("^========= [^ ].*", text, re.M))
    places = re.findall(r"^========= .*[Uu]ninitialized(.*)\n(?:========= +at (.*))?", text, re.M)
    return sum("Host API" in what or "tessera" in where for what, where in places)


# Steps of each part, which run in parallel: (name in the report, seconds, function, options).
PARTS = {
    "first_runs": [("versions", 30, versions, {}), ("libraries", 20, libraries, {}),
                   ("first_runs", 90, gpu_parts.ladder, dict(models="small", limit=40))],
    "right": [("tests", 110, tests, dict(limit=105, jobs=8, filter="*Gpu*", threads=2)),
              ("verify", 110, gpu_parts.verify, dict(jobs=4, limit=40, threads=2)),
              ("losses_small", 60, gpu_parts.curve, dict(models="small", limit=30, cpu_limit=50, threads=1)),
              ("losses", 110, gpu_parts.curve, dict(models="gpt2", limit=40, cpu_limit=100, threads=3))],
    "pytorch": [("pytorch", 330, gpu_parts.pytorch, dict(models="gpt2,llama,gpt2-xl=bf16/default", rounds=3, limit=50,
                                                         compile_limit=150))],
    "kernels": [("kernels", 50, gpu_parts.kernels, dict(limit=45))],
    "strategies": [("strategies", 75, gpu_parts.strategies, dict(
        rounds=1, steps=8, limit=20, only="tensor;tensor and sequence;context, ring;context, Ulysses;one of 4 experts;DDP;ZeRO-1;"
        "ZeRO-3;1F1B;ZB-H1"))],
    "strategy_kernels": [("strategy_kernels", 75, gpu_parts.strategy_kernels, dict(
        limit=30, only="tensor;tensor and sequence;context, ring;one of 4 experts"))],
    "shapes": [("shapes", 90, gpu_parts.shapes, dict(
        models="gpt2,llama,llama-experts,gpt2-8k,llama-8k,llama-8k-window,gpt2-32k,gpt2-medium,llama-1b", rounds=1, steps=10, limit=30))],
    "bases": [("bases", 80, gpu_parts.bases, dict(models="gpt2,llama-1b", limit=70))],
    "tuning": [("tuning", 90, gpu_parts.tuning, dict(models="gpt2,llama-1b", rounds=1, steps=10, limit=45))],
    "ways": [("ways", 45, gpu_parts.ways, dict(rounds=1, steps=15, limit=30))],
    "ops": [("ops", 30, gpu_parts.ops, dict(limit=28))],
    "sanitizer": [("sanitizer", 75, sanitizer, dict(tools="racecheck,memcheck", over="attention,norms,cross-entropy", limit=70))],
}
STEPS = {step[2].__name__: [step] for part in ("first_runs", "right") for step in PARTS[part]}
SELECTIONS = {"all": (480, [part for part in PARTS if part != "bases"]), "A": (240, ["first_runs", "right", "sanitizer"]),
         "B": (270, ["pytorch", "kernels", "ways", "ops"]), "C": (200, ["strategies", "strategy_kernels", "shapes", "tuning"])}


class Contact:
    """One invocation: steps in threads, and the report."""

    def __init__(self, given, seconds):
        self.given, self.start, self.end = given, time.monotonic(), time.monotonic() + seconds - 15  # reserves time for the archive
        self.seconds, self.status, self.unrun, self.begun = seconds, 0, 0, {}
        self.what = given.what.replace(",", "_")  # some file transfers do not accept commas
        self.report, self.logs = (os.path.join(given.out, name.format(self.what)) for name in ("report_{}.md", "logs_{}"))

    def say(self, *lines):
        with open(self.report, "a") as report:
            for to in (report, sys.stdout):
                print(*lines, sep="\n", file=to, flush=True)

    def begin(self, steps):
        """Starts steps in parallel, limited by the remaining time."""
        for name, seconds, function, own in steps:
            seconds = int(min(self.given.seconds or seconds, self.end - time.monotonic()))
            if seconds < 8:
                self.say("", f"## {name}", "", "NOT RUN: no time left")
                self.unrun += 1
                continue
            print(f"=== {name} (at most {seconds} s)", flush=True)
            defaults = {option: value for option, (value, _) in OPTIONS.items()}
            options = argparse.Namespace(**(defaults | own | {o: v for o, v in vars(self.given).items() if v is not None}))
            env = {"OMP_NUM_THREADS": str(own["threads"])} if "threads" in own else {}
            runner = Runner(os.path.join(self.logs, name), seconds - 4, env)
            bench = gpu_parts.Bench(options, runner, open(os.path.join(self.logs, f"{name}.md"), "w"))
            thread = threading.Thread(target=self.run, args=(bench, function), daemon=True)
            self.begun[name] = (bench, thread, time.monotonic(), seconds)
            thread.start()

    @staticmethod
    def run(bench, function):
        try:
            function(bench)
        except Failed as e:
            bench.say(bench.failed(function.__name__, e))
        except Exception as e:  # reported; other parts continue
            bench.say(bench.failed(function.__name__, Failed("FAILED", f"unexpected error: {e!r}")))

    def finish(self, but=()):
        """Waits for the started steps and adds them to the report in order."""
        for name in [name for name in self.begun if name not in but]:
            bench, thread, start, seconds = self.begun[name]
            thread.join(max(start + seconds + 2 - time.monotonic(), 0))
            self.tell(name, f"HUNG, stopped after {seconds} s" if thread.is_alive() else "FAILED" if bench.bad else "ok")

    def tell(self, name, how):
        bench, _, start, _ = self.begun.pop(name)
        self.say("", f"## {name}: {how}, {time.monotonic() - start:.0f} s", "", read_text(os.path.join(self.logs, f"{name}.md"))[:60000])
        if how != "ok":
            self.status = self.status or 1
            self.say("```", *(note[:400] for note in bench.notes[-15:]), "```")
        if name == "first_runs" and not bench.trained:
            self.status = 3

    def all_parts(self, parts):
        made = {}
        for part in parts:
            steps = PARTS.get(part) or STEPS[part]
            early = {"right": ["pytorch", "bases"], "tuning": ["bases"]}.get(part, [])
            for other in early:  # PyTorch compiles during the tests and then waits for its turn
                if other not in made and (other in parts or other == "bases" and "tuning" in parts):
                    made[other] = True
                    self.begin(PARTS[other])
            if part == "tuning":
                self.finish()
            if part not in made:
                self.begin(steps)
            if "pytorch" in self.begun and part != "right":
                self.begun["pytorch"][0].go.set()
            self.finish(["pytorch"] if part == "right" else [])
            if self.status == 3:
                break
        took = time.monotonic() - self.start
        self.say("", f"{self.given.what} took {took:.0f} s of {self.seconds}; {'something' if self.status else 'nothing'} failed; "
                 f"{self.unrun} steps were not run")

    def pack_up(self, caches):
        """Archives the report, the logs and, except for `all`, the caches."""
        archive = os.path.join(self.given.out, f"first_contact_{self.what}.tar.gz")
        for old in glob.glob(archive + "*"):
            os.remove(old)
        with tarfile.open(archive, "w:gz") as packed:
            for path in [self.report, self.logs] + ([caches] if self.given.what != "all" else []):
                packed.add(path, os.path.relpath(path, self.given.out))
        if os.path.getsize(archive) > 15_000_000:
            with open(archive, "rb") as full:
                for letter in "abcdef":
                    if chunk := full.read(15_000_000):
                        with open(f"{archive}.a{letter}", "wb") as to:
                            to.write(chunk)
            os.remove(archive)
        shutil.rmtree(caches)
        shutil.rmtree(self.logs)
        print(*sorted(os.listdir(self.given.out)), sep="\n")


def mend_libraries(contact):
    """Searches this machine for libraries that the loader did not find."""
    found = subprocess.run(["ldd", f"{contact.given.build}/bin/tessera", *glob.glob(f"{contact.given.build}/tests/test_*")],
                           capture_output=True, text=True).stdout
    for name in sorted(set(re.findall(r"(\S+) => not found", found))):
        search = ["timeout", "-k", "5", "20", "find", "/", "(", "-path", "/proc", "-o", "-path", "/sys", ")", "-prune", "-o", "-name", name,
                  "-not", "-path", "*/stubs/*", "-printf", "%h\\n", "-quit"]
        directory = subprocess.run(search, capture_output=True, text=True).stdout.strip()
        contact.say(f"library path: {name} is in {directory or 'no directory on this machine'}")
        os.environ["LD_LIBRARY_PATH"] = ":".join(filter(None, [os.environ.get("LD_LIBRARY_PATH"), directory]))


def options_given():
    parser = argparse.ArgumentParser(prog="first_contact.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what")
    parser.add_argument("out", nargs="?", default="first_contact", type=os.path.abspath)
    parser.add_argument("files", nargs="*")
    for name, (value, text) in OPTIONS.items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(value), help=f"{text} (default {value}, or the default of the part)")
    parser.add_argument("--seconds", type=float, help="time limit of each step, in place of its own limit")
    given = parser.parse_args()
    parts = SELECTIONS.get(given.what, (480, given.what.split(",")))[1]
    listed = ((parts, "part", [*PARTS, *STEPS]), (given.tools, "--tools", OPTIONS["tools"][0].split(",")), (given.over, "--over", GROUPS),
              ([word.partition("=")[0] for word in (given.models or "").split(",") if word], "--models", gpu_parts.MODELS))
    for values, name, known in listed:
        for word in values.split(",") if isinstance(values, str) else values or []:
            if word not in known:
                parser.error(f"unknown {name} '{word}'; expected all, A, B, C or some of {', '.join(known)}"
                             if name == "part" else f"{name}: unknown '{word}'; expected some of {', '.join(known)}")
    return given, parts


def main():
    given, parts = options_given()
    given.build = os.path.abspath(os.environ.get("TESSERA_PACKED", os.path.join(ROOT, "build")))
    given.python = os.environ.get("TESSERA_PYTHON", sys.executable)
    given.binary, caches = os.path.join(given.build, "bin", "tessera"), os.path.join(given.out, "caches")
    total = int(os.environ.get("FIRST_CONTACT_SECONDS", SELECTIONS.get(given.what, (480,))[0]))
    contact = Contact(given, total)
    os.makedirs(contact.logs, exist_ok=True)
    os.makedirs(caches, exist_ok=True)
    if given.files:
        joined = subprocess.Popen(["cat", *given.files], stdout=subprocess.PIPE)
        if subprocess.run(["tar", "-xzf", "-", "-C", given.out, "caches"], stdin=joined.stdout).returncode != 0:
            print(f"first_contact.sh: no caches could be read from {' '.join(given.files)}", file=sys.stderr)
    for variable, directory in (("TESSERA_CACHE", "tessera"), ("TORCHINDUCTOR_CACHE_DIR", "inductor"), ("TRITON_CACHE_DIR", "triton")):
        os.environ[variable] = os.path.join(caches, directory)
        os.makedirs(os.environ[variable], exist_ok=True)
    os.environ |= {"GOMP_SPINCOUNT": "1000", "TORCHINDUCTOR_FX_GRAPH_CACHE": "1", "PATH": os.environ["PATH"] + ":/usr/local/cuda/bin"}
    if os.path.isdir(os.path.join(given.build, "lib")):
        os.environ["LD_LIBRARY_PATH"] = library_path()

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with open(contact.report, "w") as report:
        commit = read_text(os.path.join(ROOT, "COMMIT")).strip() or "unknown"
        print(f"# {' '.join(parts)}, {time.strftime('%FT%TZ', time.gmtime())}, commit {commit}", file=report)
    with tempfile.TemporaryDirectory() as given.work:
        try:
            seen = subprocess.run(["timeout", "-k", "5", "30", "nvidia-smi", "-L"], capture_output=True, text=True)
            if seen.returncode == 0:
                mend_libraries(contact)
                contact.all_parts(parts)
            else:
                contact.say("", f"no GPU: {(seen.stdout + seen.stderr).strip() or 'nvidia-smi did not respond within 30 s'}")
                contact.status = 2
        except KeyboardInterrupt:
            end_all()
            contact.say("", "NOT FINISHED: terminated by a signal")
            time.sleep(1)
            for name in list(contact.begun):
                contact.tell(name, "not finished")
            contact.status = 143
    contact.pack_up(caches)
    sys.stdout.flush()
    os._exit(contact.status)  # even if a thread is still waiting


if __name__ == "__main__":
    main()
