#!/usr/bin/env python3
"""Counts lines of code and files of each layer and of the tests, without comments, blank lines and `#include` lines.

count.py [DIRECTORY...]   the layers, the tests and three sums, or only these directories: name, lines, files
count.py --since REV      in addition the change of each count since a git revision
count.py --check TABLE    exit status 1 if a directory has more lines or files than the table allows

`product` is all layers. `core` consists of the layers CORE without the directories PERIPHERAL, at any depth, and without
CUDA sources; `peripheral` is the rest of the product. The directory of a file decides, not its name. Apart from
`#include` lines, counts agree with cloc within 0.5%; a docstring is a comment, and `#!` is code.
"""
import argparse
import io
import os
import re
import subprocess
import sys
import tarfile

LAYERS = ["app", "autograd", "base", "bench", "data", "hub", "lab", "models", "nn", "optim", "parallel", "planner", "python",
          "tensor", "train", "verify"]
CORE = {"tensor", "autograd", "nn", "optim", "models", "parallel", "train", "verify"}
PERIPHERAL = {"cuda", "cpu", "mpi", "tcp", "nccl", "async", "quantize", "experts", "adapters", "diagnosis", "defects"}
SUMS = ["core", "peripheral", "product"]
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

# For each kind of file, a pattern whose group 1 is a comment. Its first alternatives match texts in which no comment
# begins.
C = re.compile(r"""R"(?P<end>\w*)\(.*?\)(?P=end)"|"(?:\\.|[^"\\\n])*"|'(?:\\.[^'\n]*|[^'\\\n])'|(//[^\n]*|/\*.*?\*/)""", re.S)
SHELL = re.compile(r"^[ \t]*(#(?!!)[^\n]*)", re.M)
PYTHON = re.compile(r'^[ \t]*(#(?!!)[^\n]*|[rR]?""".*?""")', re.M | re.S)
HTML = re.compile(r"(<!--.*?-->)", re.S)
INCLUDE = re.compile(r"[ \t]*#[ \t]*include\b")  # not counted, so that no file has a reason to omit one
KINDS = {".h": C, ".cpp": C, ".cu": C, ".cuh": C, ".js": C, ".css": C, ".py": PYTHON, ".sh": SHELL, ".html": HTML}


def lines_of_code(path, text):
    """The lines of a text that contain more than a comment or an `#include`."""
    def without(match):
        return "\n" * match[0].count("\n") if match[match.re.groups] else match[0]
    pattern = KINDS[os.path.splitext(path)[1]]
    lines = pattern.sub(without, text).split("\n")
    return sum(1 for line in lines if line.strip() and not (pattern is C and INCLUDE.match(line)))


def in_checkout(tops):
    """Lines of code of each file below these directories, by path."""
    paths = [os.path.join(directory, name) for top in tops for directory, _, names in os.walk(os.path.join(ROOT, top))
             for name in names if os.path.splitext(name)[1] in KINDS]
    found = {}
    for path in paths:
        with open(path, encoding="utf-8", errors="replace") as file:
            found[os.path.relpath(path, ROOT)] = lines_of_code(path, file.read())
    return found


def in_revision(revision, tops):
    """Lines of code of each file of a revision, by path."""
    archive = subprocess.run(["git", "-C", ROOT, "archive", revision], stdout=subprocess.PIPE, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return {entry.name: lines_of_code(entry.name, tar.extractfile(entry).read().decode("utf-8", "replace"))
                for entry in tar if entry.isfile() and os.path.splitext(entry.name)[1] in KINDS
                and entry.name.split("/")[0] in tops}


def belongs(path, row):
    """Whether a file belongs to a row: a directory or one of the three sums."""
    top, *directories = path.split("/")[:-1]
    if row not in SUMS:
        return path.startswith(row + "/")
    if top not in LAYERS or row == "product":
        return top in LAYERS
    core = top in CORE and PERIPHERAL.isdisjoint(directories) and not path.endswith((".cu", ".cuh"))
    return core == (row == "core")


def total(found, row):
    """Lines and files of a row."""
    lines = [count for path, count in found.items() if belongs(path, row)]
    return sum(lines), len(lines)


def complaints(found, table):
    """One line for each count above its limit, and for each row that the table or the checkout lacks."""
    with open(table, encoding="utf-8") as file:
        rows = [line.split() for line in file if line.strip() and not line.startswith("#")]
    allowed = {row: (int(lines), int(files)) for row, lines, files in rows}
    for row in dict.fromkeys([*allowed, *LAYERS, "tests", "core", "product"]):
        counts = total(found, row)
        if row not in allowed and counts[1]:
            yield f"{row}: {counts[0]} lines of code in {counts[1]} files, and no row in the budget"
        elif row in allowed and not counts[1]:
            yield f"{row}: has a row in the budget, and no file"
        for number, limit, unit in zip(counts, allowed.get(row, counts), ("lines of code", "files")):
            if number > limit:
                yield f"{row}: {number} {unit}, allowed {limit}; a commit that raises a limit gives the reason"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", nargs="*", metavar="DIRECTORY")
    parser.add_argument("--since", metavar="REV")
    parser.add_argument("--check", metavar="TABLE")
    asked = parser.parse_args()
    rows = [directory.rstrip("/") for directory in asked.directories] or [*LAYERS, "tests", *SUMS]
    tops = dict.fromkeys([*LAYERS, "tests", *(row.split("/")[0] for row in rows)])
    found = in_checkout(tops)
    if asked.check:
        over = list(complaints(found, asked.check))
        sys.exit("\n".join(over) or 0)
    before = in_revision(asked.since, tops) if asked.since else None
    for row in rows:
        counts, old = total(found, row), total(before or {}, row)
        if asked.directories and not counts[1] and not old[1]:
            sys.exit(f"{row}: no code here")
        change = [f"{new - was:+7}" if before is not None else "" for new, was in zip(counts, old)]
        if counts[1] or old[1]:
            print(f"{row:18}{counts[0]:7}{change[0]}{counts[1]:6}{change[1]}")


if __name__ == "__main__":
    main()
