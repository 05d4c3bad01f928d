"""patch(model) and unpatch(model): a pre-hook on the decoder and a name in its config; leaving takes both away."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from tritonpack.errors import UnsupportedModelError
from tritonpack.patches import interface
from tritonpack.patches.families import FAMILIES, layer_windows
from tritonpack.patches.packing import read_packing


@dataclass(frozen=True)
class Report:
    """What a patch changed.

    Attributes:
        model_type: transformers' name for the family.
        layers: how many attention layers go through tritonpack.
        windows: the sliding window of each layer in tokens, itself included; None for full attention.
        backend: what computes attention, as `varlen_attention` takes it.
        replaced: the attention implementation that the model had before.
    """

    model_type: str
    layers: int
    windows: tuple[int | None, ...]
    backend: str
    replaced: str | None

    def __str__(self) -> str:
        kinds = sorted({window for window in self.windows if window is not None})
        sliding = (
            f"{sum(w is not None for w in self.windows)} with a sliding window of {kinds}" if kinds else "no window"
        )
        return (
            f"{FAMILIES[self.model_type]} ({self.model_type}): {self.layers} attention layers, {sliding}; backend "
            f"{self.backend}, in "
            f"place of {self.replaced}"
        )


class Patch:
    """A patched model; a context manager that unpatches it on leaving, also after an exception."""

    def __init__(self, model: nn.Module, report: Report) -> None:
        self.model = model
        self.report = report

    def unpatch(self) -> None:
        """Restore the model; does nothing if that has been done already."""
        if _find_hook(self.model) is not None:
            unpatch(self.model)

    def __enter__(self) -> Patch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.unpatch()

    def __repr__(self) -> str:
        return f"Patch({self.report})"


def patch(model: nn.Module, *, backend: str = "auto") -> Patch:
    """Replace a transformers model's attention with varlen attention that keeps packed documents apart.

    Afterwards documents are told apart by whatever says where they begin: `cu_seq_lens_q` or `seq_idx` as collators
    pass them, a two-dimensional `attention_mask` (0 for padding; other numbers number documents), or `position_ids`
    that restart; with or without `use_cache`, in one row or many. Nothing process-wide is replaced and no state
    outlives a forward pass.

    Args:
        model: a transformers model of a supported family, or a module that holds one (PEFT's wrappers do).
        backend: as `varlen_attention` takes it: "auto", "triton", "blocked" or "reference".

    Returns:
        A handle with `report` and `unpatch()`; as a context manager it unpatches on leaving.

    Raises:
        UnsupportedModelError: (a ValueError) a family that isn't supported yet.
        ValueError: a model that is patched already, or an unknown backend.
    """
    if backend not in ("auto", "triton", "blocked", "reference"):
        raise ValueError(f"backend must be 'auto', 'triton', 'blocked' or 'reference'; got {backend!r}.")
    decoder = _decoder(model)
    if _hook_of(decoder) is not None:
        raise ValueError("this model is patched already; call tritonpack.unpatch(model) first to change its options.")
    interface.register()
    config = decoder.config
    hook = PackingHook(decoder, backend, replaced=config._attn_implementation_internal)
    decoder.register_forward_pre_hook(hook, with_kwargs=True)
    config._attn_implementation_internal = interface.NAME
    windows = layer_windows(config)
    return Patch(model, Report(config.model_type, len(windows), windows, backend, hook.replaced))


def unpatch(model: nn.Module) -> None:
    """Give a patched model its own attention back.

    Raises:
        ValueError: the model isn't patched.
    """
    found = _find_hook(model)
    if found is None:
        raise ValueError("this model isn't patched; tritonpack.patch(model) does that.")
    decoder, key, hook = found
    del decoder._forward_pre_hooks[key]
    decoder._forward_pre_hooks_with_kwargs.pop(key, None)
    decoder.config._attn_implementation_internal = hook.replaced  # type: ignore[union-attr]


class PackingHook:
    """The decoder's pre-hook: reads where documents begin and passes it on as `attention_mask`."""

    def __init__(self, decoder: PreTrainedModel, backend: str, replaced: str | None) -> None:
        self.names = tuple(inspect.signature(decoder.forward).parameters)
        self.backend = backend
        self.replaced = replaced

    def __call__(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        chosen = decoder.config._attn_implementation_internal  # type: ignore[union-attr]
        if chosen != interface.NAME:
            raise ValueError(
                f"the attention implementation was set to {chosen!r} since this model was patched, which would ignore "
                "its packing. Call tritonpack.unpatch(model) before setting another."
            )
        arguments = {**dict(zip(self.names, args, strict=False)), **kwargs}
        arguments["attention_mask"] = read_packing(arguments, self.backend)
        return (), arguments


def _decoder(model: nn.Module) -> PreTrainedModel:
    """The one module inside that embeds tokens and runs the layers."""
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    if not models:
        raise UnsupportedModelError(f"expected a transformers model; got {type(model).__name__}.")
    for module in models:
        if module.config.model_type not in FAMILIES:
            raise UnsupportedModelError(
                f"{type(module).__name__} (model type {module.config.model_type!r}) isn't supported yet: it isn't "
                "known to keep packed "
                f"documents apart. Supported: {', '.join(sorted(FAMILIES))}."
            )
    decoders = [module for module in models if module.base_model is module]
    if len(decoders) != 1:
        names = ", ".join(type(module).__name__ for module in decoders)
        raise UnsupportedModelError(f"expected one decoder; {type(model).__name__} holds {len(decoders)} ({names}).")
    return decoders[0]


def _hook_of(decoder: nn.Module) -> tuple[int, PackingHook] | None:
    for key, hook in decoder._forward_pre_hooks.items():
        if isinstance(hook, PackingHook):
            return key, hook
    return None


def _find_hook(model: nn.Module) -> tuple[nn.Module, int, PackingHook] | None:
    for module in model.modules():
        found = _hook_of(module)
        if found is not None:
            return module, *found
    return None
