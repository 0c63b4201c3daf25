#!/usr/bin/env python3
"""Mutation testing: builds random mutants of the product code and records which test kills each (docs/mutants.md).

    tests/campaign/mutants.py --tree ../mutants --results build/mutants.jsonl --count 150 --seed 1

--tree is a dedicated git worktree; it is created if missing, and changes in it are lost. Each result is one line of JSON; a
stopped campaign resumes. `--only N` repeats one mutant and prints its diff. Tests run in a separate process namespace
(requires root), so mutants leave no processes.
"""
import argparse
import fcntl
import glob
import hashlib
import json
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

sys.dont_write_bytecode = True
from mutations import mask_noncode, mutations  # noqa: E402

LAYERS = ["base", "tensor", "autograd", "nn", "optim", "parallel", "models", "data", "train", "verify", "app", "bench"]
TESTS = ["base", "tensor", "autograd", "nn", "models", "data", "train", "hub", "fuzz", "parallel", "verify", "app"]
# Test binaries per layer, in the order of detection speed; app, which takes half of the time, only if others are insufficient.
SEEN_BY = {"tensor": "tensor autograd nn models parallel verify data train hub", "autograd": "autograd nn models parallel verify",
           "nn": "nn models parallel verify train hub", "optim": "nn parallel verify train", "parallel": "parallel verify train app",
           "models": "models hub parallel verify train app", "data": "data fuzz train app", "train": "train verify app",
           "verify": "verify app", "app": "app fuzz", "bench": "autograd app", "base": "base tensor data train hub app"}
# Code that this CPU or build cannot run.
UNREACHED = re.compile(r"(^|/)(cuda/|main/)|amx|cudnn|nccl|blaslt|mpi_")
MAX_OBJECTS = 40
SLOW = 4  # seconds
CONFIGURE = ["-G", "Ninja", "-DCMAKE_BUILD_TYPE=Mutants", "-DCMAKE_CXX_FLAGS_MUTANTS=-O1", "-DTESSERA_CUDA=OFF",
             "-DBUILD_SHARED_LIBS=ON", "-DCMAKE_LINK_DEPENDS_NO_SHARED=ON", "-DTESSERA_INSTALL=OFF"]



def command_output(command, **more):
    return subprocess.run(command, check=True, capture_output=True, text=True, **more).stdout


def used_by(root):
    """CPU seconds of a process and its children, and whether all of them are blocked.

    On a busy machine, a limit on wall-clock time would count as killed mutants that are only slow."""
    children, ticks, waits = {}, 0, True
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rsplit(")", 1)[1].split()
            children.setdefault(int(fields[1]), []).append((int(pid), sum(map(int, fields[11:15]))))
        except OSError:
            pass
    found = [(root, 0)]
    for pid, used in found:
        found += children.get(pid, [])
        ticks += used
        for path in glob.glob(f"/proc/{pid}/task/*/stat"):
            try:
                waits = waits and Path(path).read_text("utf-8", "replace").rsplit(")", 1)[1].split()[0] not in "RD"
            except OSError:
                pass
    return ticks / os.sysconf("SC_CLK_TCK"), waits


class Campaign:
    def __init__(self, tree, seed):
        self.tree, self.build, self.seed = tree, os.path.join(tree, "build/mutants"), seed
        if not os.path.exists(tree):
            command_output(["git", "worktree", "add", "--detach", tree, "HEAD"])
        if not os.path.isfile(os.path.join(tree, ".git")):
            sys.exit(f"mutants: {tree} is not a separate worktree; expected a directory created by `git worktree add`")
        self.lock = open(os.path.join(tree, ".git"), encoding="utf-8")  # for the lifetime of the process
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            sys.exit(f"mutants: another campaign is at work in {tree}")
        command_output(["git", "checkout", "-q", "--", "."], cwd=tree)
        if not os.path.exists(os.path.join(self.build, "build.ninja")):
            command_output(["cmake", "-S", tree, "-B", self.build, *CONFIGURE])
        self.targets = [f"test_{name}" for name in TESTS]
        if self.ninja(self.targets) != 0:
            sys.exit("mutants: the code as it is does not build")
        self.skipped = self.long_tests()
        self.read_objects()
        self.read_code()

    def ninja(self, targets):
        return subprocess.run(["ninja", "-j", "1", *targets], cwd=self.build, stdout=subprocess.DEVNULL).returncode

    def long_tests(self):
        script = Path(self.tree, ".ci/run").read_text("utf-8")
        return "".join(re.findall(r"^long_tests\+?=(\S+)$", script, re.M)).split(":")

    def read_objects(self):
        self.objects, current = {}, None
        for line in command_output(["ninja", "-t", "deps"], cwd=self.build).splitlines():
            if line.startswith("    "):
                path = os.path.relpath(os.path.join(self.build, line.strip()), self.tree)
                self.objects.setdefault(path, []).append(current)
            elif line:
                current = line.split(": #deps")[0]

    def read_code(self):
        files = command_output(["git", "ls-files", *LAYERS], cwd=self.tree).splitlines()
        files = [f for f in files if f.endswith((".cpp", ".h")) and not UNREACHED.search(f)]
        self.files = [f for f in files if 0 < len(self.objects.get(f, [])) <= MAX_OBJECTS]
        self.left_out = [f for f in files if f not in self.files]
        self.lines = []  # uniform over lines of code
        self.text, self.code = {}, {}
        for f in self.files:
            self.text[f] = Path(self.tree, f).read_text("utf-8")
            self.code[f], at = mask_noncode(self.text[f]), 0
            for number, line in enumerate(self.code[f].split("\n"), 1):
                if re.search(r"\w", line):
                    self.lines.append((f, number, at, at + len(line) + 1))
                at += len(line) + 1

    def candidates(self, n):
        """An endless sequence of candidates for the n-th mutant: (file, line, kind, begin, end, instead)."""
        dice = random.Random(f"{self.seed}:{n}")
        while True:
            f, number, begin, end = dice.choice(self.lines)
            found = mutations(self.text[f], self.code[f], begin, end)
            if found:
                kind = dice.choice(sorted(found))
                yield (f, number, kind, *dice.choice(found[kind]))

    def digest(self, objects):
        h = hashlib.sha256()
        for o in objects:
            h.update(Path(self.build, o).read_bytes())
        return h.digest()

    def run_test(self, name, chosen, limit):
        """(killing test, seconds); empty if the selected tests of a binary pass."""
        env = dict(os.environ, TESSERA_PLANS="4", OMP_WAIT_POLICY="passive")
        command = ("mount -t tmpfs none /tmp && mount -t tmpfs none /dev/shm && "
                   f"exec tests/test_{name} --gtest_fail_fast --gtest_filter='{chosen}'")
        start = time.time()
        with open(os.path.join(self.build, "mutant.log"), "w+", encoding="utf-8", errors="replace") as log:
            child = subprocess.Popen(["unshare", "-m", "-p", "-f", "--kill-child", "--mount-proc", "sh", "-c", command],
                                     cwd=self.build, env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
            cpu = idle = 0
            while child.poll() is None:
                cpu, waits = used_by(child.pid)
                idle += waits / 4
                if cpu > limit or idle > limit:
                    child.kill()
                time.sleep(0.25)
            status = "hang" if cpu > limit or idle > limit else child.returncode
            log.seek(0)
            said = log.read()
        took = time.time() - start
        if status == 0:
            return "", took
        begun = re.findall(r"^\[ RUN      \] (\S+)", said, re.M)
        test = (re.findall(r"^\[  FAILED  \] (\S+?),? ", said, re.M) or begun[-1:] or ["?"])[0]
        return test + ("" if status == 1 else f" (status {status})"), took

    def baseline(self):
        """Seconds of each binary, cached. Excludes tests that fail without a mutant or are slow."""
        kept, head = Path(self.build, "baseline.json"), command_output(["git", "rev-parse", "HEAD"], cwd=self.tree)
        if kept.exists():
            of, seconds, skipped = json.loads(kept.read_text("utf-8"))
            if of == head:
                self.seconds, self.skipped = seconds, skipped
                return
        self.seconds = {}
        for name in TESTS:
            while True:
                killer, took = self.run_test(name, "-" + ":".join(self.skipped), 1800)
                if not killer:
                    break
                print(f"left out, since it fails without a mutant: {killer}", flush=True)
                self.skipped.append(killer.split(" ")[0])
            log = Path(self.build, "mutant.log").read_text("utf-8", "replace")
            slow = [(test, int(ms) / 1000) for test, ms in re.findall(r"^\[       OK \] (\S+?),? .*\((\d+) ms\)$", log, re.M)
                    if int(ms) > 1000 * SLOW]
            self.skipped += [test for test, _ in slow]
            self.seconds[name] = took - sum(s for _, s in slow)
            print(f"{name}: {self.seconds[name]:.1f} s; left out, since slow: {' '.join(test for test, _ in slow)}", flush=True)
        kept.write_text(json.dumps([head, self.seconds, self.skipped]), "utf-8")

    def judge(self, file):
        """The test that kills the current build, or "". A test that fails here but passes when it is rerun alone is excluded."""
        for name in SEEN_BY[file.split("/")[0]].split():
            while True:
                limit = 30 + 4 * self.seconds[name]
                killer, _ = self.run_test(name, "-" + ":".join(self.skipped), limit)
                test = killer.split(" ")[0]
                if not killer:
                    break
                if test == "?" or self.run_test(name, test, limit)[0]:
                    return f"{name}: {killer}"
                print(f"left out, since it fails now and then: {test}", flush=True)
                self.skipped.append(test)
        return ""

    def mutant(self, n, show=False):
        tried = {"no_build": 0, "same_code": 0}
        for file, number, kind, begin, end, instead in self.candidates(n):
            path, text = Path(self.tree, file), self.text[file]
            objects = self.objects[file]
            if self.ninja(objects) != 0:
                sys.exit("mutants: the code as it is no longer builds")
            before = self.digest(objects)
            path.write_text(text[:begin] + instead + text[end:], "utf-8")
            try:
                start = time.time()
                built = self.ninja(objects) == 0
                if built and self.digest(objects) == before:
                    tried["same_code"] += 1
                    continue
                if not built or self.ninja(self.targets) != 0:
                    tried["no_build"] += 1
                    continue
                if show:
                    print(command_output(["git", "diff", "-U1", "--", file], cwd=self.tree), flush=True)
                killer = self.judge(file)
            finally:
                path.write_text(text, "utf-8")
            return {"n": n, "file": file, "line": number, "kind": kind, "before": " ".join(text[begin:end].split())[:120],
                    "after": " ".join(instead.split())[:120], "killed_by": killer, "seconds": round(time.time() - start), **tried}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", required=True)
    parser.add_argument("--results", default="mutants.jsonl")
    parser.add_argument("--count", type=int, default=150)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int)
    parser.add_argument("--baseline", action="store_true", help="time the tests without a mutant, and end")
    parser.add_argument("--list", action="store_true", help="print the first candidate of each and build nothing more")
    o = parser.parse_args()
    campaign = Campaign(os.path.abspath(o.tree), o.seed)
    if o.list:
        for n in range(o.count):
            f, number, kind, begin, end, instead = next(campaign.candidates(n))
            print(f"{n} {f}:{number} {kind}: {' '.join(campaign.text[f][begin:end].split())} -> {' '.join(instead.split())}")
        print(f"{len(campaign.lines)} lines of {len(campaign.files)} files; left out: {' '.join(campaign.left_out)}")
        return
    campaign.baseline()
    if o.baseline:
        return
    if o.only is not None:
        print(json.dumps(campaign.mutant(o.only, show=True)))
        return
    lines = Path(o.results).read_text("utf-8").splitlines() if os.path.exists(o.results) else []
    done = {json.loads(line)["n"] for line in lines}
    for n in range(o.count):
        if n not in done:
            result = json.dumps(campaign.mutant(n))
            with open(o.results, "a", encoding="utf-8") as file:
                file.write(result + "\n")


if __name__ == "__main__":
    main()
