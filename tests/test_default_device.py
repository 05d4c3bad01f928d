"""A default device other than that of the tensors, as notebooks set one, changes no result."""

from typing import Any

import pytest
import torch

import tritonpack
from tritonpack import BlockDiagonalMask, PackingCollator

pytest.importorskip("transformers")

from tests.patches import zoo
from tests.patches.models import tiny_model

DOCUMENTS = [{"input_ids": [5, 6, 7, 8]}, {"input_ids": [9]}, {"input_ids": [3, 4, 10]}]


# "meta" stands for a GPU, which users set by `torch.set_default_device`.
@pytest.mark.parametrize(
    "collate",
    [PackingCollator(), PackingCollator(pad_to_multiple_of=16, pad_token_id=0), tritonpack.TreeCollator()],
    ids=["packed", "padded", "tree"],
)
def test_collators_and_masks(collate: Any) -> None:
    expected = collate(DOCUMENTS)
    with torch.device("meta"):
        got = collate(DOCUMENTS)
        assert BlockDiagonalMask.from_seqlens([3, 2]).device.type == "cpu"
        assert BlockDiagonalMask.from_tree([-1, 0, 1, 2, 1]).device.type == "cpu"
    torch.testing.assert_close(dict(got), dict(expected), rtol=0, atol=0)


# A family, and options of a patch
PATCHES: list[tuple[str, dict[str, Any]]] = [
    *(("llama", options) for options in ({}, {"attention": "sdpa"}, {"unpad": True}, {"share_prefixes": True})),
    ("falcon_h1", {}),
]


@pytest.mark.parametrize(("family", "options"), PATCHES, ids=str)
def test_calls(family: str, options: dict[str, Any]) -> None:
    model = tiny_model("llama", dtype=torch.float32) if family == "llama" else zoo.tiny_model(family)
    batch = PackingCollator()(DOCUMENTS) | {"use_cache": False}
    with tritonpack.patch(model, **options):
        expected = model(**batch).loss
        with torch.device("meta"):
            got = model(**batch).loss
            got.backward()
    assert torch.equal(got, expected)
