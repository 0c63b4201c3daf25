"""The recorder with experts: routers at block level, outputs of experts by tokens, fused experts."""
import numpy as np
import pytest
import torch
from assembled import Recorded
from torch import nn
from torch.nn import functional as F

from tessera.torch import record

torch.set_num_threads(1)
EXPERTS, CHANNELS, VOCAB = 4, 8, 16


class Routed(nn.Module):
    """Two of four experts per token, as in transformers: a list of experts that are called with their tokens."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(CHANNELS, EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(CHANNELS, 6), nn.SiLU(), nn.Linear(6, CHANNELS))
                                     for _ in range(EXPERTS))

    def forward(self, x):
        rows = x.reshape(-1, CHANNELS)
        weights, chosen = self.gate(rows).softmax(-1).topk(2)
        y = torch.zeros_like(rows)
        for i, expert in enumerate(self.experts):
            token, place = torch.where(chosen == i)
            y = y.index_add(0, token, expert(rows[token]) * weights[token, place, None])
        return y.reshape(x.shape)


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(EXPERTS, CHANNELS))

    def forward(self, rows):
        logits = F.linear(rows, self.weight)
        scores, indices = logits.softmax(-1).topk(2)
        return logits, scores, indices


class FusedExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up_proj = nn.Parameter(torch.empty(EXPERTS, 6, CHANNELS))
        self.down_proj, self.act_fn = nn.Parameter(torch.empty(EXPERTS, CHANNELS, 6)), nn.SiLU()

    def forward(self, rows, indices, scores):
        hidden = self.act_fn(torch.einsum("ekc,nc->enk", self.up_proj, rows))
        every = torch.einsum("eck,enk->enc", self.down_proj, hidden)
        weights = torch.zeros(len(rows), EXPERTS).scatter(1, indices, scores)
        return torch.einsum("enc,ne->nc", every, weights)


class Fused(nn.Module):
    """The experts are one module with tensors of three dims, as in transformers 5."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = Router(), FusedExperts()

    def forward(self, x):
        rows = x.reshape(-1, CHANNELS)
        _, scores, indices = self.gate(rows)
        return self.experts(rows, indices, scores).reshape(x.shape)


class Layer(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.mlp = kind()

    def forward(self, x):
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.embed_tokens, self.lm_head = nn.Embedding(VOCAB, CHANNELS), nn.Linear(CHANNELS, VOCAB)
        self.layers = nn.ModuleList(Layer(kind) for _ in range(2))
        generator = torch.Generator().manual_seed(5)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) / 2

    def forward(self, ids):
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


def train(path, model, microbatches=1, **more):
    text = torch.randint(VOCAB, (2, 7), generator=torch.Generator().manual_seed(2))
    text[1, 1] = text[0, 0]  # the same token twice: rows of the first layer with equal values
    with record(model, path, **more):
        for rows in text.chunk(microbatches):
            loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
            (loss / microbatches).backward()
    return Recorded(path).tensors


@pytest.mark.parametrize("kind", [Routed, Fused])
def test_routers_are_recorded_with_the_blocks(tmp_path, kind):
    tensors = train(tmp_path, Model(kind))
    names = {name for name, kind in tensors if kind == "output_grad"}
    blocks = {f"layers.{i}{name}" for i in range(2) for name in ("", ".mlp", ".mlp.gate")}
    assert names == blocks | {"embed_tokens", "lm_head"}
    logits, gradient = (tensors["layers.0.mlp.gate", kind] for kind in ("output", "output_grad"))
    assert logits.shape == gradient.shape == (2, 6, EXPERTS) and np.abs(gradient).max() > 0


def test_experts_are_recorded_by_tokens(tmp_path):
    model, outputs, tokens = Model(Routed), {}, {}
    for i, expert in enumerate(model.layers[1].mlp.experts):
        def keep(module, given, output, i=i):
            output.retain_grad()
            outputs[i] = output
        expert.register_forward_hook(keep)

    def route(module, given, output):
        tokens.update((i, (output.softmax(-1).topk(2)[1] == i).any(-1)) for i in range(EXPERTS))
    model.layers[1].mlp.gate.register_forward_hook(route)
    tensors = train(tmp_path / "once", model, detail="modules")
    for i in range(EXPERTS):
        for kind, values in (("output", outputs[i].detach()), ("output_grad", outputs[i].grad)):
            full = torch.zeros(12, CHANNELS)
            full[tokens[i]] = values
            assert np.array_equal(tensors[f"layers.1.mlp.experts.{i}", kind], full.reshape(2, 6, CHANNELS))
    assert not any(".experts.0.0" in name for name, kind in tensors if kind.startswith("output"))
    split = train(tmp_path / "split", Model(Routed), microbatches=2, detail="modules")
    assert split.keys() == tensors.keys()
    for name, kind in tensors:
        if ".experts." in name and kind == "output":
            assert np.allclose(split[name, kind], tensors[name, kind], atol=1e-6)


def test_fused_experts_are_recorded_as_one_module(tmp_path):
    tensors = train(tmp_path, Model(Fused), detail="modules")
    assert np.array_equal(tensors["layers.0.mlp.experts", "output"], tensors["layers.0.mlp", "output"])
    assert tensors["layers.0.mlp.experts.up_proj", "grad"].shape == (EXPERTS, 6, CHANNELS)
    assert ("layers.0.mlp.experts.act_fn", "output") not in tensors


def test_experts_without_a_router_or_with_tokens_of_other_ranks_are_omitted(tmp_path):
    model = Model(Routed)
    model.layers[0].mlp.experts[0].register_forward_pre_hook(lambda module, given: (given[0] + 1,))
    names = {name for name, kind in train(tmp_path, model, detail="modules") if kind == "output"}
    assert "layers.0.mlp.experts.0" not in names and "layers.0.mlp.experts.1" in names
