#!/usr/bin/env python3
"""Runs random command lines of the program and checks its guarantees: a documented exit status, one clear line on failure, no
partial files, no remaining processes, JSON if requested.

    tests/campaign/command_lines.py PROGRAM [--count 40] [--seed $TESSERA_DRAW] [--only N] [--mpi] [--without CLASS,...]

Options are taken from --help, so new ones are included automatically. Violations are printed with the line number:
`--seed S --only N` repeats a line and prints its output. Every line runs in a separate directory for at most --limit seconds;
--without excludes classes.
"""
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

sys.dont_write_bytecode = True
from drawn_lines import CLASSES, Lines  # noqa: E402
from restarts import is_program, options  # noqa: E402


def run_line(lines, line, directory, mpi, limit=30):
    """(status, stdout, stderr, other observations) of one line in a separate directory."""
    args, changes, before, strike, config = line
    os.makedirs(os.path.join(directory, "tmp"))
    os.makedirs(os.path.join(directory, "home"))
    place = os.path.join(directory, "w")
    lines.copy_template(place)
    with open(os.path.join(place, "drawn.toml"), "w", errors="surrogateescape") as f:
        f.write(config)
    env = {k: v for k, v in {**lines.environment(place), **changes}.items() if v is not None}
    shell = "echo 1000 >/proc/self/oom_score_adj; " + before + '\nexec "$0" "$@"'  # the kernel kills this program first if memory is exhausted
    command = ["/bin/bash", "-c", shell, lines.program]
    if mpi:  # mpirun gets a normal environment; the ranks get the modified one
        theirs = re.compile("OMPI|PMI|SLURM|TMPDIR")
        odd = [w for k, v in changes.items() if v is not None and not theirs.match(k) for w in ("-x", f"{k}={v}")]
        env = {k: v for k, v in lines.environment(place).items() if v}
        split = args.index(":") if ":" in args else len(args)
        full = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "1" if ":" in args else "2", *odd, *command, *args[:split]]
        full += [":", "-n", "1", *odd, *command, *args[split + 1:]] if ":" in args else []
    else:
        full = command + args
    had = set(files(place))
    start = time.time()
    child = subprocess.Popen([os.fsencode(w) for w in full], cwd=place, env={os.fsencode(k): os.fsencode(v) for k, v in env.items()},
                             stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    seen = []
    if strike:
        try:
            out, err = child.communicate(timeout=strike[1])
        except subprocess.TimeoutExpired:
            target, end = child.pid, time.time() + limit
            while strike[0] == signal.SIGKILL and target == child.pid and child.poll() is None and time.time() < end:
                if os.path.exists(os.path.join(place, "new", "metrics.jsonl")):  # ranks that found each other
                    target = ([p for p in inside(place) if is_program(lines.program, p)] or [target])[-1]
                time.sleep(0.05)
            try:
                os.kill(target, strike[0])
            except ProcessLookupError:
                pass
    try:
        out, err = child.communicate(timeout=limit + (strike[1] if strike else 0))
    except subprocess.TimeoutExpired:
        seen.append(f"hangs: it has not ended after {limit} s")
        os.killpg(child.pid, signal.SIGKILL)
        out, err = child.communicate()
    end = time.time() + 10
    while (left := inside(place)) and time.time() < end:
        time.sleep(0.05)
    for pid in left:
        seen.append(f"process {pid} is left running")
        os.kill(pid, signal.SIGKILL)
    theirs = ("cache", *filter(None, (changes.get("TMPDIR") or "").split("/")[:1]))  # MPI creates a missing TMPDIR
    new = [f for f in files(place) if f not in had and not f.startswith(theirs)]
    seen += left_files(directory, place, new, changes, strike, child.returncode)
    return child.returncode, out, err, seen, time.time() - start


def files(place):
    return [os.path.relpath(os.path.join(at, name), place) for at, inner, names in os.walk(place) for name in inner + names]


def inside(place):
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.readlink(f"/proc/{pid}/cwd").startswith(place) and open(f"/proc/{pid}/cmdline", "rb").read():
                found.append(int(pid))
        except OSError:
            pass
    return found


def left_files(directory, place, new, changes, strike, status):
    seen = []
    if not (strike and strike[0] == signal.SIGKILL):
        seen += [f"half-written: {f}" for f in new if ".tmp-" in f]
    seen += [f"a checkpoint without a manifest: {f}" for f in new if re.search(r"checkpoints/step-\d+$", f)
             and not os.path.exists(os.path.join(place, f, "manifest.json"))]
    if status in (2, 4) and new:
        seen.append(f"status {status}, and yet it made {' '.join(sorted(new)[:3])}")
    outside = set(os.listdir(directory)) - {"w", "tmp", "home"}
    outside |= {f for f in os.listdir(os.path.join(directory, "tmp")) if not re.match("ompi|pmix|prte|vader", f)}
    if "TESSERA_CACHE" not in changes:
        outside |= set(os.listdir(os.path.join(directory, "home")))
    return seen + [f"created outside of its directory: {' '.join(sorted(outside))}"] * bool(outside)


def complaints(line, status, out, err, mpi):
    """The violated guarantees."""
    args, changes, before, strike, _ = line
    seen = []
    text = err.decode("utf-8", "backslashreplace")
    spoken = [x for x in text.split("\n") if x and not x.startswith(("/bin/bash: warning", "libgomp: "))]
    if strike and (not spoken or mpi and status < 0):  # killed before startup, or mpirun itself was killed
        return seen
    if status < 0:
        seen.append(f"died of signal {-status}")
    elif status > 6 and status not in (130, 143) and not (mpi and status in (137, 1)):
        seen.append(f"status {status}")
    if re.search(r"unexpected failure|terminate called|what\(\)|Assertion|libgomp: Thread|Sanitizer", text):
        seen.append("undocumented output")
    if re.search(r"[\x00-\x08\x0b-\x1f\x7f]", text):
        seen.append("control characters on standard error")
    if status == 0 and re.search(r"\b(error|fatal|failed)\b", text, re.I):
        seen.append("status 0, and an error on standard error")
    if status > 0 and "2>&-" not in before:
        promised = ("tessera: ", "[rank ") + ("stopped after step ", "timeline written") * bool(strike)
        if mpi or re.search("OMPI_|PMI_|SLURM_", " ".join(changes)):  # MPI output is mixed with ours
            spoken = [x for x in spoken if x.startswith(promised)]
        last = spoken[-1:] or [""]
        if not last[0].startswith(promised):
            seen.append(f"status {status}, and the last line is no line of ours: {last[0][:80]!r}")
        if len(last[0]) > 600:
            seen.append(f"its last line has {len(last[0])} characters")
    asked = re.findall(r"--format[= ](\S*)", " ".join(args))
    if asked[-1:] == ["json"] and args[0] in ("train", "verify") and not {"-h", "--help", "--version"} & set(args):
        for x in out.decode("utf-8", "backslashreplace").splitlines():
            try:
                json.loads(x, parse_constant=lambda name: json.loads(""))
            except ValueError:
                seen.append(f"a line that is no JSON: {x[:80]!r}")
                break
    return seen


def main():
    o = options(__doc__, count=40, seed=int(os.environ.get("TESSERA_DRAW", "1")), only=None, first=0, limit=30.0, mpi=False,
                jobs=2, without="")
    without = set(filter(None, o.without.split(",")))
    if without - set(CLASSES):
        sys.exit(f"command_lines: --without: expected of {', '.join(CLASSES)}; got {o.without}")
    statuses, wrong = Counter(), 0
    with tempfile.TemporaryDirectory(prefix="tessera-lines-") as home, ThreadPoolExecutor(o.jobs) as pool:
        lines = Lines(o.program, home, without)

        def one(n):
            line, directory = lines.rng(o.seed, n, o.mpi), os.path.join(home, str(n))
            status, out, err, seen, took = run_line(lines, line, directory, o.mpi, o.limit)
            shutil.rmtree(directory, onerror=lambda *_: None)
            return n, line, status, out, err, seen + complaints(line, status, out, err, o.mpi), took

        for n, line, status, out, err, seen, took in pool.map(one, [o.only] if o.only is not None else range(o.first, o.first + o.count)):
            args, changes, before, strike, config = line
            statuses[args[0] + " " + str(status)] += 1
            wrong += bool(seen)
            if seen or o.only is not None:
                print(f"{n}: {'; '.join(seen) or 'nothing is wrong'} (status {status}, {took:.1f} s)")
                shown = shlex.join(args).encode("ascii", "backslashreplace").decode()
                print("   ", " ".join(f"{k}={v}" for k, v in changes.items()), before, shown,
                      f"struck by {strike}" if strike else "", flush=True)
            if o.only is not None:
                print(config, out.decode(errors="replace"), err.decode(errors="backslashreplace"), sep="\n---\n")
            elif seen:
                print("    says:", err.decode(errors="backslashreplace")[-300:].encode("unicode_escape").decode())
    print(f"seed {o.seed}: {sum(statuses.values())} lines, {wrong} wrong; " + ", ".join(f"{k}: {v}" for k, v in sorted(statuses.items())))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
