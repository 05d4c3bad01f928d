"""Packed against alone, to the bit: shared by the tests of the backends."""

from typing import Any

import torch
from torch import Tensor

from tritonpack import BlockDiagonalMask, varlen_attention
from tritonpack.testing import Case, make_inputs
from tritonpack.testing.tolerance import ROW_OUTPUTS

LENGTHS = (21, 5, 70, 1, 64, 9)  # around the interpreter's tiles of 64 and 32
CASES = (
    Case("causal", LENGTHS),
    Case("bidirectional", LENGTHS, causal=False),
    Case("window", LENGTHS, window=(16, 0)),
    Case("window-self", LENGTHS, window=(0, 0)),
    Case("features", LENGTHS, softcap=5.0, sinks=True, alibi="heads", head_dim_v=48),
)


def moved_outputs(
    case: Case, dtype: torch.dtype, backend: Any, *, pack_invariant: bool, device: str = "cpu"
) -> set[str]:
    """The outputs in which a document's bits in the pack differ from its bits alone."""
    inputs = make_inputs(case, dtype, device)

    def outputs(mask: BlockDiagonalMask, rows: slice) -> tuple[Tensor, ...]:
        q, k, v = (x[rows].clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
        out, lse = varlen_attention(
            q, k, v, mask, sinks=inputs.sinks, return_lse=True, pack_invariant=pack_invariant, backend=backend,
            **inputs.keywords,
        )  # fmt: skip
        grads = torch.autograd.grad((out, lse), (q, k, v), (inputs.dout[rows], inputs.dlse[:, rows]))
        return out.detach(), lse.detach().T, *grads

    packed, moved, begin = outputs(inputs.mask, slice(None)), set(), 0
    for length in case.seqlens:
        rows = slice(begin, begin + length)
        mask = BlockDiagonalMask.from_seqlens([length], causal=case.causal, window=case.window, device=device)
        alone = outputs(mask, rows)
        moved |= {n for n, a, p in zip(ROW_OUTPUTS, alone, packed, strict=True) if not torch.equal(a, p[rows])}
        begin += length
    return moved
