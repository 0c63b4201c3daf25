"""Inputs and outputs of the program: plans, schedule and placement files, tensors."""
from __future__ import annotations

import atexit
import functools
import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import process, program

if TYPE_CHECKING:
    import numpy as np

    from .results import Figure


@functools.cache
def scratch() -> Path:
    """A temporary directory for files that the program reads and writes, deleted when Python exits."""
    directory = Path(tempfile.mkdtemp(prefix="tessera-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


def written(name: str, text: str) -> str:
    """Writes this text to a temporary file and returns its path."""
    path = scratch() / (hashlib.sha256(text.encode()).hexdigest()[:12] + "-" + name)
    path.write_text(text, encoding="utf-8")
    return str(path)


@dataclass(frozen=True)
class Plan:
    """A plan: how the work is partitioned over ranks. Fields that are None use the program's defaults.

    `more` contains further options, by their Python names: Plan(dp=2, more={"bucket_mb": 1}).
    """

    ranks: int | None = None
    pp: int | None = None
    dp: int | None = None
    cp: int | None = None
    tp: int | None = None
    ep: int | None = None
    sp: bool | None = None
    zero: int | None = None
    shard_ranks: int | None = None
    dp_mode: str | None = None
    microbatches: int | None = None
    schedule: Any = None
    chunks: int | None = None
    cp_mode: str | None = None
    all_reduce: str | None = None
    recompute: str | None = None
    more: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if value is not None and entry.type == "int | None" and not hasattr(value, "__index__"):
                known = program.command_options("train", build=False).get(entry.name)
                within = f" in [{known['least']:.0f}, {known['most']:.0f}]" if known else ""
                raise process.Error(f"tessera: --{entry.name.replace('_', '-')}: expected an integer{within}, "
                                    f"got '{value}'")

    def options(self) -> dict[str, Any]:
        """The options of this plan."""
        own = {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name != "more"}
        return {name: value for name, value in (own | dict(self.more)).items() if value is not None}

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Plan:
        """Creates a plan from a JSON record; keys that are not options of `train` are ignored."""
        known = {key: record[key] for key in record.keys() & program.command_options("train").keys()}
        for key in ("backend", "threads_per_rank", *(("chunks",) if known.get("schedule") != "interleaved" else ())):
            known.pop(key, None)
        named = {entry.name: known.pop(entry.name) for entry in fields(cls) if entry.name in known}
        return cls(**named, more=known)

    def __repr__(self) -> str:
        return "Plan(" + ", ".join(f"{name}={value!r}" for name, value in self.options().items()) + ")"


class Schedule:
    """A pipeline schedule: the ordered actions of each rank, as [["0F0", "0B0"], ["1F0", "1B0"]] or as text.

    "1B2" is the backward pass of stage 1 for micro-batch 2. The program plots, simulates and checks it.
    """

    def __init__(self, ranks: str | Sequence[str | Sequence[str]]) -> None:
        lines = ranks.splitlines() if isinstance(ranks, str) else ranks
        lists = [line.split("#")[0].split() if isinstance(line, str) else list(line) for line in lines]
        self.ranks = [actions for actions in lists if actions]

    def __str__(self) -> str:
        return "\n".join(" ".join(actions) for actions in self.ranks) + "\n"

    def __repr__(self) -> str:
        return f"Schedule({self.ranks!r})"

    def __fspath__(self) -> str:
        return written("schedule.txt", str(self))

    def options(self) -> dict[str, int]:
        """The numbers of pipeline ranks and micro-batches, derived from the actions."""
        last = [int(action[-1]) for rank in self.ranks for action in re.findall(r"\d+[A-Z](\d+)", " ".join(rank))]
        return {"pp": len(self.ranks), "microbatches": max(last, default=0) + 1}

    @functools.cached_property
    def figure(self) -> Figure:
        """The program's plot; an invalid schedule raises the program's error message."""
        from .commands import report

        stages = [int(stage) for stage in re.findall(r"(\d+)[A-Z]\d+", str(self))]
        sizes = self.options()
        drawn: Figure = report(figure="pipeline", schedule=self, layers=max(stages, default=0) + 1,
                               batch=sizes["microbatches"], **sizes)
        return drawn

    @property
    def bubble(self) -> float:
        """The idle time of the ranks as a fraction of the total time, from the program's simulation."""
        found = re.search(r"bubble ([\d.]+)%", self.figure.svg)
        return float(found[1]) / 100 if found else 0.0

    def _repr_svg_(self) -> str:
        return self.figure.svg


class Placements:
    """The placement of each tensor of a module: {"mlp": "tp=2", "x": "I->R", ...}, lines, or text.

    A value may be a list with one placement per axis: {"mlp": "dp=2 tp=2", "x": ["S(0)", "I"], ...}.
    """

    def __init__(self, lines: str | Sequence[str] | Mapping[str, str | Sequence[str]]) -> None:
        if isinstance(lines, Mapping):
            lines = [f"{name:<12} {axes if isinstance(axes, str) else ' '.join(axes)}" for name, axes in lines.items()]
        self.text = lines if isinstance(lines, str) else "\n".join(lines) + "\n"

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Placements({self.text!r})"

    def __fspath__(self) -> str:
        return written("placements.txt", self.text)


DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1",
          "U16": "<u2", "U32": "<u4", "U64": "<u8", "BOOL": "?", "BF16": "<u2"}


def load(path: Any) -> dict[str, np.ndarray[Any, Any]]:
    """The tensors of a safetensors file, or of all such files of a directory, as numpy arrays by name.

    Arrays are memory-mapped. numpy has no bfloat16, so such tensors are converted to float32, which is exact.
    """
    import numpy as np

    path, tensors = Path(path), {}
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise FileNotFoundError(f"{path}: contains no safetensors file")
    for file in files:
        data = np.memmap(file, np.uint8, "r")
        begin = 8 + int(data[:8].view("<u8")[0])
        for name, entry in json.loads(data[8:begin].tobytes()).items():
            if name == "__metadata__":
                continue
            first, last = entry["data_offsets"]
            array = data[begin + first:begin + last].view(DTYPES[entry["dtype"]])
            if entry["dtype"] == "BF16":
                array = (array.astype("<u4") << 16).view("<f4")
            tensors[name] = array.reshape(entry["shape"])
    return tensors
