"""Code of others that gets no mask, such as adapters: the first packed call shows whether it keeps tokens apart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tritonpack.errors import UnsupportedModelError
from tritonpack.patches.forwards import by_class, is_own, mixes
from tritonpack.patches.packed_batch import PackedBatch

# How far an output may move, relative to its largest value, because of rounding: scales of quantized layers follow
# from all tokens of a call.
ROUNDING = {torch.float64: 1e-8, torch.float32: 1e-4}
ROUNDING_OF_OTHERS = 2e-2


def strangers(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of a model whose forward is neither transformers' nor torch's, nor known to take a mask, by name.

    A layer that takes arguments about its row is tried when the model is patched (`probe.py`).
    """
    mixing = by_class(mixes)
    return {name: one for name, one in model.named_modules() if not is_own(one) and not mixing(type(one))}


@contextmanager
def kept_apart(model: nn.Module, packed_batch: PackedBatch) -> Iterator[None]:
    """Watch a call of a model with packed rows: no stranger may let a document's tokens move another document's.

    Each stranger runs three times more: as it did, and with the tokens of every second document exchanged, and of the
    others. It is left alone where it gets something else than a value for each token.

    Args:
        model: the model that is called.
        packed_batch: of its tokens.

    Raises:
        UnsupportedModelError: a stranger mixes documents; the message names it.
    """
    found: dict[str, nn.Module] = {}
    watches = {
        name: _Watch(one, packed_batch) for name, one in strangers(model).items() if not _is_watched(one, packed_batch)
    }
    if watches:
        starts = packed_batch.runs()[0].flatten().cumsum(0).view(packed_batch.tokens)
        second = starts % 2 == 0
        for watch in watches.values():
            watch.begin(second)
    try:
        yield
    finally:
        for name, watch in watches.items():
            watch.handle.remove()
            if watch.mixes:
                found[name] = watch.module
    if found:
        named = ", ".join(f"{name} ({type(one).__name__})" for name, one in list(found.items())[:4])
        raise UnsupportedModelError(
            f"{named} isn't transformers' own and lets tokens of one document move another document's, because nothing "
            "tells it where documents begin. Take it out, or train on one document per row, unpatched."
        )


class _Watch:
    """The hook after a stranger."""

    def __init__(self, module: nn.Module, packed_batch: PackedBatch) -> None:
        self.module, self.packed_batch, self.tokens = module, packed_batch, packed_batch.tokens
        self.mixes = self.running = False

    def begin(self, second: Tensor) -> None:
        self.second = second
        self.handle = self.module.register_forward_hook(self, with_kwargs=True)

    @torch.no_grad()
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if (
            self.running
            or not args
            or not _is_of_tokens(args[0], self.tokens)
            or not _is_of_tokens(output, self.tokens)
        ):
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
        with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):  # the same dropout in both
            return self.module.forward(x, *args, **kwargs)


def _is_watched(module: nn.Module, packed_batch: PackedBatch) -> bool:
    """Whether the model around this one, which was handed the same packing, watches a module already."""
    return any(
        isinstance(hook, _Watch) and hook.packed_batch is packed_batch for hook in module._forward_hooks.values()
    )


def _is_of_tokens(value: Any, tokens: torch.Size) -> bool:
    """Whether something is (B, T, n) numbers."""
    return isinstance(value, Tensor) and value.ndim == 3 and value.shape[:2] == tokens and value.is_floating_point()
