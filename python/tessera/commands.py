"""The commands of the program as functions with keyword arguments."""
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
    """Trains a model, and returns the run: its losses, weights and figures.

    Options are keyword arguments: `--lora-rank 8` is lora_rank=8, a flag is True, a list is joined by commas. The
    optional positional argument is a plan: tessera.train(tessera.Plan(dp=2, zero=1), steps=100).
    """
    ended = _run("train", (), _merged(plan, options) | {"format": "json"}, total=options.get("steps"))
    return results.Run(json.loads(ended.out.splitlines()[-1])["out"], ended.log)


def verify(plan: Plan | None = None, /, **options: Any) -> results.Proof:
    """Trains under a plan, compares the run with one rank, and returns the proof: passed, or the violated bounds.

    `schedule` may be a Schedule or lists of actions; `placements` may be Placements, a dict or lines.
    """
    form = {} if options.get("defect") == "list" else {"format": "json"}
    ended = _run("verify", (), _merged(plan, options) | form, ok=(0, 1))
    if not form:
        return results.Proof({"passed": ended.status == 0}, ended.out + (ended.log if ended.status else ""))
    if not ended.out.strip():
        raise Error(ended.log.strip(), ended.status, ended.log)
    return results.Proof(json.loads(ended.out), ended.log)


def audit(recording: Any, reference: Any = None, /, **options: Any) -> results.Audit:
    """Compares a recorded step of any program with a reference, and returns the verdict, first divergence and causes.

    `reference` is the Hugging Face directory of the model before the step, or another recording of the same step.
    Without it, only replicas, norm and update are checked.
    """
    paths = [recording] if reference is None else [recording, reference]
    for kind in ("html", "svg"):
        options[kind] = options.get(kind) or files.scratch() / f"audit-{len(os.listdir(files.scratch()))}.{kind}"
    ended = _run("audit", paths, options | {"format": "json"}, ok=(0, 1))
    if not ended.out.strip():
        raise Error(ended.log.strip(), ended.status, ended.log)
    return results.Audit(json.loads(ended.out), results.Page(options["html"]), results.Figure.read(options["svg"]))


def plan(plan: Plan | None = None, /, **options: Any) -> results.Ranking:
    """Predicts and ranks plans for a model and a machine. Fields that `plan` sets are fixed; others are searched."""
    return results.Ranking(_records(_run("plan", (), _merged(plan, options) | {"format": "json"}).out))


def bench(filter: str | None = None, /, **options: Any) -> results.Bench | results.Text:
    """Benchmarks operations, collectives, strategies and schedules whose names match the filter (a regular expression).

    Flags of Google Benchmark are also keyword arguments: benchmark_min_time=0.1, benchmark_repetitions=5.
    """
    if filter is not None:
        options["benchmark_filter"] = filter
    if options.get("table") or options.get("benchmark_list_tests"):
        return results.Text(_run("bench", (), options).out)
    return results.Bench(json.loads(_run("bench", (), options | {"benchmark_format": "json"}).out))


def report(*runs: Any, **options: Any) -> Any:
    """Plots runs, benchmarks, or the prediction for a plan: a Figure if `figure` is set, else an HTML Page.

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
    """Evaluates the loss of a model (a run, a checkpoint or a directory) on text or examples."""
    return results.Record(json.loads(_run("evaluate", (model,), options | {"format": "json"}).out))


def generate(model: Any, /, prompt: Any = None, **options: Any) -> results.Texts:
    """Generates text with a model (a run, a checkpoint or a directory), one text per prompt."""
    return results.Texts(_records(_run("generate", (model,), options | {"prompt": prompt, "format": "json"}).out))


def lab(*arguments: Any, **options: Any) -> results.Text | results.Verdict:
    """Puzzles and exercises: lab(), lab("start", "p1", "my-p1"), lab("check", "p1", "my-p1").

    A schedule or placements can be checked without a file: lab("check", "p1", Schedule(...)).
    """
    if arguments[:1] not in (("check",), ("grade",)) or options.get("all"):
        return results.Text(_run("lab", arguments, options, ok=(0, 1)).out)
    ended = _run("lab", arguments, options, ok=(0, 1))
    return results.Verdict(ended.status == 0, ended.out)


def checkpoint(*arguments: Any, **options: Any) -> results.Text:
    """Converts models: checkpoint("export", run, out="f"); other actions: import, reshard, quantize and inspect."""
    return results.Text(_run("checkpoint", arguments, options).out)


def data(*sources: Any, **options: Any) -> results.Text:
    """Creates a token dataset from texts."""
    return results.Text(_run("data", sources, options).out)


def _records(lines: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines.splitlines() if line.strip()]


def _merged(plan: Plan | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a plan merged with `options`, which take precedence. A plan may also be a keyword argument."""
    options = dict(options)
    plan = options.pop("plan", None) if plan is None else plan
    if not isinstance(plan, Plan | None):
        raise Error(f"tessera: the first argument: expected a Plan, got {plan!r}; pass options by keyword, such as "
                    "model='gpt-nano'")
    return _with_schedule((plan.options() if plan else {}) | options)


def _with_schedule(options: dict[str, Any]) -> dict[str, Any]:
    """A schedule made of lists also sets the number of ranks and micro-batches."""
    given = options.get("schedule")
    if isinstance(given, list | tuple) and given and not all(isinstance(entry, str | Schedule) for entry in given):
        given = options["schedule"] = Schedule(given)
    return given.options() | options if isinstance(given, Schedule) else options


def _run(command: str, arguments: Iterable[Any], options: Mapping[str, Any], ok: tuple[int, ...] = (0,),
         total: Any = None) -> Finished:
    path = program.find()
    known = program.command_options(command)
    line = [command, *(os.fspath(entry) if hasattr(entry, "__fspath__") else str(entry) for entry in arguments)]
    for name, value in options.items():
        line += _option(name, value, known.get(name.rstrip("_"), {}))
    return run([path, *line], Progress(command, total if isinstance(total, int) else None), ok)


def _option(name: str, value: Any, known: Mapping[str, Any]) -> list[str]:
    """The arguments for one option, as --name=value."""
    flag = "--" + (name if name.startswith("benchmark_") else name.rstrip("_").replace("_", "-"))
    if value is None or (value is False and known.get("default") is False):
        return []
    if name == "placements" and (not isinstance(value, str | os.PathLike) or "\n" in str(value)):
        value = Placements(value)
    if isinstance(value, list | tuple | range) and known.get("repeated"):
        return [f"{flag}={_text(entry)}" for entry in value]
    return [f"{flag}={_text(value)}"]


def _text(value: Any) -> str:
    """A value in the syntax of the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return ",".join(f"{_text(key)}={_text(entry)}" for key, entry in value.items())
    if isinstance(value, list | tuple | range):
        return ",".join(map(_text, value))
    return os.fspath(value) if hasattr(value, "__fspath__") else str(value)


TYPES = {"integer": int, "number": float, "flag": bool, "integers": list, "texts": list}


def documented(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options of a command, as the program describes them, to its function's help and signature."""
    options = program.command_options(function.__name__, build=False)
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
    """The help of an option, with its choices, range and default."""
    clauses = [entry["help"]]
    if "choices" in entry:
        clauses.append("one of " + ", ".join(entry["choices"]))
    elif "least" in entry or "most" in entry:
        ends = [f"{side} {entry[key]:,.15g}" for key, side in (("least", "from"), ("most", "to")) if key in entry]
        clauses.append(" ".join(ends))
    return "; ".join(clauses) + (f" [{entry['default']}]" if "default" in entry and clauses[0][-1] != "]" else "")
