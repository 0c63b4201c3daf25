#!/usr/bin/env python3
"""Runs the tests of the Python client with pytest: run.py PROGRAM FILE...

TESSERA_PYTHON selects the interpreter (default: this one). Exits with status 77 and a message if a package is missing.
"""
import importlib.util
import os
import sys

NEEDED = ["pytest", "numpy", "pandas", "tqdm"]


def main():
    if python := os.environ.pop("TESSERA_PYTHON", None):
        os.execv(python, [python, *sys.argv])
    files = sys.argv[2:]
    needed = NEEDED + (["nbclient", "ipykernel"] if any("notebooks" in name for name in files) else [])
    needed += ["torch"] if any("recorder" in name for name in files) else []
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        print(f"the Python client is not tested: {sys.executable} has no {', '.join(missing)}")
        sys.exit(77)
    here = os.path.dirname(os.path.abspath(__file__))
    package = os.path.join(here, "..", "..", "python")
    paths = [os.path.abspath(package), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ.update(TESSERA=os.path.abspath(sys.argv[1]), PYTHONPATH=os.pathsep.join(paths),
                      OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", OMP_NUM_THREADS="1")
    os.execv(sys.executable, [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", here,
                              "--durations=5", *(os.path.join(here, name) for name in files)])


if __name__ == "__main__":
    main()
