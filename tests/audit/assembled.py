"""Full tensors of a recording, assembled in Python: the tests' independent reading of the format."""
import json
from pathlib import Path

import numpy as np

import tessera

ACTIVATIONS = ("input_ids", "targets", "output", "output_grad")


class Recorded:
    """`tensors`: (name, kind) -> the full tensor, rows of the global batch in order; `ranks`: info of each rank."""

    def __init__(self, directory):
        self.ranks, slices = [], {}
        files = sorted(Path(directory).glob("rank_*.safetensors"))
        for path in files:
            data = path.read_bytes()
            metadata = json.loads(data[8:8 + int.from_bytes(data[:8], "little")])["__metadata__"]
            assert int(metadata["ranks"]) == len(files)
            info, arrays = json.loads(metadata["info"]), tessera.load(path)
            self.ranks.append(info)
            entries = json.loads(metadata["tensors"])
            assert entries.keys() == arrays.keys()
            for key, entry in entries.items():
                where = (row_rank(info["axes"]), entry["microbatch"]) if "microbatch" in entry else ()
                slices.setdefault((entry["name"], entry["kind"]), {}).setdefault(where, []).append(
                    (entry, np.array(arrays[key]), info))
        self.tensors = {}
        for (name, kind), rows in slices.items():
            full = [fill(rows[where]) for where in sorted(rows)]
            if kind == "loss":
                self.tensors[name, kind] = np.array(full)
            else:
                self.tensors[name, kind] = np.concatenate(full) if kind in ACTIVATIONS else full[0]


def row_rank(axes):
    """The data coordinate: mixed radix over the axes whose names begin with dp."""
    rank = 0
    for axis in sorted(name for name in axes if name.startswith("dp")):
        rank = rank * axes[axis][1] + axes[axis][0]
    return rank


def fill(slices):
    """The full tensor from its slices; every element must be present, and replicas must agree."""
    full, written = np.zeros(slices[0][0]["shape"]), np.zeros(slices[0][0]["shape"], bool)
    partial = {axis for entry, *_ in slices for axis in entry.get("partial", ())}
    assert len(partial) <= 1, "partial sums over several axes"
    if partial:  # the sum over the axis, for complete slices
        assert all("partial" in entry and "index" not in entry for entry, *_ in slices)
        axis, = partial
        return sum({info["axes"][axis][0]: values.astype(np.float64) for _, values, info in slices}.values())
    for entry, values, _ in slices:
        assert entry["shape"] == list(full.shape)
        index = entry.get("index") or [[[0, extent]] for extent in full.shape]
        at = np.ix_(*[np.concatenate([np.arange(*one) for one in ranges]) for ranges in index]) if index else ()
        if entry["kind"] != "loss":
            differing = np.abs(full[at] - values) > 1e-5 * np.abs(values).max(initial=0)
            assert not np.any(differing & written[at]), entry["name"]
        full[at], written[at] = values, True
    assert written.all(), slices[0][0]["name"]
    return full


def distance(ours, theirs):
    """The relative distance of two tensors in the 2-norm, and the factor between them."""
    ours, theirs = ours.astype(np.float64).ravel(), theirs.astype(np.float64).ravel()
    factor = float(ours @ theirs) / max(float(theirs @ theirs), 1e-300)
    return float(np.linalg.norm(ours - theirs)) / max(float(np.linalg.norm(theirs)), 1e-300), factor


def check_equal(ours, theirs, bound):
    """Asserts that all tensors are equal, gradients of outputs up to one factor; `theirs` may have more outputs."""
    assert ours.tensors.keys() <= theirs.tensors.keys()
    assert {key for key in theirs.tensors if not key[1].startswith("output")} <= ours.tensors.keys()
    factors = {}
    for (name, kind), found in ours.tensors.items():
        expected = theirs.tensors[name, kind]
        if kind == "output_grad":
            factors[name] = distance(found, expected)[1]
        if kind != "loss":
            assert distance(found, factors.get(name, 1) * expected)[0] <= bound, (name, kind)
    assert max(factors.values()) - min(factors.values()) <= bound * max(factors.values())
