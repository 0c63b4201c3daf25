"""Contents of a recording: modules, slices of tensors, published names, the file. This part does not import torch."""
import json
import os
import re
import struct
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self


@dataclass(frozen=True)
class Slice:
    """The position of a rank's tensor in the full tensor.

    shape: that of the full tensor; for activations (b, T, C) of this micro-batch of this data rank.
    index: for each dim the list of ranges [start, stop) that the rank holds, in the order of its tensor; None: all.
    partial: axes over which the values must be summed. name: replaces the name of the module or parameter.
    tensor: replaces the values, for example by a transposed view.
    """

    shape: Sequence[int]
    index: Sequence[Sequence[Sequence[int]]] | None = None
    partial: Sequence[str] = ()
    name: str | None = None
    tensor: Any = None

    @classmethod
    def shard(cls, tensor: Any, dim: int, rank: int, size: int, **more: Any) -> Self:
        """The slice of rank `rank` of a tensor that is sharded evenly over `size` ranks along `dim`: these values."""
        shape, index = list(tensor.shape), [[[0, extent]] for extent in tensor.shape]
        index[dim] = [[rank * shape[dim], (rank + 1) * shape[dim]]]
        shape[dim] *= size
        return cls(shape, index, **{"tensor": tensor, **more})


def head_counts(config: Any) -> list[int] | None:
    """The numbers of attention heads and of key-value heads in a model's config."""
    heads = getattr(config, "num_attention_heads", None) or getattr(config, "n_head", None)
    keys = getattr(config, "num_key_value_heads", None) or heads
    return [int(heads), int(keys)] if isinstance(heads, int) and isinstance(keys, int) else None


def is_dtensor(tensor: Any) -> bool:
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def local(tensor: Any) -> Any:
    """The values that this rank holds, without their gradient."""
    return (tensor.to_local() if is_dtensor(tensor) else tensor).detach()


def axis_name(mesh: Any, dim: int) -> str:
    """The name of a mesh axis; names of data axes begin with "dp"."""
    name = mesh.mesh_dim_names[dim] if mesh.mesh_dim_names else f"dp{dim}" if mesh.ndim > 1 else "dp"
    return f"dp_{name}" if re.match("fsdp|ddp|data|replicate|shard", name) else name


def dtensor_axes(tensors: Iterable[Any]) -> dict[str, Any]:
    """Coordinate and size of each mesh axis of the DTensors among these."""
    meshes = [tensor.device_mesh for tensor in tensors if is_dtensor(tensor)]
    return {axis_name(mesh, i): (mesh.get_local_rank(i), mesh.size(i)) for mesh in meshes for i in range(mesh.ndim)}


def find_slice(tensor: Any) -> Slice:
    """The slice of a DTensor. Strided shards (FSDP2 over TP on one dim) were applied after the other shards."""
    if not is_dtensor(tensor):
        return Slice(tensor.shape)
    index, mesh = [[0, extent] for extent in tensor.shape], tensor.device_mesh
    kinds = [type(placement).__name__ for placement in tensor.placements]
    for i in sorted(range(len(kinds)), key=lambda i: (1, -i) if kinds[i] == "_StridedShard" else (0, i)):
        if kinds[i].endswith("Shard"):
            (start, stop), rank = index[tensor.placements[i].dim], mesh.get_local_rank(i)
            chunk = -(-(stop - start) // mesh.size(i))  # the last ranks have fewer elements, or none
            index[tensor.placements[i].dim] = [min(start + n * chunk, stop) for n in (rank, rank + 1)]
    partial = [axis_name(mesh, i) for i, kind in enumerate(kinds) if "Partial" in kind]
    return Slice(list(tensor.shape), [[interval] for interval in index], partial)


def find_rows(some: Any, every: Any) -> list[int] | None:
    """For each row of a matrix the position of the equal row of another one, or None if a row has none."""
    positions: dict[bytes, list[int]] = {}
    for i, row in reversed(list(enumerate(every))):
        positions.setdefault(row.tobytes(), []).append(i)
    found = [(positions.get(row.tobytes()) or [-1]).pop() for row in some]
    return None if -1 in found else found


ROUTERS = (".gate", ".router")
WRAPPERS, LISTS = {"DistributedDataParallel", "CheckpointWrapper"}, {"ModuleList", "ModuleDict"}
REFUSED = {"FullyShardedDataParallel": "FSDP1: expected fully_shard (FSDP2) or DistributedDataParallel",
           "DeepSpeedEngine": "DeepSpeed: expected the model without its engine",
           "OptimizedModule": "torch.compile: expected the model before compilation",
           "ScriptModule": "TorchScript: expected the model before compilation",
           "GraphModule": "captured module: expected the model before it is captured"}
EXPERT = 99  # depth of modules whose rows depend on routing; deeper ones are within them


def _classes(module: Any) -> set[str]:
    compiled = {"OptimizedModule"} if getattr(module, "_compiled_call_impl", None) else set()
    return {kind.__name__ for kind in type(module).__mro__} | compiled


def modules(root: Any) -> Iterator[tuple[str, Any, int]]:
    """(name, module, depth) without wrappers; depth: 0 outside of blocks, 1 for a block, 2 for its branches, ..."""
    found: dict[str, tuple[str, Any, int]] = {}
    for path, module in root.named_modules():
        for refused in _classes(module) & REFUSED.keys():
            raise ValueError(f"{path or 'model'}: {REFUSED[refused]}, got {type(module).__name__}")
        above, _, key = path.rpartition(".")
        name, parent, depth = found.get(above, ("", None, 0))
        if path and not _classes(parent) & WRAPPERS:
            name, listed = f"{name}.{key}".lstrip("."), _classes(parent) & {*LISTS, "Sequential"}
            step = EXPERT if above.endswith(".experts") and not listed else bool(depth or listed)  # fused experts
            depth = EXPERT if 1 < depth < EXPERT and listed & LISTS else depth + step
        found[path] = (name, module, depth)
        yield found[path]


def stages(roots: Sequence[Any]) -> list[tuple[str, Any, int, Any]]:
    """(name, module, depth, root); if names of parameters repeat, all names begin with the index of their root."""
    found = [(*entry, root) for root in roots for entry in modules(root)]
    names = [f"{name}.{key}" for name, module, *_ in found for key, _ in module.named_parameters(recurse=False)]
    if len({*names}) == len(names):
        return found
    index = {id(root): i for i, root in enumerate(roots)}
    return [(f"{index[id(root)]}.{name}".rstrip("."), module, depth, root) for name, module, depth, root in found]


def is_recorded(name: str, module: Any, depth: int, detail: str) -> bool:
    """Whether outputs of a module are recorded at this level of detail."""
    if not name or depth > EXPERT or _classes(module) & (LISTS | WRAPPERS):
        return False
    leaf, router = next(module.children(), None) is None, name.endswith(ROUTERS)
    return detail == "modules" or depth == 1 or (depth == 2 and not leaf) or (depth == 3 and router) or (
        not depth and leaf and next(module.parameters(), None) is not None)


def name_map(path: Any) -> Callable[[str], str]:
    """A TOML file of names and their published names, each with at most one {i}; the longest match is replaced."""
    table = tomllib.loads(Path(path).read_text(encoding="utf-8")) if path else {}
    for key, value in table.items():
        if not isinstance(value, str) or max(key.count("{i}"), value.count("{i}")) > 1:
            raise ValueError(f"{path}: {key}: expected a name with at most one {{i}}, got {value!r}")
    patterns = [(re.compile(re.escape(key).replace(r"\{i\}", r"(?P<i>\d+)") + r"(?=\.|$)"), table[key])
                for key in sorted(table, key=len, reverse=True)]

    def published(name: str) -> str:
        found, new = next(((match, new) for pattern, new in patterns if (match := pattern.match(name))), (None, ""))
        return new.replace("{i}", found.groupdict().get("i", "")) + name[found.end():] if found else name
    return published


def write(directory: Any, world: tuple[int, int], info: Any, entries: Any, tensors: dict[str, Any]) -> None:
    """Writes a rank's safetensors file of (type, shape, bytes as an array); it gets its name when it is complete."""
    header: dict[str, Any] = {"__metadata__": {
        "tessera_recording": "1", "rank": str(world[0]), "ranks": str(world[1]), "step": str(info["step"]),
        "info": json.dumps(info, default=str), "tensors": json.dumps(entries)}}
    position, aligned = 0, sorted(tensors.items(), key=lambda entry: -int(re.sub(r"\D", "", entry[1][0]) or 8))
    for key, (kind, shape, data) in aligned:
        header[key] = {"dtype": kind, "shape": shape, "data_offsets": [position, position := position + data.nbytes]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path = Path(directory) / f"rank_{world[0]:04}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{path}.tmp", "wb") as file:
        file.writelines([struct.pack("<Q", len(text)) + text, *(data for _, (_, _, data) in aligned)])
    os.replace(f"{path}.tmp", path)
