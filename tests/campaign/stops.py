#!/usr/bin/env python3
"""Kills or stops one rank at a random time, with mpirun or TCP. All others must exit soon with an error line of the program, a
nonzero status and no remaining process. Or suspends all ranks (threads, TCP, mpirun) for longer than the timeout,
as a closed laptop or a frozen container does, or kills a rank during the rendezvous and starts it again: the run must end
with status 0 and write the same file as an undisturbed run.

    tests/campaign/stops.py PROGRAM [--runs 60] [--seed 1] [--only N] [--slack 20]

A rank may be killed or stopped at any time after its process has started. `bench` has no --timeout, so its ranks are only
killed. --slack: additional seconds for starting and for ending all ranks; increase it on a busy machine.
"""
import filecmp
import os
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.dont_write_bytecode = True
from restarts import TINY, is_program, options, ranks, write_text  # noqa: E402

TIMEOUT = 3  # timeout of a rank, seconds
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"]
SMALL = "--layers 2 --heads 2 --channels 32 --context 16 --batch 8 --threads-per-rank 1"
JOBS = {
    "train": f"train {TINY.replace('--steps 300', '--steps 1000000')} --timeout {TIMEOUT} --out run",
    "train pp": f"train {TINY.replace('--steps 300', '--steps 1000000')} --timeout {TIMEOUT} --pp 2 --microbatches 2 --no-save",
    "verify": f"verify {SMALL} --tp 2 --steps 300 --timeout {TIMEOUT}",
    "generate": f"generate first --tokens 1000000 --timeout {TIMEOUT}",
    "bench": "bench --benchmark_filter=strategy/.*/fp32/2",
}


def free_address():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{s.getsockname()[1]}"


def one(program, home, dice, slack):
    """(parameters, violations)"""
    job, tcp = dice.choice(list(JOBS)), dice.random() < 0.4
    tcp = tcp and job.split()[0] in ("train", "verify")
    number = signal.SIGKILL if job == "bench" or dice.random() < 0.4 else signal.SIGSTOP
    args, moment, victim = shlex.split(JOBS[job]), dice.random() ** 2 * 4, dice.randrange(2)
    described = f"{job} {'over TCP' if tcp else 'under mpirun'}: rank {victim} gets {number.name} after {moment:.2f} s"
    if os.path.exists(run := os.path.join(home, "run")):
        shutil.rmtree(run)
    env = {**os.environ, "OMP_WAIT_POLICY": "passive", "TESSERA_CACHE": os.path.join(home, "cache")}
    seen = []
    with open(os.path.join(home, "err"), "wb") as err:
        def start(command):
            return subprocess.Popen(command, cwd=home, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=err)
        if tcp:
            where = free_address()
            jobs = [start([program, *args, "--ranks", "2", "--rendezvous", where, "--rank", str(r)]) for r in range(2)]
        else:
            jobs = [start([*MPIRUN, program, *args])]
        begin = time.time()
        while len(found := [j.pid for j in jobs] if tcp else ranks(program, jobs[0].pid)) < 2 and time.time() < begin + slack:
            time.sleep(0.002)
        time.sleep(moment)
        os.kill(found[victim], number)
        other, begin = jobs[1 - victim] if tcp else jobs[0], time.time()
        while other.poll() is None and time.time() < begin + TIMEOUT + slack:
            time.sleep(0.02)
        took = time.time() - begin
        if other.returncode == 0:
            seen.append("status 0")
        elif other.returncode is None and (tcp or any(is_program(program, pid) for pid in found)):
            seen.append(f"has not ended after {TIMEOUT + slack} s")
        elif other.returncode is None:
            described += " (its ranks have ended, and mpirun does not)"
        if tcp:
            os.kill(found[victim], signal.SIGKILL)
        for j in jobs:
            j.kill()
            j.wait()
    time.sleep(0.2)
    for pid in found:
        if is_program(program, pid):
            seen.append(f"process {pid} is left")
            os.kill(pid, signal.SIGKILL)
    text = Path(home, "err").read_text(errors="replace")
    # mpirun kills the remaining ranks itself, possibly before they report the cause.
    by_mpirun = not tcp and number == signal.SIGKILL and "signal 9" in text
    if "tessera: " not in text and not by_mpirun:
        seen.append("nobody says why: " + text[-300:])
    return f"{described}; the others ended {took:.1f} s later", seen


SHORT = f"train {TINY.replace('--steps 300', '--steps 60')} --timeout {TIMEOUT} --ranks 2 --no-eval"


def disturbed(program, home, dice, slack):
    """(parameters, violations) of a disturbance that a run must survive"""
    kind = dice.choice(["suspended", "restarted"])
    how = dice.choice(["tcp", "mpirun", "threads"]) if kind == "suspended" else "tcp"
    args, env = shlex.split(SHORT), {**os.environ, "OMP_WAIT_POLICY": "passive", "TESSERA_CACHE": os.path.join(home, "cache")}
    if os.path.exists(run := os.path.join(home, "again")):
        shutil.rmtree(run)
    command, where = [program, *args, "--out", "again"], free_address()
    victim, moment, pause = dice.randrange(2), dice.random() ** 2 * 2, TIMEOUT + 1 + dice.random() * 2
    with open(os.path.join(home, "err"), "wb") as err:
        def start(args):
            return subprocess.Popen(args, cwd=home, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=err)
        def rank(r):
            return start([*command, "--rendezvous", where, "--rank", str(r)])
        if kind == "restarted":
            described = f"rank {victim} is killed {moment:.2f} s into the rendezvous and started again"
            first = rank(victim)
            time.sleep(moment)
            first.kill()
            first.wait()
            other = rank(1 - victim)  # this rank may have found the first process, or finds the second
            time.sleep(dice.random())
            jobs = [other, rank(victim)]
        else:
            described = f"all ranks ({how}) are suspended after {moment:.2f} s for {pause:.1f} s"
            jobs = [rank(0), rank(1)] if how == "tcp" else [start(command if how == "threads" else [*MPIRUN, *command])]
            found = [j.pid for j in jobs]
            while how == "mpirun" and len(found := ranks(program, jobs[0].pid)) < 2 and jobs[0].poll() is None:
                time.sleep(0.002)
            time.sleep(moment)
            for number in (signal.SIGSTOP, signal.SIGCONT):
                for pid in found:
                    if is_program(program, pid):
                        os.kill(pid, number)
                time.sleep(pause if number == signal.SIGSTOP else 0)
        seen = []
        for j in jobs:
            try:
                if (status := j.wait(timeout=60 + slack)) != 0:
                    seen.append(f"status {status}")
            except subprocess.TimeoutExpired:
                seen.append("has not ended")
                j.kill()
    made, wanted = (os.path.join(home, run, "checkpoints/step-60/model.safetensors") for run in ("again", "undisturbed"))
    if not seen and not filecmp.cmp(made, wanted, shallow=False):
        seen.append("other weights than those of an undisturbed run")
    if seen:
        seen.append(Path(home, "err").read_text(errors="replace")[-300:])
    return described, seen


def main():
    o = options(__doc__, runs=60, seed=1, only=None, slack=20.0)
    program, bad = os.path.realpath(o.program), 0
    with tempfile.TemporaryDirectory() as home:
        write_text(home)
        subprocess.run([program, "train", *shlex.split(TINY), "--steps", "2", "--quiet", "--out", "first"], cwd=home, check=True, capture_output=True)
        subprocess.run([program, *shlex.split(SHORT), "--quiet", "--out", "undisturbed"], cwd=home, check=True, capture_output=True)
        for i in range(o.runs) if o.only is None else [o.only]:
            dice = random.Random(f"{o.seed} {i}")
            described, seen = (disturbed if dice.random() < 0.5 else one)(program, home, dice, o.slack)
            print(f"{i}: {described}{''.join('; WRONG: ' + s for s in seen)}", flush=True)
            bad += bool(seen)
    print(f"{bad} of {o.runs if o.only is None else 1} runs ended otherwise than they must")
    return bad > 0


if __name__ == "__main__":
    sys.exit(main())
