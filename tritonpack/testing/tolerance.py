"""The tolerance rule: a backend's error against float64, bounded by the error of plain attention in the same dtype.

FlashAttention's own tests use this rule. On the same rounded inputs, the largest error against a float64 reference is
at most twice the error of plain attention that is computed in the low precision throughout, plus a band for rounding.
The band covers the rounding of the result in its own dtype, of its terms in the dtype of their sum (float32 or
float64), and of `out`, from which the gradient of the few sinks sums over all tokens. So no tolerance is chosen by
hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tritonpack.attention import varlen_attention
from tritonpack.backends.reference import kept_weights, masked_scores
from tritonpack.masks.block_diagonal import BlockDiagonalMask
from tritonpack.options import make_options
from tritonpack.testing.cases import Inputs

ROW_OUTPUTS = ("out", "lse", "dq", "dk", "dv")  # outputs with a value for every token
OUTPUTS = (*ROW_OUTPUTS, "dsinks")

# How many roundings the band admits: a product, a sum and a final cast, with one to spare.
BAND = 4


@dataclass(frozen=True)
class Errors:
    """The largest absolute errors against float64 by output, and the largest that are allowed."""

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
    """Check that a backend's outputs and gradients on one case are as exact as plain attention's.

    Args:
        inputs: the case, as `make_inputs` makes it.
        backend, scale: as `varlen_attention` takes them.

    Returns:
        The errors, for tables.

    Raises:
        AssertionError: a value isn't finite where the reference's is, an empty row has values, or an error is too
            large; the message names the output and the figures.
    """
    return check_outputs(inputs, run(inputs, backend, scale=scale), scale=scale)


def check_outputs(inputs: Inputs, actual: dict[str, Tensor], *, scale: float | None = None) -> Errors:
    """Check outputs that were computed elsewhere, as `check_backend` does.

    Args:
        inputs, scale: as `check_backend` takes them.
        actual: some or all of "out", "lse", "dq", "dk", "dv", "dsinks".
    """
    exact, plain, terms = _standard(inputs, scale)
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
        if name == "dsinks":
            rounding += torch.finfo(inputs.q.dtype).eps * terms["rounded"]
        errors["allowed"][name] = 2 * errors["plain"][name] + BAND * rounding
    report = Errors(**errors)
    worse = [name for name in actual if errors["backend"][name] > errors["allowed"][name]]
    if worse:
        raise AssertionError(f"{', '.join(worse)} beyond twice plain attention's error: {report}")
    return report


def _standard(inputs: Inputs, scale: float | None) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, float]]:
    """Return the float64 reference, plain attention's outputs, and the sizes of the terms."""
    exact = run(_as_float64(inputs), "reference", scale=scale)
    return exact, run_plain(inputs, scale=scale), _sizes_of_terms(_as_float64(inputs), exact, scale=scale)


def run(inputs: Inputs, backend: Any, *, scale: float | None = None) -> dict[str, Tensor]:
    """Return out, lse and the gradients of q, k, v and sinks under the case's dout and dlse, by `varlen_attention`."""
    leaves = _leaves(inputs.q, inputs.k, inputs.v, inputs.sinks)
    q, k, v = leaves[:3]
    sinks = leaves[3] if inputs.sinks is not None else None
    out, lse = varlen_attention(
        q, k, v, inputs.mask, scale=scale, sinks=sinks, return_lse=True, backend=backend, **inputs.keywords
    )
    return _outputs(out, lse, torch.autograd.grad((out, lse), leaves, (inputs.dout, inputs.dlse)))


def run_plain(inputs: Inputs, *, scale: float | None = None) -> dict[str, Tensor]:
    """Return the same by plain attention in the inputs' dtype throughout, differentiated by autograd."""
    seeing, seen = _live_rows(inputs.mask)
    dtype = inputs.q.dtype
    leaves = _leaves(
        inputs.q.masked_fill(~seeing, 0.0),
        *(x.masked_fill(~seen, 0.0) for x in (inputs.k, inputs.v)),
        None if inputs.sinks is None else inputs.sinks.to(dtype),
    )
    q, k, v = leaves[:3]
    group, options = q.shape[1] // k.shape[1], make_options(inputs.q, inputs.mask, scale=scale, **inputs.keywords)
    keys, values = (x.repeat_interleave(group, 1) for x in (k, v))
    scores, _ = masked_scores(q, keys, inputs.mask, options)
    # The softmax of a row without keys is NaN, and so is every gradient through it.
    blind = ~seeing[:, :, 0]
    scores = scores.masked_fill(blind, 0.0)
    if inputs.sinks is not None:
        scores = torch.cat([leaves[3][:, None, None].expand(-1, q.shape[0], 1), scores], -1)
    p = torch.softmax(scores, -1).masked_fill(blind, 0.0)[..., -k.shape[0] :] * kept_weights(q, k, options)
    out = torch.einsum("hqk,khd->qhd", p, values)
    lse = torch.logsumexp(scores, -1).masked_fill(blind[:, 0], float("-inf"))
    dout, dlse = (
        torch.where(live, x, 0.0).to(dtype) for x, live in ((inputs.dout, seeing), (inputs.dlse, seeing[:, 0, 0]))
    )
    return _outputs(out, lse, torch.autograd.grad((out, lse), leaves, (dout, dlse)))


def _leaves(*tensors: Tensor | None) -> tuple[Tensor, ...]:
    return tuple(x.detach().requires_grad_() for x in tensors if x is not None)


def _outputs(out: Tensor, lse: Tensor, grads: tuple[Tensor, ...]) -> dict[str, Tensor]:
    return dict(zip(OUTPUTS, (out.detach(), lse.detach(), *grads), strict=False))  # dsinks where there are sinks


def _live_rows(mask: BlockDiagonalMask) -> tuple[Tensor, Tensor]:
    """Return which queries see keys, and which keys are seen by queries; (T, 1, 1) bool."""
    transposed = mask.transpose()
    seeing, seen = (m.key_start < m.key_stop for m in (mask, transposed))
    return seeing[:, None, None], seen[:, None, None]


def _sizes_of_terms(inputs: Inputs, exact: dict[str, Tensor], *, scale: float | None) -> dict[str, float]:
    """Return the largest sum of absolute terms of each output.

    Where terms cancel, rounding is in proportion to this sum and not to the result. In a row with a single key, say,
    the only gradient comes from lse. "rounded" is the root of the sum of squares of the terms of `dsinks` that hold a
    value of `out`, each of which was rounded in its own way.
    """
    options = make_options(inputs.q, inputs.mask, scale=scale, **inputs.keywords)
    lse = exact["lse"].masked_fill(exact["lse"].isinf(), 0.0)
    q, k, v, dout, dlse, out = (
        x.nan_to_num().abs() for x in (inputs.q, inputs.k, inputs.v, inputs.dout, inputs.dlse, exact["out"])
    )
    group = q.shape[1] // k.shape[1]
    k, v, signed_k = (x.repeat_interleave(group, 1) for x in (k, v, inputs.k.nan_to_num()))
    scores, slope = masked_scores(inputs.q.nan_to_num(), signed_k, inputs.mask, options)
    p, kept = torch.exp(scores - lse[..., None]), kept_weights(q, k, options)
    delta = (out * dout).sum(-1).T + dlse
    ds = p * (torch.einsum("qhd,khd->hqk", dout, v) * kept + delta[..., None]) * slope * options.scale
    terms = {
        "out": torch.einsum("hqk,khd->qhd", p * kept, v),
        "lse": torch.einsum("qhd,khd->hqk", q, k) * options.scale,
        "dq": torch.einsum("hqk,khd->qhd", ds, k),
        "dk": torch.einsum("hqk,qhd->khd", ds, q).unflatten(1, (-1, group)).sum(2),
        "dv": torch.einsum("hqk,qhd->khd", p * kept, dout).unflatten(1, (-1, group)).sum(2),
    }
    if inputs.sinks is not None:
        share = torch.exp(inputs.sinks[:, None] - lse).masked_fill(exact["lse"].isinf(), 0.0)
        terms["dsinks"] = (share * delta).sum(-1)
        terms["rounded"] = (share * torch.linalg.vector_norm(out * dout, dim=-1).T).square().sum(-1).sqrt()
    return {name: float(x.max()) if x.numel() else 0.0 for name, x in terms.items()}


def _as_float64(inputs: Inputs) -> Inputs:
    q, k, v, dout, dlse = (x.double() for x in (inputs.q, inputs.k, inputs.v, inputs.dout, inputs.dlse))
    sinks = None if inputs.sinks is None else inputs.sinks.double()
    return Inputs(q, k, v, dout, dlse, inputs.mask, sinks, inputs.keywords)


def _largest(x: Tensor, where: Tensor) -> float:
    values = x[where].abs()
    return float(values.max()) if values.numel() else 0.0
