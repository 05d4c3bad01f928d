"""Code of others that gets no mask, such as adapters: the first packed call shows whether it keeps documents apart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tritonpack.errors import UnsupportedModelError
from tritonpack.patches.forwards import by_class, is_own, mixes
from tritonpack.patches.packed_batch import PackedBatch

# How far an output may move because of rounding, relative to its largest value: scales of quantized layers depend on
# all tokens of a call.
ROUNDING = {torch.float64: 1e-8, torch.float32: 1e-4}
ROUNDING_OF_OTHERS = 2e-2


def foreign_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules whose forward is neither transformers' nor torch's and gets no mask, by name.

    A layer that takes arguments about its row is tried when the model is patched (`probe.py`).
    """
    mixing = by_class(mixes)
    return {name: one for name, one in model.named_modules() if not is_own(one) and not mixing(type(one))}


@contextmanager
def kept_apart(model: nn.Module, packed_batch: PackedBatch) -> Iterator[None]:
    """Watch a call of a model with packed rows, and refuse foreign modules that mix documents.

    Each runs three times more: unchanged, with the tokens of every second document exchanged, and with the tokens of
    the others exchanged. One that doesn't compute a value for each token isn't watched.
    """
    others = {name: one for name, one in foreign_modules(model).items() if not _is_watched(one, packed_batch)}
    watches: dict[str, _Watch] = {}
    if others:
        begins = packed_batch.runs()[0].flatten()
        if packed_batch.tree_ends is not None:
            begins = torch.ones_like(begins)  # no module may let a token change another: its branch may be another one
        numbers = begins.cumsum(0).view(packed_batch.tokens)
        watches = {name: _Watch(one, packed_batch, numbers % 2 == 0) for name, one in others.items()}
    try:
        yield
    finally:
        for watch in watches.values():
            watch.handle.remove()
    mixing = [f"{name} ({type(watch.module).__name__})" for name, watch in watches.items() if watch.mixes]
    if mixing:
        raise UnsupportedModelError(
            f"{', '.join(mixing[:4])} isn't transformers' own and lets tokens of one document change another's values, "
            "because nothing tells it where documents begin. Take it out, or train on one document per row, unpatched."
        )


class _Watch:
    """The hook after a foreign module's forward. `second`, (B, T), is true for the tokens of every second document."""

    def __init__(self, module: nn.Module, packed_batch: PackedBatch, second: Tensor) -> None:
        self.module, self.packed_batch, self.second = module, packed_batch, second
        self.mixes = self.running = False
        self.handle = module.register_forward_hook(self, with_kwargs=True)

    @torch.no_grad()
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        tokens = self.packed_batch.tokens
        if self.running or not args or not _is_of_tokens(args[0], tokens) or not _is_of_tokens(output, tokens):
            return
        second = self.second.to(args[0].device)
        self.running = True
        try:
            before = self._run(args[0], args[1:], kwargs)
            limit = ROUNDING.get(before.dtype, ROUNDING_OF_OTHERS) * before.abs().float().max()
            for exchanged in (second, ~second):
                x = torch.where(exchanged[..., None], 1 - args[0], args[0])
                moved = (self._run(x, args[1:], kwargs) - before).abs().float()[~exchanged]
                self.mixes |= bool(moved.numel() and moved.max() > limit)
        finally:
            self.running = False

    def _run(self, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):  # the same dropout in all runs
            return self.module.forward(x, *args, **kwargs)


def _is_watched(module: nn.Module, packed_batch: PackedBatch) -> bool:
    """Whether a hook of the model around this one, which got the same packing, watches a module already."""
    return any(
        isinstance(hook, _Watch) and hook.packed_batch is packed_batch for hook in module._forward_hooks.values()
    )


def _is_of_tokens(value: Any, tokens: torch.Size) -> bool:
    """Whether something is (B, T, n) numbers."""
    return isinstance(value, Tensor) and value.ndim == 3 and value.shape[:2] == tokens and value.is_floating_point()
