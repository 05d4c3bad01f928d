"""Every pair of class and model type in transformers' auto mappings, which of them take text, and tiny models."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

from tests.patches import zoo

PREFIX, SUFFIX = "MODEL_FOR_", "_MAPPING_NAMES"


@dataclasses.dataclass(frozen=True)
class Case:
    """A class of transformers, built from the configuration of one model type, a key of CONFIG_MAPPING.

    `mappings` are the auto mappings that lead from the type to the class, such as "CAUSAL_LM"; "BASE" is AutoModel's.
    """

    name: str
    model_type: str
    mappings: tuple[str, ...]

    @property
    def key(self) -> str:
        return f"{self.name}/{self.model_type}"

    @property
    def takes_options(self) -> bool:
        """Whether it is tried with `unpad` and `share_prefixes`: causal language models are."""
        return "CAUSAL_LM" in self.mappings


@functools.cache
def cases() -> tuple[Case, ...]:
    """Return every pair of class and model type once, grouped by type, without importing any class."""
    homes: dict[tuple[str, str], list[str]] = {}
    for mapping, kinds in vars(modeling_auto).items():
        if mapping.startswith("MODEL_") and mapping.endswith(SUFFIX):
            short = mapping.removeprefix(PREFIX).removesuffix(SUFFIX) if mapping.startswith(PREFIX) else "BASE"
            for kind, names in kinds.items():
                for name in names if isinstance(names, (tuple, list)) else (names,):
                    homes.setdefault((kind, name), []).append(short)
    return tuple(Case(name, kind, tuple(found)) for (kind, name), found in sorted(homes.items()))


def load(case: Case) -> Any:
    """Return the class itself; raise ImportError if it, or a library that it needs, is missing."""
    cls = getattr(transformers, case.name, None)
    if cls is None:
        raise ImportError(f"transformers {transformers.__version__} names {case.name} in a mapping and doesn't have it")
    cls.forward  # noqa: B018 - what stands in for a class whose library is missing raises here
    return cls


IDS = ("input_ids", "decoder_input_ids")  # parameters by which a forward takes text
# Classes with such a parameter that isn't given text, and why.
ONE_STEP = ("Nemotron3_5AsrForRNNT", "NemotronAsrStreamingForRNNT", "ParakeetForRNNT", "ParakeetForTDT")
NOT_TEXT = dict.fromkeys(ONE_STEP, "its decoder_input_ids are the one token of a decoding step")


def no_text(cls: Any) -> str | None:
    """Return why a class takes no text, None if it takes some.

    The rule: `forward` has `input_ids` or `decoder_input_ids`. Embeddings alone may be of images, sounds or queries.
    """
    if why := NOT_TEXT.get(cls.__name__):
        return why
    takes_ids = any(name in inspect.signature(cls.forward).parameters for name in IDS)
    return None if takes_ids else "its forward has no input_ids"


class NotBuiltError(Exception):
    """No model of a class can be built, or called; the message says why."""


def build(case: Case, *, dtype: torch.dtype = torch.float64, attn_implementation: str | None = None) -> PreTrainedModel:
    """Build a tiny random model of a class, in evaluation mode, with the same weights in every call."""
    load(case)
    name = "jev" if case.name == "JevForDecision" else case.model_type
    try:
        return zoo.tiny_model(name, kind=case.name, dtype=dtype, attention=attn_implementation, **overrides(case))
    except Exception as error:
        if attn_implementation == "tritonpack" and isinstance(error, ValueError) and "tritonpack" in str(error):
            raise
        raise NotBuiltError(f"{type(error).__name__}: {' '.join(str(error).split())}"[:240]) from error


def overrides(case: Case) -> dict[str, Any]:
    """Return the fields that a head requires of its configuration."""
    if case.name == "JevForDecision":  # a head around any model
        return {"text_config": zoo.tiny_config(case.model_type)} if case.model_type != "jev" else {}
    two = any(part in mapping for mapping in case.mappings for part in ("QUESTION", "PRETRAINING", "NEXT_SENTENCE"))
    head: dict[str, Any] = {"num_labels": 2 if two else 3}
    if case.name == "T5GemmaEncoderModel":
        head["is_encoder_decoder"] = False
    if "is_decoder" in zoo.ROWS.get(case.model_type, {}) and "CAUSAL_LM" not in case.mappings:
        head["is_decoder"] = False
    return head
