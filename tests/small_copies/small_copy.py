"""A small random copy of a model, built from its configuration alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

from tests.small_copies.shrink import shrink
from tritonpack.patches.interface import use_eager_if_sdpa_differs
from tritonpack.patches.proof import one_line

# transformers' auto classes in the order in which a model is looked for, and what each of their models is.
AUTO = {
    "AutoModelForCausalLM": "a causal language model",
    "AutoModelForImageTextToText": "a multimodal language model, given text alone",
    "AutoModel": "a model without a language head: its hidden states are compared",
}

# Model types whose language model takes a part of the configuration, and the name of that part.
PARTS = {"musicgen": "decoder", "musicgen_melody": "decoder"}

# The fused experts don't support float64.
_EXPERTS = "eager"


class NotSmallError(ValueError):
    """No small copy can be built from a configuration; the message says why."""


@dataclass(frozen=True)
class Built:
    """A model in evaluation mode, and its description."""

    model: nn.Module
    kind: str  # the name of its class, and what it is
    notes: tuple[str, ...] = ()  # what differs from the configuration


def small_copy(config: Any, *, dtype: torch.dtype = torch.float32, **options: Any) -> Built:
    """Build a small random model of the auto class of a configuration, with every switch of it (see `shrink`).

    If the whole can't be built, the language model inside it is built. Options are those of the auto classes'
    `from_config`, such as `trust_remote_code`. The configuration stays as it is.

    Raises:
        NotSmallError: transformers builds no such model, or not in this size.
    """
    try:
        torch.default_generator.manual_seed(0)  # a few parts draw their constants at construction
        auto, small = auto_class(config), shrink(config)
        small.name_or_path = config.name_or_path  # the place of a model's own code
        if config.model_type in PARTS:
            model = model_class(config)(part_of(small))
        else:
            model = auto.from_config(small, experts_implementation=_EXPERTS, **options)
    except Exception as error:  # a configuration's or a model's own code may raise anything
        reason = one_line(error)
        text = config.get_text_config(decoder=True)
        if text is config or text.__class__ is config.__class__:
            raise NotSmallError(reason) from error
        try:
            inside = small_copy(text, dtype=dtype, **options)
        except NotSmallError:
            raise NotSmallError(reason) from error
        note = f"only the language model inside was built, because the whole can't be: {reason}"
        return Built(inside.model, inside.kind, (note, *inside.notes))
    use_eager_if_sdpa_differs(model)
    spread(model, torch.Generator(device="cpu").manual_seed(0))
    return Built(model.to(dtype).eval(), f"{type(model).__name__}, {AUTO[auto.__name__]}")


def auto_class(config: Any) -> Any:
    """Return the first of the classes in `AUTO` that has a model for a configuration.

    Raises:
        ValueError: none has.
    """
    for name in AUTO:
        auto = getattr(transformers, name)
        if type(config) in auto._model_mapping or name in (getattr(config, "auto_map", None) or {}):
            return auto
    raise ValueError(f"transformers has no model for a {type(config).__name__}")


def model_class(config: Any) -> Any:
    """Return the model class of a configuration whose class transformers knows."""
    return auto_class(config)._model_mapping[type(config)]


def part_of(config: Any) -> Any:
    """Return the part of a configuration that its language model takes, which mostly is all of it."""
    return getattr(config, PARTS[config.model_type]) if config.model_type in PARTS else config


def spread(model: nn.Module, generator: torch.Generator) -> None:
    """Draw weights with which every part contributes. With transformers' small weights attention has little effect."""
    done: set[int] = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if id(parameter) in done or parameter.numel() == 0:
                continue
            done.add(id(parameter))
            noise = torch.randn(parameter.shape, generator=generator, device="cpu")
            values = parameter.data
            settled = bool(values.isfinite().all()) and 0.1 < float(values.abs().mean()) < 100
            if isinstance(module, nn.Embedding):
                parameter.data = 0.5 * noise
            elif parameter.ndim >= 2 and not settled:
                parameter.data = noise / parameter.shape[-1] ** 0.5
            else:  # norms, decays, biases, sinks: near the values that the model gives them, but no two alike
                parameter.data = values + 0.2 * noise
