"""The Python client with the program itself, and with a stub that prints its arguments."""
import importlib.util
import inspect
import json
import os
import pydoc
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tessera
from tessera import process, program

PROGRAM = os.environ["TESSERA"]
PACKAGE = Path(tessera.__file__).resolve().parent
SMALL = {"model": "gpt-nano", "layers": 2, "heads": 2, "channels": 32, "context": 32}

REPEATS = """#!{python}
import json, sys
with open({starts!r}, "a") as file:
    file.write(sys.argv[1] + "\\n")
if sys.argv[1] == "describe":
    print(open({described!r}).read())
else:
    {body}
"""


def script(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.fixture(scope="session")
def described(tmp_path_factory):
    path = tmp_path_factory.mktemp("described") / "options.json"
    path.write_text(subprocess.run([PROGRAM, "describe", "--format", "json"], check=True, capture_output=True,
                                   encoding="utf-8").stdout, encoding="utf-8")
    return path


@pytest.fixture
def repeats(tmp_path, monkeypatch, described):
    """Creates a stub that describes itself like the program, and otherwise runs a line of Python."""
    def make(body="print(json.dumps(sys.argv[1:]))"):
        path = script(tmp_path / "a b µ" / "tessera", REPEATS.format(
            python=sys.executable, starts=str(tmp_path / "starts"), described=str(described), body=body))
        monkeypatch.setenv("TESSERA", str(path))
        return path
    return make


def python(code, *arguments, **variables):
    """Runs this code in a new Python process."""
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, encoding="utf-8",
                          env=os.environ | variables, check=False)


def test_options_become_arguments(repeats, tmp_path):
    repeats()
    printed = tessera.data("a text.txt", tmp_path / "ü b", tokenizer="bpe", out=Path("x y"), val_share=None)
    assert json.loads(printed) == ["data", "a text.txt", str(tmp_path / "ü b"), "--tokenizer=bpe", "--out=x y"]


@pytest.mark.parametrize(("options", "arguments"), [
    ({"lora_rank": 8}, ["--lora-rank=8"]),
    ({"no_save": True, "resume": False, "sp": False}, ["--no-save=true"]),
    ({"lora_targets": ["q_proj", "v_proj"]}, ["--lora-targets=q_proj,v_proj"]),
    ({"map": {"prompt": "question", "completion": "answer"}}, ["--map=prompt=question,completion=answer"]),
    ({"lr": 3e-4, "min_lr": "5%"}, ["--lr=0.0003", "--min-lr=5%"]),
    ({"plan": tessera.Plan(dp=2, zero=1, more={"bucket_mb": 1})}, ["--dp=2", "--zero=1", "--bucket-mb=1"]),
    ({"plan": tessera.Plan(dp=2, zero=1), "dp": 4}, ["--dp=4", "--zero=1"]),
])
def test_values_are_formatted(repeats, tmp_path, options, arguments):
    out = tmp_path / "run"
    out.mkdir()
    (out / "metrics.jsonl").write_text(json.dumps({"event": "summary"}) + "\n")
    repeats(f"print(json.dumps({{'out': {str(out)!r}}}))")
    plans = [options.pop("plan")] if "plan" in options else []
    observed = []
    original = process.run

    def run(command, *rest):
        observed.append([str(entry) for entry in command])
        return original(command, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tessera.commands.run", run)
        tessera.train(*plans, **options)
    assert observed[0][1:] == ["train", *arguments, "--format=json"]


def test_repeated_option_is_passed_for_each_value(repeats):
    repeats("print(json.dumps({'prompt': ' '.join(sys.argv[2:]), 'text': ''}))")
    assert tessera.generate("r", ["a, b", "--c"])[0].prompt == "r --prompt=a, b --prompt=--c --format=json"


def test_description_is_cached_per_program(repeats, tmp_path):
    repeats()
    for _ in range(3):
        tessera.describe()
    assert (tmp_path / "starts").read_text().split() == ["describe"]


def test_large_output_on_both_pipes_is_read(repeats):
    repeats("sys.stdout.write('o' * 3_000_000); sys.stderr.write('e' * 3_000_000)")
    assert len(tessera.lab()) == 3_000_000


def test_silent_failure_reports_exit_status(repeats):
    repeats("sys.exit(3)")
    with pytest.raises(tessera.Error, match="exited with status 3 without an error message") as caught:
        tessera.lab()
    assert caught.value.status == 3


def test_progress_is_parsed_from_output():
    bar = process.Progress("train", 10)
    bar.read('{"event":"step","step":3,"loss":4.25,"lr":0.1}')
    assert (bar.done, bar.total, bar.postfix) == (3, 10, "loss 4.250")
    bar.read("[12/340] Building CXX object")
    assert (bar.done, bar.total) == (12, 340)
    bar.read("comparing the plan with one rank: step 3 of 20")
    assert (bar.done, bar.total) == (3, 20)
    bar.read('      "name": "op/gelu/forward/fp32",')
    assert bar.postfix == "op/gelu/forward/fp32"


def test_progress_bar_shows_steps(repeats, monkeypatch, capsys):
    repeats("import time; print('step 1/2', file=sys.stderr, flush=True); time.sleep(1.2)")
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    assert tessera.lab() == ""
    assert "lab:  50%" in capsys.readouterr().err


@pytest.mark.parametrize("options", [{"layerz": 2}, {"layers": "x"}, {"dtype": "fp31"}, {"heads": 5}])
def test_invalid_option_raises_error_of_program(options):
    arguments = [f"--{name}={value}" for name, value in options.items()]
    expected = subprocess.run([PROGRAM, "train", *arguments], capture_output=True, encoding="utf-8", check=False)
    with pytest.raises(tessera.Error) as caught:
        tessera.train(**options)
    assert str(caught.value) == expected.stderr.strip()
    assert str(caught.value).startswith("tessera: ")
    assert caught.value.status == expected.returncode == 2


@pytest.mark.parametrize("make", [lambda: tessera.Plan(dp="two"), lambda: tessera.Plan(dp=2.5)])
def test_plan_of_wrong_type_raises_error_of_program(make):
    with pytest.raises(tessera.Error) as caught:
        make()
    value = str(caught.value).split("'")[1]
    expected = subprocess.run([PROGRAM, "train", f"--dp={value}"], capture_output=True, encoding="utf-8", check=False)
    assert str(caught.value) == expected.stderr.strip()


def test_first_argument_must_be_a_plan():
    for wrong in ("gpt-nano", {"dp": 2}, 2):
        with pytest.raises(tessera.Error, match=r"tessera: the first argument: expected a Plan, got .*gpt-nano"):
            tessera.train(wrong)
    assert tessera.verify(plan=tessera.Plan(dp=2), **SMALL, steps=1).plan.dp == 2


def test_missing_program_reports_build_command(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "tessera")
    code = "import os; os.chdir('/'); import tessera; tessera.train.__doc__; tessera.train()"
    result = python(code, PYTHONPATH=str(tmp_path), PATH="/nowhere", TESSERA="")
    assert result.stderr.strip().splitlines()[-1].endswith(
        "no program found: build one with ./tessera --version in a checkout, and set TESSERA=CHECKOUT")


def test_checkout_is_built_once_and_found_from_subdirectories(tmp_path, monkeypatch):
    top = tmp_path / "check out µ"
    (top / "tessera.h").parent.mkdir()
    (top / "tessera.h").touch()
    launcher = ("#!/bin/sh\necho built >>built; mkdir -p build/release/bin\nprintf '[1/2] a\\n' >&2\n"
                "printf '#!/bin/sh\\necho found\\n' >build/release/bin/tessera; chmod +x build/release/bin/tessera\n")
    script(top / "tessera", launcher.replace("\necho", '\ncd "$(dirname "$0")" || exit\necho', 1))
    (top / "docs" / "notebooks").mkdir(parents=True)
    monkeypatch.chdir(top / "docs" / "notebooks")
    monkeypatch.delenv("TESSERA")
    monkeypatch.setattr(program, "command_options", lambda command: {})
    assert program._there() is None
    assert tessera.lab() == "found\n"
    assert tessera.lab() == "found\n"
    assert (top / "built").read_text() == "built\n"


def test_failed_build_raises_error_of_launcher(tmp_path, monkeypatch):
    script(tmp_path / "tessera", "#!/bin/sh\necho 'tessera: missing packages: g++' >&2; exit 2\n")
    (tmp_path / "tessera.h").touch()
    monkeypatch.setenv("TESSERA", str(tmp_path))
    with pytest.raises(tessera.Error, match="tessera: missing packages"):
        program.find()


def test_import_is_fast_and_loads_no_pandas():
    code = ("import os, sys; t = sum(os.times()[:4]); import tessera; print(sum(os.times()[:4]) - t);"
            "print([name for name in ('pandas', 'numpy', 'tqdm') if name in sys.modules])")
    outputs = [python(code).stdout.splitlines() for _ in range(5)]
    assert min(float(lines[0]) for lines in outputs) < 0.3
    assert {lines[1] for lines in outputs} == {"[]"}


def test_help_lists_every_option():
    for command in ("train", "verify", "audit", "plan", "bench", "report", "evaluate", "generate", "lab", "checkpoint",
                    "data"):
        function = getattr(tessera, command)
        page, names = pydoc.render_doc(function), inspect.signature(function).parameters
        for name, entry in program.command_options(command).items():
            assert name in page, (command, name)
            assert " ".join(entry["help"].split())[:40] in " ".join(page.split()), (command, name)
            assert name in names or name == "format" or name + "_" in names, (command, name)
            assert not entry.get("group") or f"{entry['group']}:" in page, (command, entry["group"])
            assert entry.get("default") is None or f"[{entry['default']}]" in page, (command, name)
    assert "from 1 to 1,000,000" in " ".join((tessera.train.__doc__ or "").split())


def test_plan_fields_are_options():
    assert set(tessera.Plan.__dataclass_fields__) - {"more"} <= set(program.command_options("train"))


def test_run_provides_tables_arrays_and_figures(tmp_path):
    out = tmp_path / "a run, µ"
    run = tessera.train(tessera.Plan(dp=2), **SMALL, steps=4, out=out, trace=True)
    assert list(run.steps.index) == [1, 2, 3, 4]
    assert run.steps.loss.dtype == np.float64
    assert run.summary.loss == run.steps.loss.iloc[-1]
    assert list(run.evals.index) == [4]
    weights = run.weights()
    assert weights["tokens.weight"].shape == (81, 32)
    assert all(np.isfinite(array).all() for array in weights.values())
    for kind in ("loss", "timeline", "memory", "bytes"):
        assert run.figure(kind)._repr_svg_().startswith("<svg")
    assert "<img" in run._repr_html_()
    assert "<iframe" in tessera.report(run)._repr_html_()
    assert run.plan.dp == 2
    assert tessera.Run(out).summary == run.summary
    tessera.checkpoint("export", run, out=tmp_path / "folder")
    exported = tessera.load(tmp_path / "folder")
    assert (exported["transformer.wte.weight"] == weights["tokens.weight"]).all()
    assert len(tessera.generate(run, "It was", tokens=5)[0].text) == 5


def test_bf16_is_converted_exactly(tmp_path):
    header = json.dumps({"__metadata__": {"a": "b"}, "x": {"dtype": "BF16", "shape": [1, 2], "data_offsets": [0, 4]},
                         "y": {"dtype": "I64", "shape": [], "data_offsets": [4, 12]}}).encode()
    data = struct.pack("<Q", len(header)) + header + b"\x80\x3f\x40\xc0" + struct.pack("<q", -7)
    (tmp_path / "w.safetensors").write_bytes(data)
    loaded = tessera.load(tmp_path)
    assert loaded["x"].tolist() == [[1.0, -3.0]]
    assert loaded["y"].tolist() == -7


def test_verification_passes_or_reports_violated_bound():
    proof = tessera.verify(tessera.Plan(dp=2, zero=1), **SMALL, steps=2)
    assert proof and "bitwise identical" in repr(proof) and "#1a7f37" in proof._repr_html_()
    assert len(proof.losses) == 2
    assert (proof.bytes.sent == proof.bytes.expected).all() and (proof.memory.measured == proof.memory.expected).all()
    assert tessera.verify(proof.plan, **SMALL, steps=2).plan == proof.plan
    broken = tessera.verify(**SMALL, ranks=2, steps=2, defect="local-mean-loss")
    assert not broken and broken.why.startswith("step 1: the gradient norm is")
    assert broken.broken.bound.iloc[0] == "gradient norm"
    assert "#c62828" in broken._repr_html_() and "once too often" in broken._repr_html_()


RECORDINGS = Path(__file__).resolve().parents[1] / "audit" / "recordings"


def test_audit_returns_tensors_figure_and_page(tmp_path):
    audit = tessera.audit(RECORDINGS / "dtensor_tp2", RECORDINGS / "reference", html=tmp_path / "a.html")
    assert audit and audit.verdict == "correct" and audit.first is None and audit.why == ""
    assert "correct" in repr(audit) and "#1a7f37" in audit._repr_html_()
    assert set(audit.tensors.kind) >= {"parameter", "output", "output_grad", "grad", "updated"}
    assert (audit.tensors.distance <= audit.tensors.tolerance).all() and len(audit.wrong) == 0 and audit.causes == []
    assert audit.figure.svg.startswith("<svg") and audit.page.path == tmp_path / "a.html"
    alone = tessera.audit(RECORDINGS / "dtensor_tp2")
    assert not alone and alone.verdict == "undecided" and "no reference" in repr(alone)
    assert set(alone.tensors.kind) == {"updated"} and "#6e757f" in alone._repr_html_()


def scale(path, key, factor):
    """Multiplies one fp32 tensor of a safetensors file."""
    data = bytearray(path.read_bytes())
    begin = 8 + struct.unpack("<Q", data[:8])[0]
    first, last = json.loads(data[8:begin])[key]["data_offsets"]
    values = np.frombuffer(data, "<f4", (last - first) // 4, begin + first)
    values *= factor
    path.write_bytes(data)


def test_audit_returns_first_divergence_and_causes(tmp_path):
    shutil.copytree(RECORDINGS / "dtensor_tp2", tmp_path / "recording")
    for file in (tmp_path / "recording").iterdir():
        scale(file, "norm.weight.grad", 2)
    audit = tessera.audit(tmp_path / "recording", RECORDINGS / "reference")
    assert not audit and audit.verdict == "diverges"
    assert (audit.first.name, audit.first.kind) == ("norm.weight", "grad") and audit.first.factor == pytest.approx(2)
    assert audit.wrong.kind.iloc[0] == "grad" and audit.wrong.name.iloc[0] == "norm.weight"
    assert audit.why.startswith("grad of norm.weight, ranks 0, 1, ") and audit.why.endswith(audit.causes[0].text)
    assert repr(audit) == "diverges: " + audit.why
    assert "#c62828" in audit._repr_html_() and "data:image/svg+xml" in audit._repr_html_()
    assert "first divergence here" in audit.page.path.read_text(encoding="utf-8")
    with pytest.raises(tessera.Error, match="missing: no such file or directory; expected a recording") as caught:
        tessera.audit("missing", RECORDINGS / "reference")
    assert caught.value.status == 4


def test_schedule_in_lists_is_plotted_simulated_checked_and_run():
    lists = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
    schedule = tessera.Schedule(lists)
    assert str(schedule) == "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1\n" and tessera.Schedule(str(schedule)).ranks == lists
    assert schedule._repr_svg_().count("<svg") == 1
    assert schedule.bubble == pytest.approx(1 / 3, abs=1e-3)
    for form in (schedule, lists):
        proof = tessera.verify(**SMALL, schedule=form, batch=4, steps=2)
        assert proof and proof.plan.pp == 2 and proof.plan.microbatches == 2
    with pytest.raises(tessera.Error, match="deadlock"):
        _ = tessera.Schedule(["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"]).bubble
    assert not tessera.lab("check", "p1", schedule)


def test_placements_in_dict_are_checked():
    mlp = {"mlp": "tp=2", "x": ["I->R"], "up.weight": "S(0)", "up.bias": "S(0)", "h": "S(2)", "down.weight": "S(1)",
           "z": "P->I", "down.bias": "I", "y": "I"}
    proof = tessera.verify(placements=mlp)
    assert proof and "same results as one rank" in repr(proof)
    assert proof.data["sent"] == {"measured": 16384, "expected": 16384}
    assert tessera.verify(placements=str(tessera.Placements(mlp)))
    broken = tessera.verify(placements=mlp | {"x": "I"})
    assert not broken and broken.why in broken.data["failures"]
    assert "expected R" in broken.why and "Likely cause" in repr(broken)


def test_ranking_returns_valid_plans(tmp_path):
    ranking = tessera.plan(**SMALL, hardware="h100", ranks=2, batch=4, top=3)
    assert ranking.why and len(ranking.table) == len(ranking.plans) >= 3
    assert "because" in ranking.why_not and "<table" in ranking._repr_html_()
    assert tessera.verify(ranking.best, **SMALL, batch=4, steps=1)


def test_predicted_plans_provide_figures():
    figure = tessera.report(tessera.Plan(ranks=4), **SMALL, figure="memory", zero=[0, 1, 2, 3])
    assert figure.svg.startswith("<svg") and "data:image/svg+xml;base64," in figure.as_image()


def test_quartiles_are_returned_as_columns():
    row = {"name": "a", "real_time": 2.0, "median": 2.0, "quartiles": [1.5, 3.0], "rounds": [1, 2, 3]}
    table = tessera.Bench({"context": {}, "benchmarks": [row, {"name": "b", "real_time": 1.0}]}).table
    assert table.loc["a"].to_dict() == {"real_time": 2.0, "median": 2.0, "quartile_1": 1.5, "quartile_3": 3.0}


def test_bench_results_are_returned_as_table(tmp_path):
    assert tessera.bench("^op/gelu/forward/fp32$", benchmark_list_tests=True) == "op/gelu/forward/fp32\n"
    bench = tessera.bench("^op/gelu/forward/fp32$", benchmark_min_time=0.01)
    assert list(bench.table.index) == ["op/gelu/forward/fp32"] and bench.table.real_time.iloc[0] > 0
    again = tessera.Bench.read(bench.save(tmp_path / "a.json"))
    assert again.table.equals(bench.table) and "<table" in again._repr_html_()


def test_examples_on_page_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (PACKAGE.parents[1] / "docs" / "python.md").read_text(encoding="utf-8")
    blocks = [block.split("```")[0] for block in page.split("```python\n")[1:]]
    names = {}
    for block in blocks:
        exec(block, names)
    assert len(blocks) > 5 and names["figure"].svg == Path("zero.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize("command", [["ruff", "check", "--config", "pyproject.toml", ".", "../tests/python"], ["mypy"]])
def test_lint_passes(command):
    if importlib.util.find_spec(command[0]) is None:
        pytest.skip(f"{sys.executable} has no {command[0]}")
    result = subprocess.run([sys.executable, "-m", *command], cwd=PACKAGE.parent, capture_output=True, encoding="utf-8",
                          check=False, env=os.environ | {"MYPY_CACHE_DIR": os.devnull, "RUFF_NO_CACHE": "true"})
    assert result.returncode == 0, result.stdout + result.stderr


def test_table_rows_are_converted(tmp_path):
    rows = [{"prompt": "a, b", "completion": "é\n1"}, {"prompt": "", "completion": "c"}]
    files = {"t.csv": '\ufeffprompt,completion\r\n"a, b","é\n1"\r\n,c\r\n',
             "t.tsv": 'prompt\tcompletion\na, b\t"é\n1"\n\tc\n'}
    for name, text in files.items():
        (tmp_path / name).write_bytes(text.encode())
    if importlib.util.find_spec("yaml"):
        (tmp_path / "t.yaml").write_text(json.dumps(rows), encoding="utf-8")
    if importlib.util.find_spec("pyarrow"):
        import pyarrow
        from pyarrow import parquet

        table = pyarrow.Table.from_pylist(rows)
        parquet.write_table(table, tmp_path / "t.parquet")
        for name, new in (("file.arrow", pyarrow.ipc.new_file), ("stream.arrow", pyarrow.ipc.new_stream)):
            with pyarrow.OSFile(str(tmp_path / name), "wb") as out, new(out, table.schema) as writer:
                writer.write_table(table)
    for path in tmp_path.iterdir():
        done = subprocess.run([sys.executable, "-m", "tessera.rows", path], capture_output=True, encoding="utf-8",
                              check=True)
        assert [json.loads(line) for line in done.stdout.splitlines()] == rows, path
    bad = subprocess.run([sys.executable, "-m", "tessera.rows", tmp_path / "t.xlsx"], capture_output=True, text=True,
                         check=False)
    assert bad.returncode == 4 and bad.stderr.count("\n") == 1 and "expected a name that ends in .csv" in bad.stderr
