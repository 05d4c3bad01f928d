"""Compares documents in a pack with the same documents alone, to the bit, for the tests of the backends."""

from typing import Any

import torch
from torch import Tensor

from tritonpack import BlockDiagonalMask, varlen_attention
from tritonpack.testing import Case, make_inputs
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
    case: Case, dtype: torch.dtype, backend: Any, *, pack_invariant: bool, device: str = "cpu",
    poison: tuple[str, ...] = (),
) -> set[str]:  # fmt: skip
    """The outputs in which a document's bits in the pack differ from its bits alone.

    `poison` names tensors that are NaN in all other documents of the pack.
    """
    inputs = make_inputs(case, dtype, device)
    tensors = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "dout": inputs.dout, "dlse": inputs.dlse.T}

    def outputs(mask: BlockDiagonalMask, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        q, k, v = (tensors[name].clone().requires_grad_() for name in "qkv")
        out, lse = varlen_attention(
            q, k, v, mask, sinks=inputs.sinks, return_lse=True, pack_invariant=pack_invariant, backend=backend,
            **inputs.keywords,
        )  # fmt: skip
        grads = torch.autograd.grad((out, lse), (q, k, v), (tensors["dout"], tensors["dlse"].T))
        return dict(zip(ROW_OUTPUTS, (out.detach(), lse.detach().T, *grads), strict=True))

    packed, moved, begin = outputs(inputs.mask, tensors), set(), 0
    for length in case.seqlens:
        rows = slice(begin, begin + length)
        begin += length
        mask = BlockDiagonalMask.from_seqlens([length], causal=case.causal, window=case.window, device=device)
        alone = outputs(mask, {name: x[rows] for name, x in tensors.items()})
        if poison:
            packed = outputs(inputs.mask, tensors | {name: _poisoned(tensors[name], rows) for name in poison})
        moved |= {name for name, x in alone.items() if not torch.equal(x, packed[name][rows])}
    return moved


def _poisoned(x: Tensor, rows: slice) -> Tensor:
    """x, with NaN in all other rows."""
    poisoned = torch.full_like(x, float("nan"))
    poisoned[rows] = x[rows]
    return poisoned
