#!/usr/bin/env python3
"""Kills ranks of runs with --restarts repeatedly at random times. Each run must end bitwise identical to an undisturbed run,
report as many restarts as kills, and leave no partial files or processes.

    tests/campaign/restarts.py PROGRAM [--runs 40] [--seed 1] [--only N] [--mpi]

Thread ranks are killed as one process; with --mpi every second run uses mpirun (Open MPI), and one rank is killed. The time of
a kill is random: during startup, between two saves, or while a checkpoint is written.
"""
import argparse
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

TINY = ("--data text.txt --layers 2 --heads 2 --channels 32 --context 16 --batch 8 --steps 300 --warmup 5 --lr 0.01 "
        "--dropout 0.1 --threads-per-rank 1 --eval-every 60 --save-every 10")
PLANS = ["--ranks 1", "--ranks 2", "--ranks 4 --zero 1", "--ranks 2 --zero 3 --microbatches 2", "--pp 2 --microbatches 2",
         "--pp 2 --schedule zb-h1 --microbatches 4", "--tp 2", "--cp 2", "--ranks 2 --dp-mode ps-sync", "--pp 2 --dp 2 --zero 2",
         "--ranks 2 --zero 3 --dtype bf16", "--ranks 2 --all-reduce ring --optimizer sgd"]
MPIRUN = "mpirun --allow-run-as-root --oversubscribe -n {ranks}"
LIMIT = 300  # seconds for a run


def options(doc, **defaults):
    """Parses PROGRAM and options: a flag if the default is False, a number if it is None."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    for name, value in defaults.items():
        form = {"action": "store_true"} if value is False else {"type": int if value is None else type(value)}
        parser.add_argument("--" + name, default=value, **form)
    return parser.parse_args()


def write_text(directory):
    lines = (f"Line {i} of a text that says little, but {i * i % 97} of it.\n" for i in range(900))
    Path(directory, "text.txt").write_text("".join(lines))


def children(pid):
    try:
        return [int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()]
    except OSError:
        return []


def is_program(program, pid):
    try:
        return os.readlink(f"/proc/{pid}/exe") == program
    except OSError:  # it has exited, or is a zombie
        return False


def ranks(program, pid):
    """Descendant processes of the program without children."""
    return [rank for child in children(pid) for rank in ranks(program, child) or [child] * is_program(program, child)]


def saved(place):
    """(steps of the newest checkpoint, whether one is being written)"""
    try:
        names = os.listdir(os.path.join(place, "run", "checkpoints"))
    except OSError:
        return 0, False
    steps = [int(n[5:]) for n in names if re.fullmatch(r"step-\d+", n)]
    return max(steps, default=0), any(".tmp-" in n for n in names)


def final_state(place, run):
    step = Path(place, run, "checkpoints", "step-300")
    return (step / "model.safetensors").read_bytes() + (step / "optimizer.safetensors").read_bytes()


class Soak:
    def __init__(self, program, home):
        self.program, self.home, self.undisturbed = os.path.abspath(program), home, {}
        self.env = {**os.environ, "TESSERA_CACHE": os.path.join(home, "cache"), "OMP_WAIT_POLICY": "passive"}
        write_text(home)

    def train_undisturbed(self, plan):
        if plan not in self.undisturbed:
            name = f"uninterrupted-{len(self.undisturbed)}"
            subprocess.run([self.program, "train", *shlex.split(f"{TINY} {plan} --quiet --out {name}")], cwd=self.home, check=True,
                           capture_output=True, env=self.env)
            self.undisturbed[plan] = final_state(self.home, name)
        return self.undisturbed[plan]

    def one(self, dice, mpi):
        """(parameters, kills, violations)"""
        plan = dice.choice(PLANS)
        expected = self.train_undisturbed(plan)
        place = os.path.join(self.home, "place")
        shutil.rmtree(place, ignore_errors=True)
        os.mkdir(place)
        os.symlink("../text.txt", os.path.join(place, "text.txt"))
        args = shlex.split(f"{TINY} {plan} --out run --restarts 20") + (["--launch", MPIRUN] if mpi else [])
        with open(os.path.join(place, "err"), "wb") as err:
            launcher = subprocess.Popen([self.program, "train", *args], cwd=place, env=self.env, stdin=subprocess.DEVNULL,
                                        stdout=subprocess.DEVNULL, stderr=err)
        kills, begin = 0, time.time()
        for _ in range(dice.randint(1, 4)):
            where, fraction = dice.choice(["start", "work", "work", "save", "save"]), dice.random()
            until = saved(place)[0] + dice.randint(1, 8) * 10
            while launcher.poll() is None and not (found := ranks(self.program, launcher.pid)):
                time.sleep(0.005)
            if where == "start":
                time.sleep(fraction * (1.5 if mpi else 0.4))
            else:
                while launcher.poll() is None and saved(place)[0] < until:
                    time.sleep(0.002)
                time.sleep(fraction * 0.05)
                while where == "save" and launcher.poll() is None and not saved(place)[1]:
                    pass
            if launcher.poll() is not None:
                break
            found = ranks(self.program, launcher.pid)
            if not found:
                continue
            target = dice.choice(found)
            try:
                os.kill(target, signal.SIGKILL)
                kills += 1
            except ProcessLookupError:
                continue
            while os.path.exists(f"/proc/{target}") and launcher.poll() is None and time.time() - begin < LIMIT:
                time.sleep(0.005)
        seen = []
        try:
            launcher.wait(max(1, LIMIT - (time.time() - begin)))
        except subprocess.TimeoutExpired:
            launcher.kill()
            launcher.wait()
            seen.append(f"it has not ended after {LIMIT} s")
        text = Path(place, "err").read_text(errors="replace")
        if launcher.returncode != 0:
            seen.append(f"status {launcher.returncode}")
        elif final_state(place, "run") != expected:
            seen.append("other bits than the run that was left alone")
        told = len(re.findall(r"^tessera: start \d+ of 21 failed", text, re.M))
        if told > kills or (told < kills and not mpi):  # mpirun may already be ending when a second rank is killed
            seen.append(f"{kills} kills, and {told} failures were told")
        seen += [f"half-written: {n}" for at, _, names in os.walk(os.path.join(place, "run")) for n in names if ".tmp-" in n]
        if seen:
            print(text)
        return f"{'mpirun, ' if mpi else ''}{plan}", kills, seen


def main():
    o = options(__doc__, runs=40, seed=1, only=None, mpi=False)
    counts, begin = Counter(), time.time()
    with tempfile.TemporaryDirectory(prefix="tessera-restarts-") as home:
        soak = Soak(o.program, home)
        for number in range(o.runs) if o.only is None else [o.only]:
            what, kills, seen = soak.one(random.Random(f"{o.seed} {number}"), o.mpi and number % 2 == 1)
            counts.update(runs=1, kills=kills, undisturbed=kills == 0, wrong=bool(seen))
            print(f"{number}: {what}: {kills} kills: {'; '.join(seen) or 'the same bits'}", flush=True)
    print(f"{counts['runs']} runs, {counts['kills']} kills ({counts['undisturbed']} runs ended before one), {counts['wrong']} wrong; "
          f"{time.time() - begin:.0f} s")
    return min(1, counts["wrong"])


if __name__ == "__main__":
    sys.exit(main())
