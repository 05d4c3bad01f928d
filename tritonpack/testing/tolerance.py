"""The tolerance rule: a backend's error against float64, bounded by the error of plain attention in the same dtype.

FlashAttention's own tests use this rule. On the same rounded inputs, the largest error against a float64 reference is
at most twice the error of plain attention that is computed in the low precision throughout, plus a band for rounding:
of the result in its own dtype, of its terms in the dtype of their sum (float32 or float64), and of `out`, from which
the gradient of the few sinks sums over all tokens. So no tolerance is chosen by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tritonpack.attention import varlen_attention
from tritonpack.backends.reference import kept_weights, masked_scores
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
        rows = zip(self.backend, self.backend.values(), self.plain.values(), self.allowed.values(), strict=True)
        return "; ".join(f"{name}: {x:.2e} (plain {y:.2e}, allowed {z:.2e})" for name, x, y, z in rows)


def check_backend(inputs: Inputs, backend: Any = "auto") -> Errors:
    """Check that a backend's outputs and gradients are as exact as plain attention's, and return the errors.

    Args:
        inputs: the case, as `make_inputs` makes it.
        backend: as `varlen_attention` takes it.

    Raises:
        AssertionError: a value isn't finite where the reference's is, an empty row has values, or an error is too
            large; the message names the output and the figures.
    """
    return check_outputs(inputs, run(inputs, backend))


def check_outputs(inputs: Inputs, actual: dict[str, Tensor]) -> Errors:
    """Check outputs that were computed elsewhere, some or all of "out", "lse", "dq", "dk", "dv" and "dsinks", as
    `check_backend` does."""
    wide, errors = _with_dtype(inputs, torch.float64), Errors({}, {}, {})
    exact, plain = run(wide, "reference"), run_plain(inputs)
    terms = _sizes_of_terms(wide, exact)
    for name, got in actual.items():
        want, finite = exact[name], exact[name].isfinite()
        if not torch.equal(got.isfinite(), finite) or not torch.equal(got.isneginf(), want.isneginf()):
            raise AssertionError(f"{name}: finite and infinite values are not where the reference has them")
        errors.backend[name] = _largest(got.double() - want, finite)
        errors.plain[name] = _largest(plain[name].double() - want, finite)
        sums = torch.promote_types(got.dtype, torch.float32)
        rounding = torch.finfo(got.dtype).eps * _largest(want, finite) + torch.finfo(sums).eps * terms[name]
        if name == "dsinks":
            rounding += torch.finfo(inputs.q.dtype).eps * terms["rounded"]
        errors.allowed[name] = 2 * errors.plain[name] + BAND * rounding
    worse = [name for name in actual if errors.backend[name] > errors.allowed[name]]
    if worse:
        raise AssertionError(f"{', '.join(worse)} beyond twice plain attention's error: {errors}")
    return errors


def _with_dtype(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    tensors = {name: getattr(inputs, name) for name in ("q", "k", "v", "dout", "dlse", "sinks")}
    return replace(inputs, **{name: x.to(dtype) for name, x in tensors.items() if x is not None})


def run(inputs: Inputs, backend: Any) -> dict[str, Tensor]:
    """Return out, lse and the gradients of q, k, v and sinks under the case's dout and dlse, by `varlen_attention`."""

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return varlen_attention(q, k, v, inputs.mask, sinks=sinks, return_lse=True, backend=backend, **inputs.keywords)

    return _outputs(attend, inputs)


def run_plain(inputs: Inputs) -> dict[str, Tensor]:
    """Return the same by plain attention in the inputs' dtype throughout, differentiated by autograd."""
    options = make_options(inputs.q, inputs.mask, **inputs.keywords)
    blind = (inputs.mask.key_start == inputs.mask.key_stop)[:, None]

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        q, k, v = (x.masked_fill(~x.isfinite(), 0.0) for x in (q, k, v))  # in unseen rows, because 0 * NaN is NaN
        keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        # The softmax of a row without keys is NaN, and so is every gradient through it.
        scores = masked_scores(q, keys, inputs.mask, options)[0].masked_fill(blind, 0.0)
        if sinks is not None:
            scores = torch.cat([sinks[:, None, None].expand(-1, q.shape[0], 1), scores], -1)
        p = torch.softmax(scores, -1).masked_fill(blind, 0.0)[..., -k.shape[0] :] * kept_weights(q, k, options)
        lse = torch.logsumexp(scores, -1).masked_fill(blind[:, 0], float("-inf"))
        return torch.einsum("hqk,khd->qhd", p, values).masked_fill(blind[..., None], 0.0), lse

    return _outputs(attend, _with_dtype(inputs, inputs.q.dtype))


def _outputs(attend: Callable[..., tuple[Tensor, Tensor]], inputs: Inputs) -> dict[str, Tensor]:
    """Return out, lse and the gradients; dsinks if there are sinks."""
    tensors = (inputs.q, inputs.k, inputs.v, inputs.sinks)
    leaves = [x.detach().requires_grad_() for x in tensors if x is not None]
    out, lse = attend(*leaves)
    gradients = torch.autograd.grad((out, lse), leaves, (inputs.dout, inputs.dlse))
    return dict(zip(OUTPUTS, (out.detach(), lse.detach(), *gradients), strict=False))


def _sizes_of_terms(inputs: Inputs, exact: dict[str, Tensor]) -> dict[str, float]:
    """Return the largest sum of absolute terms of each output: where terms cancel, rounding is in proportion to it.

    "rounded" is the root of the sum of squares of the terms of `dsinks` that hold a value of `out`, each of which was
    rounded in its own way.
    """
    options = make_options(inputs.q, inputs.mask, **inputs.keywords)
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


def _largest(x: Tensor, where: Tensor) -> float:
    values = x[where].abs()
    return float(values.max()) if values.numel() else 0.0
