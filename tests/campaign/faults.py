#!/usr/bin/env python3
"""Injects random faults of five kinds: a failing system call of a save, a corrupted file, a file larger than the memory limit,
a wrong library call, a killed or stopped rank. In every case the program must exit with its own status and error line,
leave existing files usable and no partial files, and report no false success.

    tests/campaign/faults.py PROGRAM [--calls 24] [--files 120] [--large 6] [--misuse 20] [--stops 2]
        [--seed $TESSERA_DRAW] [--only KIND:N]

--calls all fails every call of each job once. Violations are printed with kind and number, which --only repeats:
call:N, file:N, large:N or, with --calls all, every:N. --misuse: wrong calls, by test_train next to the program's directory.
Exits with 77 (skipped) without a C compiler, which builds the preload library (failing_calls.c).
"""
import errno
import filecmp
import glob
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.dont_write_bytecode = True
from restarts import options, write_text  # noqa: E402

HERE = os.path.dirname(os.path.abspath(__file__))
TINY = ("--data text.txt --layers 1 --heads 2 --channels 16 --context 16 --batch 4 --warmup 2 --lr 0.03 --threads-per-rank 1 "
        "--eval-every 4 --save-every 4 --quiet")
LIMIT = 60  # time limit of a command, seconds

# Commands run with a failing call: {name: (command, created or modified files)}.
JOBS = {"save": (f"train {TINY} --steps 8 --resume --out run", "run"),
        "save of 2 ranks": (f"train {TINY} --steps 8 --resume --out sharded", "sharded"),
        "export": ("checkpoint export run --out made", "made"),
        "import": ("checkpoint import hub --out made", "made"),
        "reshard": ("checkpoint reshard run --out made --dp 2 --zero 3", "made"),
        "data": ("data text.txt --tokenizer bytes --out made", "made")}
SAID_BY = {"open": ("ENOSPC", "EMFILE", "EACCES", "EROFS", "EDQUOT"), "write": ("ENOSPC", "EIO", "EDQUOT", "EFBIG", "EINTR", "short"),
           "fsync": ("EIO", "ENOSPC"), "rename": ("EIO", "ENOSPC", "EXDEV"), "ftruncate": ("EIO", "EFBIG"),
           "posix_fallocate": ("ENOSPC", "EIO", "EOPNOTSUPP"), "mmap": ("ENOMEM", "EAGAIN"), "close": ("EIO", "EDQUOT")}
KIND = {"fopen": "open", "mkdir": "open", "pwrite": "write", "writev": "write", "fdatasync": "fsync", "syncfs": "fsync",
        "renameat2": "rename"}

# Readers of altered files: {file pattern: commands}.
READ = {"run/checkpoints/step-4/*": ["generate run --tokens 3 --prompt Line", "checkpoint inspect run", "evaluate run --data text.txt",
                                     f"train {TINY} --steps 6 --resume --out run", "checkpoint export run --out made"],
        "run/checkpoints/latest": ["generate run --tokens 3 --prompt Line"],
        "run/checkpoints/best": ["generate run/checkpoints/best --tokens 3 --prompt Line"],
        "run/*.*": [f"train {TINY} --steps 6 --resume --out run", "report run"],
        "hub/*": ["checkpoint import hub --out made", "generate hub --tokens 3 --prompt Line", "checkpoint inspect hub",
                  f"train {TINY} --steps 2 --init hub --out made"],
        "set/*": [f"train {TINY.replace('text.txt', 'set')} --steps 2 --out made"]}

# Files that are read completely: (option, file, valid beginning, repeated continuation, command).
RUN = f"train {TINY} --steps 1 --out made"
LARGE = [("train --config", "c.toml", b"", b"# a comment\n", f"{RUN} --config c.toml"),
         ("train --config, one line", "c.toml", b"lr = ", b"0", f"{RUN} --config c.toml"),
         ("train --data, one row", "d.jsonl", b'{"text": "', b"a text ", f"{RUN.replace('text.txt', 'd.jsonl')}"),
         ("train --data, one list", "d.jsonl", b'{"input_ids": [1', b", 1", f"{RUN.replace('text.txt', 'd.jsonl')}"),
         ("train --data, weights", "w.toml", b"text.txt = 1\n", b"# a comment\n", f"{RUN.replace('text.txt', 'w.toml')}"),
         ("train --tokenizer", "t/tokenizer.json", b'{"version": "1.0", "added_tokens": [', b"[],", f"{RUN} --tokenizer t"),
         ("train --schedule", "s.txt", b"", b"0F0 0B0 ", f"{RUN} --schedule ./s.txt"),
         ("generate --prompts", "p.txt", b"", b"Line\n", "generate run --tokens 1 --prompts p.txt"),
         ("generate, config.json", "hub/config.json", b'{"model_type": "gpt2", "x": [', b"1,", "generate hub --tokens 1 --prompt Line"),
         ("generate, tokenizer.json", "hub/tokenizer.json", b'{"version": "1.0", "model": {"vocab": {"a": 1', b', "b": 2', "generate hub --tokens 1 --prompt Line"),
         ("generate, tokenizer_config.json", "hub/tokenizer_config.json", b'{"chat_template": "', b"text ", "generate hub --tokens 1 --prompt Line"),
         ("generate, generation_config.json", "hub/generation_config.json", b'{"eos_token_id": [1', b",1", "generate hub --tokens 1 --prompt Line"),
         ("checkpoint inspect, manifest", "run/checkpoints/step-4/manifest.json", b'{"format": [', b"0,", "checkpoint inspect run/checkpoints/step-4"),
         ("plan --model", "m.json", b'{"layers": [', b"1,", "plan --model m.json --ranks 2"),
         ("plan --cases", "cases.jsonl", b"", b"\n", "plan --cases cases.jsonl --format json"),
         ("report, metrics.jsonl", "run/metrics.jsonl", b"", b'{"event": "step", "step": 1, "loss": 1}\n', "report run"),
         ("report, trace.json", "run/trace.json", b'{"traceEvents": [', b"{},", "report run"),
         ("report, report.json", "run/report.json", b'{"a": [', b"[],", "report run"),
         ("evaluate, config.toml", "run/checkpoints/step-4/config.toml", b"", b"# a comment\n", "evaluate run/checkpoints/step-4 --data text.txt"),
         ("train --data, dataset.json", "set/dataset.json", b'{"source": "', b"text ", f"{RUN.replace('text.txt', 'set')}")]


class Faults:
    def __init__(self, program, home):
        self.program, self.home, self.template = program, home, os.path.join(home, "template")
        self.library, self.logs, self.wanted = os.path.join(home, "failing_calls.so"), {}, {}
        os.mkdir(self.template)
        write_text(self.template)
        for args in (f"train {TINY} --steps 4 --trace --out run", f"train {TINY} --steps 4 --ranks 2 --zero 3 --out sharded",
                      "checkpoint export run --out hub", "data text.txt --tokenizer char --out set"):
            if (said := self.run(args, self.template)[1:])[0] != 0:
                sys.exit(f"faults: {args}: {said}")

    def run(self, args, place, before=(), **more):
        """Runs a command with a time limit: (last line, status, standard error)"""
        env = {**os.environ, "TESSERA_CACHE": os.path.join(self.home, "cache"), "OMP_WAIT_POLICY": "passive", **more}
        try:
            done = subprocess.run([*before, self.program, *shlex.split(args)], cwd=place, env=env, stdin=subprocess.DEVNULL,
                                  capture_output=True, timeout=LIMIT)
        except subprocess.TimeoutExpired:
            return "", "a hang", ""
        said = done.stderr.decode(errors="backslashreplace")
        return (said.rstrip("\n").split("\n") or [""])[-1], done.returncode, said

    def fresh(self, name):
        place = os.path.join(self.home, name)
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(self.template, place, symlinks=True)
        return place

    def wrong_end(self, status, last, said):
        """Violations of the exit guarantees."""
        if not isinstance(status, int) or status < 0 or status not in (0, 2, 3, 4, 5, 6):
            return [f"ended by {status}"]
        if status != 0 and not last.startswith("tessera: "):
            return [f"status {status}, and the last line is {last[-200:]!r}"]
        return ["undocumented output: " + said[-200:]] if re.search("unexpected failure|terminate called|Sanitizer", said) else []

    @staticmethod
    def half_written(place):
        return [f"half-written: {os.path.relpath(f, place)}" for f in glob.glob(place + "/**/*.tmp-*", recursive=True)]

    # --- calls ---

    def prepare_calls(self):
        """Builds the library and runs each job once without faults, to record its calls and files."""
        compiled = subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", self.library, os.path.join(HERE, "failing_calls.c"), "-ldl"],
                                  capture_output=True, text=True)
        if compiled.returncode != 0:
            sys.exit("faults: failing_calls.c: " + compiled.stderr)
        for job, (args, made) in JOBS.items():
            place = self.fresh("undisturbed " + job)
            log = place + ".log"
            last, status, _ = self.run(args, place, LD_PRELOAD=self.library, FAULT_FOLDER=place, FAULT_LOG=log)
            if status != 0:
                sys.exit(f"faults: {args}: {last}")
            self.wanted[job] = os.path.join(place, made)
            self.logs[job] = [line.split()[0] for line in Path(log).read_text().splitlines()]

    def same(self, job, made):
        """Whether all deterministic files exist with the expected bytes."""
        fixed = ("model.safetensors", "optimizer.safetensors", "config.json", "tokenizer.json", ".bin")
        kept = [f for f in glob.glob(self.wanted[job] + "/**/*", recursive=True) if os.path.isfile(f) and f.endswith(fixed)]
        theirs = [os.path.join(made, os.path.relpath(f, self.wanted[job])) for f in kept]
        return bool(kept) and all(os.path.isfile(t) and filecmp.cmp(f, t, shallow=False) for f, t in zip(kept, theirs))

    def call(self, name, dice, job=None, at=0):
        """Violations of a job with the given or a random failing call."""
        job = job or dice.choice(list(JOBS))
        at = at or dice.randrange(len(self.logs[job])) + 1
        failed = self.logs[job][at - 1]
        cause = dice.choice(SAID_BY[KIND.get(failed, failed)])
        place, (args, made) = self.fresh(name), JOBS[job]
        number = str(0 if cause == "short" else getattr(errno, cause))
        last, status, said = self.run(args, place, LD_PRELOAD=self.library, FAULT_FOLDER=place, FAULT_AT=str(at), FAULT_ERRNO=number)
        seen, path = self.wrong_end(status, last, said), os.path.join(place, made)
        seen += self.half_written(place)
        if status == 0 and not self.same(job, path):
            seen.append("status 0, and what it made is not what it makes undisturbed")
        if cause in ("short", "EINTR") and status != 0:
            seen.append(f"stopped, but could have continued: {last}")
        if made == "made" and status != 0 and os.path.exists(path) and glob.glob(path + "/**/*.json", recursive=True) and not self.same(job, path):
            seen.append("a result exists that looks complete")
        if job.startswith("save"):  # the existing run continues to the same result
            last, status, said = self.run(args, place)
            seen += [f"afterwards: {w}" for w in self.wrong_end(status, last, said)]
            if status != 0 or not self.same(job, path):
                seen.append(f"the resumed run ends differently: {status} {last}")
        elif status != 0:  # the target does not exist, or is reported as existing
            again, status, said = self.run(args, place)
            seen += [f"afterwards: {w}" for w in self.wrong_end(status, again, said)]
            if status == 0 and not self.same(job, path):
                seen.append("done again, it is not what it is undisturbed")
        shutil.rmtree(place)
        return f"{job}: {failed} number {at} fails with {cause}; {last[-150:]}", seen

    # --- files ---

    def file(self, name, dice):
        place = self.fresh(name)
        pattern = dice.choice(list(READ))
        files = sorted(f for f in glob.glob(os.path.join(place, pattern)) if os.path.isfile(f) and os.path.getsize(f) > 0)
        file, args = dice.choice(files), dice.choice(READ[pattern])
        bytes_before = Path(file).read_bytes()
        how, altered = alter(dice, bytes_before)
        Path(file).write_bytes(altered)
        last, status, said = self.run(args, place)
        seen = self.wrong_end(status, last, said) + self.half_written(place)
        of_checkpoint = "/step-4/" in file and not file.endswith("manifest.json") and not args.startswith("checkpoint inspect")
        if of_checkpoint and altered != bytes_before and status == 0:
            seen.append("status 0 with a checkpoint that is not what was saved")
        where = os.path.relpath(file, place)
        shutil.rmtree(place)
        return f"{args.split(' --')[0]}: {where} of {len(bytes_before)} bytes: {how}; {status} {last[-150:]}", seen

    # --- files larger than memory ---

    def large(self, name, dice):
        """Violations with an input file that is larger than the memory limit, which is about 600 MB."""
        place = self.fresh(name)
        option, file, head, chunk, args = dice.choice(LARGE)
        size, bound = dice.randrange(100, 400) << 20, dice.randrange(500, 700) << 20
        os.makedirs(os.path.dirname(os.path.join(place, file)), exist_ok=True)
        with open(os.path.join(place, file), "wb") as f:
            f.write(head)
            block = chunk * max(1, (1 << 20) // len(chunk))
            for _ in range(size // len(block)):
                f.write(block)
        last, status, said = self.run(args, place, before=["prlimit", f"--as={bound}"])
        seen = self.wrong_end(status, last, said) + self.half_written(place)
        if status not in (2, 4):
            seen.append(f"status {status}, not that of bad input")
        if os.path.basename(file) not in last or not re.search("expected|manifest says", last):
            seen.append("the line does not name the file and the bound: " + last[-300:])
        shutil.rmtree(place)
        return f"{option}: {size >> 20} MiB under {bound >> 20} MiB; {status} {last[-200:]}", seen


def alter(dice, data):
    """(kind, bytes): small changes as made by disks, transfers and editors."""
    at, kind = dice.randrange(len(data)), dice.randrange(8)
    if kind == 0:
        return f"bit flipped at {at}", data[:at] + bytes([data[at] ^ 1 << dice.randrange(8)]) + data[at + 1:]
    if kind == 1:
        return f"cut at {at}", data[:at]
    if kind == 2:
        return f"a hole at {at}", data[:at] + bytes(min(512, len(data) - at)) + data[at + 512:]
    if kind == 3:
        length = dice.randrange(1, 64)
        return f"{length} bytes left out at {at}", data[:at] + data[at + length:]
    if kind == 4:
        return f"bytes put in at {at}", data[:at] + bytes(dice.randrange(256) for _ in range(dice.randrange(1, 16))) + data[at:]
    if kind == 5:
        return "twice", data + data
    digits = [m.start() for m in re.finditer(rb"[0-9]", data[:20000])]
    if kind == 6 and digits:
        at = dice.choice(digits)
        return f"another digit at {at}", data[:at] + str(dice.randrange(10)).encode() + data[at + 1:]
    other = dice.randrange(len(data))
    low, high = sorted((at, other))
    return f"{low} and {high} change places", data[:low] + data[high:high + 1] + data[low + 1:high] + data[low:low + 1] + data[high + 1:]


def main():
    o = options(__doc__, calls="24", files=120, large=6, misuse=20, stops=2, seed=int(os.environ.get("TESSERA_DRAW", "1")), only="", jobs=2)
    if not shutil.which("cc"):
        print("skipped: no C compiler (cc)")
        sys.exit(77)
    bad, ends = 0, Counter()
    with tempfile.TemporaryDirectory(prefix="tessera-faults-") as home, ThreadPoolExecutor(o.jobs) as pool:
        faults = Faults(os.path.realpath(o.program), home)
        faults.prepare_calls()
        every = [(job, at + 1) for job, log in faults.logs.items() for at in range(len(log))]
        count = len(every) if o.calls == "all" else int(o.calls)

        def one(what):
            kind, n = what.split(":")
            fail = {"file": faults.file, "large": faults.large}.get(kind, faults.call)
            return (what, *fail(what, random.Random(f"{o.seed} {what}"), *(every[int(n)] if kind == "every" else ())))

        cases = [f"{'every' if o.calls == 'all' else 'call'}:{n}" for n in range(count)] + [f"file:{n}" for n in range(o.files)]
        bounded = shutil.which("prlimit") and faults.run("--version", home, before=["prlimit", f"--as={500 << 20}"])[1] == 0
        cases += [f"large:{n}" for n in range(o.large if bounded else 0)]  # sanitizers need more address space
        for what, told, seen in pool.map(one, [o.only] if o.only else cases):
            ends[what.split(":")[0]] += 1
            bad += bool(seen)
            if seen or o.only:
                print(f"{what} {told}{''.join('; WRONG: ' + s for s in seen)}", flush=True)
    print(f"seed {o.seed}: {', '.join(f'{n} of {kind}' for kind, n in ends.items())}: {bad} ended otherwise than they must", flush=True)
    library = os.path.join(os.path.dirname(os.path.realpath(o.program)), "../tests/test_train")
    if o.misuse and not o.only and os.path.exists(library):
        env = {**os.environ, "TESSERA_MISUSE": str(o.misuse), "TESSERA_DRAW": str(o.seed)}
        bad += subprocess.run([library, "--gtest_filter=Misuse.Random*", "--gtest_brief=1"], env=env).returncode != 0
    if o.stops and not o.only and shutil.which("mpirun"):
        bad += subprocess.run([sys.executable, os.path.join(HERE, "stops.py"), o.program, "--runs", str(o.stops), "--seed", str(o.seed)]).returncode
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
