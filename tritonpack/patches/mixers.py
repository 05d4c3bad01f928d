"""Layers that mix along the row, told where its documents begin: run once with boundaries, or on each by itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from tritonpack.patches.current import OUTSIDE, Current, InstanceForward
from tritonpack.patches.packing import Packing, Serving
from tritonpack.patches.tensor_like import TensorLike, as_tensor

# What mixers are given besides the tokens, and mustn't see when a document runs by itself.
ROW_ARGUMENTS = ("attention_mask", "conv_mask", "causal_mask", "cache_params", "past_key_values", "state", "seq_idx")
ROW_KEYWORDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


class DocumentByDocument(InstanceForward):
    """A layer that mixes along the row (a recurrence, a convolution): runs on every document from its beginning.

    Documents of similar lengths share a batch, each padded on the right to its longest, which a causal layer doesn't
    see. What comes out is laid back into the row; padding gets zeros.

    Attributes:
        takes_boundaries: whether the layer keeps documents apart by itself when it is told where they begin, as it does
            where its kernels (causal-conv1d, mamba-ssm, flash-linear-attention) are installed; then it runs once.
    """

    def __init__(self, module: nn.Module, current: Current, takes_boundaries: bool = False) -> None:
        super().__init__(module, current)
        self.takes_boundaries = takes_boundaries

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arguments = self.bound(args, kwargs)
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
        if self.takes_boundaries:
            return self._run_once(arguments, packing)
        batches, inverse = packing.batches()
        results = [self.inner(**_gather(arguments, packing.tokens, places)) for places, _ in batches]
        return _scatter(results, [inside for _, inside in batches], inverse, packing.tokens)

    def _run_once(self, arguments: dict[str, Any], packing: Packing) -> Any:
        """All rows as one, with the boundaries that transformers' layers hand to their kernels."""
        starts = packing.runs()[0].flatten()
        total = starts.shape[0]
        row = torch.arange(total, device=starts.device)[None]
        offsets = torch.cat([starts.nonzero().flatten(), row.new_tensor([total])]).to(torch.int32)
        told = {
            "seq_idx": (starts.cumsum(0) - 1)[None].to(torch.int32),
            "cu_seq_lens_q": offsets,
            "cu_seq_lens_k": offsets,
        }
        result = self.inner(**_gather(arguments, packing.tokens, row) | told)
        return _scatter([result], [torch.ones_like(row, dtype=torch.bool)], row[0], packing.tokens)


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


@torch.no_grad()
def takes_boundaries(mixer: nn.Module, hidden_size: int) -> bool:
    """Whether a layer keeps two documents of a row apart when it is told where they begin: tried on a few tokens.

    Without its kernels a layer raises, or takes no notice; then it must run on each document by itself.
    """
    weight = next(mixer.parameters(), None)
    if weight is None or weight.is_meta or not weight.is_floating_point():
        return False
    generator = torch.Generator().manual_seed(0)
    row = torch.randn((1, 12, hidden_size), generator=generator).to(weight.device, weight.dtype)
    places = torch.cat([torch.arange(5), torch.arange(7)])[None].to(weight.device)
    tokens = torch.Size((1, 12))
    packing = Packing(None, places, None, tokens, weight.device, Serving("tritonpack", "auto"), by_document=True)
    results = []
    for once in (True, False):
        trial = DocumentByDocument(mixer, Current(packing, depth=1), once)
        try:
            result = trial(row)
            results.append(result[0] if isinstance(result, tuple) else result)
        except Exception:  # whatever a layer raises where it can't
            return False
        finally:
            trial.remove()
    once, apart = results
    if not isinstance(once, Tensor) or not bool(once.isfinite().all()):
        return False
    scale = float(apart.abs().max())
    return float((once - apart).abs().max()) <= torch.finfo(weight.dtype).eps ** 0.5 * scale
