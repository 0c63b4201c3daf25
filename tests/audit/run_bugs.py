"""Public bugs of distributed training: `tessera audit` refutes each script, names its cause and passes its twin.

    run_bugs.py TESSERA [NAME ...] [--ci] [--keep DIRECTORY] [--table FILE]

Each script of bugs/ records a training step with and without `--fixed`, next to a one-process reference. Its first
comment states what is wrong (`cause:`) and which cause the audit must name first (`expected:`). The table has one line
per recording: script, bug or twin, verdict, first cause, and whether it is the expected one. The exit status is 1 if a
verdict or a cause is wrong, and 77 (skipped) without torch. This process imports torch once, and each script runs in a
fork of it: importing torch takes longer than a script.
"""
import argparse
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

from forks import Fork, import_torch

BUGS = Path(__file__).resolve().parent / "bugs"
SHARED = {"common", "llama"}
EXPECTED = {"bug": "diverges", "twin": "correct"}
TIMEOUT = 120  # seconds of one script


def header(path):
    """The thread, the cause, its expected names, the oldest torch and whether CI runs the script."""
    lines = []
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            break
        lines.append(line[1:].strip())
    text = " ".join(lines)
    found = re.match(r"(\S+): .* cause: (.*?) expected: (\S+(?: or \S+)*)(?: torch: (\d+)\.(\d+))?( ci: yes)?$", text)
    if not found:
        raise SystemExit(f"{path}: expected 'THREAD: ... cause: ... expected: ...' in the first comment")
    torch = (int(found[4] or 1), int(found[5] or 13))
    return {"thread": found[1], "stated": found[2], "expected": found[3].split(" or "), "torch": torch,
            "ci": bool(found[6])}


def audit(tessera, out):
    """The verdict of one recording and the text of its first cause."""
    command = [tessera, "audit", f"{out}/recording", f"{out}/reference", "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode not in (0, 1):
        text = (done.stderr or done.stdout).strip()
        return {"verdict": f"exit status {done.returncode}", "cause": "", "text": text}
    answer = json.loads(done.stdout)
    first, cause = answer.get("first") or {}, (answer.get("causes") or [{}])[0]
    where = f"{first.get('name')} ({first.get('kind')})" if first else ""
    return {"verdict": answer["verdict"], "cause": cause.get("cause", ""), "text": cause.get("text", ""),
            "first": where}


def run(tessera, path, twin, directory):
    out = Path(directory) / path.stem / ("twin" if twin else "bug")
    if (out / "recording").is_dir() and (out / "reference").is_dir():
        return audit(tessera, out)
    out.mkdir(parents=True, exist_ok=True)
    def script():
        sys.argv = [str(path), str(out), *["--fixed"] * twin]
        runpy.run_path(str(path), run_name="__main__")

    if error := Fork(script, out / "log.txt", TIMEOUT).error():
        return {"verdict": "script failed", "cause": "", "text": error.splitlines()[-1], "output": error}
    return audit(tessera, out)


def rows(options, directory):
    names = options.names or sorted(path.stem for path in BUGS.glob("*.py") if path.stem not in SHARED)
    for name in names:
        path = BUGS / f"{name}.py"
        about = header(path)
        if options.ci and not about["ci"]:
            continue
        if about["torch"] > options.torch and not (Path(directory) / name).is_dir():
            print(f"{name:32} skipped: expected torch {'.'.join(map(str, about['torch']))} or newer")
            continue
        for kind in ("bug", "twin"):
            answer = run(options.tessera, path, kind == "twin", directory)
            right = answer["verdict"] == EXPECTED[kind] and (kind == "twin" or answer["cause"] in about["expected"])
            yield {**about, "script": name, "kind": kind, **answer, "right": right}


def markdown(table):
    head = ("script", "thread", "recording", "verdict", "first divergence", "first cause", "right",
            "stated by the script")
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in table:
        cause = f"`{row['cause']}` {row['text']}" if row["cause"] else row["text"]
        cells = [row["script"], row["thread"], row["kind"], row["verdict"], row.get("first", ""), cause,
                 "yes" if row["right"] else "no", row["stated"] if row["kind"] == "bug" else ""]
        lines.append("| " + " | ".join(" ".join(cell.split()).replace("|", "/") for cell in cells) + " |")
    return "\n".join([*lines, "", summary(table), ""])


def summary(table):
    parts = []
    for kind, verdict in EXPECTED.items():
        of_kind = [row for row in table if row["kind"] == kind]
        right = sum(row["verdict"] == verdict for row in of_kind)
        parts.append(f"{kind}s with verdict {verdict}: {right} of {len(of_kind)}")
    bugs = [row for row in table if row["kind"] == "bug"]
    parts.append(f"expected first cause: {sum(row['right'] for row in bugs)} of {len(bugs)}")
    return "; ".join(parts)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tessera")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--ci", action="store_true", help="only the scripts marked `ci: yes`")
    parser.add_argument("--python", default=os.environ.get("TESSERA_PYTHON", sys.executable),
                        help="interpreter with torch")
    parser.add_argument("--keep", metavar="DIRECTORY",
                        help="directory of the recordings, which a later call audits again; default: a temporary one")
    parser.add_argument("--table", metavar="FILE", help="also write the table as Markdown")
    options = parser.parse_args()
    if Path(options.python).absolute() != Path(sys.executable).absolute():
        os.execv(options.python, [options.python, *sys.argv, "--python", options.python])
    sys.path[:0] = [str(BUGS), str(BUGS.parents[2] / "python")]
    if not import_torch(*sorted(SHARED)):
        print(f"skipped: {options.python} has no torch")
        return 77
    options.torch = tuple(map(int, sys.modules["torch"].__version__.split(".")[:2]))
    table = []
    with tempfile.TemporaryDirectory() as directory:
        for row in rows(options, options.keep or directory):
            table.append(row)
            print(f"{row['script']:32} {row['kind']:4} {row['verdict']:14} {row['cause']:28} {row.get('first', '')}")
            if not row["right"]:
                print(textwrap.indent(textwrap.fill(f"answer: {row['text']}", 112), "    "))
                print(f"    expected: {' or '.join(row['expected'])}")
                print(textwrap.indent(textwrap.fill(f"stated: {row['stated']}", 112), "    "), flush=True)
            if "output" in row:
                print(textwrap.indent(row["output"], "    "), flush=True)
    print(summary(table))
    if options.table:
        Path(options.table).write_text(markdown(table))
    return int(not table or not all(row["right"] for row in table))


if __name__ == "__main__":
    sys.exit(main())
