"""SequenceParallel with PEFT and torch.compile, and the code blocks of its guide."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import Trainer

import tritonpack
from tests.parallel.composition_cases import optimizer_of
from tests.parallel.models import make_batch, make_float32_model
from tests.parallel.trainer_cases import arguments, launched
from tritonpack import MultipackDistributedBatchSampler, PackingCollator

GUIDE = Path(__file__).parents[2] / "docs" / "sequence-parallelism.md"


def guide() -> None:
    """Each block of docs/sequence-parallelism.md runs, with the names that it uses defined and with short rows."""
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 10
    documents = [{"input_ids": list(range(start, start + 9))} for start in range(16)]
    for block in blocks:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "sp"))
        model = make_float32_model()
        sampler = MultipackDistributedBatchSampler(32, [9] * 16, 1, 0, seed=0)
        loader = DataLoader(documents, batch_sampler=sampler, collate_fn=PackingCollator())
        with launched(), tempfile.TemporaryDirectory() as folder:
            given = {
                "tritonpack": tritonpack, "torch": torch, "dist": dist, "init_device_mesh": init_device_mesh,
                "fully_shard": fully_shard, "DistributedDataParallel": DistributedDataParallel, "Trainer": Trainer,
                "DataLoader": DataLoader, "get_state_dict": get_state_dict, "dcp": dcp, "folder": folder, "step": 1,
                "model": model, "mesh": mesh, "batch": make_batch(0), "optimizer": optimizer_of(model),
                "device_type": "cpu", "world_size": 2, "own_loss": lambda logits: logits.logsumexp(-1).mean(),
                "sampler": sampler, "loader": loader, "dataset": documents, "lengths": [9] * 16,
                "arguments": arguments(folder),
            }  # fmt: skip
            exec(compile(block.replace("32768", "32"), GUIDE.name, "exec"), given)
        left = [p.grad is not None for p in model.parameters()]
        assert all(left) or not any(left)


CASES = {
    "the guide": guide,
}
