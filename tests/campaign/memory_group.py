#!/usr/bin/env python3
"""Runs commands inside a real memory cgroup of 300 MB with files that are larger than its limit. Each must end with its own
status and one line that names the file and the bound, instead of being killed (status 137).

    tests/campaign/memory_group.py PROGRAM

The group is a child of this process's own memory cgroup (version 1 or 2) and is removed afterwards. Exits with 77 (skipped)
and the reason if it cannot be created.
"""
import os
import re
import subprocess
import sys
import tempfile
import time

sys.dont_write_bytecode = True
from faults import LARGE, Faults  # noqa: E402

LIMIT = 300 << 20
OPTIONS = ["train --config", "train --tokenizer", "train --data, one row", "generate --prompts", "plan --model"]
# Moves the shell into the group before it becomes the program.
ENTER = 'echo $$ >"$0/cgroup.procs" && exec "$@"'


def skip(reason):
    print(f"skipped: {reason}")
    sys.exit(77)


def make_group():
    """The directory of a new group with the limit, and the name of its limit file."""
    lines = [line.rstrip("\n").split(":", 2) for line in open("/proc/self/cgroup", encoding="utf-8")]
    first = [path for _, kinds, path in lines if "memory" in kinds.split(",")]
    top, path, file = ("/sys/fs/cgroup/memory", first[0], "memory.limit_in_bytes") if first else \
        ("/sys/fs/cgroup", next((path for _, kinds, path in lines if not kinds), "/"), "memory.max")
    group = os.path.join(top + path, f"tessera-{os.getpid()}")
    try:
        os.mkdir(group)
    except OSError as e:
        skip(f"a memory cgroup cannot be created: {e}")
    try:
        with open(os.path.join(group, file), "w", encoding="utf-8") as out:
            out.write(str(LIMIT))
    except OSError as e:
        os.rmdir(group)
        skip(f"a memory cgroup cannot be limited: {e}")
    return group, file


def failures(program, home, group, file):
    faults, found, of_group = Faults(program, home), [], 0
    before = ["sh", "-c", ENTER, group]
    killed = subprocess.run([*before, sys.executable, "-c", f"b'x' * {2 * LIMIT}"], capture_output=True).returncode
    if killed != -9:
        found.append(f"an allocation of twice the limit ends with status {killed}; expected -9, killed by the group")
    for option in OPTIONS:
        _, name, head, chunk, args = next(large for large in LARGE if large[0] == option)
        place = faults.fresh("place")
        path = os.path.join(place, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as out:
            out.write(head)
            block = chunk * ((1 << 20) // len(chunk))
            while out.tell() <= LIMIT + (20 << 20):
                out.write(block)
        last, status, said = faults.run(args, place, before)
        print(f"{option}: {os.path.getsize(path) >> 20} MiB; status {status}: {last}")
        found += [f"{option}: {w}" for w in faults.wrong_end(status, last, said)]
        if status not in (2, 4) or said.count("\n") != 1:
            found.append(f"{option}: status {status}; expected 2 or 4 with one line, got {said[-300:]!r}")
        if os.path.basename(name) not in last or not re.search("expected at most [0-9]+", last):
            found.append(f"{option}: expected a line with {name} and the bound")
        of_group += f"{group}/{file} leaves" in last
    if of_group < len(OPTIONS) - 1:  # --tokenizer has a constant bound
        found.append(f"{of_group} bounds follow from the limit of the group; expected {len(OPTIONS) - 1}")
    return found


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    group, file = make_group()
    try:
        with tempfile.TemporaryDirectory() as home:
            found = failures(os.path.abspath(sys.argv[1]), home, group, file)
    finally:
        for _ in range(50):  # a killed process leaves its group a moment later
            try:
                os.rmdir(group)
                break
            except OSError:
                time.sleep(0.1)
    print("\n".join(found) or "every command names its file and the bound")
    sys.exit(1 if found else 0)


main()
