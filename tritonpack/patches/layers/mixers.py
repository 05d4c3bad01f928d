"""Layers that mix along the row, told where its documents begin: run once with boundaries, or on each by itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from tritonpack.patches.packed_batch import PackedBatch, Serving
from tritonpack.patches.packing_context import PackingContext
from tritonpack.patches.parts import InstanceForward
from tritonpack.patches.tensor_like import TensorLike, as_tensor
from tritonpack.patches.unpacking.documents import Documents, batches_of, lay_back

# What mixers are given besides the tokens, and mustn't see when a document runs by itself.
ROW_ARGUMENTS = ("attention_mask", "conv_mask", "causal_mask", "cache_params", "past_key_values", "state", "seq_idx")
ROW_KEYWORDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


# Whether layers of a class keep documents apart by themselves when they are told where these begin, by class, device
# and dtype: a model may be moved, and the kernels that can are for GPUs.
Capabilities = dict[tuple[type, str, torch.dtype], bool]


class DocumentByDocument(InstanceForward):
    """A layer that mixes along the row (a recurrence, a convolution): runs on every document from its beginning.

    Where its kernels (causal-conv1d, mamba-ssm, flash-linear-attention) keep documents apart, it runs once and is told
    where they begin. Otherwise documents of similar lengths share a batch, each padded on the right to its longest,
    which a causal layer doesn't see. What comes out is laid back into the row; padding gets zeros.

    Attributes:
        capabilities: what is known of layers of these classes, shared by those of a model.
    """

    def __init__(self, module: nn.Module, context: PackingContext, capabilities: Capabilities) -> None:
        super().__init__(module, context)
        self.capabilities = capabilities

    # A graph for the documents' lengths would be one for these lengths alone.
    @torch.compiler.disable
    def call(self, *args: Any, **kwargs: Any) -> Any:
        packed_batch = self.packed_batch
        arguments = self.bound(args, kwargs)
        if packed_batch is None or not packed_batch.by_document:  # rows of one document each
            if "seq_idx" in arguments:
                arguments["seq_idx"] = None
            for name in ROW_KEYWORDS:
                arguments.pop(name, None)
            return self.inner(**tree_map(as_tensor, arguments, is_leaf=_is_ours))
        return self._run(arguments, packed_batch)

    def _run(self, arguments: dict[str, Any], packed_batch: PackedBatch) -> Any:
        for name in ROW_ARGUMENTS:
            if name in arguments:
                arguments[name] = None
        for name in ROW_KEYWORDS:
            arguments.pop(name, None)
        if "use_cache" in arguments:
            arguments["use_cache"] = False
        tokens = next((x for x in arguments.values() if isinstance(x, Tensor) and x.is_floating_point()), None)
        if tokens is not None and self.takes_boundaries(tokens.shape[-1]):
            return self._run_once(arguments, packed_batch)
        batches = batches_of(packed_batch)
        return _lay_back(batches, [self.inner(**_cut(arguments, batch)) for batch in batches])

    def _run_once(self, arguments: dict[str, Any], packed_batch: PackedBatch) -> Any:
        """Run all rows as one, with the boundaries that transformers' layers pass to their kernels."""
        row = torch.arange(packed_batch.tokens.numel(), device=packed_batch.device)[None]
        whole = Documents(packed_batch.tokens, row, torch.ones_like(row, dtype=torch.bool))
        return _lay_back([whole], [self.inner(**_cut(arguments, whole) | packed_batch.boundary_arguments())])

    def takes_boundaries(self, width: int) -> bool:
        """Whether layers of this class keep documents apart when they are told where these begin, on the device and in
        the dtype of this one: tried on a few tokens of this width when first asked. False where weights aren't there
        yet, which isn't kept."""
        weight = next((p for p in self.module.parameters() if p.is_floating_point()), None)
        if weight is None or weight.is_meta:
            return False
        key = (type(self.module), weight.device.type, weight.dtype)
        if key not in self.capabilities:
            self.capabilities[key] = self._keeps_documents_apart(width, weight)
        return self.capabilities[key]

    @torch.no_grad()
    def _keeps_documents_apart(self, width: int, weight: Tensor) -> bool:
        """Whether two documents in a row are what each is alone, and a change of the first moves no other. Without its
        kernels a layer raises, or takes no notice of boundaries."""
        generator = torch.Generator().manual_seed(0)
        first, second, other = (torch.randn((1, n, width), generator=generator) for n in (5, 7, 5))
        first, second, other = (x.to(weight.device, weight.dtype) for x in (first, second, 8 * other))
        places = torch.cat([torch.arange(5), torch.arange(7)])[None].to(weight.device)
        packed_batch = PackedBatch(
            None, places, None, torch.Size((1, 12)), weight.device, Serving("tritonpack", "auto")
        )
        try:
            packed, changed = (
                _first(self._run_once(self.bound((torch.cat([x, second], dim=1),), {}), packed_batch))
                for x in (first, other)
            )
            alone = torch.cat([_first(self.inner(**self.bound((x,), {}))) for x in (first, second)], dim=1)
        except Exception:  # whatever a layer raises where it can't
            return False
        if not isinstance(packed, Tensor) or not bool(packed.isfinite().all()):
            return False
        eps, scale = torch.finfo(weight.dtype).eps, float(alone.abs().max())
        moved, differs = (packed - changed)[:, 5:].abs().max(), (packed - alone).abs().max()
        return float(moved) <= eps * scale and float(differs) <= eps**0.5 * scale


def _is_ours(value: Any) -> bool:
    return isinstance(value, TensorLike)


def _first(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


def _cut(arguments: dict[str, Any], documents: Documents) -> dict[str, Any]:
    """The arguments for one batch of documents. Values for each token of a row are cut into documents."""
    rows, length = documents.tokens

    def cut(value: Any) -> Any:
        of_tokens = isinstance(value, Tensor) and value.shape[:2] in ((rows, length), (1, length))
        return documents.cut(value) if of_tokens else value

    return tree_map(cut, arguments)


def _lay_back(batches: list[Documents], results: list[Any]) -> Any:
    """The outputs of all batches in packed rows. States and weights of one batch belong to no row, so they are None."""

    def lay(*pieces: Any) -> Any:
        if not isinstance(pieces[0], Tensor) or pieces[0].shape[:2] != batches[0].inside.shape:
            return None
        return lay_back(batches, pieces)

    if isinstance(results[0], tuple):
        return tuple(lay(*pieces) for pieces in zip(*results, strict=True))
    return lay(*results)
