"""Compares documents in a pack with the same documents alone, to the bit, for the tests of the backends."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tritonpack import BlockDiagonalMask, varlen_attention
from tritonpack.testing import Case, Inputs, make_inputs
from tritonpack.testing.tolerance import ROW_OUTPUTS

LENGTHS = (21, 5, 70, 1, 64, 9)  # around the sizes of the interpreter's tiles, 64 and 32
POISONS = (("q", "k", "v", "dout", "dlse"), ("v", "dout"))  # with finite q and k the log-sum-exps stay finite
CASES = (
    Case("causal", LENGTHS),
    Case("bidirectional", LENGTHS, causal=False),
    Case("window", LENGTHS, window=(16, 0)),
    Case("window-self", LENGTHS, window=(0, 0)),
    Case("features", LENGTHS, softcap=5.0, sinks=True, alibi="heads", head_dim_v=48),
)


def moved_outputs(
    case: Case,
    dtype: torch.dtype,
    backend: Any,
    *,
    pack_invariant: bool,
    device: str = "cpu",
    poison: tuple[str, ...] = (),
) -> set[str]:
    """The outputs in which a document's bits in the pack differ from its bits alone.

    `poison` names tensors that are NaN in all other documents of the pack.
    """
    inputs = make_inputs(case, dtype, device)

    def outputs(inputs: Inputs) -> dict[str, Tensor]:
        q, k, v = (x.clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
        out, lse = varlen_attention(
            q, k, v, inputs.mask, sinks=inputs.sinks, return_lse=True, pack_invariant=pack_invariant, backend=backend,
            **inputs.keywords,
        )  # fmt: skip
        grads = torch.autograd.grad((out, lse), (q, k, v), (inputs.dout, inputs.dlse))
        return dict(zip(ROW_OUTPUTS, (out.detach(), lse.detach().T, *grads), strict=True))

    def change(mask: BlockDiagonalMask, by: Callable[[str, Tensor], Tensor]) -> Inputs:
        changed: dict[str, Any] = {name: by(name, getattr(inputs, name)) for name in ("q", "k", "v", "dout")}
        return replace(inputs, **changed, dlse=by("dlse", inputs.dlse.T).T, mask=mask)

    packed, moved, begin = outputs(inputs), set(), 0
    for length in case.seqlens:
        rows = slice(begin, begin + length)
        mask = BlockDiagonalMask.from_seqlens([length], causal=case.causal, window=case.window, device=device)
        alone = outputs(change(mask, partial(_only, rows)))
        if poison:
            packed = outputs(change(inputs.mask, partial(_poisoned, rows, poison)))
        moved |= {name for name, x in alone.items() if not torch.equal(x, packed[name][rows])}
        begin += length
    return moved


def _only(rows: slice, name: str, x: Tensor) -> Tensor:
    return x[rows]


def _poisoned(rows: slice, poison: tuple[str, ...], name: str, x: Tensor) -> Tensor:
    """x, with NaN in all rows but these if it is to be poisoned."""
    if name not in poison:
        return x
    kept = torch.full_like(x, float("nan"))
    kept[rows] = x[rows]
    return kept
