"""The recorder for PyTorch: assembled recordings of correct steps equal those of one rank; errors; special programs."""
import json
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.fx
from assembled import Recorded, check_equal, distance
from correct import run
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import tessera
from tessera.torch import Slice, record

torch.set_num_threads(1)
BOUNDS = {"fp64": 1e-12, "fp32": 2e-5, "bf16": 3e-2}
PLANS = {
    "accumulation": {"microbatches": 4, "clip": 1.0},
    "ddp": {"dp": 2, "ddp": True, "microbatches": 2, "clip": 1.0, "untrained": True},
    "sp": {"tp": 2, "sp": True, "tied": True, "clip": 1.0, "detail": "modules", "dtype": "fp64"},
    "cp": {"cp": 2, "zigzag": True, "optimizer": "sgd", "dtype": "fp64", "step": 2},
    "gpipe": {"pp": 2, "microbatches": 4, "tied": True, "dtype": "bf16"},
    "1f1b": {"pp": 2, "tp": 2, "schedule": "1f1b", "microbatches": 4, "clip": 1.0},
}


@pytest.mark.parametrize("name", PLANS)
def test_recording_of_a_plan_equals_that_of_one_rank(tmp_path, name):
    options = run(tmp_path, **PLANS[name])
    ours, theirs = Recorded(tmp_path / "recording"), Recorded(tmp_path / "reference")
    tied_copy = {key for key in ours.tensors if options.tied and options.pp > 1 and key[0].startswith("lm_head.weight")}
    for key in tied_copy:
        del ours.tensors[key]
    assert ours.tensors.keys() == theirs.tensors.keys()
    check_equal(ours, theirs, BOUNDS[options.dtype])
    assert sum(info["microbatches"] for info in ours.ranks) == options.ranks * options.microbatches
    assert not any(info["recomputed"] or info["dropout"] for info in ours.ranks)
    if options.pp == options.tp == 1:  # losses and token counts explain the global loss
        losses = [loss for info in ours.ranks if info["axes"]["cp"][0] == 0 for loss in info["losses"]]
        assert sum(loss["tokens"] for loss in losses) * options.cp == theirs.ranks[0]["losses"][0]["tokens"]


@pytest.mark.parametrize("name, reference", [("fsdp2_dp4", "reference_clipped"), ("fsdp2_dp2_tp2", "reference"),
                                             ("dtensor_tp2", "reference"), ("pipelining_1f1b", "reference")])
def test_recordings_of_torch_2_8_equal_those_of_one_rank(name, reference):
    """Recordings that placements_test.py made: FSDP2 with empty ranks, strided shards, partial sums, a pipeline."""
    recordings = Path(__file__).parent / "recordings"
    check_equal(Recorded(recordings / name), Recorded(recordings / reference), 1e-4)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = nn.Sequential(nn.Linear(8, 8))
        self.ln = nn.LayerNorm(8)

    def forward(self, x):
        return x + self.attn(self.ln(x))


class Model(nn.Module):
    def __init__(self, dropout=0.0, recompute=False):
        super().__init__()
        torch.manual_seed(1)
        self.wte = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.drop, self.head, self.recompute = nn.Dropout(dropout), nn.Linear(8, 16), recompute

    def forward(self, ids):
        x = self.drop(self.wte(ids))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x)


def batch():
    text = torch.randint(16, (2, 7), generator=torch.Generator().manual_seed(2))
    return text[:, :-1], text[:, 1:]


def train(path, model, optimizer=None, scale=1.0, **more):
    """Records one step and returns the tensors and the info."""
    ids, targets = batch()
    with record(model, path, optimizer=optimizer, **more):
        (F.cross_entropy(model(ids).flatten(0, 1), targets.flatten()) * scale).backward()
        if optimizer:
            optimizer.step()
    recorded = Recorded(path if "repeat" not in more else path / f"repeat_{more['repeat']}")
    return recorded.tensors, recorded.ranks[0]


def test_hooks_see_what_the_program_computes(tmp_path):
    model = Model()
    ids, targets = batch()
    outputs = {}
    for name in ("wte", "blocks.0", "blocks.1.attn", "head"):
        def keep(module, given, output, name=name):
            output.retain_grad()
            outputs[name] = output
        model.get_submodule(name).register_forward_hook(keep)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    tensors, info = train(tmp_path, model, optimizer)
    for name, output in outputs.items():
        assert np.array_equal(tensors[name, "output"], output.detach().numpy())
        assert np.array_equal(tensors[name, "output_grad"], output.grad.numpy())
    for name, parameter in model.named_parameters():
        assert np.array_equal(tensors[name, "parameter"], before[name].numpy())
        assert np.array_equal(tensors[name, "grad"], parameter.grad.numpy())
        assert np.array_equal(tensors[name, "updated"], parameter.detach().numpy())
    assert np.array_equal(tensors["input_ids", "input_ids"], ids)
    assert np.array_equal(tensors["targets", "targets"], targets)
    assert info["optimizer"]["class"] == "torch.optim.adamw.AdamW" and info["optimizer"]["step"] == 0
    assert info["optimizer"]["groups"][0]["weight_decay"] == 0.5
    assert info["optimizer"]["groups"][0]["parameters"] == list(before)
    tensors, info = train(tmp_path, model, optimizer, step=2)
    assert info["optimizer"]["step"] == 1 and ("head.weight.exp_avg_sq", "state") in tensors


def test_head_counts_are_those_of_the_config(tmp_path):
    model = Model()
    assert train(tmp_path, model, None)[1]["heads"] is None
    model.config = SimpleNamespace(model_type="llama", num_attention_heads=4, num_key_value_heads=2)
    assert train(tmp_path, model, None)[1]["heads"] == [4, 2]
    model.config = SimpleNamespace(model_type="gpt2", n_head=2)
    assert train(tmp_path, model, None)[1]["heads"] == [2, 2]


def test_recorded_step_is_bitwise_that_of_the_program(tmp_path):
    ids, targets = batch()
    results = []
    for recorded in (False, True):
        model = Model(dropout=0.5)
        optimizer = torch.optim.AdamW(model.parameters())
        if recorded:
            _, info = train(tmp_path, model, optimizer)
            assert info["dropout"]
        else:
            F.cross_entropy(model(ids).flatten(0, 1), targets.flatten()).backward()
            optimizer.step()
        results.append([parameter.detach() for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    assert "step" not in vars(optimizer) and not hasattr(torch.autograd.backward, "func")
    assert not model._forward_pre_hooks and not model.head._forward_hooks


def test_learning_rate_schedulers_see_the_step(tmp_path, recwarn):
    model, (ids, targets) = Model(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with record(model, tmp_path, optimizer=optimizer):
        F.cross_entropy(model(ids).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        scheduler.step()
    assert not [str(warning.message) for warning in recwarn if "lr_scheduler" in str(warning.message)]
    assert Recorded(tmp_path).tensors["lr", "lr"] == 0.1


def test_levels_of_detail(tmp_path):
    blocks = {name for name, kind in train(tmp_path, Model())[0] if kind == "output"}
    assert blocks == {"wte", "blocks.0", "blocks.0.attn", "blocks.1", "blocks.1.attn", "head"}
    modules = {name for name, kind in train(tmp_path, Model(), detail="modules")[0] if kind == "output"}
    assert modules == blocks | {"drop", *(f"blocks.{i}.{name}" for i in (0, 1) for name in ("attn.0", "ln"))}


def test_name_map_and_repeat(tmp_path):
    lines = ['wte = "embed"', '"blocks.{i}" = "layers.{i}"', '"blocks.{i}.attn" = "layers.{i}.mix"']
    (tmp_path / "map.toml").write_text("\n".join(lines))
    tensors, _ = train(tmp_path, Model(), names=tmp_path / "map.toml", repeat=1)
    assert {("embed", "output"), ("layers.1.mix", "output_grad"), ("layers.0.mix.0.weight", "grad"),
            ("layers.1.ln.bias", "parameter"), ("embed.weight", "grad"), ("head", "output")} <= tensors.keys()
    (tmp_path / "map.toml").write_text('wte = 3\n')
    with pytest.raises(ValueError, match=r"map.toml: wte: expected a name with at most one \{i\}, got 3"):
        record(Model(), tmp_path, names=tmp_path / "map.toml")


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_recomputation_is_no_micro_batch(tmp_path, dropout):
    model = Model()

    def forward(ids):  # the recomputed block has other masks if there is dropout
        x = model.blocks[0](model.wte(ids))
        return model.head(checkpoint(model.blocks[1], x, use_reentrant=False, preserve_rng_state=False))

    model.forward = forward
    model.blocks[1].attn.append(nn.Dropout(dropout))
    tensors, info = train(tmp_path, model, layout=lambda name, kind, tensor: (
        Slice.shard(tensor.transpose(0, 1), 0, 0, 1) if kind.startswith("output") else None))
    assert info["microbatches"] == 1 and info["dropout"] == (dropout > 0)
    assert {entry["name"] for entry in info["recomputed"]} == ({"blocks.1", "blocks.1.attn"} if dropout else set())
    assert ("blocks.1.attn", "output_grad") in tensors


def test_reentrant_checkpointing_has_gradients(tmp_path):
    model, plain = Model(), Model()
    expected, _ = train(tmp_path / "plain", plain)
    model.forward = lambda ids: model.head(checkpoint(
        nn.Sequential(*model.blocks), model.wte(ids), use_reentrant=True))
    tensors, info = train(tmp_path / "recomputed", model)
    assert info["microbatches"] == 1 and tensors.keys() == expected.keys()
    assert all(np.allclose(tensors[key], expected[key]) for key in expected)


def test_evaluation_within_the_step_is_not_recorded(tmp_path):
    model, (ids, targets) = Model(), batch()
    with record(model, tmp_path):
        for _ in range(2):
            with torch.no_grad():
                F.cross_entropy(model(15 - ids).flatten(0, 1), targets.flatten())
            F.cross_entropy(model(ids).flatten(0, 1), targets.flatten()).backward()
    recorded = Recorded(tmp_path)
    assert recorded.ranks[0]["microbatches"] == 2 and len(recorded.tensors["input_ids", "input_ids"]) == 4
    assert [loss["tokens"] for loss in recorded.ranks[0]["losses"]] == [12, 12]


def test_targets_are_observed_where_labels_are_shifted_or_ignored(tmp_path):
    model, (ids, _) = Model(), batch()
    with record(model, tmp_path):
        labels = torch.cat([torch.tensor([[-100, -100]]).T, ids[:, 1:]], 1)
        logits = model(ids)[:, :-1].flatten(0, 1)
        F.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=int(ids[0, 1]), reduction="sum").backward()
    recorded = Recorded(tmp_path)
    expected = torch.cat([ids[:, 1:].masked_fill(ids[:, 1:] == ids[0, 1], -1), torch.tensor([[-1], [-1]])], 1)
    assert np.array_equal(recorded.tensors["targets", "targets"], expected)
    assert recorded.ranks[0]["losses"][0]["reduction"] == "sum"
    assert recorded.ranks[0]["losses"][0]["tokens"] == int((expected != -1).sum())


def test_several_losses_of_one_micro_batch_add_their_gradients(tmp_path):
    def layout(name, kind, tensor):
        return Slice.shard(tensor.transpose(0, 1), 0, 0, 1) if kind.startswith("output") else None

    model, twice, (ids, targets) = Model(), Model(), batch()
    expected, _ = train(tmp_path / "once", model, layout=layout)
    with record(twice, tmp_path / "twice", layout=layout):
        losses = F.cross_entropy(twice(ids).flatten(0, 1), targets.flatten(), reduction="none")
        (losses[:4].sum() / 12).backward(retain_graph=True)
        (losses[4:].sum() / 12).reshape(1).backward()
    recorded = Recorded(tmp_path / "twice")
    for name in ("wte", "blocks.0.attn", "head"):
        assert np.allclose(recorded.tensors[name, "output_grad"], expected[name, "output_grad"], atol=1e-7)
    assert len(recorded.ranks[0]["losses"]) == 2


def test_slices_must_fit_and_names_must_be_unique(tmp_path):
    with pytest.raises(ValueError, match=r"layout: wte.weight \(parameter\): expected a slice of shape \[16, 8\]"):
        train(tmp_path, Model(), layout=lambda name, kind, tensor: Slice((32, 8), [[[0, 8]], [[0, 8]]]))
    with pytest.raises(ValueError, match=r"wte.weight: recorded twice; expected distinct names"), \
            record(Model(), tmp_path, layout=lambda name, kind, tensor: Slice(tensor.shape, name="wte.weight")):
        pass
    assert not list(tmp_path.iterdir())


def test_layout_renames_and_transposes(tmp_path):
    def layout(name, kind, tensor):
        if name == "head" and kind in ("output", "output_grad"):
            view = tensor.transpose(0, 1)
            return Slice(view.shape, name="lm_head", tensor=view)
        return None

    tensors, _ = train(tmp_path, Model(), layout=layout)
    assert tensors["lm_head", "output"].shape == tensors["lm_head", "output_grad"].shape == (6, 2, 16)


def test_layout_divides_fused_parameters(tmp_path):
    def layout(name, kind, tensor):
        if name != "head.weight":
            return None
        return [Slice.shard(part, 0, 0, 1, name=f"{key}.weight") for key, part in zip("qk", tensor.chunk(2))]

    (tensors, info), (full, _) = (train(tmp_path / name, model := Model(), torch.optim.AdamW(model.parameters()), layout=f)
                                  for name, f in (("divided", layout), ("full", None)))
    for kind in ("parameter", "grad", "updated"):
        found = np.concatenate([tensors["q.weight", kind], tensors["k.weight", kind]])
        assert np.array_equal(found, full["head.weight", kind])
    assert {"q.weight", "k.weight"} < {*info["optimizer"]["groups"][0]["parameters"]}


def test_stages_that_number_their_layers_from_zero(tmp_path):
    stages = [Block(), Block()]
    with record(stages, tmp_path):
        stages[1](stages[0](torch.randn(2, 6, 8))).sum().backward()
    recorded = Recorded(tmp_path)
    assert {name for name, kind in recorded.tensors if kind == "grad" and "ln" in name} == {
        "0.ln.weight", "0.ln.bias", "1.ln.weight", "1.ln.bias"}


@pytest.mark.parametrize("kind, reason", [("FullyShardedDataParallel", "FSDP1"), ("DeepSpeedEngine", "DeepSpeed"),
                                          ("OptimizedModule", "torch.compile")])
def test_other_wrappers_are_refused_by_name(tmp_path, kind, reason):
    wrapper = type(kind, (nn.Sequential,), {})
    with pytest.raises(ValueError, match=rf"model: {reason}: expected .*, got {kind}"):
        record(wrapper(Model()), tmp_path)


def test_compiled_modules_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"model: TorchScript: expected the model before compilation"):
        record(torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2)), tmp_path)
    with pytest.raises(ValueError, match=r"model: captured module: expected the model before it is captured"):
        record(torch.fx.symbolic_trace(nn.Linear(2, 2)), tmp_path)
    if hasattr(torch, "compile") and hasattr(nn.Module, "compile"):
        for compiled in (torch.compile(Model()), Model()):
            compiled.compile()
            with pytest.raises(ValueError, match=r"model: torch.compile: expected the model before compilation"):
                record(compiled, tmp_path)


def test_second_optimizer_step_is_refused_and_leaves_no_file(tmp_path):
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="expected one optimizer step, got a second one"), \
            record(model, tmp_path, optimizer=optimizer):
        for _ in range(2):
            model(batch()[0]).sum().backward()
            optimizer.step()
    assert not list(tmp_path.iterdir())


def test_values_that_are_not_finite_are_valid_json(tmp_path):
    model = Model()
    model.head.weight.data[0, 0] = float("nan")
    _, info = train(tmp_path, model)
    assert info["losses"][0]["value"] is None


def test_loss_scale_is_known(tmp_path, monkeypatch):
    kind = next(kind for kind in reversed(torch.cuda.amp.GradScaler.__mro__) if "scale" in vars(kind))
    monkeypatch.setattr(kind, "scale", lambda scaler, loss: loss * 8)
    monkeypatch.setattr(kind, "get_scale", lambda scaler: 8.0)
    scaler = kind(enabled=False)
    model, (ids, targets) = Model(), batch()
    expected, alone = train(tmp_path / "plain", Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record(model, tmp_path / "scaled", optimizer=optimizer):
        scaler.scale(F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
    recorded = Recorded(tmp_path / "scaled")
    loss = recorded.ranks[0]["losses"][0]
    assert loss["scale"] == 8 and loss["value"] == pytest.approx(alone["losses"][0]["value"])
    assert distance(recorded.tensors["wte.weight", "grad"], expected["wte.weight", "grad"])[0] < 1e-6


def test_file_is_read_by_the_package_safetensors(tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    train(tmp_path, Model())
    path = tmp_path / "rank_0000.safetensors"
    ours, theirs = tessera.load(path), safetensors.load_file(path)
    assert ours.keys() == theirs.keys() and all(np.array_equal(ours[name], theirs[name]) for name in ours)
    assert os.listdir(tmp_path) == ["rank_0000.safetensors"]
    data = path.read_bytes()
    metadata = json.loads(data[8:8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    assert metadata["tessera_recording"] == "1" and metadata["step"] == "1"
