"""Executes each notebook in docs/notebooks from top to bottom in a temporary directory, and checks its output."""
import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import nbclient
import nbformat
import pytest

import tessera
from tessera import program

DIRECTORY = Path(__file__).resolve().parents[2] / "docs" / "notebooks"
NOTEBOOKS = sorted(DIRECTORY.glob("*.ipynb"))


def test_six_notebooks_exist():
    assert [path.name[0] for path in NOTEBOOKS] == list("123456")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stored_without_outputs(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert all(cell["outputs"] == [] for cell in cells if cell["cell_type"] == "code")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_resolve(path):
    text = "".join("".join(cell["source"]) for cell in json.loads(path.read_text(encoding="utf-8"))["cells"])
    for link in text.split("](")[1:]:
        name = link.split(")")[0].split("#")[0]
        assert (DIRECTORY / name).is_file(), name


def test_audit_finds_every_hidden_fault(tmp_path, monkeypatch, capsys):
    if not importlib.util.find_spec("torch"):
        pytest.skip(f"{sys.executable} has no torch")
    monkeypatch.syspath_prepend(DIRECTORY)
    import find_the_fault

    find_the_fault.record(find_the_fault.Step, 1, tmp_path / "reference")
    find_the_fault.record(find_the_fault.Step, 2, tmp_path / "correct")
    assert tessera.audit(tmp_path / "correct", tmp_path / "reference")
    for cause, step in find_the_fault.FAULTS.items():
        find_the_fault.record(step, 2, tmp_path / cause)
        assert tessera.audit(tmp_path / cause, tmp_path / "reference").causes[0].cause == cause
    monkeypatch.setattr(sys, "argv", ["find_the_fault.py", "start", str(tmp_path / "game"), "--seed", "3"])
    assert find_the_fault.main() == 0
    cause = tessera.audit(tmp_path / "game" / "recording", tmp_path / "game" / "reference").causes[0].cause
    for answer in find_the_fault.FAULTS:
        monkeypatch.setattr(sys, "argv", ["find_the_fault.py", "check", str(tmp_path / "game"), answer])
        assert find_the_fault.main() == (answer != cause)
    assert capsys.readouterr().out.count("solved\n") == 1
    monkeypatch.setattr(sys, "argv", ["find_the_fault.py", "check", str(tmp_path / "game"), "wrong"])
    with pytest.raises(SystemExit) as caught:
        find_the_fault.main()
    assert caught.value.code == 2 and "CAUSE: expected one of factor-microbatches" in capsys.readouterr().err


def test_example_of_audit_page(tmp_path, monkeypatch):
    if not importlib.util.find_spec("torch"):
        pytest.skip(f"{sys.executable} has no torch")
    monkeypatch.chdir(tmp_path)
    page = (DIRECTORY.parent / "audit.md").read_text(encoding="utf-8")
    text = page.split("```python\n# train.py\n")[1].split("```")[0]
    printed = page.split("--svg audit.svg\n```\n```\n")[1].split("```")[0]
    Path("train.py").write_text(text, encoding="utf-8")
    Path("repaired.py").write_text(text.replace("targets.flatten())", "targets.flatten()) / len(micro_batches)"),
                                   encoding="utf-8")
    for script, ranks, out in (("train", 2, "recording"), ("train", 1, "reference"), ("repaired", 2, "right")):
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        variables = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # as torchrun does
        started = [subprocess.Popen([sys.executable, f"{script}.py", out],
                                    env=os.environ | variables | {"RANK": str(rank)}) for rank in range(ranks)]
        assert [process.wait(100) for process in started] == [0] * ranks
    assert tessera.audit("right", "reference")
    found = subprocess.run([os.environ["TESSERA"], "audit", "recording", "reference", "--svg", "audit.svg"],
                           capture_output=True, encoding="utf-8", check=False).stdout
    numbers = re.compile(r"[-+.\de]*\d")  # rounding differs between versions of torch
    assert numbers.sub("#", found).split() == numbers.sub("#", printed).split()
    for fact in ("factor 3\n", "(factor-microbatches)", "grad                  5      5          0"):
        assert fact in found and fact in printed
    labels = [re.findall(r'<text class="(?:name|end)"[^>]*>([^<]*)', path.read_text(encoding="utf-8"))
              for path in (Path("audit.svg"), DIRECTORY.parent / "audit.svg")]
    assert labels[0] == labels[1] and "Gradients of parameters: 5 of 5 wrong; first divergence here" in labels[0]


# The statements that the text of each notebook makes about the output of its cells.
STATEMENTS = {"1": """
assert proof.data["bitwise"] and (proof.losses == zero.losses).all()
assert 0 < abs(proof.losses - pipeline.losses).max() < 1e-6
assert (proof.bytes.sent == proof.bytes.expected).all() and run.steps.loss.iloc[-1] < run.steps.loss.iloc[0]
assert not broken and broken.losses[-1] < broken.losses[0] and not (broken.losses == proof.losses).all()
assert abs(broken.broken.iloc[0].found / broken.broken.iloc[0].expected - 2) < 0.01 and "too often" in repr(broken.data)
""", "2": """
assert gpipe.bubble == one_f_one_b.bubble > halves.bubble and proof and not tessera.lab("check", "p2", mine)
""", "3": """
import re
drawn = tessera.report(tessera.Plan(ranks=4), **sizes, figure="memory", zero=[0, 1, 2, 3]).svg
peaks = [float(peak) * 1e3 for peak in re.findall(r"each of 4 ranks: ([0-9.]+) KB", drawn)]
assert len(peaks) == 4 and all(abs(table.loc["peak", stage] - peaks[stage]) < 51 for stage in range(4)), peaks
before, after = table.T.shift(1).T.iloc[:3], table.iloc[:3]
assert [(0.24 < (after / before)[stage]).tolist() for stage in (1, 2, 3)] == [[True] * 3] * 3
assert [((after / before)[stage] < 0.3).tolist() for stage in (1, 2, 3)] == [
    [False, True, False], [True, False, False], [False, False, True]]
totals = sent.groupby("zero")["sent"].sum()
assert totals[1] == totals[2] < 1.1 * totals[0] and 1.45 < totals[3] / totals[2] < 1.55
assert list(rows) == [1, 2, 3]
""", "4": """
shown = ranking._repr_html_()
assert other.step_ms > 1.1 * best.step_ms and "step_ms_to" in shown and "<th>ep</th>" not in shown
hidden = [row for _, row in ranking.why_not.iterrows() if all(
    row[name] == ranking.answer["plan"].get(name) for name in ranking.why_not if name != "because")]
assert not hidden and (ranking.table.step_ms_to > ranking.table.step_ms).all()
""", "5": """
verdicts = tessera.report("first.json", "second.json", format="text")
assert "verdict" in verdicts and {"no", "busy", "machine", "slower", "faster"} & set(verdicts.splitlines()[-1].split())
assert "share" in ops.table and "bubble_predicted" in _.table and len(first.data["benchmarks"]) > 7
""", "6": """
assert audit and measured and not scaled and not norms and not means and mine
assert (audit.data["tolerance"], measured.data["tolerance"]) == ("assumed", "measured")
assert measured.tensors.tolerance.median() < audit.tensors.tolerance.median()
assert [each.causes[0].cause for each in (scaled, norms, means)] == ["factor-dp", "not-synchronized", "mean-of-means"]
assert set(scaled.wrong.kind) == {"grad"} and len(scaled.wrong) == 16 and abs(scaled.wrong.factor - 2).max() < 1e-4
assert norms.wrong.name.str.contains("norm").all() and (norms.wrong.kind == "grad").sum() == 6
assert tessera.audit("norms").why.startswith("grad of norm.")
assert means.wrong.factor.std() > 0.01 and "targets: 24, 8" in means.causes[0].evidence
assert max(abs(one - other) for one, other in zip(right, twice, strict=True)) < 1e-4 and right[-1] < right[0]
"""}


# The instruction set matters only for computations of the program itself.
RUNS = [(path, isa) for path in NOTEBOOKS for isa in ("avx2", "avx512", "amx")
        if isa == "avx2" or "import torch" not in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize(("path", "isa"), RUNS, ids=[f"{path.stem}-{isa}" for path, isa in RUNS])
def test_assertions_pass_on_every_isa(path, isa, tmp_path, monkeypatch):
    monkeypatch.setenv("TESSERA_MAX_CPU_ISA", isa)
    if "import torch" in path.read_text(encoding="utf-8") and not importlib.util.find_spec("torch"):
        pytest.skip(f"{sys.executable} has no torch")
    if "report(ops" in path.read_text(encoding="utf-8") and "table" not in program.command_options("bench"):
        pytest.skip("the report of this program draws no benchmarks")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TESSERA_CACHE", os.environ.get("TESSERA_CACHE", str(tmp_path / "cache")))
    notebook, begin = nbformat.read(path, as_version=4), time.monotonic()
    notebook.cells.append(nbformat.v4.new_code_cell(STATEMENTS[path.name[0]]))
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    print(f"{path.stem}: {time.monotonic() - begin:.1f} s")
    shown = json.dumps(notebook)
    assert "image/svg+xml" in shown or "<table" in shown
    assert '"output_type": "error"' not in shown
