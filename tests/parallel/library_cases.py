"""The code blocks of the guide: all run, and with its module for images loss and gradients are exact."""

from __future__ import annotations

import copy
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import LlavaConfig, LlavaForConditionalGeneration, Trainer

import tritonpack
from tests.parallel.composition_cases import optimizer_of
from tests.parallel.models import Result, gradients_of, in_float64, make_batch, make_float32_model, packed, same
from tests.parallel.trainer_cases import arguments, launched
from tests.patches.models import VOCAB
from tritonpack import MultipackDistributedBatchSampler, PackingCollator, SequenceParallel, UnsupportedModelError, patch

GUIDE = Path(__file__).parents[2] / "docs" / "sequence-parallelism.md"
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)


def guide() -> None:
    """Each block of docs/sequence-parallelism.md runs, with the names that it uses defined and with short rows."""
    assert len(BLOCKS) >= 10
    documents = [{"input_ids": list(range(start, start + 9))} for start in range(16)]
    for block in BLOCKS:
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


SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
IMAGE = VOCAB - 1


def with_images() -> None:
    """The guide's module embeds images on every rank."""
    names: dict[str, Any] = {"torch": torch}
    exec(next(block for block in BLOCKS if "WithImages" in block), names)
    torch.manual_seed(0)
    vision = {"model_type": "clip_vision_model", "image_size": 8, "patch_size": 4, "projection_dim": 32, **SIZES}
    text = {"model_type": "llama", "vocab_size": VOCAB, **SIZES}
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_id=IMAGE, image_seq_length=4)
    model = LlavaForConditionalGeneration(config).double().eval()
    batch = packed((29, 11, 11))
    for first in (3, 22, 41):  # four tokens each, two of them where the rows of two ranks meet
        batch["input_ids"][0, first : first + 4] = IMAGE
        batch["labels"][0, first : first + 4] = -100
    batch["pixel_values"] = torch.randn(3, 3, 8, 8, dtype=torch.float64)
    other = copy.deepcopy(model)
    patch(model)
    with in_float64():
        wanted = model(**batch).loss
        wanted.backward()
        trained = DistributedDataParallel(names["WithImages"](other), find_unused_parameters=True)
        with SequenceParallel(trained, layout="contiguous"):
            got = trained(**batch).loss
            got.backward()
            with pytest.raises(UnsupportedModelError, match="embed all tokens on every rank and pass inputs_embeds"):
                other(**batch)
    results = Result(got.detach(), gradients_of(other)), Result(wanted.detach(), gradients_of(model))
    assert any("vision_tower" in name for name in results[0].gradients)
    same(*results)


CASES = {"the guide": guide, "images": with_images}
