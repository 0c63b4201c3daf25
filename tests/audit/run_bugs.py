"""Public bugs of distributed training: `tessera audit` refutes each script and passes its corrected twin.

    run_bugs.py TESSERA [NAME ...] [--ci] [--keep DIRECTORY] [--table FILE]

Each script of bugs/ records a training step with and without `--fixed`, next to a one-process reference. The table has
one line per recording: script, bug or twin, verdict, first cause, and what the script states is wrong. The exit status
is 1 if a verdict is wrong and 77 (skipped) without torch; causes are printed for a reader to judge. This process
imports torch once, and each script runs in a fork of it: importing torch takes longer than a script.
"""
import argparse
import importlib
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import traceback
from pathlib import Path

BUGS = Path(__file__).resolve().parent / "bugs"
SHARED = {"common", "llama"}
EXPECTED = {"bug": "diverges", "twin": "correct"}
TIMEOUT = 120  # seconds of one script


def header(path):
    """The thread, the cause, the oldest torch and whether CI runs the script, from its first comment."""
    lines = []
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            break
        lines.append(line[1:].strip())
    text = " ".join(lines)
    found = re.match(r"(\S+): .* cause: (.*?)(?: torch: (\d+)\.(\d+))?( ci: yes)?$", text)
    if not found:
        raise SystemExit(f"{path}: expected 'THREAD: ... cause: ...' in the first comment")
    torch = (int(found[3] or 1), int(found[4] or 13))
    return {"thread": found[1], "cause": found[2], "torch": torch, "ci": bool(found[5])}


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


def forked(path, arguments, log):
    """Runs a script in a fork of this process; its output goes to the file `log`. Returns the error, or None.

    The fork leads a process group, so that the ranks that it has started end with it.
    """
    sys.stdout.flush()
    child = os.fork()
    if not child:
        status = 1
        try:
            os.setpgid(0, 0)
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            sys.argv = [str(path), *arguments]
            runpy.run_path(str(path), run_name="__main__")
            status = 0
        except SystemExit as end:
            status = int(end.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    limit, ended, status = time.monotonic() + TIMEOUT, 0, 0
    while not ended and time.monotonic() < limit:
        ended, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.0 if ended else 0.01)
    if not ended:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return f"{Path(log).read_text()}no end after {TIMEOUT} s"
    return (Path(log).read_text().strip() or f"status {status}") if status else None


def run(tessera, path, twin, directory):
    out = Path(directory) / path.stem / ("twin" if twin else "bug")
    if (out / "recording").is_dir() and (out / "reference").is_dir():
        return audit(tessera, out)
    out.mkdir(parents=True, exist_ok=True)
    if error := forked(path, [str(out), *["--fixed"] * twin], out / "log.txt"):
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
            yield {"script": name, "kind": kind, **answer, "thread": about["thread"], "expected": about["cause"]}


def markdown(table):
    lines = ["| script | thread | recording | verdict | first divergence | first cause | stated by the script |",
             "|---|---|---|---|---|---|---|"]
    for row in table:
        cause = f"`{row['cause']}` {row['text']}" if row["cause"] else row["text"]
        cells = [row["script"], row["thread"], row["kind"], row["verdict"], row.get("first", ""), cause,
                 row["expected"] if row["kind"] == "bug" else ""]
        lines.append("| " + " | ".join(" ".join(cell.split()).replace("|", "/") for cell in cells) + " |")
    return "\n".join([*lines, "", summary(table), ""])


def summary(table):
    parts = []
    for kind, verdict in EXPECTED.items():
        of_kind = [row for row in table if row["kind"] == kind]
        right = sum(row["verdict"] == verdict for row in of_kind)
        parts.append(f"{kind}s with verdict {verdict}: {right} of {len(of_kind)}")
    return "; ".join(parts)


def load_torch():
    """Imports what the scripts import, with one thread, because threads do not survive a fork; False without torch."""
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")
    sys.path[:0] = [str(BUGS), str(BUGS.parents[2] / "python")]
    try:
        importlib.import_module("torch")
    except ImportError:
        return False
    for name in sorted(SHARED):
        importlib.import_module(name)
    return True


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
    if not load_torch():
        print(f"skipped: {options.python} has no torch")
        return 77
    options.torch = tuple(map(int, sys.modules["torch"].__version__.split(".")[:2]))
    table = []
    with tempfile.TemporaryDirectory() as directory:
        for row in rows(options, options.keep or directory):
            table.append(row)
            print(f"{row['script']:32} {row['kind']:4} {row['verdict']:14} {row['cause']:28} {row.get('first', '')}")
            if row["kind"] == "bug" or row["verdict"] != EXPECTED["twin"]:
                print(textwrap.indent(textwrap.fill(f"answer: {row['text']}", 112), "    "))
                print(textwrap.indent(textwrap.fill(f"stated: {row['expected']}", 112), "    "), flush=True)
            if "output" in row:
                print(textwrap.indent(row["output"], "    "), flush=True)
    print(summary(table))
    if options.table:
        Path(options.table).write_text(markdown(table))
    return int(not table or any(row["verdict"] != EXPECTED[row["kind"]] for row in table))


if __name__ == "__main__":
    sys.exit(main())
