"""Images: the guide's module embeds them on every rank; loss and gradients equal those of one process to 1e-12."""

import copy
import re

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import LlavaConfig, LlavaForConditionalGeneration

from tests.parallel.library_cases import GUIDE
from tests.parallel.models import Result, gradients_of, packed
from tests.parallel.recurrent_cases import in_float64, require_equal
from tests.patches.models import VOCAB
from tritonpack import SequenceParallel, UnsupportedModelError, patch

SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
IMAGE = VOCAB - 1


def guide_module():
    """The class of the guide's block."""
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    names = {"torch": torch}
    exec(next(block for block in blocks if "WithImages" in block), names)
    return names["WithImages"]


def with_images():
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
        trained = DistributedDataParallel(guide_module()(other), find_unused_parameters=True)
        with SequenceParallel(trained, layout="contiguous"):
            got = trained(**batch).loss
            got.backward()
            with pytest.raises(UnsupportedModelError, match="embed all tokens on every rank and pass inputs_embeds"):
                other(**batch)
    results = Result(got.detach(), gradients_of(other)), Result(wanted.detach(), gradients_of(model))
    assert any("vision_tower" in name for name in results[0].gradients)
    require_equal(*results)


CASES = {"LLaVA": with_images}
