"""Runs the program under its guard, reads its output, and shows a progress bar."""
from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

GRACE = 10.0  # seconds between an interrupt, after which a run saves its state, and killing the processes that remain


class Error(RuntimeError):
    """The program's error message. `status` is its exit status (table in docs/commands.md), `log` its full log."""

    def __init__(self, text: str, status: int = 2, log: str = "") -> None:
        super().__init__(text)
        self.status, self.log = status, log


class Finished(NamedTuple):
    """A completed command: its exit status, output and log."""

    status: int
    out: str
    log: str


class Progress:
    """A progress bar updated from the program's output: steps if it reports any, else elapsed seconds."""

    AT = re.compile(r"(?:^step |: step |^\[)(\d+)(?:/| of )(\d+)")
    STEP = re.compile(r'"event":"step","step":(\d+),"loss":([\d.]+)')
    ROW = re.compile(r'^ *"name": "(.*)"')

    def __init__(self, name: str, total: int | None = None) -> None:
        self.name, self.total, self.done = name, total, 0
        self.begin, self.postfix = time.monotonic(), ""
        self.next = self.begin + 0.5  # a short command shows no bar
        self.bar: Any = None

    def read(self, line: str) -> None:
        if at := self.AT.search(line):
            self.done, self.total = int(at[1]), int(at[2])
        elif step := self.STEP.search(line):
            self.done, self.postfix = int(step[1]), f"loss {float(step[2]):.3f}"
        elif row := self.ROW.match(line):
            self.postfix = row[1]

    def show(self) -> None:
        if (now := time.monotonic()) < self.next:
            return
        self.next = now + 0.2
        if self.bar is None:
            with warnings.catch_warnings():  # without ipywidgets it is a text bar
                warnings.simplefilter("ignore")
                from tqdm.auto import tqdm
            form = None if self.total else "{desc}: {elapsed}{postfix}"
            hidden = False if "ipykernel" in sys.modules else None  # None: shown on a terminal
            self.bar = tqdm(desc=self.name, total=self.total, leave=False, disable=hidden, bar_format=form)
            self.bar.start_t = time.time() - (now - self.begin)
        self.bar.total, self.bar.n = self.total, self.done
        self.bar.set_postfix_str(self.postfix, refresh=False)
        self.bar.refresh()

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def run(command: Sequence[str | Path], progress: Progress | None = None, ok: Sequence[int] = (0,)) -> Finished:
    """Runs a command to completion; a status that is not in `ok` raises the program's error message."""
    arguments = [sys.executable, "-I", "-S", str(Path(__file__).with_name("guard.py")), str(GRACE), *map(str, command)]
    with subprocess.Popen(arguments, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          start_new_session=True) as guard:
        try:
            with contextlib.closing(progress or Progress(Path(arguments[5]).name)) as bar:
                out, log = _read(guard, bar)
            status = guard.wait()
        except BaseException:
            _end(guard)
            raise
    if status not in ok:
        raise Error(_line(log) or f"{arguments[5]} exited with status {status} without an error message", status, log)
    return Finished(status, out, log)


def _read(guard: subprocess.Popen[bytes], bar: Progress) -> tuple[str, str]:
    """Reads both outputs to their ends; each line updates the bar."""
    assert guard.stdout and guard.stderr
    texts = {guard.stdout.fileno(): b"", guard.stderr.fileno(): b""}
    parsed = dict.fromkeys(texts, 0)
    with selectors.DefaultSelector() as selector:
        for number in texts:
            selector.register(number, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select(0.5):
                chunk = os.read(key.fd, 1 << 16)
                texts[key.fd] += chunk
                if not chunk:
                    selector.unregister(key.fd)
                end = texts[key.fd].rfind(b"\n") + 1
                for line in texts[key.fd][parsed[key.fd]:end].splitlines():
                    bar.read(line.decode(errors="replace"))
                parsed[key.fd] = max(end, parsed[key.fd])
            bar.show()
    out, log = (text.decode(errors="replace") for text in texts.values())
    return out, log


def _end(guard: subprocess.Popen[bytes]) -> None:
    """Interrupts the program and waits for it; a second interrupt does not wait."""
    for number in (signal.SIGINT, signal.SIGTERM):
        try:
            guard.send_signal(number)
            guard.communicate()
            return
        except KeyboardInterrupt:
            continue


def _line(log: str) -> str:
    """The last message that starts with the program's name; otherwise the last lines of the log."""
    begin = log.rfind("\ntessera: ") + 1
    return log[begin:].strip() if log[begin:].startswith("tessera: ") else "\n".join(log.strip().splitlines()[-3:])
