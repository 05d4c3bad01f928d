"""DeepSpeed's Ulysses around a patched model: refused in the call."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import tritonpack
from tests.patches.zoo import tiny_model

MIXED = {"input_ids": torch.tensor([[5, 6, 7, 8, 9]]), "position_ids": torch.tensor([[0, 1, 0, 1, 2]])}


@contextmanager
def ulysses(name: str, home: str = "deepspeed.runtime.sequence_parallel.ulysses_sp") -> Iterator[None]:
    """Replace an attention function as DeepSpeed does: by a function under the same name, which drops the mask."""
    core = ALL_ATTENTION_FUNCTIONS[name]

    def uattn_wrapper(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        return core(module, query, key, value, None, **kwargs)

    uattn_wrapper.__module__ = home
    ALL_ATTENTION_FUNCTIONS[name] = uattn_wrapper
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS[name]


@pytest.mark.parametrize("family", ["llama", "falcon"])  # Falcon's attention looks up no function
@pytest.mark.parametrize("attention", ["tritonpack", "sdpa"])
def test_ulysses_around_tritonpacks_attention_is_refused(family: str, attention: Any) -> None:
    model = tiny_model(family, dtype=torch.float32)
    with tritonpack.patch(model, attention=attention):
        expected = model(**MIXED).logits
        with (
            ulysses(model.config._attn_implementation),
            pytest.raises(tritonpack.UnsupportedModelError, match=r"Ulysses.*tritonpack\.SequenceParallel"),
        ):
            model(**MIXED)
        assert torch.equal(model(**MIXED).logits, expected)


def test_ulysses_around_the_attention_before_the_patch() -> None:
    """Nothing calls Ulysses then, so a token would see only the tokens of its rank."""
    model = tiny_model("llama", dtype=torch.float32)
    with ulysses("sdpa"), tritonpack.patch(model), pytest.raises(tritonpack.UnsupportedModelError, match="Ulysses"):
        model(**MIXED)


def test_a_replaced_attention_function_is_refused() -> None:
    model = tiny_model("llama", dtype=torch.float32)
    with (
        tritonpack.patch(model),
        ulysses("tritonpack", "another.library"),
        pytest.raises(tritonpack.UnsupportedModelError, match=r"'tritonpack' was replaced by another\.library\."),
    ):
        model(**MIXED)


def test_other_replaced_functions_are_accepted() -> None:
    """Only DeepSpeed's function is known to share rows between ranks."""
    model = tiny_model("llama", dtype=torch.float32)
    with ulysses("sdpa", "another.library"), tritonpack.patch(model):
        assert model(**MIXED).logits.isfinite().all()
