"""The recorder with FSDP2, DTensor and torch.distributed.pipelining of torch 2.8: recordings equal that of one rank."""
import copy
import inspect
import os
import tempfile

import pytest
import torch
import torch.distributed as dist
from assembled import Recorded, check_equal
from torch import nn
from torch.nn import functional as F

from tessera.torch import record

if tuple(int(number) for number in torch.__version__.split(".")[:2]) < (2, 8):
    pytest.skip("FSDP2 and 1F1B over gloo require torch 2.8", allow_module_level=True)

from torch.distributed import fsdp, pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

torch.set_num_threads(1)
VOCAB, CHANNELS, BATCH, TOKENS = 27, 9, 4, 6  # over 4 ranks, dims of 9 elements leave the last rank empty


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(CHANNELS, 12), nn.Linear(12, CHANNELS)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(CHANNELS), Mlp()

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    """Stages of a pipeline have some of the layers, and no embedding or no head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(VOCAB, CHANNELS)
        self.layers = nn.ModuleDict({str(i): Block() for i in range(4)})
        self.norm, self.head = nn.LayerNorm(CHANNELS), nn.Linear(CHANNELS, VOCAB)

    def forward(self, x):
        x = self.embed(x) if self.embed else x
        for layer in self.layers.values():
            x = layer(x)
        return self.head(self.norm(x)).clone() if self.head else x  # no view: torch 2.6 detaches it in place

    def stage(self, first, last, blocks):
        part = copy.deepcopy(self)
        part.embed = part.embed if first else None
        part.norm, part.head = (part.norm, part.head) if last else (None, None)
        part.layers = nn.ModuleDict({str(i): part.layers[str(i)] for i in blocks})
        return part


def batch():
    text = torch.randint(VOCAB, (BATCH, TOKENS + 1), generator=torch.Generator().manual_seed(4))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(model, directory, rank=0, size=1, microbatches=1, clip=True, **more):
    """One step with the rows of a data rank."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    rows = [zip(x.chunk(size)[rank].chunk(microbatches)) for x in batch()]
    with record(model, directory, optimizer=optimizer, **more):
        for (ids,), (targets,) in zip(*rows, strict=True):
            (loss(model(ids), targets) / microbatches).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


def shard(model, mesh=None):
    for module in [*model.layers.values(), model]:
        fsdp.fully_shard(module, mesh=mesh)
        module.set_force_sum_reduction_for_comms(True)  # gloo's reduce-scatter sums where FSDP2 requests the mean
    return model


def fully_sharded(rank, ranks, directory):
    train(shard(Model()), directory, rank, ranks)


def replicated_and_sharded(rank, ranks, directory):
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    train(shard(Model(), mesh), directory, rank, ranks)


def tensor_parallel(model, mesh):
    """Sequence parallelism: the residual stream is sharded over the tokens."""
    parallelize_module(model, mesh, {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())})
    for layer in model.layers.values():
        parallelize_module(layer, mesh, {
            "norm": SequenceParallel(),
            "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False)})
    return model


def dtensor(rank, ranks, directory):
    """Without clipping: the norm of a partial sum is not that of the sum in torch 2.8."""
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    train(tensor_parallel(Model(), mesh), directory, clip=False)


def fully_sharded_dtensor(rank, ranks, directory):
    """FSDP2 over TP: dim 0 of column layers is sharded twice (strided)."""
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("dp", "tp"))
    model = shard(tensor_parallel(Model(), mesh["tp"]), mesh["dp"])
    train(model, directory, mesh.get_local_rank("dp"), 2, microbatches=2, clip=False)


def pipeline(rank, ranks, directory, schedule, virtual):
    """Micro-batches of one row."""
    model, count = Model(), ranks * virtual
    numbers = range(rank, count, ranks)
    parts = [model.stage(i == 0, i == count - 1, range(i * 4 // count, (i + 1) * 4 // count)) for i in numbers]
    stages = [pipelining.PipelineStage(part, number, count, torch.device("cpu"))
              for part, number in zip(parts, numbers, strict=True)]
    kind = getattr(pipelining, schedule)
    scaled = {"scale_grads": False} if "scale_grads" in inspect.signature(kind).parameters else {}
    run = kind(stages if virtual > 1 else stages[0], BATCH, loss_fn=lambda *given: loss(*given) / BATCH, **scaled)
    optimizer = torch.optim.AdamW([parameter for part in parts for parameter in part.parameters()], 1e-2)
    ids, targets = batch()
    with record(parts, directory, optimizer=optimizer, axes={"pp": (rank, ranks)}):
        run.step(*([ids] if 0 in numbers else []), **({"target": targets} if count - 1 in numbers else {}))
        optimizer.step()


def start(program, rank, ranks, directory, store, more):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    program(rank, ranks, directory, **more)
    dist.barrier()
    dist.destroy_process_group()


def check(tmp_path, program, ranks, clip=True, **more):
    """Records with `program` and on one rank; compares. Returns the recording."""
    train(Model(), tmp_path / "reference", clip=clip, detail="modules")
    with tempfile.TemporaryDirectory() as scratch:
        torch.multiprocessing.start_processes(
            start_rank, (program, ranks, tmp_path / "recording", f"{scratch}/store", more), ranks, start_method="fork")
    ours, theirs = Recorded(tmp_path / "recording"), Recorded(tmp_path / "reference")
    check_equal(ours, theirs, 1e-4)
    return ours


def start_rank(rank, program, ranks, directory, store, more):
    os.environ["OMP_NUM_THREADS"] = "1"
    start(program, rank, ranks, directory, store, more)


@pytest.mark.parametrize("program, ranks", [(fully_sharded, 2), (fully_sharded, 4), (replicated_and_sharded, 4)])
def test_fully_sharded_data_parallel(tmp_path, program, ranks):
    ours = check(tmp_path, program, ranks)
    assert all(name.startswith("dp") for info in ours.ranks for name in info["axes"])


def test_dtensor_placements(tmp_path):
    ours = check(tmp_path, dtensor, 2, clip=False)
    assert [info["axes"] for info in ours.ranks] == [{"tp": [0, 2]}, {"tp": [1, 2]}]


def test_strided_shards(tmp_path):
    check(tmp_path, fully_sharded_dtensor, 4, clip=False)


@pytest.mark.parametrize("schedule, virtual", [
    ("ScheduleGPipe", 1), ("Schedule1F1B", 1), ("ScheduleInterleaved1F1B", 2), ("ScheduleInterleavedZeroBubble", 2)])
def test_pipelines(tmp_path, schedule, virtual):
    ours = check(tmp_path, pipeline, 2, clip=False, schedule=schedule, virtual=virtual)
    assert [info["microbatches"] for info in ours.ranks] == [BATCH, BATCH]
    assert [len(info["losses"]) for info in ours.ranks] == [0, BATCH]  # of the last stage
