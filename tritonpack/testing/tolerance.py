"""How exact is exact: a backend's error against float64, bounded by the error of plain attention in the same dtype.

The rule (that of FlashAttention's own tests): on the same rounded inputs, the largest error against a float64 reference
is at most twice that of plain attention computed in the low precision throughout, plus a band of rounding: of the
result in its own dtype, and of its terms in the float32 (or float64) that they are summed in. So no tolerance is
chosen by hand, and none grows with a dtype that doesn't need it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tritonpack.attention import varlen_attention
from tritonpack.testing.cases import Inputs

OUTPUTS = ("out", "lse", "dq", "dk", "dv")

# How many roundings the band admits: a product, a sum and a final cast, with one to spare.
BAND = 4


@dataclass(frozen=True)
class Errors:
    """Largest absolute errors against float64, by output name: the backend's, plain attention's, and what was
    allowed."""

    backend: dict[str, float]
    plain: dict[str, float]
    allowed: dict[str, float]

    def __str__(self) -> str:
        rows = (
            f"{name}: {self.backend[name]:.2e} (plain {self.plain[name]:.2e}, allowed {self.allowed[name]:.2e})"
            for name in self.backend
        )
        return "; ".join(rows)


def check_backend(inputs: Inputs, backend: Any = "auto", *, scale: float | None = None) -> Errors:
    """Check a backend's outputs and gradients on one case; raises where they aren't as good as plain attention's.

    Args:
        inputs: the case, as `make_inputs` makes it.
        backend: as `varlen_attention` takes it.
        scale: as `varlen_attention` takes it.

    Returns:
        The errors, for tables.

    Raises:
        AssertionError: a value that isn't finite where the reference's is, a row that should be empty and isn't, or an
            error beyond what is allowed; the message names the output and the figures.
    """
    return check_outputs(inputs, run(inputs, backend, scale=scale), scale=scale)


def check_outputs(inputs: Inputs, actual: dict[str, Tensor], *, scale: float | None = None) -> Errors:
    """As `check_backend`, on outputs computed elsewhere: some or all of "out", "lse", "dq", "dk", "dv"."""
    exact = run(_as_float64(inputs), "reference", scale=scale)
    plain = run_plain(inputs, scale=scale)
    terms = _sizes_of_terms(_as_float64(inputs), exact, scale=scale)
    errors: dict[str, dict[str, float]] = {"backend": {}, "plain": {}, "allowed": {}}
    for name in actual:
        got, want = actual[name], exact[name]
        finite = want.isfinite()
        if not torch.equal(got.isfinite(), finite) or not torch.equal(got.isneginf(), want.isneginf()):
            raise AssertionError(f"{name}: finite and infinite values are not where the reference has them")
        errors["backend"][name] = _largest(got.double() - want, finite)
        errors["plain"][name] = _largest(plain[name].double() - want, finite)
        wide = torch.promote_types(got.dtype, torch.float32)
        rounding = torch.finfo(got.dtype).eps * _largest(want, finite) + torch.finfo(wide).eps * terms[name]
        errors["allowed"][name] = 2 * errors["plain"][name] + BAND * rounding
    report = Errors(**errors)
    worse = [name for name in actual if errors["backend"][name] > errors["allowed"][name]]
    if worse:
        raise AssertionError(f"{', '.join(worse)} beyond twice plain attention's error: {report}")
    return report


def run(inputs: Inputs, backend: Any, *, scale: float | None = None) -> dict[str, Tensor]:
    """out, lse and the gradients of q, k, v under the case's dout and dlse, through `varlen_attention`."""
    q, k, v = (x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    out, lse = varlen_attention(q, k, v, inputs.mask, scale=scale, return_lse=True, backend=backend)
    grads = torch.autograd.grad((out, lse), (q, k, v), (inputs.dout, inputs.dlse))
    return dict(zip(OUTPUTS, (out.detach(), lse.detach(), *grads), strict=True))


def run_plain(inputs: Inputs, *, scale: float | None = None) -> dict[str, Tensor]:
    """The same from plain attention in the inputs' dtype throughout, differentiated by autograd."""
    seeing = (inputs.mask.key_start < inputs.mask.key_stop)[:, None, None]
    transposed = inputs.mask.transpose()
    seen = (transposed.key_start < transposed.key_stop)[:, None, None]
    q = inputs.q.masked_fill(~seeing, 0.0).requires_grad_()
    k, v = (x.masked_fill(~seen, 0.0).requires_grad_() for x in (inputs.k, inputs.v))
    group = q.shape[1] // k.shape[1]
    hidden = ~inputs.mask.to_dense()
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1))
    scores = scores * (q.shape[2] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(hidden, float("-inf"))
    # A row without keys would make NaN of its softmax and of every gradient it touches.
    safe = scores.masked_fill(~seeing[:, :, 0], 0.0)
    p = torch.softmax(safe, -1).masked_fill(~seeing[:, :, 0], 0.0)
    out = torch.einsum("hqk,khd->qhd", p, v.repeat_interleave(group, 1))
    lse = torch.logsumexp(safe, -1).masked_fill(~seeing[:, 0, 0], float("-inf"))
    dout, dlse = (
        torch.where(live, x, 0.0).to(q.dtype) for x, live in ((inputs.dout, seeing), (inputs.dlse, seeing[:, 0, 0]))
    )
    grads = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    return dict(zip(OUTPUTS, (out.detach(), lse.detach(), *grads), strict=True))


def _sizes_of_terms(inputs: Inputs, exact: dict[str, Tensor], *, scale: float | None) -> dict[str, float]:
    """The largest sum of absolute terms behind each output.

    Where terms cancel (a row with a single key has no gradient but that of its lse), rounding is in proportion to
    these, not to what is left of them.
    """
    scale = inputs.q.shape[2] ** -0.5 if scale is None else scale
    lse = exact["lse"].masked_fill(exact["lse"].isinf(), 0.0)
    q, k, v, dout, dlse, out = (
        x.nan_to_num().abs() for x in (inputs.q, inputs.k, inputs.v, inputs.dout, inputs.dlse, exact["out"])
    )
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    raw_q, raw_k = inputs.q.nan_to_num(), inputs.k.nan_to_num().repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", raw_q, raw_k) * scale
    p = torch.exp(scores - lse[..., None]).masked_fill(~inputs.mask.to_dense(), 0.0)
    delta = (out * dout).sum(-1).T + dlse
    ds = p * (torch.einsum("qhd,khd->hqk", dout, v) + delta[..., None]) * scale
    terms = {
        "out": torch.einsum("hqk,khd->qhd", p, v),
        "lse": torch.einsum("qhd,khd->hqk", q, k) * scale,
        "dq": torch.einsum("hqk,khd->qhd", ds, k),
        "dk": torch.einsum("hqk,qhd->khd", ds, q).unflatten(1, (-1, group)).sum(2),
        "dv": torch.einsum("hqk,qhd->khd", p, dout).unflatten(1, (-1, group)).sum(2),
    }
    return {name: float(x.max()) if x.numel() else 0.0 for name, x in terms.items()}


def _as_float64(inputs: Inputs) -> Inputs:
    q, k, v, dout, dlse = (x.double() for x in (inputs.q, inputs.k, inputs.v, inputs.dout, inputs.dlse))
    return Inputs(q, k, v, dout, dlse, inputs.mask)


def _largest(x: Tensor, where: Tensor) -> float:
    values = x[where].abs()
    return float(values.max()) if values.numel() else 0.0
