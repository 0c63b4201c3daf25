#!/usr/bin/env python3
"""Counts discouraged terms; the table next to this script gives each term's pattern, exceptions and upper bounds.

terms.py                      the counts of every term: documentation, comments, strings, identifiers
terms.py --since REV          in addition the counts of a revision
terms.py --check              exit status 1 if a count exceeds its bound; the lines are printed
terms.py --show TERM [N]      the lines that contain a term, or N of them chosen at random
"""
import argparse
import collections
import io
import os
import random
import re
import subprocess
import sys
import tarfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
TABLE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "terms")
PLACES = ["docs", "comments", "strings", "identifiers"]
CODE = (".h", ".cpp", ".cu", ".cuh")
# docs/style.md defines the terms, so it names them; fixtures hold other people's text.
SKIPPED = re.compile(r"docs/style\.md$|tests/(fuzz/corpus|.*fixtures)/|tests/conventions/terms|\.github/")
CPP = re.compile(r'(?P<comment>//[^\n]*|/\*.*?\*/)|(?P<string>R"(?P<end>\w*)\(.*?\)(?P=end)"|"(?:\\.|[^"\\\n])*")'
                 r"|'(?:\\.[^'\n]*|[^'\\\n])'|#include[^\n]*|(?P<identifier>[A-Za-z_]\w*)", re.S)
BLOCK = re.compile(r"^(```|~~~).*?^\1[^\n]*$|^( {4}|\t)[^\n]*$|`[^`\n]+`|\]\([^)]*\)", re.M | re.S)


def blank(match):
    return re.sub(r"[^\n]", " ", match[0])


def texts(path, text):
    """(place, line number, text) of everything in a file that people read."""
    if path.endswith(".md"):
        for number, line in enumerate(BLOCK.sub(blank, text).split("\n"), 1):
            yield "docs", number, line
    elif path.endswith(CODE):
        for match in CPP.finditer(text):
            if match.lastgroup:
                place = {"comment": "comments", "end": "strings", "string": "strings"}.get(match.lastgroup, "identifiers")
                number = text.count("\n", 0, match.start()) + 1
                for more, line in enumerate(match[0].split("\n")):
                    yield place, number + more, line


def read_table():
    for line in open(TABLE, encoding="utf-8"):
        if line.strip() and not line.startswith("#"):
            name, pattern, exceptions, bounds, _ = (field.strip() for field in line.split("  |  "))
            yield name, re.compile(pattern, re.I), exceptions and re.compile(exceptions, re.I), bounds


def files(revision):
    """(path, text) of each page and source of a revision, or of the checkout."""
    if revision:
        archive = subprocess.run(["git", "-C", ROOT, "archive", revision], stdout=subprocess.PIPE, check=True).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            for entry in tar:
                if entry.isfile() and entry.name.endswith(CODE + (".md",)) and not SKIPPED.search(entry.name):
                    yield entry.name, tar.extractfile(entry).read().decode("utf-8", "replace")
        return
    listed = subprocess.run(["git", "-C", ROOT, "ls-files"], stdout=subprocess.PIPE, check=True, text=True).stdout
    for path in listed.split("\n"):
        if path.endswith(CODE + (".md",)) and not SKIPPED.search(path) and os.path.exists(os.path.join(ROOT, path)):
            with open(os.path.join(ROOT, path), encoding="utf-8", errors="replace") as file:
                yield path, file.read()


def find(revision=None):
    """Uses of each term by place, as (path, line number, text)."""
    rows = list(read_table())
    found = {name: collections.defaultdict(list) for name, *_ in rows}
    for path, text in files(revision):
        for place, number, line in texts(path, text):
            for name, pattern, exceptions, bounds in rows:
                if bounds.split("/")[PLACES.index(place)] == "-":
                    continue
                for _ in pattern.finditer(exceptions.sub("", line) if exceptions else line):
                    found[name][place].append((path, number, line.strip()))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--since")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--show", nargs="+")
    options = parser.parse_args()
    now = find()
    if options.show:
        lines = [f"{path}:{number}: {text}" for place in PLACES for path, number, text in now[options.show[0]][place]]
        if len(options.show) > 1:
            lines = random.sample(lines, min(len(lines), int(options.show[1])))
        print("\n".join(lines))
        return
    before = find(options.since) if options.since else None
    failed = False
    for name, _, _, bounds in read_table():
        cells = []
        for place, bound in zip(PLACES, bounds.split("/")):
            count = len(now[name][place])
            cells.append("-" if bound == "-" else f"{len(before[name][place])} -> {count}" if before else str(count))
            if options.check and bound != "-" and count > int(bound):
                failed = True
                print(f"{name}: {count} uses in {place}, {bound} allowed; docs/style.md has the term to use instead")
                for path, number, text in now[name][place]:
                    print(f"  {path}:{number}: {text}")
        if not options.check:
            print(f"{name:18}" + "".join(f"{cell:>16}" for cell in cells))
    sys.exit(failed)


if __name__ == "__main__":
    main()
