"""`Report`: the changes of a patch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from tritonpack.backends import Backend, resolve_backend
from tritonpack.patches.configurations import text_config
from tritonpack.patches.families import MIXERS, POSITION_TABLES
from tritonpack.patches.forwards import takes_dense_mask
from tritonpack.patches.modules import holds, models_in, modules_in, paths_of

NO_ATTENTION = "no attention"


@dataclass(frozen=True)
class Report:
    """The changes of a patch.

    Attributes:
        model_type: transformers' name for the family.
        attention: the attention that runs: "tritonpack" for the kernels; "sdpa" or "eager" for transformers' own with a
            dense block-diagonal mask; "dense" for attention outside of transformers' interface, with the same mask.
        backend: the backend of the kernels that was asked for, as `varlen_attention` takes it.
        replaced: the attention implementation that the model had before.
        by_document: names of the layers with recurrences or convolutions that run once per document.
        positions: names of the tables of absolute positions whose positions restart in each document.
        left: names of the inner models that stay unchanged, such as a vision tower.
        runs: the implementation that computes attention: the backend that "auto" chooses on the model's device in its
            dtype, "sdpa", "eager", "its own attention" of the model, or "no attention" (Mamba).
    """

    model_type: str
    attention: str
    backend: str
    replaced: str | None
    by_document: tuple[str, ...]
    positions: tuple[str, ...]
    left: tuple[str, ...]
    runs: str = field(default="", compare=False)  # depends on the device, to which a model may be moved

    def on_device(self, model: nn.Module) -> Report:
        """Return this report with `runs` for the device of the model."""
        runs = "its own attention" if self.attention == "dense" else self.attention
        kinds = {type(module).__name__ for module in modules_in(model)}
        if kinds & MIXERS and not any("Attention" in name or "Attn" in name for name in kinds - MIXERS):
            runs = NO_ATTENTION
        elif self.attention == "tritonpack":
            runs = self.backend
            weight = next((p for p in model.parameters() if p.is_floating_point()), None)
            if weight is not None and weight.device.type != "meta":
                like = torch.empty(1, 1, 16, dtype=weight.dtype, device=weight.device)
                with suppress(ValueError):  # no backend runs there; the first call says why
                    backend = resolve_backend(cast("Backend", self.backend), like)
                    runs = backend if backend == self.backend else f"{backend} (auto, on {weight.device})"
        return replace(self, runs=runs)

    def __str__(self) -> str:
        runs = f"{self.runs} in its layers"
        if self.runs != NO_ATTENTION:
            kernels = self.attention == "tritonpack"
            what = f"backend {self.runs}" if kernels else f"{self.runs} with a dense mask, O(T^2) memory"
            runs = f"{what}, in place of {self.replaced}"
        lines = [f"{self.model_type}: {runs}"]
        for what, names in (
            ("run document by document", self.by_document),
            ("positions counted per document", self.positions),
            ("left alone", self.left),
        ):
            if names:
                lines.append(f"  {what}: {', '.join(names[:6])}{', ...' if len(names) > 6 else ''}")
        return "\n".join(lines)


def make_report(model: nn.Module, patched: Sequence[PreTrainedModel], layers: Sequence[Any], options: Any) -> Report:
    """Make the report from the patched modules, the forwards of layers, and the options of `patch`."""
    config = patched[-1].config
    width = getattr(text_config(config), "hidden_size", 0)
    mixers = [forward for forward in layers if forward.name in MIXERS]
    # Classes of mixing layers whose kernels keep documents apart when they get boundaries.
    once = {type(mixer.module) for mixer in mixers if mixer.takes_boundaries(width)}
    changed = [forward.module for forward in layers if type(forward.module) not in once]

    def named(kinds: frozenset[str]) -> tuple[str, ...]:
        return paths_of([module for module in changed if type(module).__name__ in kinds], model)

    return Report(
        model_type=config.model_type,
        attention="dense" if takes_dense_mask(patched[-1]) else options.attention,
        backend=options.backend,
        replaced=config._attn_implementation_internal,
        by_document=named(MIXERS),
        positions=named(POSITION_TABLES),
        left=paths_of([m for m in models_in(model) if not any(holds(m, inner) for inner in patched)], model),
    )
