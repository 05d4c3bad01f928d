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
from tests.parallel.models import close, make_batch, make_float32_model, make_model
from tests.parallel.trainer_cases import arguments, launched
from tritonpack import MultipackDistributedBatchSampler, PackingCollator, SequenceParallel, patch

GUIDE = Path(__file__).parents[2] / "docs" / "sequence-parallelism.md"


def lora() -> None:
    from peft import LoraConfig, get_peft_model

    models = []
    for _ in range(2):
        model = get_peft_model(make_model(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"])).double()
        generator = torch.Generator().manual_seed(5)
        for name, p in model.named_parameters():
            if "lora" in name:
                p.data = torch.randn(p.shape, generator=generator, dtype=p.dtype) / 8  # B is initialised to zero
        models.append(model)
    reference, model = models
    patch(reference)
    reference(**make_batch(0)).loss.backward()
    trained = DistributedDataParallel(model)
    with SequenceParallel(trained):
        output = trained(**make_batch(0))
        output.loss.backward()
    assert output.logits.shape[1] < make_batch(0)["input_ids"].shape[1]
    expected = dict(reference.named_parameters())
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(gradients) == 8
    for name, gradient in gradients.items():
        close(gradient, expected[name].grad, name)


def compiled() -> None:
    """A model that was compiled before entering; graphs end where ranks exchange."""
    reference, model = make_model(), make_model()
    for one in (reference, model):
        del one.model.layers[1:]
    patch(reference)
    expected = reference(**make_batch(0)).loss
    expected.backward()
    trained = DistributedDataParallel(torch.compile(model, backend="eager"))
    with SequenceParallel(trained):
        output = trained(**make_batch(0))
        output.loss.backward()
    assert output.logits.shape[1] < make_batch(0)["input_ids"].shape[1]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 1, "nothing was compiled"
    close(output.loss.detach(), expected.detach(), "loss")
    for (name, p), whole in zip(model.named_parameters(), reference.parameters(), strict=True):
        close(p.grad, whole.grad, name)


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
    "a PEFT model": lora,
    "a compiled model": compiled,
    "the guide": guide,
}
