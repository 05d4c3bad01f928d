"""Models that were loaded with another attention, or meant to be: patched to our kernels, and given it back."""

import pytest
import torch

import tritonpack
from tests.patches import zoo
from tests.patches.calls import alone, require_exact, state

NAMES = ("flash_attention_2", "flash_attention_3", "flex_attention", "eager", "sdpa", "kernels-community/flash-attn2")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", ["mistral", "falcon"])
def test_any_name_is_replaced_and_restored(family: str, name: str) -> None:
    """The name is all that a loaded model keeps of its attention; machines without GPUs can't load most of these."""
    model = zoo.tiny_model(family, dtype=torch.float64)
    expected = alone(model)
    model.config._attn_implementation_internal = name
    before = state(model)
    with tritonpack.patch(model) as handle:
        assert (handle.report.attention, handle.report.replaced) == ("tritonpack", name)
        require_exact(model, expected, "all_ones_mask")
    assert state(model) == before
    assert model.config._attn_implementation == name
