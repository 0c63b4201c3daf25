"""Starts the program under its guard, reads what it says, and shows how far it is."""
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

GRACE = 10.0  # seconds between an interrupt, in which a run saves its state, and the end of what has not ended


class Error(RuntimeError):
    """The program's own line. `status` is its exit status (docs/commands.md has a table), `log` all that it said."""

    def __init__(self, text: str, status: int = 2, log: str = "") -> None:
        super().__init__(text)
        self.status, self.log = status, log


class Finished(NamedTuple):
    """A command that has ended: its exit status, its output, and its log."""

    status: int
    out: str
    log: str


class Progress:
    """A bar that follows the lines of a program: of steps where it counts some, else of seconds."""

    AT = re.compile(r"(?:^step |: step |^\[)(\d+)(?:/| of )(\d+)")
    STEP = re.compile(r'"event":"step","step":(\d+),"loss":([\d.]+)')
    ROW = re.compile(r'^ *"name": "(.*)"')

    def __init__(self, name: str, total: int | None = None) -> None:
        self.name, self.total, self.done = name, total, 0
        self.begin, self.words = time.monotonic(), ""
        self.next = self.begin + 0.5  # what ends at once shows no bar
        self.bar: Any = None

    def read(self, line: str) -> None:
        if at := self.AT.search(line):
            self.done, self.total = int(at[1]), int(at[2])
        elif step := self.STEP.search(line):
            self.done, self.words = int(step[1]), f"loss {float(step[2]):.3f}"
        elif row := self.ROW.match(line):
            self.words = row[1]

    def show(self) -> None:
        if (now := time.monotonic()) < self.next:
            return
        self.next = now + 0.2
        if self.bar is None:
            with warnings.catch_warnings():  # without ipywidgets it is a bar of letters
                warnings.simplefilter("ignore")
                from tqdm.auto import tqdm
            form = None if self.total else "{desc}: {elapsed}{postfix}"
            hidden = False if "ipykernel" in sys.modules else None  # None: shown on a terminal
            self.bar = tqdm(desc=self.name, total=self.total, leave=False, disable=hidden, bar_format=form)
            self.bar.start_t = time.time() - (now - self.begin)
        self.bar.total, self.bar.n = self.total, self.done
        self.bar.set_postfix_str(self.words, refresh=False)
        self.bar.refresh()

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def run(command: Sequence[str | Path], progress: Progress | None = None, ok: Sequence[int] = (0,)) -> Finished:
    """Runs a command to its end; a status that is not `ok` raises the program's line."""
    words = [sys.executable, "-I", "-S", str(Path(__file__).with_name("guard.py")), str(GRACE), *map(str, command)]
    with subprocess.Popen(words, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          start_new_session=True) as guard:
        try:
            with contextlib.closing(progress or Progress(Path(words[5]).name)) as bar:
                out, log = _read(guard, bar)
            status = guard.wait()
        except BaseException:
            _end(guard)
            raise
    if status not in ok:
        raise Error(_line(log) or f"{words[5]} ended with status {status} and said nothing", status, log)
    return Finished(status, out, log)


def _read(guard: subprocess.Popen[bytes], bar: Progress) -> tuple[str, str]:
    """Both outputs to their ends; lines move the bar as they come."""
    assert guard.stdout and guard.stderr
    texts = {guard.stdout.fileno(): b"", guard.stderr.fileno(): b""}
    seen = dict.fromkeys(texts, 0)
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
                for line in texts[key.fd][seen[key.fd]:end].splitlines():
                    bar.read(line.decode(errors="replace"))
                seen[key.fd] = max(end, seen[key.fd])
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
    """The program's last line that names itself, with what follows it; else the end of what it said."""
    begin = log.rfind("\ntessera: ") + 1
    return log[begin:].strip() if log[begin:].startswith("tessera: ") else "\n".join(log.strip().splitlines()[-3:])
