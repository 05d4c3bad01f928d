"""`Report`: what a patch changed in a model."""

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
from tritonpack.patches.modules import holds, modules_in, paths_of

NO_ATTENTION = "no attention"


@dataclass(frozen=True)
class Report:
    """What a patch changed.

    Attributes:
        model_type: transformers' name for the family.
        attention: which attention runs: "tritonpack" for the kernels; "sdpa" or "eager" for transformers' own with a
            dense block-diagonal mask; "dense" for attention outside of transformers' interface, with the same mask.
        backend: the backend of the kernels that was asked for, as `varlen_attention` takes it.
        runs: what computes attention: the backend that "auto" chooses on the model's device, in its dtype, "sdpa",
            "eager", the model's own attention, or "no attention" (Mamba).
        layers: how many layers the decoder has.
        windows: how many keys a query of each layer sees, its own included; None for full attention.
        features: what else attention computes, such as "softcap", "sinks" or "chunks of 8192".
        by_document: names of the layers with recurrences or convolutions that run on each document by itself.
        positions: names of the tables of absolute positions that count in each document.
        left: names of the parts of the model that stay unchanged, such as a vision tower.
        replaced: the attention implementation that the model had before.
        saves: what of a padded batch isn't computed, as `unpad` and `share_prefixes` ask for; empty without them.
    """

    model_type: str
    attention: str
    backend: str
    layers: int
    windows: tuple[int | None, ...]
    features: tuple[str, ...]
    by_document: tuple[str, ...]
    positions: tuple[str, ...]
    left: tuple[str, ...]
    replaced: str | None
    saves: tuple[str, ...] = ()
    runs: str = field(default="", compare=False)  # no change of the patch: a model may move

    def on_device(self, model: nn.Module) -> Report:
        """This report, with what computes attention on the device on which the model lies."""
        runs = "its own attention" if self.attention == "dense" else self.attention
        kinds = {type(module).__name__ for module in modules_in(model)} - MIXERS
        if not any("Attention" in name or "Attn" in name for name in kinds):
            runs = NO_ATTENTION
        elif self.attention == "tritonpack":
            runs = self.backend
            weight = next((p for p in model.parameters() if p.is_floating_point()), None)
            if weight is not None and weight.device.type != "meta":
                like = torch.empty(1, 1, 16, dtype=weight.dtype, device=weight.device)
                with suppress(ValueError):  # no backend runs there; the first call says why
                    found = resolve_backend(cast("Backend", self.backend), like)
                    runs = found if found == self.backend else f"{found} (auto, on {weight.device})"
        return replace(self, runs=runs)

    def __str__(self) -> str:
        kinds = sorted({window for window in self.windows if window is not None})
        sliding = f"{sum(w is not None for w in self.windows)} with a sliding window of {kinds}" if kinds else ""
        parts = [f"{self.model_type}: {self.layers} layer{'' if self.layers == 1 else 's'}", sliding, *self.features]
        if self.runs == NO_ATTENTION:
            runs = f"{NO_ATTENTION} in its layers"
        elif self.attention == "tritonpack":
            runs = f"backend {self.runs or self.backend}, in place of {self.replaced}"
        else:
            own = "its own attention" if self.attention == "dense" else self.attention
            runs = f"{own} with a dense mask, O(T^2) memory, in place of {self.replaced}"
        lines = [f"{', '.join(filter(None, parts))}; {runs}"]
        for what, names in (
            ("run document by document", self.by_document),
            ("positions counted per document", self.positions),
            ("left alone", self.left),
            ("not computed", self.saves),
        ):
            if names:
                lines.append(f"  {what}: {', '.join(names[:6])}{', ...' if len(names) > 6 else ''}")
        return "\n".join(lines)


def make_report(model: nn.Module, patched: Sequence[PreTrainedModel], layers: Sequence[Any], asked: Any) -> Report:
    """The report of a patch of some modules of a model, with these forwards of layers, and the options of `patch`."""
    config = patched[-1].config
    width = getattr(text_config(config), "hidden_size", 0)
    mixers = [forward for forward in layers if forward.name in MIXERS]
    # Classes of mixing layers that keep documents apart by themselves when they get boundaries.
    once = {type(mixer.module) for mixer in mixers if mixer.takes_boundaries(width)}
    copies = ("copies of common beginnings",) if asked.share_prefixes else ()
    windows = layer_windows(config)
    every = list(modules_in(model))
    models = [module for module in every if isinstance(module, PreTrainedModel)]

    def named(kinds: frozenset[str]) -> tuple[str, ...]:
        return paths_of([m for m in every if type(m).__name__ in kinds and type(m) not in once], model)

    return Report(
        model_type=config.model_type,
        layers=len(windows),
        windows=windows,
        features=_features(config, patched[-1]),
        by_document=named(MIXERS),
        positions=named(POSITION_TABLES),
        left=paths_of([m for m in models if not any(holds(m, inner) for inner in patched)], model),
        replaced=config._attn_implementation_internal,
        attention="dense" if takes_dense_mask(patched[-1]) else asked.attention,
        backend=asked.backend,
        saves=("padding", *copies) if asked.unpad or asked.share_prefixes else (),
    )


def layer_windows(config: Any) -> tuple[int | None, ...]:
    """How many keys a query of each layer sees, its own included; None for full attention."""
    try:
        window = getattr(config, "sliding_window", None)
    except Exception:  # a configuration with a window for each layer raises
        window = None
    layer_types = getattr(config, "layer_types", None) or []
    if layer_types:
        return tuple(window if "sliding" in kind else None for kind in layer_types)
    layers = getattr(config, "num_hidden_layers", 0)
    return (window,) * (layers if isinstance(layers, int) else 0)  # LXMERT counts several kinds


def _features(config: Any, decoder: nn.Module) -> tuple[str, ...]:
    """The features of attention besides a plain softmax."""
    softcap, chunk, topk = (
        getattr(config, name, None) for name in ("attn_logit_softcapping", "attention_chunk_size", "index_topk")
    )
    sinks = ("sinks", "sink_bias", "attention_sink")
    found = {
        f"softcap {softcap or 0:g}": softcap,
        "sinks": any(name.endswith(sinks) for module in modules_in(decoder) for name in module._parameters),
        f"chunks of {chunk}": chunk,
        "ALiBi": getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt"),
        f"{topk} keys chosen by an indexer": topk,
        "bidirectional": getattr(config, "is_causal", True) is False,
    }
    return tuple(name for name, has in found.items() if has)
