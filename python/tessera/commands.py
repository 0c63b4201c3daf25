"""The commands of the program as functions: options go in by their names in Python, and results come out."""
from __future__ import annotations

import inspect
import json
import keyword
import os
import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from . import files, program, results
from .files import Placements, Plan, Schedule
from .process import Error, Finished, Progress, run


def train(plan: Plan | None = None, /, **options: Any) -> results.Run:
    """Trains a model, and gives the run: its losses, its weights, its figures.

    An option is an argument: `--lora-rank 8` is lora_rank=8, a flag is True, a list is joined by commas. A plan may
    come first: tessera.train(tessera.Plan(dp=2, zero=1), steps=100).
    """
    ended = _run("train", (), _merged(plan, options) | {"format": "json"}, total=options.get("steps"))
    return results.Run(json.loads(ended.out.splitlines()[-1])["out"], ended.log)


def verify(plan: Plan | None = None, /, **options: Any) -> results.Proof:
    """Trains a plan beside one rank, and gives the proof: whether it holds, or which bound broke.

    `schedule` may be a Schedule or lists of actions, `placements` Placements, a dict or lines.
    """
    form = {} if options.get("defect") == "list" else {"format": "json"}
    ended = _run("verify", (), _merged(plan, options) | form, ok=(0, 1))
    if not form:
        return results.Proof({"passed": ended.status == 0}, ended.out + (ended.log if ended.status else ""))
    if not ended.out.strip():
        raise Error(ended.log.strip(), ended.status, ended.log)
    return results.Proof(json.loads(ended.out), ended.log)


def plan(plan: Plan | None = None, /, **options: Any) -> results.Ranking:
    """Ranks layouts for a model and a machine before anything runs. What a plan says is fixed; the rest is searched."""
    return results.Ranking(_records(_run("plan", (), _merged(plan, options) | {"format": "json"}).out))


def bench(filter: str | None = None, /, **options: Any) -> results.Bench | results.Text:
    """Times operations, collectives, strategies and schedules whose names have the filter in them (a pattern).

    Flags of Google Benchmark are arguments too: benchmark_min_time=0.1, benchmark_repetitions=5.
    """
    if filter is not None:
        options["benchmark_filter"] = filter
    if options.get("table") or options.get("benchmark_list_tests"):
        return results.Text(_run("bench", (), options).out)
    return results.Bench(json.loads(_run("bench", (), options | {"benchmark_format": "json"}).out))


def report(*runs: Any, **options: Any) -> Any:
    """Draws runs, benchmarks, or a plan that has not run: a Figure if `figure` says which, else a Page.

    One option may have several values: tessera.report(figure="memory", ranks=4, zero=[0, 1, 2, 3]).
    """
    if runs and isinstance(runs[0], Plan):
        runs, options = runs[1:], _merged(runs[0], options)
    options = _merged(None, options)
    if options.get("format") == "text":
        return results.Text(_run("report", runs, options).out)
    kind = "svg" if options.get("figure") else "html"
    path = options.setdefault("out", files.scratch() / f"{len(os.listdir(files.scratch()))}.{kind}")
    _run("report", runs, options | {"svg": True} if kind == "svg" else options)
    page = results.Page(path)
    return results.Figure(page.path.read_text(encoding="utf-8")) if kind == "svg" else page


def evaluate(model: Any, /, **options: Any) -> results.Record:
    """Says how well a model (a run, a checkpoint, a folder) predicts a text."""
    return results.Record(json.loads(_run("evaluate", (model,), options | {"format": "json"}).out))


def generate(model: Any, /, prompt: Any = None, **options: Any) -> results.Texts:
    """Writes texts with a model (a run, a checkpoint, a folder), one for each prompt."""
    return results.Texts(_records(_run("generate", (model,), options | {"prompt": prompt, "format": "json"}).out))


def lab(*words: Any, **options: Any) -> results.Text | results.Verdict:
    """Puzzles and exercises: lab(), lab("start", "p1", "my-p1"), lab("check", "p1", "my-p1").

    A puzzle of a schedule or of placements may be checked without a file: lab("check", "p1", Schedule(...)).
    """
    if words[:1] not in (("check",), ("grade",)) or options.get("all"):
        return results.Text(_run("lab", words, options, ok=(0, 1)).out)
    told = _run("lab", words, options, ok=(0, 1))
    return results.Verdict(told.status == 0, told.out)


def checkpoint(*words: Any, **options: Any) -> results.Text:
    """Models as folders of Hugging Face: checkpoint("export", run, out="f"), import, reshard, quantize, inspect."""
    return results.Text(_run("checkpoint", words, options).out)


def data(*sources: Any, **options: Any) -> results.Text:
    """Makes a token dataset from texts."""
    return results.Text(_run("data", sources, options).out)


def _records(lines: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines.splitlines() if line.strip()]


def _merged(plan: Plan | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """A plan's options and others, which win. The plan may also be named: plan=Plan(dp=2)."""
    options = dict(options)
    plan = options.pop("plan", None) if plan is None else plan
    if not isinstance(plan, Plan | None):
        raise Error(f"tessera: the first argument: expected a Plan, found {plan!r}; options have names, as in "
                    "model='gpt-nano'")
    return _with_schedule((plan.options() if plan else {}) | options)


def _with_schedule(options: dict[str, Any]) -> dict[str, Any]:
    """A schedule made of lists says how many ranks and micro-batches it is for."""
    said = options.get("schedule")
    if isinstance(said, list | tuple) and said and not all(isinstance(entry, str | Schedule) for entry in said):
        said = options["schedule"] = Schedule(said)
    return said.options() | options if isinstance(said, Schedule) else options


def _run(command: str, words: Iterable[Any], options: Mapping[str, Any], ok: tuple[int, ...] = (0,),
         total: Any = None) -> Finished:
    path = program.find()
    known = program.options_of(command)
    line = [command, *(os.fspath(word) if hasattr(word, "__fspath__") else str(word) for word in words)]
    for name, value in options.items():
        line += _option(name, value, known.get(name.rstrip("_"), {}))
    return run([path, *line], Progress(command, total if isinstance(total, int) else None), ok)


def _option(name: str, value: Any, known: Mapping[str, Any]) -> list[str]:
    """The words of one option, as --name=value."""
    flag = "--" + (name if name.startswith("benchmark_") else name.rstrip("_").replace("_", "-"))
    if value is None or (value is False and known.get("default") is False):
        return []
    if name == "placements" and (not isinstance(value, str | os.PathLike) or "\n" in str(value)):
        value = Placements(value)
    if isinstance(value, list | tuple | range) and known.get("repeated"):
        return [f"{flag}={_word(entry)}" for entry in value]
    return [f"{flag}={_word(value)}"]


def _word(value: Any) -> str:
    """One value as the program reads it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return ",".join(f"{_word(key)}={_word(entry)}" for key, entry in value.items())
    if isinstance(value, list | tuple | range):
        return ",".join(map(_word, value))
    return os.fspath(value) if hasattr(value, "__fspath__") else str(value)


TYPES = {"integer": int, "number": float, "flag": bool, "integers": list, "texts": list}


def documented(function: Callable[..., Any]) -> Callable[..., Any]:
    """Puts the options of a command, as the program describes them, into its function's help and signature."""
    options = program.options_of(function.__name__, build=False)
    if not options:
        return function
    own = inspect.signature(function)
    named = [inspect.Parameter(name + "_" * keyword.iskeyword(name), inspect.Parameter.KEYWORD_ONLY,
                               default=entry.get("default"), annotation=TYPES.get(entry["kind"], str))
             for name, entry in options.items() if name not in own.parameters and name != "format"]
    rest = [parameter for parameter in own.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
    function.__signature__ = own.replace(parameters=[*rest, *named])  # type: ignore[attr-defined]
    text, group = inspect.cleandoc(function.__doc__ or ""), None
    for name, entry in options.items():
        if entry.get("group") != group:
            group = entry.get("group")
            text += f"\n\n{group or 'Options'}:"
        text += "\n" + textwrap.fill(f"{name}: {_help(entry)}", 100, initial_indent="  ", subsequent_indent="      ")
    function.__doc__ = text
    return function


def _help(entry: Mapping[str, Any]) -> str:
    """The help of an option, with its choices, its range and its default."""
    says = [entry["help"]]
    if "choices" in entry:
        says.append("one of " + ", ".join(entry["choices"]))
    elif "least" in entry or "most" in entry:
        ends = [f"{word} {entry[key]:,.15g}" for key, word in (("least", "from"), ("most", "to")) if key in entry]
        says.append(" ".join(ends))
    return "; ".join(says) + (f" [{entry['default']}]" if "default" in entry and says[0][-1] != "]" else "")
