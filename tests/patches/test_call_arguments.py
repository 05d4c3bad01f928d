"""The form of arguments that tell documents apart: other forms are refused by name, or read as well."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import GitConfig, GitForCausalLM, PreTrainedModel

import tritonpack
from tests.patches import sweep, zoo
from tests.patches.test_patching import LENGTHS, documents, offsets, positions, segments
from tests.patches.test_shared_parts import build

BAD_FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "offsets as a list": ({"cu_seq_lens_q": offsets().tolist()}, r"cu_seq_lens_q must be .*; got list \[0, 7, 8, 11"),
    "offsets of keys as a list": (
        {"cu_seq_lens_q": offsets(), "cu_seq_lens_k": offsets().tolist()},
        "cu_seq_lens_k must be a one-dimensional int32 or int64 tensor",
    ),
    "offsets as a row": ({"cu_seq_lens_q": offsets()[None]}, r"cu_seq_lens_q must be .*; got \(1, 5\) int32 on cpu"),
    "offsets of floats": ({"cu_seq_lens_q": offsets().float()}, r"cu_seq_lens_q must be .*; got \(5,\) float32"),
    "numbers as a list": ({"seq_idx": segments().tolist()}, r"seq_idx must be .*; got list \[\[1, 1"),
    "numbers of floats": ({"seq_idx": segments().float()}, r"seq_idx must be an integer tensor.*; got \(1, 22\) float"),
    "positions as a list": ({"position_ids": positions().tolist()}, r"position_ids must be .*; got list \[\[0, 1"),
    "positions of floats": ({"position_ids": positions().float()}, r"position_ids must .*; got \(1, 22\) float32"),
    "a mask as a list": ({"attention_mask": segments().tolist()}, r"attention_mask must be .*; got list \[\[1, 1"),
    "a mask of NumPy": ({"attention_mask": segments().numpy()}, "attention_mask must be .*; got ndarray"),
}


@pytest.mark.parametrize("inner", [False, True], ids=["head", "model"])
@pytest.mark.parametrize("name", BAD_FORMS)
def test_arguments_in_another_form_are_refused(inner: bool, name: str) -> None:
    arguments, message = BAD_FORMS[name]
    model = zoo.tiny_model("llama", dtype=torch.float64)
    with tritonpack.patch(model):
        called = model.base_model if inner else model
        with pytest.raises(ValueError, match=message):
            called(torch.cat(documents(), 1), **arguments)


@pytest.mark.parametrize("masks", [{"full_attention": None}, {"full_attention": np.ones(3)}, {}], ids=str)
@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])  # the first does not take such masks, the second does
def test_masks_by_kind_of_layer_are_refused(kind: str, masks: dict[str, Any]) -> None:
    model = zoo.tiny_model(kind, dtype=torch.float64)
    message = r"attention_mask is a dict.*position_ids, cu_seq_lens_q, seq_idx or a two-dimensional mask"
    with tritonpack.patch(model), pytest.raises(ValueError, match=message):
        model(torch.cat(documents(), 1), attention_mask=masks, position_ids=positions())


@pytest.mark.parametrize("family", ["llama", "gpt2", "mamba", "bloom", "bert"])
@pytest.mark.parametrize("inner", [False, True], ids=["head", "model"])
def test_positions_of_one_row_may_be_one_dimensional(family: str, inner: bool) -> None:
    model = zoo.tiny_model(family, dtype=torch.float64)
    with tritonpack.patch(model):
        called = model.base_model if inner and family in ("llama", "gpt2") else model
        expected = called(torch.cat(documents(), 1), position_ids=positions())[0]
        assert torch.equal(called(torch.cat(documents(), 1), position_ids=positions()[0])[0], expected)
        alone = torch.cat([called(d)[0] for d in documents()], 1)
    assert float(((expected - alone).abs().max() / alone.abs().max()).detach()) < sweep.tolerance(model)


def git() -> PreTrainedModel:
    torch.manual_seed(0)
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision = {**small, "image_size": 8, "patch_size": 4}
    config = GitConfig(vocab_size=99, max_position_embeddings=64, pad_token_id=0, vision_config=vision, **small)
    return build(GitForCausalLM, config)


@pytest.mark.parametrize("images", [1, len(LENGTHS)])
def test_images_before_the_tokens_of_a_packed_row_are_refused(images: int) -> None:
    model = git()
    pixels = torch.randn(images, 3, 8, 8, dtype=torch.float64)
    message = "GitForCausalLM.* pixel_values.*or pass padded rows to the unpatched model"
    with tritonpack.patch(model), pytest.raises(ValueError, match=message):
        model(torch.cat(documents(), 1), position_ids=positions(), pixel_values=pixels)


def test_other_errors_of_a_call_with_images_stay_unchanged() -> None:
    """The number of images is not the cause."""
    model = git()

    def fail(*_: Any) -> Tensor:
        raise RuntimeError("of the tower")

    model.git.image_encoder.register_forward_pre_hook(fail)
    with tritonpack.patch(model), pytest.raises(RuntimeError, match="of the tower"):
        model(documents()[0], pixel_values=torch.randn(1, 3, 8, 8, dtype=torch.float64))
