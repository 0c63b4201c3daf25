"""Recorder for PyTorch (1.13 or newer): writes one training step to files that `tessera audit` reads.

    with tessera.torch.record(model, "recording", optimizer=optimizer, step=1):
        for ids, targets in micro_batches:
            loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten()) / len(micro_batches)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

Each rank writes rank_NNNN.safetensors: tokens and targets, outputs of modules and the gradients with respect to them,
parameters, their gradients before and after clipping, the optimizer state, the updated parameters. Nothing is gathered:
a rank writes its slices. The results of the step do not change. docs/audit.md describes the files and the options.
"""
import contextlib
import functools
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, Self

import torch
import torch.utils.checkpoint

from . import recording
from .recording import Slice as Slice
from .recording import local

DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
          torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL"}


def _first(output: Any) -> Any:
    """The first floating-point tensor of a module's output."""
    if isinstance(output, torch.Tensor):
        return output if output.is_floating_point() else None
    values = output.values() if isinstance(output, dict) else output if isinstance(output, (list, tuple)) else ()
    return next((tensor for tensor in map(_first, values) if tensor is not None), None)


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [] if value is None else [value]


def _finite(value: Any) -> float | None:
    return float(value) if abs(value) < torch.inf else None  # JSON has no NaN


def _random_state() -> list[Any]:
    return [torch.get_rng_state().tolist(), torch.cuda.is_initialized() and torch.cuda.get_rng_state().tolist()]


def _bytes(matrix: Any) -> Any:
    return local(matrix).cpu().contiguous().view(torch.uint8).numpy()


class Recording:
    """A context manager that records the training step within it and writes the file of this rank at its end.

    model: a module, or the list of a rank's pipeline stages (if names repeat: "INDEX.NAME"). optimizer: one, or a list.
    step: number of the step, from 1. axes: {"tp": (coordinate, size), ...}; default: those of DDP, FSDP2 and DTensor.
    layout: layout(name, kind, tensor) returns the Slice of a tensor of hand-written parallelism, a list of Slices of
    a fused tensor, or None.
    names: TOML file that maps names to published ones, as in "blocks.{i}.attn" = "model.layers.{i}.self_attn".
    detail: "blocks" (embedding, blocks, their branches, routers, final norm, head) or "modules" (every module).
    repeat: k writes to DIRECTORY/repeat_k: the same step again, for example in float64, to measure tolerances.
    Raises ValueError if the model cannot be recorded, if names are not unique, or if a slice does not fit its tensor.
    """

    def __init__(self, model: Any, directory: Any, *, optimizer: Any = None, step: int = 1,
                 axes: dict[str, Any] | None = None,
                 layout: Callable[[str, str, Any], Slice | list[Slice] | None] | None = None, names: Any = None,
                 detail: str = "blocks", repeat: int | None = None) -> None:
        if detail not in ("blocks", "modules"):
            raise ValueError(f"detail: expected 'blocks' or 'modules', got {detail!r}")
        self._directory = f"{directory}/repeat_{repeat}" if repeat is not None else directory
        self._roots, self._optimizers = _listed(model), _listed(optimizer)
        self._layout, self._published = layout, recording.name_map(names)
        # By key; by key; by name; by (name, micro-batch, suffix): the key
        self._tensors, self._entries, self._order, self._keys = (dict[Any, Any]() for _ in range(4))
        self._slices: dict[str, list[str]] = {}  # published names of a parameter: several if `layout` divides it
        # By micro-batch: (b, T); tokens and reduction of the loss. By root in its forward call: whether with gradients.
        # By name of a block with experts: input of its router
        self._rows, self._counted, self._open, self._routed = (dict[Any, Any]() for _ in range(4))
        # Touched: micro-batches of the current backward pass
        self._calls, self._once, self._touched = Counter[Any](), set[Any](), set[int]()
        self._given = self._latest = self._current = self._passes = 0
        self._undo, self._split, self._scaler, self._loss_scale = contextlib.ExitStack(), False, None, 1.0
        world: Any = torch.distributed if torch.distributed.is_available() else None
        self._world = (world.get_rank(), world.get_world_size()) if world and world.is_initialized() else (0, 1)
        modules = recording.stages(self._roots)
        self._recorded = [entry for entry in modules if recording.is_recorded(*entry[:3], detail)]
        named = [(f"{name}.{key}".lstrip("."), parameter) for name, module, *_ in modules
                 for key, parameter in module.named_parameters(recurse=False)]
        self._names = {id(parameter): name for name, parameter in reversed(named)}  # tied parameters: the first name
        self._parameters = [(name, parameter) for name, parameter in named if self._names[id(parameter)] == name]
        found = recording.dtensor_axes(parameter for _, parameter in named)
        for _, module, *_ in modules:
            if isinstance(module, torch.nn.parallel.DistributedDataParallel):
                found["dp"] = (world.get_rank(module.process_group), module.process_group.size())
        config = getattr(self._roots[0], "config", None)
        self._info: dict[str, Any] = {
            "framework": f"torch {torch.__version__}", "step": step, "detail": detail, "axes": axes or found,
            "microbatches": 0, "losses": [], "recomputed": [], "dropout": False,
            "family": str(getattr(config, "model_type", "")), "heads": recording.head_counts(config)}

    def batch(self, ids: Any = None, targets: Any = None) -> None:
        """Names the tokens and targets (b, T) of the next micro-batch; call it before the forward pass."""
        for kind, tensor in (("input_ids", ids), ("targets", targets)):
            self._tokens(kind, tensor, self._given)
        self._given += 1

    def clip(self, norm: Any, max_norm: float) -> None:
        """Reads the gradients and records this norm of them; call it just before hand-written clipping."""
        self._gradients(".grad")
        if "clip" not in self._info:
            norm = torch.as_tensor(norm.full_tensor() if recording.is_dtensor(norm) else norm, dtype=torch.float64)
            self._info["clip"] = {"max_norm": float(max_norm), "norm": _finite(norm)}
            self._add("grad_norm", "norm", norm)

    def __enter__(self) -> Self:
        for name, parameter in self._parameters:
            self._add(name, "parameter", parameter)
        hooks = [hook for root in self._roots for hook in (root.register_forward_pre_hook(self._enter_root),
                                                           root.register_forward_hook(self._leave_root))]
        for hook in [*hooks, *(module.register_forward_hook(functools.partial(self._forward, name, depth, root))
                               for name, module, depth, root in self._recorded)]:
            self._undo.callback(hook.remove)
        replaced = {id(function): functools.partial(observer, function) for function, observer in (
            (torch.autograd.backward, self._backward), (torch.autograd.grad, self._backward),
            (torch._C._nn.cross_entropy_loss, self._cross_entropy), (torch.nn.utils.clip_grad_norm_, self._clip))}
        for holder in [*sys.modules.values(), torch._C._nn]:  # the program may have imported the function itself
            for key, value in list(vars(holder).items()) if hasattr(holder, "__dict__") else ():
                if id(value) in replaced:
                    self._replace(holder, key, value, replaced[id(value)])
        early_stop = getattr(torch.utils.checkpoint, "set_checkpoint_early_stop", contextlib.nullcontext)
        self._undo.enter_context(early_stop(False))  # recompute all outputs, to compare them
        for one in self._optimizers:
            self._replace(one, "step", vars(one).get("step"), functools.partial(self._step, one, one.step))
        scaler: Any = next(kind for kind in reversed(torch.cuda.amp.GradScaler.__mro__) if "scale" in vars(kind))
        self._replace(scaler, "scale", scaler.scale,
                      lambda scaler, outputs, scale=scaler.scale: self._scale(scale, scaler, outputs))
        return self

    def _replace(self, holder: Any, key: str, original: Any, replacement: Any) -> None:
        setattr(holder, key, functools.update_wrapper(replacement, getattr(holder, key)))  # schedulers mark `step`
        self._undo.callback(*(delattr, holder, key) if original is None else (setattr, holder, key, original))

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._undo.close()
        if kind is not None:
            return
        self._gradients(".grad")
        for name, parameter in self._parameters if "optimizer" in self._info else ():
            self._add(name, "updated", parameter, suffix=".updated")
        overflows = self._scaler and any(entry["kind"] == "grad" and not self._tensors[key].isfinite().all()
                                         for key, entry in self._entries.items())
        if overflows or (self._scaler and self._optimizers and "optimizer" not in self._info):
            warnings.warn(f"step {self._info['step']} is not recorded: GradScaler skipped it, because gradients are "
                          f"not finite at loss scale {self._loss_scale:g}; record a later step", stacklevel=2)
            return
        recording.write(self._directory, self._world, self._info, self._entries, {
            key: (DTYPES[values.dtype], list(values.shape), _bytes(values.reshape(-1)))
            for key, values in self._tensors.items()})

    def _add(self, name: str, kind: str, tensor: Any, microbatch: int | None = None, suffix: str = "") -> str:
        """Copies a tensor; returns its (last) key."""
        keys = [self._add_slice(name, kind, where, values, microbatch, suffix)
                for where, values in self._placed(name, kind, tensor)]
        if kind == "parameter":
            self._slices[name] = keys
        return keys[-1]

    def _placed(self, name: str, kind: str, tensor: Any) -> list[tuple[Slice, Any]]:
        """The slices of a tensor and their values."""
        where = self._layout(name, kind, tensor) if self._layout and kind not in ("loss", "norm", "lr") else None
        where = where or recording.find_slice(tensor)
        return [(one, local(tensor if one.tensor is None else one.tensor)) for one in _listed(where)]

    def _add_slice(self, name: str, kind: str, where: Slice, values: Any, microbatch: int | None, suffix: str) -> str:
        rows, shape = self._rows.get(microbatch), list(where.shape)
        if where.index is None and kind.startswith("output") and rows and shape[:-1] == [rows[0] * rows[1]]:
            values, shape = values.reshape(*rows, -1), [*rows, shape[-1]]
        full = [[[0, extent]] for extent in shape]
        index = [[list(one) for one in ranges] for ranges in where.index or full]
        size = [sum(stop - start for start, stop in ranges) for ranges in index]
        if size != list(values.shape):
            raise ValueError(f"layout: {name} ({kind}): expected a slice of shape {list(values.shape)}, got {size}")
        published = where.name or self._published(name)
        key = f"{published}{suffix}" if microbatch is None else f"{microbatch}/{published}{suffix}"
        if key in self._tensors:
            raise ValueError(f"{key}: recorded twice; expected distinct names (`names`, or `name` of a Slice)")
        self._tensors[key] = values.to("cpu", values.dtype if values.dtype in DTYPES else torch.float32, copy=True)
        order = self._order.setdefault(published, len(self._order)) if kind == "output" else None
        entry = {"name": key if kind == "state" else published, "kind": kind, "microbatch": microbatch, "shape": shape,
                 "index": index if index != full else None, "partial": list(where.partial) or None, "order": order}
        self._entries[key] = {field: value for field, value in entry.items() if value is not None}
        return key

    def _tokens(self, kind: str, tensor: Any, microbatch: int) -> None:
        if tensor is not None and (kind, microbatch, "") not in self._keys:
            tensor = local(tensor).clamp(min=-1)  # targets that are ignored are -1
            self._rows.setdefault(microbatch, tuple(tensor.shape))
            if kind == "targets":
                self._counted.setdefault(microbatch, {})["tokens"] = int((tensor != -1).sum())
            self._keys[kind, microbatch, ""] = self._add(kind, kind, tensor, microbatch)

    def _enter_root(self, root: Any, given: Any) -> None:
        if not self._passes:
            self._open[id(root)], self._random = torch.is_grad_enabled(), _random_state()
            self._calls[id(root)] += torch.is_grad_enabled()

    def _leave_root(self, root: Any, given: Any, output: Any) -> None:
        self._info["dropout"] |= self._open.pop(id(root), False) and self._random != _random_state()

    def _forward(self, name: str, depth: int, root: Any, module: Any, given: Any, output: Any) -> None:
        """Records an output. Micro-batches are counted by calls of the root, or of the module if used without it."""
        if not self._open.get(id(root), torch.is_grad_enabled()) or (output := _first(output)) is None:
            return
        again, inside = self._passes > 0, id(root) in self._open
        microbatch = self._current if again else self._calls[id(root)] - 1 if inside else self._calls[name]
        place: Any
        ids, place = given[0] if given and isinstance(given[0], torch.Tensor) else output, lambda tensor: tensor
        if name.endswith(recording.ROUTERS):
            self._routed[name.rpartition(".")[0]] = ids.reshape(-1, ids.shape[-1])
        elif depth == recording.EXPERT and (place := self._placement(name, ids, microbatch)) is None:
            return
        self._calls[name] += not again
        suffix = self._number(name, microbatch, again)
        if again:
            second = self._placed(name, "output", place(output))[-1][1].cpu().double().reshape(-1)
            first = self._tensors.get(self._keys.get((name, microbatch, suffix), ""), second).double().reshape(-1)
            if not torch.equal(first, second):
                self._info["recomputed"].append({"name": self._published(name), "microbatch": microbatch,
                                                 "distance": _finite((first - second).norm() / first.norm())})
        else:
            self._latest, self._info["microbatches"] = microbatch, max(self._info["microbatches"], microbatch + 1)
            if ids.dim() == 2 and not ids.is_floating_point():
                self._tokens("input_ids", ids, microbatch)
            elif output.dim() == 3:
                self._rows.setdefault(microbatch, tuple(output.shape[:2]))
            self._keys[name, microbatch, suffix] = self._add(name, "output", place(output), microbatch, suffix)
        if output.requires_grad and (name, microbatch, suffix) not in self._once:
            self._once.add((name, microbatch, suffix))
            self._undo.callback(output.register_hook(
                lambda grad: self._output_grad(name, microbatch, suffix + ".grad", place(grad))).remove)

    def _placement(self, name: str, given: Any, microbatch: int) -> Any:
        """Moves rows of an expert to their tokens, which are those with the same input, or None; others are 0."""
        every = self._routed.get(name.rsplit(".", 2)[0])
        if every is None or (rows := recording.find_rows(_bytes(given), _bytes(every))) is None:
            return None
        size, places = self._rows.get(microbatch, (1, len(every))), torch.tensor(rows, dtype=torch.int64)
        return lambda tensor: local(tensor).new_zeros(len(every), tensor.shape[-1]).index_copy(
            0, places.to(tensor.device), local(tensor)).reshape(*size, -1)

    def _output_grad(self, name: str, microbatch: int, suffix: str, grad: Any) -> None:
        """Gradients of two backward passes add; torch.autograd.grad divides one pass into two."""
        self._current = microbatch
        self._touched.add(microbatch)
        key = self._keys.get((name, microbatch, suffix))
        if key is None:
            self._keys[name, microbatch, suffix] = self._add(name, "output_grad", grad, microbatch, suffix)
        elif not self._split:
            values = self._placed(name, "output_grad", grad)[-1][1]
            self._tensors[key] += values.cpu().reshape(self._tensors[key].shape)

    def _backward(self, original: Any, tensors: Any, *given: Any, **more: Any) -> Any:
        if not self._passes:
            self._touched, self._split = set(), original.__name__ == "grad"
        self._passes += 1
        try:
            return original(tensors, *given, **more)
        finally:
            self._passes -= 1
            roots = [local(root) for root in _listed(tensors) if isinstance(root, torch.Tensor)]
            scalars = [root.reshape(()) for root in roots if root.numel() == 1]
            if not self._passes and scalars and (self._touched or not self._split):
                # The root is the loss of the micro-batch to whose outputs the pass has gradients
                microbatch, value = min(self._touched, default=self._latest), sum(scalars) / self._loss_scale
                self._add("loss", "loss", value, microbatch, self._number("loss", microbatch))
                self._info["losses"].append({"microbatch": microbatch, "value": _finite(value),
                                             "scale": self._loss_scale} | self._counted.get(microbatch, {}))

    def _number(self, *call: Any) -> str:
        """A suffix for the second and later calls."""
        self._calls[call] += 1
        return f":{self._calls[call] - 1}" if self._calls[call] > 1 else ""

    def _cross_entropy(self, original: Any, logits: Any, target: Any, *given: Any) -> Any:
        observed = (any(self._open.values()) if self._open else torch.is_grad_enabled()) and not self._passes
        if observed and not target.is_floating_point():
            counted, (b, t) = self._counted.setdefault(self._latest, {}), self._rows.get(self._latest, (1, 0))
            counted["reduction"] = ("none", "mean", "sum")[given[1]]
            targets = local(target).masked_fill(local(target) == given[2], -1)
            if targets.numel() == b * (t - 1):  # the last token has no target
                targets = torch.nn.functional.pad(targets.reshape(b, -1), (0, 1), value=-1)
            if targets.numel() == b * t:
                self._tokens("targets", targets.reshape(b, t), self._latest)
            elif ("targets", self._latest, "") not in self._keys:  # a chunk
                counted["tokens"] = counted.get("tokens", 0) + int((targets != -1).sum())
        return original(logits, target, *given)

    def _clip(self, original: Any, parameters: Any, max_norm: float, *given: Any, **more: Any) -> Any:
        states = getattr(self._scaler, "_per_optimizer_states", {}).values()
        unscaled = any(state["stage"].name != "READY" for state in states)
        self._gradients(".grad", 1.0 if unscaled else self._loss_scale)
        norm = original(parameters, max_norm, *given, **more)
        self.clip(norm, max_norm)
        return norm

    def _scale(self, original: Any, scaler: Any, outputs: Any) -> Any:
        self._scaler, self._loss_scale = scaler, float(scaler.get_scale())
        return original(scaler, outputs)

    def _gradients(self, suffix: str, scale: float = 1.0) -> None:
        """Reads all gradients, the first time it is called for a suffix; Megatron-LM's are in `main_grad`."""
        for name, parameter in self._parameters if suffix not in self._once else ():
            grad = parameter.grad if parameter.grad is not None else getattr(parameter, "main_grad", None)
            if grad is not None:
                self._add(name, suffix[1:], grad if scale == 1 else grad / scale, suffix=suffix)
        self._once.add(suffix)

    def _step(self, optimizer: Any, original: Any, *given: Any, **more: Any) -> Any:
        if id(optimizer) in self._once:
            raise ValueError("record: expected one optimizer step, got a second one")
        self._once.add(id(optimizer))
        scale = getattr(optimizer, "grad_scale", None)  # GradScaler lets fused optimizers unscale the gradients
        self._gradients(".clipped_grad" if "clip" in self._info else ".grad", 1.0 if scale is None else float(scale))
        about = self._info.setdefault("optimizer", {
            "class": f"{type(optimizer).__module__}.{type(optimizer).__name__}", "step": 0, "groups": []})
        for group in optimizer.param_groups:
            names = {self._names[id(p)]: p for p in group["params"] if id(p) in self._names}
            settings = {k: float(v) if isinstance(v, torch.Tensor) else v for k, v in group.items() if k != "params"}
            about["groups"].append(settings | {"parameters": [one for name in names for one in self._slices[name]]})
            for name, parameter in names.items():
                state = optimizer.state.get(parameter, {})
                about["step"] = max(about["step"], int(state.get("step", 0)))
                for key, value in state.items():
                    if isinstance(value, torch.Tensor) and value.shape == parameter.shape and key != "step":
                        self._add(name, "state", value, suffix=f".{key}")
        if "lr" not in self._tensors:
            self._add("lr", "lr", torch.tensor(float(optimizer.param_groups[0]["lr"]), dtype=torch.float64))
        return original(*given, **more)


record = Recording
