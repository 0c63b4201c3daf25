"""Runs the programs of a measurement: each for a limited time, and what it says is kept in a file of its own.

Every program runs under `timeout -k 5 LIMIT`, which ends it and all that it has started, also when this process is gone.
A Runner may have a time of its own: no program gets more of it than is left, and none begins when it is over.
"""
import json
import math
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time


class Failed(RuntimeError):
    """A run without a result. `word` says how it ended: FAILED, CRASHED, HUNG or REFUSED, or for want of
    time NOT RUN or NOT FINISHED."""

    def __init__(self, word, cause, out=""):
        super().__init__(re.sub(r"\s+", " ", cause).replace("|", "/").strip())
        self.word, self.out = word, out

    def bad(self):
        return not self.word.startswith("NOT ")

    def cell(self):
        return f"{self.word}: {self}"


class Runner:
    """Programs of one measurement. `seconds`: the time that all of them have (0: no end)."""

    running, stopped, lock = set(), False, threading.Lock()  # of the process, for end_with_children()

    def __init__(self, logs, seconds=0):
        self.logs, self.start, self.number = logs, time.monotonic(), 0
        self.seconds = seconds if seconds > 0 else math.inf
        os.makedirs(logs, exist_ok=True)

    def left(self):
        return self.seconds - (time.monotonic() - self.start)

    def log_of(self, name):
        with Runner.lock:
            self.number += 1
            return os.path.join(self.logs, f"{self.number:03d}-" + re.sub(r"[^A-Za-z0-9.]+", "_", name)[:80].strip("_"))

    def run(self, name, command, limit, cwd=None, env=None):
        """What the program wrote to standard output; both outputs are in the log. Raises Failed."""
        log = self.log_of(name)
        out, err = log + ".out", log + ".err"
        asked, limit = limit, int(min(limit, self.left()))
        if limit < 2:
            raise Failed("NOT RUN", "no time was left")
        begin = time.monotonic()
        with open(out, "wb") as to, open(err, "w+b") as errors:
            errors.write(f"$ {' '.join(command)}\n".encode())
            errors.flush()
            with Runner.lock:
                if Runner.stopped:
                    raise Failed("NOT RUN", "the measurement was ended")
                child = subprocess.Popen(["timeout", "-k", "5", str(limit), *command], cwd=cwd, stdin=subprocess.DEVNULL,
                                         stdout=to, stderr=errors, env={**os.environ, **(env or {})})
                Runner.running.add(child)
            try:
                status = child.wait()
                status = 128 - status if status < 0 else status  # `timeout` dies of the signal that its program died of
            finally:
                Runner.running.discard(child)
            took = time.monotonic() - begin
            errors.write(f"\n$ status {status} after {took:.1f} s\n".encode())
        with open(out, errors="replace") as f:
            text = f.read()
        if status in (124, 137) and took >= limit - 0.5:
            if limit < asked:
                raise Failed("NOT FINISHED", f"{limit} s were left", text)
            raise Failed("HUNG", f"ended after {limit} s; its messages are in {os.path.basename(err)}", text)
        if status != 0:
            word, how = ("CRASHED", f"signal {status - 128}") if status > 128 else ("FAILED", f"status {status}")
            raise Failed(word, f"{how}: {last_message(err, text)}", text)
        return text


class Served:
    """A program that stays, and answers a line of JSON with a line of JSON. Its first record comes when it is ready."""

    def __init__(self, runner, name, command, limit):
        self.name, self.err = name, runner.log_of(name) + ".err"
        limit = int(min(limit, runner.left()))
        if limit < 2:
            raise Failed("NOT RUN", "no time was left")
        whole = runner.seconds if runner.seconds < math.inf else 36000
        with Runner.lock, open(self.err, "wb") as errors:
            if Runner.stopped:
                raise Failed("NOT RUN", "the measurement was ended")
            self.child = subprocess.Popen(["timeout", "-k", "5", str(int(whole) + 1), *command], stdin=subprocess.PIPE,
                                          stdout=subprocess.PIPE, stderr=errors, bufsize=0)
            Runner.running.add(self.child)
        self.record = self.answer(limit)

    def ask(self, question, limit):
        try:
            self.child.stdin.write(json.dumps(question).encode() + b"\n")
        except OSError:
            pass  # it has ended, and answer() says how
        return self.answer(limit)

    def answer(self, limit):
        end = time.monotonic() + limit
        while (left := end - time.monotonic()) > 0 and select.select([self.child.stdout], [], [], left)[0]:
            line = self.child.stdout.readline()
            if not line:
                status = self.child.wait()
                self.end()
                raise Failed("CRASHED" if status < 0 or status > 128 else "FAILED", f"status {status}: {last_message(self.err, '')}")
            if records := json_lines(line.decode(errors="replace")):
                return records[-1]
        self.end()
        raise Failed("HUNG", f"no answer in {limit} s; its messages are in {os.path.basename(self.err)}")

    def end(self):
        if self.child.poll() is None:
            self.child.terminate()
            self.child.wait()
        Runner.running.discard(self.child)


def last_message(err, out):
    """The last line that a program wrote to standard error, or else to standard output."""
    with open(err, errors="replace") as f:
        lines = [line.strip() for line in f if line.strip() and not line.startswith("$ ")]
    lines = lines or [line.strip() for line in out.splitlines() if line.strip()]
    return lines[-1][:400] if lines else "no message"


def json_lines(text):
    """The records of a program that writes one a line; of one that was ended, those that are whole."""
    records = []
    for line in text.splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            pass
    return [r for r in records if isinstance(r, dict)]


def end_with_children():
    """A SIGTERM or SIGINT ends what was started too, and then this process."""

    def end(number, _):
        Runner.stopped = True
        for child in list(Runner.running):
            child.send_signal(signal.SIGTERM)  # `timeout` hands it on to all that its program has started
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
