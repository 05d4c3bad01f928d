"""Calls that continue a cache give what the whole text gives at once, wherever stock transformers does, too."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import tritonpack
from tests.patches import sweep
from tests.patches.test_every_model import EXACT, build, mostly_slow

IDS = torch.randint(6, 50, (1, 14), generator=torch.Generator().manual_seed(1))
REFUSED = {"git"}  # its text alone can't be continued
STOCK_IS_RIGHT = {
    "bailing_hybrid",
    "falcon_h1",
    "lara_mini",
    "lfm2",
    "lfm3",
    "olmo_hybrid",
    "opt",
    "qwen3_next",
    "zaya",
}


def states(output: Any) -> Tensor:
    return output.logits if "logits" in output else output.last_hidden_state


def behind_padding(model: PreTrainedModel) -> Tensor | None:
    """Two new tokens of a row that was padded on the left, beside one without padding. No position ids are given."""
    ids, mask = IDS.repeat(2, 1), torch.ones(2, 14, dtype=torch.int64)
    mask[1, :2] = 0
    output = model(input_ids=ids[:, :12], attention_mask=mask[:, :12], use_cache=True)
    if output.get("cache") is None:
        return None
    return states(model(input_ids=ids[:, 12:], attention_mask=mask, use_cache=True, cache=output.cache))[1]


def without_mask(model: PreTrainedModel) -> Tensor | None:
    """One token more than the cache holds, so that a mask for the new tokens alone would leave one place."""
    output = model(input_ids=IDS[:, :4], use_cache=True)
    if output.get("cache") is None:
        return None
    return states(model(input_ids=IDS[:, 4:9], use_cache=True, cache=output.cache))[0]


def apart(model: PreTrainedModel, continued: Callable[[PreTrainedModel], Tensor | None], whole: Tensor) -> float | None:
    """The largest distance from what the whole text gives, relative; None if there is no cache."""
    got = continued(model)
    return None if got is None else float((got - whole).abs().max() / whole.abs().max())


@mostly_slow([name for name in EXACT if name not in REFUSED])
@pytest.mark.fast("bert", "bloom", "gpt_oss", "lfm2", "opt")
@pytest.mark.filterwarnings("ignore")
def test_a_continued_text_is_the_whole_one(name: str) -> None:
    """Of the head and of the model in it, which users may patch by itself."""
    head = build(name).eval()
    base = getattr(head, head.base_model_prefix, None)
    models = [head] if base is None or "input_ids" not in inspect.signature(base.forward).parameters else [head, base]
    right = 0
    for model in models:
        for continued, text, new in ((behind_padding, slice(2, 14), 10), (without_mask, slice(0, 9), 4)):
            with torch.no_grad():
                try:
                    whole = states(model(input_ids=IDS[:, text]))[0, new:]
                    stock = apart(model, continued, whole)
                except Exception:  # stock transformers fails
                    continue
                if stock is None or not stock < sweep.tolerance(model):
                    continue
                right += 1
                with tritonpack.patch(model):
                    got = apart(model, continued, whole)
                assert got is not None
                assert got < sweep.tolerance(model), (type(model).__name__, continued.__name__)
    assert right == 4 or name not in STOCK_IS_RIGHT
