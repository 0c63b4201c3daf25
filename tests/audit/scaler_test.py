"""The recorder with torch.amp.GradScaler on CPUs: unscaled gradients, skipped steps."""
import pytest
import torch
from assembled import Recorded, distance
from torch import nn
from torch.nn import functional as F

from tessera.torch import record

if tuple(int(number) for number in torch.__version__.split(".")[:2]) < (2, 3):
    pytest.skip("GradScaler on CPUs requires torch 2.3", allow_module_level=True)

torch.set_num_threads(1)


def train(path, dtype, scale=None, clip=None, **more):
    """Records one step under autocast."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, **more)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    text = torch.randint(16, (2, 7))
    with record(model, path, optimizer=optimizer):
        with torch.autocast("cpu", dtype):
            loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
    return Recorded(path)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_are_unscaled(tmp_path, dtype, clip, fused):
    plain = train(tmp_path / "plain", dtype, clip=clip)
    scaled = train(tmp_path / "scaled", dtype, 1024.0, clip, fused=fused)
    loss, expected, tensors = scaled.ranks[0]["losses"][0], plain.tensors, scaled.tensors
    assert loss["scale"] == 1024 and loss["value"] == pytest.approx(plain.ranks[0]["losses"][0]["value"], rel=1e-6)
    assert tensors.keys() == expected.keys() and bool(clip) == any(kind == "clipped_grad" for _, kind in tensors)
    for name, kind in expected:
        if kind in ("grad", "clipped_grad", "updated", "norm"):
            assert distance(tensors[name, kind], expected[name, kind])[0] < 1e-3, (name, kind)


@pytest.mark.parametrize("fused", [False, True])
def test_skipped_step_is_not_recorded(tmp_path, fused):
    with pytest.warns(UserWarning, match=r"step 1 is not recorded: GradScaler skipped it, because gradients are not "
                                         r"finite at loss scale 1.09951e\+12; record a later step"):
        train(tmp_path, torch.float16, 2.0 ** 40, fused=fused)
    assert not list(tmp_path.iterdir())
