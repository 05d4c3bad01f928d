"""Build a tiny random model of any class, with a configuration by the zoo's rows."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from tests.patches import zoo
from tests.patches.sweep import detectron
from tests.patches.sweep.classes import Case, load
from tests.patches.zoo import PARTS, part_of, spread
from tritonpack.patches.interface import use_eager_if_sdpa_differs

LABELS = 3  # of classification
TWO = ("QUESTION", "PRETRAINING", "NEXT_SENTENCE")  # mappings whose heads have two of their own


class NotBuiltError(Exception):
    """No model of a class can be built; the message says why."""


def build(case: Case, *, dtype: torch.dtype = torch.float64, attn_implementation: str | None = None) -> PreTrainedModel:
    """Build a tiny random model of a class, in evaluation mode, with the same weights in every call.

    Raises:
        NotBuiltError: with the reason.
    """
    cls = load(case)
    if why := zoo.UNBUILT.get(case.model_type):
        raise NotBuiltError(why)
    try:
        config = _fit(_config(case), cls)
        torch.manual_seed(0)  # a few parts draw their constants at construction
        with zoo.without_timm(), detectron.stand_in(case.model_type):
            model = cls._from_config(config, experts_implementation="eager", attn_implementation=attn_implementation)
    except Exception as error:
        if attn_implementation == "tritonpack" and isinstance(error, ValueError) and "tritonpack" in str(error):
            raise
        raise NotBuiltError(f"{type(error).__name__}: {' '.join(str(error).split())}"[:240]) from error
    use_eager_if_sdpa_differs(model)
    spread(model, torch.Generator().manual_seed(0))
    return model.to(dtype).eval()


def overrides(case: Case) -> dict[str, Any]:
    """Return the fields that a head requires of its configuration."""
    head = {"num_labels": 2 if any(part in m for m in case.mappings for part in TWO) else LABELS}
    row = zoo.tiny_row(case.model_type)
    if case.name == "T5GemmaEncoderModel":
        head["is_encoder_decoder"] = False
    if "is_decoder" in row and "CAUSAL_LM" not in case.mappings:
        head["is_decoder"] = False
    return head


def _config(case: Case) -> Any:
    if case.name == "JevForDecision" and case.model_type != "jev":  # a head around any model
        config = zoo.tiny_config("jev")
        config.text_config = zoo.tiny_config(case.model_type)
        return config
    return zoo.tiny_config(case.model_type, **overrides(case))


def _fit(config: Any, cls: Any) -> Any:
    """Return the configuration, or the part of it, that a class takes."""
    wanted = cls.config_class
    if config.model_type in PARTS and isinstance(part_of(config), wanted):
        return part_of(config)
    if isinstance(config, wanted):
        return config
    for name in config.sub_configs or {}:
        part = getattr(config, name, None)
        if isinstance(part, wanted):
            return part
    return config
