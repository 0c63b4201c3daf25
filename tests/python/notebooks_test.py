"""Executes each notebook of docs/notebooks from top to bottom, in a folder of its own, and looks at what it shows."""
import json
import os
import time
from pathlib import Path

import nbclient
import nbformat
import pytest

from tessera import program

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def test_there_are_five():
    assert [path.name[0] for path in NOTEBOOKS] == list("12345")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_given_out_without_outputs(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert all(cell["outputs"] == [] for cell in cells if cell["cell_type"] == "code")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_lead_somewhere(path):
    text = "".join("".join(cell["source"]) for cell in json.loads(path.read_text(encoding="utf-8"))["cells"])
    for place in text.split("](")[1:]:
        name = place.split(")")[0].split("#")[0]
        assert (FOLDER / name).is_file(), name


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_from_top_to_bottom(path, tmp_path, monkeypatch):
    if "report(ops" in path.read_text(encoding="utf-8") and "table" not in program.options_of("bench"):
        pytest.skip("the report of this program draws no benchmarks")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TESSERA_CACHE", os.environ.get("TESSERA_CACHE", str(tmp_path / "cache")))
    notebook, begin = nbformat.read(path, as_version=4), time.monotonic()
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    print(f"{path.stem}: {time.monotonic() - begin:.1f} s")
    shown = json.dumps(notebook)
    assert "image/svg+xml" in shown or "<table" in shown
    assert '"output_type": "error"' not in shown
