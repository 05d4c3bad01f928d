"""Layers that mix along the row. They run once with the boundaries of documents, or on each document by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from tritonpack.patches.measuring import apart, half_the_digits
from tritonpack.patches.packed_batch import PackedBatch, Serving
from tritonpack.patches.parse_inputs import CACHES, LENGTHS
from tritonpack.patches.parts import InstanceForward, PackingContext
from tritonpack.patches.placement import Documents, batches_of, lay_back
from tritonpack.patches.tensor_like import as_tensor

# Arguments of mixers beside the tokens, which are left out when a document runs by itself.
ROW_ARGUMENTS = {"attention_mask", "conv_mask", "causal_mask", "seq_idx", *CACHES}

# {(class, device type, dtype): whether such layers keep documents apart when they get boundaries}. It depends on the
# device, because kernels that take boundaries need a GPU.
Capabilities = dict[tuple[type, str, torch.dtype], bool]


class DocumentByDocument(InstanceForward):
    """The forward of a layer that mixes along the row (a recurrence, a convolution): each document runs separately.

    If its kernels (causal-conv1d, mamba-ssm, flash-linear-attention) keep documents apart, the layer runs once, with
    boundaries. Otherwise it runs on batches of documents of similar lengths, padded on the right, where a causal layer
    doesn't see padding. Outputs are laid back into the row, with zeros for padding. The layers of a model share
    `capabilities`.
    """

    def __init__(self, module: nn.Module, context: PackingContext, capabilities: Capabilities) -> None:
        super().__init__(module, context)
        self.capabilities = capabilities

    # A graph would fit only the lengths of these documents.
    @torch.compiler.disable
    def call(self, *args: Any, **kwargs: Any) -> Any:
        packed_batch = self.packed_batch
        by_document = packed_batch is not None and packed_batch.by_document  # else each row holds one document
        arguments = {name: x for name, x in self.bound(args, kwargs).items() if name not in LENGTHS}
        arguments |= dict.fromkeys(arguments.keys() & (ROW_ARGUMENTS if by_document else {"seq_idx"}))
        if packed_batch is None or not by_document:
            return self.inner(**tree_map(as_tensor, arguments))
        if "use_cache" in arguments:
            arguments["use_cache"] = False
        return packed_batch.run_on_documents(self, arguments)

    def run(self, arguments: dict[str, Any], packed_batch: PackedBatch, *, once: bool | None = None) -> Any:
        """Run rows of whole documents: `once`, as one row with the arguments for boundaries of transformers' layers, or
        in batches of similar lengths. None chooses."""
        if once is None:
            tokens = next((x for x in arguments.values() if isinstance(x, Tensor) and x.is_floating_point()), None)
            once = tokens is not None and self.takes_boundaries(tokens.shape[-1])
        if once:
            row = torch.arange(packed_batch.tokens.numel(), device=packed_batch.device)[None]
            batches = [Documents(packed_batch.tokens, row, torch.ones_like(row, dtype=torch.bool))]
            boundaries = packed_batch.boundary_arguments()
        else:
            batches, boundaries = batches_of(packed_batch), {}
        return _lay_back(batches, [self.inner(**_cut(arguments, batch) | boundaries) for batch in batches])

    def takes_boundaries(self, width: int) -> bool:
        """Return whether layers of this class keep documents apart by boundaries, on this layer's device and in its
        dtype.

        The first call tries it on a few tokens of this width. A layer without weights returns False, which isn't
        cached.
        """
        weight = next((p for p in self.module.parameters() if p.is_floating_point()), None)
        if weight is None or weight.is_meta:
            return False
        key = (type(self.module), weight.device.type, weight.dtype)
        if key not in self.capabilities:
            self.capabilities[key] = self._keeps_documents_apart(width, weight)
        return self.capabilities[key]

    @torch.no_grad()
    def _keeps_documents_apart(self, width: int, weight: Tensor) -> bool:
        """Return whether two packed documents give the results of each alone, and the first doesn't change the second.

        Without its kernels a layer raises an error, or ignores boundaries.
        """
        generator = torch.Generator(device="cpu").manual_seed(0)
        draws = torch.randn((1, 17, width), generator=generator, dtype=torch.float32, device="cpu")
        draws[:, 12:] *= 8
        first, second, other = draws.to(weight.device, weight.dtype).split((5, 7, 5), dim=1)
        places = torch.cat([torch.arange(5, device="cpu"), torch.arange(7, device="cpu")])[None].to(weight.device)
        serving = Serving("tritonpack", "auto")
        packed_batch = PackedBatch(None, places, None, torch.Size((1, 12)), weight.device, serving)

        def run(*documents: Tensor) -> Sequence[Tensor]:
            packed = self.run(self.bound((torch.cat(documents, dim=1),), {}), packed_batch, once=True)
            return _first(packed).split([5, 7], dim=1)

        try:
            alone = [_first(self.inner(**self.bound((x,), {}))) for x in (first, second)]
            packed = run(first, second)
            differs, moved = apart(alone, packed), apart(packed[1:], run(other, second)[1:])
        except Exception:  # a layer without support may raise anything
            return False
        return moved <= torch.finfo(weight.dtype).eps and differs <= half_the_digits(weight.dtype)


def _first(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


def _cut(arguments: dict[str, Any], documents: Documents) -> dict[str, Any]:
    """Return the arguments for one batch of documents. Values for each token of a row are cut into documents."""
    rows, length = documents.tokens

    def cut(value: Any) -> Any:
        of_tokens = isinstance(value, Tensor) and value.shape[:2] in ((rows, length), (1, length))
        return documents.cut(value) if of_tokens else value

    return tree_map(cut, arguments)


def _lay_back(batches: list[Documents], results: list[Any]) -> Any:
    """Lay the outputs of all batches back into packed rows. States and weights belong to no row, so they become
    None."""

    def lay(*pieces: Any) -> Any:
        if not isinstance(pieces[0], Tensor) or pieces[0].shape[:2] != batches[0].inside.shape:
            return None
        return lay_back(batches, pieces)

    if isinstance(results[0], tuple):
        return tuple(lay(*pieces) for pieces in zip(*results, strict=True))
    return lay(*results)
