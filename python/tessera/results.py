"""Results of the program: objects with a notebook representation and pandas tables."""
from __future__ import annotations

import base64
import functools
import html
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import files
from .files import Plan

if TYPE_CHECKING:
    import pandas as pd

GREEN, RED, GREY = "#1a7f37", "#c62828", "#6e757f"


def _box(colour: str, title: str, body: str = "") -> str:
    return (f'<div style="border-left: 6px solid {colour}; padding: 4px 12px; margin: 4px 0">'
            f'<b style="color: {colour}">{html.escape(title)}</b>{body}</div>')


def _pre(text: str) -> str:
    return f'<pre style="margin: 4px 0">{html.escape(text.strip())}</pre>'


def _table(rows: list[dict[str, Any]]) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(rows)


def _differing(rows: list[dict[str, Any]]) -> list[str]:
    """The columns in which rows differ."""
    columns = dict.fromkeys(name for row in rows for name in row)
    return [name for name in columns if len({repr(row.get(name)) for row in rows}) > 1]


def _shown(table: pd.DataFrame, digits: int = 4) -> str:
    return str(table.to_html(float_format=lambda number: f"{number:.{digits}g}", na_rep=""))


class Text(str):
    """Printed output of the program."""

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return _pre(self)


class Record(dict[str, Any]):
    """A JSON record of the program; its keys are also attributes."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"no key {name!r}; available keys: {', '.join(self)}")

    def _repr_html_(self) -> str:
        return str(_table([self]).T.to_html(header=False))


class Texts(list[Record]):
    """Generated texts; each record has its `prompt`, `text`, and `ended`, the reason why generation ended."""

    def __init__(self, records: list[dict[str, Any]]) -> None:
        super().__init__(map(Record, records))

    def __str__(self) -> str:
        return "\n\n".join(record["prompt"] + record["text"] for record in self)

    def _repr_html_(self) -> str:
        return "".join(f"<p><b>{html.escape(record['prompt'])}</b>{html.escape(record['text'])}</p>" for record in self)


class Figure:
    """A figure in SVG format."""

    def __init__(self, svg: str) -> None:
        self.svg = svg

    @classmethod
    def read(cls, path: Any) -> Figure:
        return cls(Path(path).read_text(encoding="utf-8"))

    def save(self, path: Any) -> None:
        Path(path).write_text(self.svg, encoding="utf-8")

    def _repr_svg_(self) -> str:
        return self.svg

    def as_image(self) -> str:
        """The figure as an HTML element with isolated styles."""
        return f'<img src="data:image/svg+xml;base64,{base64.b64encode(self.svg.encode()).decode()}">'


class Page:
    """An HTML page; `path` is its file."""

    def __init__(self, path: Any) -> None:
        self.path = Path(path)

    def _repr_html_(self) -> str:
        text = html.escape(self.path.read_text(encoding="utf-8"))
        return f'<iframe srcdoc="{text}" style="width: 100%; height: 600px; border: 1px solid #ccc"></iframe>'


class Run:
    """A run: the directory that `train` wrote. tessera.Run("runs/NAME") opens an existing one."""

    def __init__(self, directory: Any, log: str = "") -> None:
        self.directory, self.log = Path(directory), log
        if not (self.directory / "metrics.jsonl").is_file():
            raise FileNotFoundError(f"{self.directory}: not a run directory: metrics.jsonl is missing")

    def __fspath__(self) -> str:
        return str(self.directory)

    @functools.cached_property
    def records(self) -> list[dict[str, Any]]:
        text = (self.directory / "metrics.jsonl").read_text(encoding="utf-8")
        return [json.loads(line) for line in text[:text.rfind("\n") + 1].splitlines()]  # a kill may truncate a line

    def _events(self, kind: str) -> pd.DataFrame:
        rows = {entry["step"]: {key: entry[key] for key in entry if key != "event"}
                for entry in self.records if entry["event"] == kind}
        return _table(list(rows.values())).set_index("step") if rows else _table([])

    @property
    def steps(self) -> pd.DataFrame:
        """One row per step: loss, learning rate, gradient norm, tokens per second."""
        return self._events("step")

    @property
    def evals(self) -> pd.DataFrame:
        """One row per validation."""
        return self._events("eval")

    @property
    def summary(self) -> Record:
        """The last record: losses, throughput, memory, bytes sent, the plan."""
        return Record(next((entry for entry in reversed(self.records) if entry["event"] == "summary"), {}))

    @property
    def plan(self) -> Plan:
        return Plan.of(self.summary.get("plan", {}))

    def weights(self, checkpoint: str = "latest", file: str = "model.safetensors") -> dict[str, Any]:
        """Arrays of a checkpoint by name. `checkpoint`: "latest", "best", or a directory in `checkpoints/`."""
        top = self.directory / "checkpoints"
        named = top / checkpoint
        return files.load((top / named.read_text().split()[0] if named.is_file() else named) / file)

    def dump(self, step: int) -> dict[str, Any]:
        """The outputs of all layers in this step and their gradients, as written by train(dump=step)."""
        return files.load(self.directory / f"dump_{step}.safetensors")

    def figure(self, kind: str = "loss") -> Figure:
        """A figure of the run: loss or, after train(trace=True), timeline, pipeline, memory or bytes."""
        from .commands import report

        drawn: Figure = report(self, figure=kind)
        return drawn

    def __repr__(self) -> str:
        last = self.summary
        return f"Run({str(self.directory)!r}: {last.get('steps', len(self.steps))} steps, loss {last.get('loss', '?')})"

    def _repr_html_(self) -> str:
        last, facts = self.summary, [f"{len(self.steps)} steps"]
        forms = {"loss": "loss {:.4f}", "val_loss": "validation loss {:.4f}", "tokens_per_s": "{:,.0f} tokens/s"}
        facts += [form.format(last[name]) for name, form in forms.items() if last.get(name) is not None]
        return f"<p><b>{html.escape(str(self.directory))}</b>: {', '.join(facts)}</p>{self.figure().as_image()}"


class Proof:
    """The result of `verify`. True if the plan trains like one rank; otherwise `why` is the first violated bound."""

    def __init__(self, data: dict[str, Any], log: str = "") -> None:
        self.data, self.log = data, data.get("text", "") + log
        self.passed = bool(data["passed"])

    def __bool__(self) -> bool:
        return self.passed

    @property
    def plan(self) -> Plan:
        return Plan.of(self.data.get("plan", {}))

    @property
    def losses(self) -> Any:
        """The loss of each step, as an array."""
        import numpy as np

        return np.array(self.data.get("losses", []))

    @property
    def bytes(self) -> pd.DataFrame:
        """One row per axis and operation: calls, bytes sent, expected bytes."""
        axes = self.data.get("bytes", {})
        return _table([{"axis": axis, "operation": name} | axes[axis][name] for axis in axes for name in axes[axis]])

    @property
    def memory(self) -> pd.DataFrame:
        """One row per category and rank: measured and expected bytes."""
        return _table([{"category": name, "rank": rank, "measured": number, "expected": both["expected"][rank]}
                       for name, both in self.data.get("memory", {}).items()
                       for rank, number in enumerate(both["measured"])])

    @property
    def broken(self) -> pd.DataFrame:
        """One row per violated bound."""
        return _table(self.data.get("broken", []))

    @property
    def why(self) -> str:
        """The program's message about the first violated bound; empty if the proof passed."""
        if self.passed:
            return ""
        messages = self.data.get("failures") or self.log.strip().splitlines()[-1:] or ["a bound is violated"]
        return str(messages[0])

    def __repr__(self) -> str:
        if not self.data.get("steps"):
            return self.log if self.log else f"Proof(passed={self.passed})"
        equal = "bitwise identical" if self.data.get("bitwise") else "equal up to rounding"
        return f"the plan trains like one rank: {self.data['steps']} steps, {equal}" if self else f"failed: {self.why}"

    def _repr_html_(self) -> str:
        if not self.data.get("steps"):
            return _box(GREEN if self else RED, "passed" if self else "failed", _pre(self.log))
        if self:
            return _box(GREEN, repr(self))
        rows = self.broken.reindex(columns=["bound", "step", "tensor", "found", "expected", "relative"]).head(8)
        causes = "".join(_pre(f"{entry['text']}\n{entry['evidence']}") for entry in self.data.get("diagnosis", [])[:3])
        return _box(RED, repr(self), causes + _shown(rows.dropna(axis=1, how="all"), 9))


class Audit:
    """The result of `audit`. True if no tensor diverges from the reference; `verdict` may also be "undecided".

    `first` is the first divergence, or None; `figure` shows all tensors, and `page` is the HTML page of the audit.
    """

    def __init__(self, data: dict[str, Any], page: Page, figure: Figure) -> None:
        self.data, self.page, self.figure = data, page, figure
        self.verdict = str(data["verdict"])
        self.first = Record(data["first"]) if data["first"] else None
        self.notes = [str(note) for note in data["notes"]]

    def __bool__(self) -> bool:
        return self.verdict == "correct"

    @property
    def tensors(self) -> pd.DataFrame:
        """One row per tensor, in causal order: error (fraction of its norm), tolerance, factor, whether it is wrong."""
        return _table(self.data["tensors"])

    @property
    def wrong(self) -> pd.DataFrame:
        """The tensors that differ from the reference. The first one is the divergence, the others its consequences."""
        table = self.tensors
        return table[table.wrong] if len(table) else table

    @property
    def causes(self) -> list[Record]:
        """Likely causes, the most likely first: `cause` (a key), `text` and `evidence`."""
        return [Record(entry) for entry in self.data["causes"]]

    @property
    def why(self) -> str:
        """The first divergence and its likely cause in one line; empty if there is no divergence."""
        where = self.first.where if self.first else ""
        return ": ".join(filter(None, [where, *(entry.text for entry in self.causes[:1])]))

    def __repr__(self) -> str:
        if self.verdict == "diverges":
            return f"diverges: {self.why}"
        compared = f"{len(self.data['tensors'])} tensors compared, tolerances {self.data['tolerance']}"
        return f"{self.verdict}: {'; '.join([compared, *self.notes])}"

    def _repr_html_(self) -> str:
        causes = "".join(_pre(f"{entry.text} ({entry.cause})\n{entry.evidence}") for entry in self.causes[:3])
        colour = {"correct": GREEN, "diverges": RED}.get(self.verdict, GREY)
        return _box(colour, repr(self), causes) + self.figure.as_image()


class Verdict(Text):
    """The lab's verdict on a solution; it is true if the exercise is solved."""

    solved: bool

    def __new__(cls, solved: bool, text: str) -> Verdict:
        made = super().__new__(cls, text)
        made.solved = solved
        return made

    def __bool__(self) -> bool:
        return self.solved

    def _repr_html_(self) -> str:
        return _box(GREEN if self else RED, "solved" if self else "not yet", _pre(self))


class Ranking:
    """Plans in order of predicted time. `best` is the recommended plan, `why` the reasons."""

    def __init__(self, records: list[dict[str, Any]]) -> None:
        self.records = records
        self.answer = next((entry for entry in records if entry.get("event") == "recommendation"), {})

    @property
    def plans(self) -> list[Plan]:
        return [Plan.of(entry["plan"]) for entry in self.records if entry.get("event") == "plan"]

    @property
    def best(self) -> Plan:
        return Plan.of(self.answer["plan"])

    @property
    def why(self) -> list[str]:
        return list(self.answer.get("why", []))

    @property
    def why_not(self) -> pd.DataFrame:
        """Alternative plans: their differences from the best one, and the reason against each."""
        rows = [entry["plan"] | {"because": entry["because"]} for entry in self.answer.get("why_not", [])]
        return _table(rows)[_differing([self.answer["plan"], *rows])] if rows else _table([])

    @property
    def table(self) -> pd.DataFrame:
        """One row per plan: layout, tokens per second, ms per step (predicted, maximum), GB of the peak rank."""
        return _table([entry["plan"] | {name: entry[name] for name in ("fits", "tokens_per_s", "mfu")}
                       | {"bubble": round(entry["bubble"], 6), "step_ms": entry["step_s"] * 1e3,
                          "step_ms_to": entry["step_s_range"][1] * 1e3, "peak_gb": entry["memory"]["peak"] / 1e9}
                       for entry in self.records if entry.get("event") == "plan"])

    def __repr__(self) -> str:
        return "\n".join([f"{len(self.table)} plans", *self.why])

    def _repr_html_(self) -> str:
        rows = "".join(f"<li>{html.escape(line)}</li>" for line in self.why)
        title = repr(self.best) if self.answer else "predictions"
        table = self.table.head(10)
        choices = [column for column in table if column not in ("tokens_per_s", "mfu", "bubble", "peak_gb")
                   and not column.startswith("step_ms")]
        same = set(choices) - set(_differing(table[choices].to_dict("records"))) if len(table) > 1 else set()
        return _box(GREEN, title, f"<ul>{rows}</ul>") + _shown(table.drop(columns=list(same)))


class Bench:
    """Results of `bench`. Bench.read("a.json") reads a file; `save` writes one."""

    HIDDEN = ("family_index", "per_family_instance_index", "run_name", "run_type", "repetitions", "repetition_index",
              "threads")

    def __init__(self, data: dict[str, Any]) -> None:
        self.context, self.data = Record(data["context"]), data

    @classmethod
    def read(cls, path: Any) -> Bench:
        return cls(json.loads(Path(path).read_text(encoding="utf-8")))

    def save(self, path: Any) -> Path:
        Path(path).write_text(json.dumps(self.data, indent=1), encoding="utf-8")
        return Path(path)

    def __fspath__(self) -> str:
        return files.written("bench.json", json.dumps(self.data))

    @property
    def table(self) -> pd.DataFrame:
        """One row per benchmark, by name: its time and counters. Individual repetitions are in `data`."""
        rows = [{key: value for key, value in row.items() if key not in self.HIDDEN and not isinstance(value, list)}
                | dict(zip(("quartile_1", "quartile_3"), row.get("quartiles", ()), strict=False))
                for row in self.data["benchmarks"]]
        return _table(rows).set_index("name") if rows else _table([])

    def __repr__(self) -> str:
        return str(self.table)

    def _repr_html_(self) -> str:
        return _shown(self.table)
