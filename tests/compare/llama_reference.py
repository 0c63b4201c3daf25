"""The Llama family in plain PyTorch and float64, implemented from the papers, independent of this library, as an oracle.

Zhang and Sennrich 2019 (RMSNorm), Su et al. 2021 (rotary positions; in a head of D channels, channel j is paired with
j + D/2), Shazeer 2020 (SwiGLU), Ainslie et al. 2023 (grouped queries), Chen et al. 2023 (linear scaling), Peng et al.
2023 (YaRN), Llama 3.1 (its scaling by frequency bands), Qwen2 (biases of q, k and v), Qwen3 (RMSNorm of each head of q and k).

usage: llama_reference.py FOLDER FIXTURE...
A fixture is a file of tests/models/fixtures/make.py. Prints the error of its float32 values and fails if it exceeds 1e-5
(2-norms, relative). Writes logits, loss and grad.NAME in float64 to a file of the same name in FOLDER.
"""
import json
import math
import os
import struct
import sys

import numpy as np
import torch
from torch.nn import functional as F

TYPES = {"F32": "<f4", "F64": "<f8", "I32": "<i4"}


def read_tensors(path):  # metadata and tensors (float64, int64) of a safetensors file
    with open(path, "rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header, data = json.loads(file.read(size)), file.read()
    about, tensors = header.pop("__metadata__"), {}
    for name, t in header.items():
        array = np.frombuffer(data[slice(*t["data_offsets"])], TYPES[t["dtype"]]).reshape(t["shape"])
        tensors[name] = torch.from_numpy(array.astype("i8" if t["dtype"] == "I32" else "f8"))
    return about, tensors


def read(path):
    about, tensors = read_tensors(path)
    return json.loads(about["config"]), tensors


def write(path, tensors):
    header, end = {}, 0
    for name, t in tensors.items():
        begin, end = end, end + 8 * t.numel()
        header[name] = {"dtype": "F64", "shape": list(t.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(t.numpy().tobytes() for t in tensors.values()))


def frequencies(rope, d):  # frequencies and the scale of cosines and sines
    f = rope["rope_theta"] ** (-2 * torch.arange(d // 2, dtype=torch.float64) / d)
    if rope["rope_type"] == "linear":
        return f / rope["factor"], 1
    if rope["rope_type"] == "yarn":
        old, base = rope["original_max_position_embeddings"], rope["rope_theta"]

        def place(turns):  # index of the frequency with this number of turns in the original context
            return d * math.log(old / (2 * math.pi * turns)) / (2 * math.log(base))

        first = max(math.floor(place(rope.get("beta_fast") or 32)), 0)
        last = min(math.ceil(place(rope.get("beta_slow") or 1)), d - 1)
        divided = ((torch.arange(d // 2, dtype=torch.float64) - first) / (last - first)).clamp(0, 1)
        scale = rope.get("attention_factor") or 0.1 * math.log(rope["factor"]) + 1
        return f * (1 - divided) + f / rope["factor"] * divided, scale
    if rope["rope_type"] == "llama3":
        turns = f * rope["original_max_position_embeddings"] / (2 * math.pi)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return kept * f + (1 - kept) * f / rope["factor"], 1
    return f, 1


def rotate(x, f, scale):  # (B, T, heads, D): pairs are complex numbers, which a position multiplies by exp(i angle)
    angles = torch.arange(x.shape[1], dtype=torch.float64)[:, None, None] * f
    turned = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.full_like(angles, scale), angles)
    return torch.cat([turned.real, turned.imag], -1)


def norm(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def attention(x, w, c):
    heads, shared, eps = c["num_attention_heads"], c["num_key_value_heads"], c["rms_norm_eps"]
    d = c.get("head_dim") or c["hidden_size"] // heads
    q, k, v = (F.linear(x, w[n + "_proj.weight"], w.get(n + "_proj.bias")).unflatten(-1, (-1, d)) for n in "qkv")
    if "q_norm.weight" in w:
        q, k = norm(q, w["q_norm.weight"], eps), norm(k, w["k_norm.weight"], eps)
    turn = frequencies(c["rope_parameters"], d)
    q, k = rotate(q, *turn).unflatten(2, (shared, heads // shared)), rotate(k, *turn)
    scores = torch.einsum("btkgd,bskd->bkgts", q, k) / math.sqrt(d)
    all_pairs = torch.ones(scores.shape[-2:], dtype=torch.bool)
    hidden = all_pairs.triu(1)
    if c.get("sliding_window"):
        hidden = hidden | all_pairs.tril(-c["sliding_window"])
    y = torch.einsum("bkgts,bskd->btkgd", scores.masked_fill(hidden, -math.inf).softmax(-1), v)
    return F.linear(y.flatten(2), w["o_proj.weight"], w.get("o_proj.bias"))


def compute_logits(w, c, ids):
    x, eps = w["model.embed_tokens.weight"][ids], c["rms_norm_eps"]
    for i in range(c["num_hidden_layers"]):
        start = f"model.layers.{i}."
        b = {n[len(start) :]: t for n, t in w.items() if n.startswith(start)}
        inner = {n[len("self_attn.") :]: t for n, t in b.items() if n.startswith("self_attn.")}
        x = x + attention(norm(x, b["input_layernorm.weight"], eps), inner, c)
        y = norm(x, b["post_attention_layernorm.weight"], eps)
        gate, up = (F.linear(y, b[f"mlp.{n}_proj.weight"], b.get(f"mlp.{n}_proj.bias")) for n in ("gate", "up"))
        x = x + F.linear(gate * torch.sigmoid(gate) * up, b["mlp.down_proj.weight"], b.get("mlp.down_proj.bias"))
    head = w["model.embed_tokens.weight" if c["tie_word_embeddings"] else "lm_head.weight"]
    return F.linear(norm(x, w["model.norm.weight"], eps), head)


def compute(fixture):
    config, given = read(fixture)
    w = {n: t.requires_grad_() for n, t in given.items() if "grad." + n in given}
    logits = compute_logits(w, config, given["ids"])
    loss = F.cross_entropy(logits.flatten(0, 1), given["targets"].flatten())
    loss.backward()
    out = {"logits": logits.detach(), "loss": loss.detach().reshape(1), **{"grad." + n: t.grad for n, t in w.items()}}
    if unused := set(given) - set(out) - set(w) - {"ids", "targets"}:
        sys.exit(f"{fixture}: not looked at: {sorted(unused)}")
    return out, {n: ((given[n] - t).norm() / t.norm()).item() for n, t in out.items()}


def main():
    for fixture in sys.argv[2:]:
        out, errors = compute(fixture)
        name, worst = os.path.basename(fixture), max(errors, key=errors.get)
        print(f"{name}: logits {errors['logits']:.1e}, loss {errors['loss']:.1e}, worst {errors[worst]:.1e} ({worst})")
        if not all(e <= 1e-5 for e in errors.values()):
            sys.exit("the fixture is not what this computes")
        write(os.path.join(sys.argv[1], name), out)


if __name__ == "__main__":
    main()
