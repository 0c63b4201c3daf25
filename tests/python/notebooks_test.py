"""Executes each notebook in docs/notebooks from top to bottom in a temporary directory, and checks its output."""
import json
import os
import time
from pathlib import Path

import nbclient
import nbformat
import pytest

from tessera import program

DIRECTORY = Path(__file__).resolve().parents[2] / "docs" / "notebooks"
NOTEBOOKS = sorted(DIRECTORY.glob("*.ipynb"))


def test_five_notebooks_exist():
    assert [path.name[0] for path in NOTEBOOKS] == list("12345")


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
"""}


@pytest.mark.parametrize("isa", ["avx2", "avx512", "amx"])
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_assertions_pass_on_every_isa(path, isa, tmp_path, monkeypatch):
    monkeypatch.setenv("TESSERA_MAX_CPU_ISA", isa)
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
