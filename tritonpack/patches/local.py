"""Modules that look at a whole row, told where its documents begin: position tables, and layers that mix along rows.

Both get an instance's `forward` of our own, which unpatching takes away again; the class stays as it is.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from tritonpack.patches.kinds import Kind
from tritonpack.patches.packing import IntervalMask, Packing
from tritonpack.patches.tensor_like import TensorLike, as_tensor

# What mixers are given besides the tokens, and mustn't see when a document runs by itself.
ROW_ARGUMENTS = ("attention_mask", "conv_mask", "causal_mask", "cache_params", "past_key_values", "state", "seq_idx")
ROW_KEYWORDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


@dataclass
class Current:
    """The packing of the forward pass that is running, for modules that transformers passes nothing to.

    Attributes:
        packing: None outside of a forward pass, and where rows are left to the model (a cache is in use).
        depth: how many patched modules are running inside each other.
    """

    packing: Packing | None = None
    depth: int = 0

    def enter(self, packing: Packing | None) -> None:
        """A patched module begins; the outermost one says what the packing is."""
        self.depth += 1
        if self.depth == 1:
            self.packing = packing

    def leave(self) -> None:
        """A patched module is done, perhaps by an exception."""
        self.depth = max(self.depth - 1, 0)
        if self.depth == 0:
            self.packing = None


class Checkpoint:
    """Stands for a layer's checkpointing function: what is recomputed in backward finds the packing of its forward."""

    def __init__(self, own: Any, current: Current) -> None:
        self.own, self.current = own, current

    def __call__(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        current, packing = self.current, self.current.packing

        def run(*inputs: Any) -> Any:
            current.enter(packing)
            try:
                return function(*inputs)
            finally:
                current.leave()

        return self.own(run, *args, **kwargs)


CHECKPOINT = "_gradient_checkpointing_func"  # transformers' name for it, an attribute of every layer that has one


def hold_checkpoints(layers: list[nn.Module], current: Current) -> None:
    """Put ourselves before the checkpointing function of layers that have got one since."""
    for layer in layers:
        own = layer.__dict__.get(CHECKPOINT)
        if own is not None and not isinstance(own, Checkpoint):
            layer.__dict__[CHECKPOINT] = Checkpoint(own, current)


def release_checkpoint(layer: nn.Module) -> None:
    """Give a layer its own checkpointing function back."""
    held = layer.__dict__.get(CHECKPOINT)
    if isinstance(held, Checkpoint):
        layer.__dict__[CHECKPOINT] = held.own


class InstanceForward:
    """Stands for one module's forward; `remove()` takes it away."""

    def __init__(self, module: nn.Module, current: Current) -> None:
        self.module, self.current = module, current
        self.own = module.__dict__.get("forward")  # somebody else's, such as accelerate's
        module.forward = self  # type: ignore[assignment]

    @property
    def inner(self) -> Any:
        return self.own if self.own is not None else type(self.module).forward.__get__(self.module)

    def remove(self) -> None:
        if self.module.__dict__.get("forward") is self:
            del self.module.__dict__["forward"]
            if self.own is not None:
                self.module.__dict__["forward"] = self.own


class LocalPositions(InstanceForward):
    """A table of absolute positions that counts a row's tokens: looked up by each token's place in its document."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        packing = self.current.packing
        if packing is None:
            return self.inner(*args, **kwargs)
        module: Any = self.module
        if isinstance(module, nn.Embedding):
            table, offset = module.weight, getattr(module, "offset", 0)
        else:
            self.inner(*args, **kwargs)  # which lengthens a sinusoidal table as it needs
            table, offset = module.weights, getattr(module, "offset", None)
            if offset is None:  # as fairseq counts
                offset = getattr(module, "padding_idx", -1) + 1
        found = nn.functional.embedding(packing.places() + offset, table)
        return _Indexed(found) if type(self.module).__name__ in ADDS_AXES else found


# RoFormer gives its table's rows the axes of batch and heads, [None, None]; ours have a batch already.
ADDS_AXES = ("RoFormerSinusoidalPositionalEmbedding",)


@dataclass(frozen=True)
class _Indexed:
    found: Tensor

    def __getitem__(self, _: Any) -> Tensor:
        return self.found[:, None]


class DocumentMask(InstanceForward):
    """Attention that makes its own causal mask, or none: gets that of the documents in the argument for padding."""

    def __init__(self, module: nn.Module, current: Current, argument: str) -> None:
        super().__init__(module, current)
        self.argument = argument
        self.names = list(inspect.signature(type(module).forward).parameters)[1:]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arguments = {**dict(zip(self.names, args, strict=False)), **kwargs}
        packing = self.current.packing
        if packing is None and self.current.depth == 0:
            raise ValueError(OUTSIDE.format(type(self.module).__name__))
        if packing is not None:
            length = packing.tokens[1]
            mask = packing.interval_mask(length, 0, 0, Kind((-1, -1)))
            if arguments[self.argument] is not None and arguments[self.argument].ndim == 4:
                arguments[self.argument] = mask.to_tensor(torch.float32, additive=True)
            else:
                causal = torch.ones((length, length), dtype=torch.bool, device=packing.device)
                given = arguments[self.argument]
                if given is not None and given.ndim == 3:  # causal already
                    causal = causal.tril()
                arguments[self.argument] = mask.to_tensor()[:, 0] & causal
        return self.inner(**arguments)


OUTSIDE = (
    "{} was called outside of its model's forward pass, where nothing says where documents begin. Call the model, or "
    "unpatch it first."
)


def temperature(module: nn.Module, mask: IntervalMask) -> Tensor | None:
    """What queries are to be multiplied by where a layer has scaled them by their place in the row: (B, 1, T, 1).

    Layers without positions of long-context models sharpen attention as a row goes on; in a packed row it is the place
    in the document that counts.
    """
    rule = TEMPERATURES.get(type(module).__name__)
    if rule is None or mask.packing is None:
        return None
    places = mask.packing.places()
    in_row = torch.arange(places.shape[1], device=places.device).expand_as(places)
    return (rule(module, places) / rule(module, in_row))[:, None, :, None]


def _llama4(module: Any, places: Tensor) -> Tensor:
    if module.use_rope or not module.attn_temperature_tuning:
        return torch.ones(places.shape, device=places.device)
    return torch.log1p(torch.floor((places.float() + 1.0) / module.floor_scale)) * module.attn_scale + 1.0


def _inkling(module: Any, places: Tensor) -> Tensor:
    config = module.config
    if module.is_sliding or config.log_scaling_n_floor is None:
        return torch.ones(places.shape, device=places.device)
    beyond = ((places + 1).float() / config.log_scaling_n_floor).clamp(min=1.0)
    return 1.0 + config.log_scaling_alpha * torch.log(beyond)


# Attention layers whose queries are scaled by their place in the row, whatever position ids the model is given.
TEMPERATURES = {"Llama4TextAttention": _llama4, "InklingAttention": _inkling}


class DocumentByDocument(InstanceForward):
    """A layer that mixes along the row (a recurrence, a convolution): runs on every document from its beginning.

    Documents of similar lengths share a batch, each padded on the right to its longest, which a causal layer doesn't
    see. What comes out is laid back into the row; padding gets zeros.
    """

    def __init__(self, module: nn.Module, current: Current) -> None:
        super().__init__(module, current)
        self.names = list(inspect.signature(type(module).forward).parameters)[1:]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arguments = {**dict(zip(self.names, args, strict=False)), **kwargs}
        packing = self.current.packing
        if packing is None and self.current.depth == 0:
            raise ValueError(OUTSIDE.format(type(self.module).__name__))
        if packing is None or not packing.by_document:
            return self.inner(**tree_map(as_tensor, arguments, is_leaf=lambda x: isinstance(x, TensorLike)))
        for name in ROW_ARGUMENTS:
            if name in arguments:
                arguments[name] = None
        for name in ROW_KEYWORDS:
            arguments.pop(name, None)
        if "use_cache" in arguments:
            arguments["use_cache"] = False
        batches, inverse = packing.batches()
        results = [self.inner(**_gather(arguments, packing.tokens, places)) for places, _ in batches]
        return _scatter(results, [inside for _, inside in batches], inverse, packing.tokens)


def _gather(arguments: dict[str, Any], tokens: torch.Size, places: Tensor) -> dict[str, Any]:
    """The arguments for one batch of documents: what has a row's tokens in front is cut into them.

    `places` (documents, longest) counts tokens row after row; one past the last stands for padding.
    """

    def cut(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.ndim < 2 or value.shape[1] != tokens[1]:
            return value
        if value.shape[0] not in (1, tokens[0]):
            return value
        flat = value.expand(tokens[0], *value.shape[1:]).flatten(0, 1)
        return torch.cat([flat, torch.zeros_like(flat[:1])])[places]

    return tree_map(cut, arguments)


def _scatter(results: list[Any], inside: list[Tensor], inverse: Tensor, tokens: torch.Size) -> Any:
    """The outputs of all batches laid back into rows."""

    def lay(*pieces: Any) -> Any:
        if not isinstance(pieces[0], Tensor) or pieces[0].shape[:2] != inside[0].shape:
            return None  # a state or weights of one batch: nothing that belongs to the row
        flat = torch.cat([piece[where] for piece, where in zip(pieces, inside, strict=True)])
        flat = torch.cat([flat, torch.zeros_like(flat[:1])])
        return flat[inverse].unflatten(0, tokens)

    if isinstance(results[0], tuple):
        return tuple(lay(*pieces) for pieces in zip(*results, strict=True))
    return lay(*results)
