"""Finds the program, builds it in a checkout, and queries its options."""
from __future__ import annotations

import functools
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from . import process


def find() -> Path:
    """The program: set by TESSERA, in a checkout (which is built), next to the Python executable, or on PATH."""
    if named := os.environ.get("TESSERA"):
        if Path(named).is_dir():
            return _built(Path(named).resolve())
        if not Path(named).is_file():
            raise process.Error(f"TESSERA={named}: no such file or directory; build the program with "
                                "./tessera --version in a checkout")
        return Path(named).resolve()
    if top := checkout():
        return _built(top)
    sibling = Path(sys.executable).with_name("tessera")
    if found := str(sibling) if sibling.is_file() else shutil.which("tessera"):
        return Path(found)
    raise process.Error("no program found: build one with ./tessera --version in a checkout, and set TESSERA=CHECKOUT")


def checkout() -> Path | None:
    """The checkout that contains the working directory or this file, or from which pip installed this package."""
    for start in (Path.cwd(), Path(__file__).resolve(), _origin()):
        for top in (start, *start.parents) if start else ():
            if (top / "tessera").is_file() and (top / "tessera.h").is_file():
                return top
    return None


def _origin() -> Path | None:
    from importlib import metadata
    from urllib.parse import unquote, urlsplit

    try:
        url = json.loads(metadata.distribution("tessera").read_text("direct_url.json") or "{}").get("url", "")
    except metadata.PackageNotFoundError:
        return None
    return Path(unquote(urlsplit(url).path)) if url.startswith("file:") else None


@functools.cache
def _built(top: Path) -> Path:
    """The program of a checkout, which the launcher brings up to date once per process."""
    process.run([top / "tessera", "--version"], process.Progress("building Tessera"))
    return top / "build/release/bin/tessera"


def describe(build: bool = True) -> dict[str, Any]:
    """All commands of the program and their options; empty if the program is not built and `build` is false."""
    path = find() if build else _there()
    if path is None:
        return {"commands": []}
    known = path.stat()
    answer: dict[str, Any] = _described(path, known.st_mtime_ns, known.st_size)
    return answer


@functools.cache
def _described(path: Path, _time: int, _size: int) -> Any:
    return json.loads(process.run([path, "describe", "--format", "json"]).out)


def _there() -> Path | None:
    """The program if it is already built."""
    top = Path(named) if (named := os.environ.get("TESSERA")) else checkout()
    if top and top.is_dir():
        built = top / "build/release/bin/tessera"
        return built if built.is_file() else None
    try:
        return find()
    except process.Error:
        return None


def command_options(command: str, build: bool = True) -> dict[str, dict[str, Any]]:
    """Options of a command and of its actions, by their Python names."""
    found = {}
    for entry in describe(build)["commands"]:
        if entry["command"] == command or entry["command"].startswith(command + " "):
            found.update({option["name"].replace("-", "_"): option for option in entry["options"]
                          if not option.get("place")})
    return found
