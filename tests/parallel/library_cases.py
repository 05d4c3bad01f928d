"""The code blocks of the guide: all run, and with its module for images loss and gradients are exact."""

import copy
import re
import tempfile
from pathlib import Path

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
from tests.parallel import models
from tests.parallel.composition_cases import optimizer_of
from tests.parallel.models import make_batch
from tests.parallel.trainer_cases import arguments, launched
from tests.patches.models import VOCAB
from tritonpack import MultipackDistributedBatchSampler, PackingCollator, SequenceParallel, UnsupportedModelError

GUIDE = Path(__file__).parents[2] / "docs" / "sequence-parallelism.md"
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)


def guide():
    """Each block of docs/sequence-parallelism.md runs, with the names that it uses defined and with short rows."""
    documents = [{"input_ids": list(range(start, start + 9))} for start in range(16)]
    for block in BLOCKS:
        model, sampler = models.make_float32_model(), MultipackDistributedBatchSampler(32, [9] * 16, 1, 0, seed=0)
        with launched(), tempfile.TemporaryDirectory() as folder:
            given = {
                "tritonpack": tritonpack, "torch": torch, "dist": dist, "init_device_mesh": init_device_mesh,
                "fully_shard": fully_shard, "DistributedDataParallel": DistributedDataParallel, "Trainer": Trainer,
                "DataLoader": DataLoader, "get_state_dict": get_state_dict, "dcp": dcp,
                "model": model, "mesh": init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "sp")), "folder": folder,
                "batch": make_batch(0), "optimizer": optimizer_of(model), "device_type": "cpu", "world_size": 2,
                "own_loss": lambda logits: logits.logsumexp(-1).mean(), "sampler": sampler, "step": 1,
                "loader": DataLoader(documents, batch_sampler=sampler, collate_fn=PackingCollator()),
                "dataset": documents, "lengths": [9] * 16, "arguments": arguments(folder),
            }  # fmt: skip
            exec(compile(block.replace("32768", "32"), GUIDE.name, "exec"), given)
        assert len({p.grad is None for p in model.parameters()}) == 1


def with_images():
    """The guide's module embeds images on every rank, and loss and gradients are exact."""
    names = {"torch": torch}
    exec(next(block for block in BLOCKS if "WithImages" in block), names)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision = {"model_type": "clip_vision_model", "image_size": 8, "patch_size": 4, "projection_dim": 32, **sizes}
    text, image = {"model_type": "llama", "vocab_size": VOCAB, **sizes}, VOCAB - 1
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_id=image, image_seq_length=4)
    model = LlavaForConditionalGeneration(config).double().eval()
    batch = models.packed((29, 11, 11))
    for first in (3, 22, 41):  # four tokens each, two of them where the rows of two ranks meet
        batch["input_ids"][0, first : first + 4] = image
        batch["labels"][0, first : first + 4] = -100
    batch["pixel_values"] = torch.randn(3, 3, 8, 8, dtype=torch.float64)
    other = copy.deepcopy(model)
    with models.in_float64():
        wanted = models.alone(model, models.loss_of, batch)
        trained = DistributedDataParallel(names["WithImages"](other), find_unused_parameters=True)
        with SequenceParallel(trained, layout="contiguous"):
            loss = models.loss_of(trained, **batch)
            loss.backward()
            with pytest.raises(UnsupportedModelError, match="embed all tokens on every rank and pass inputs_embeds"):
                other(**batch)
    assert any("vision_tower" in name for name in wanted.gradients)
    models.same(models.Result(loss.detach()[None], models.gradients_of(other)), wanted)


CASES = {"the guide": guide, "images": with_images}
