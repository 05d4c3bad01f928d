"""The judges of the conformance kit: each runs one case of a function and returns its figures, or raises."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, inf, nan

from tritonpack.checks import describe
from tritonpack.testing.cases import Case, Inputs, make_inputs
from tritonpack.testing.conformance.call import NotOfferedError, VarlenFunction
from tritonpack.testing.tolerance import check_outputs

REPEATS = 5
ROWS = ("q", "k", "v", "dout")  # inputs with rows of documents
SLACK = -1  # the rows past the last document, where the number of a document is asked


class FailedError(Exception):
    """The function gave a wrong answer; the message has the figures."""


@dataclass(frozen=True)
class Problem:
    """One case for one function."""

    function: VarlenFunction
    case: Case
    inputs: Inputs  # the same for every dtype up to rounding

    @classmethod
    def of(cls, function: VarlenFunction, case: Case, dtype: torch.dtype, device: torch.device) -> Problem:
        inputs = make_inputs(case, dtype, device)
        # Few functions differentiate lse, so its gradient is 0. Some require sinks in q's dtype.
        sinks = None if inputs.sinks is None else inputs.sinks.to(dtype)
        return cls(function, case, replace(inputs, dlse=torch.zeros_like(inputs.dlse), sinks=sinks))

    def changed(self, **tensors: Any) -> Problem:
        """The same problem with other tensors among its inputs."""
        return replace(self, inputs=replace(self.inputs, **tensors))

    def forward(self, *, lse: bool = False, deterministic: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return out, after a check of its shape and dtype, and the log-sum-exp as the function returns it."""
        out, found = self.function(self.case, self.inputs, lse=lse, deterministic=deterministic)
        shape = (*self.inputs.q.shape[:2], self.inputs.v.shape[2])
        if out.shape != shape or out.dtype != self.inputs.q.dtype:
            raise FailedError(f"out is {describe(out)}; it must be {shape} {self.inputs.q.dtype}")
        return out, found

    def forward_with_lse(self) -> tuple[Tensor, Tensor]:
        """Return out and the log-sum-exp, after a check of its shape and dtype."""
        out, lse = self.forward(lse=True)
        if lse is None:
            raise NotOfferedError("no lse is returned")
        queries, heads, dtype = *out.shape[:2], torch.promote_types(out.dtype, torch.float32)
        lse = lse.T if lse.shape == (queries, heads) != (heads, queries) else lse
        if lse.shape != (heads, queries) or lse.dtype != dtype:
            raise FailedError(f"lse is {describe(lse)}; it must be (H, T_q) = {(heads, queries)} {dtype}")
        return out, lse

    def compute(self, *, deterministic: bool = False) -> dict[str, Tensor]:
        """Return out, and the gradients among dq, dk, dv and dsinks that exist, if the function is differentiable."""
        tensors = {name: getattr(self.inputs, name) for name in ("q", "k", "v", "sinks")}
        leaves = {name: x.detach().requires_grad_() for name, x in tensors.items() if x is not None}
        out, _ = self.changed(**leaves).forward(deterministic=deterministic)
        results = {"out": out.detach()}
        if out.requires_grad:
            with suppress(NotImplementedError):  # then the checks look at `out` alone
                found = torch.autograd.grad(out, list(leaves.values()), self.inputs.dout, allow_unused=True)
                results |= {f"d{name}": x for name, x in zip(leaves, found, strict=True) if x is not None}
        return results

    def repeated(self, times: int = 2) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Return the results, and how far each moves when the call is repeated."""
        first = self.compute(deterministic=True)
        noise = dict.fromkeys(first, 0.0)
        for _ in range(times - 1):
            again = self.compute(deterministic=True)
            noise = {name: max(noise[name], _distance(first[name], again[name])) for name in first}
        return first, noise

    def rows(self, name: str, document: int) -> Tensor:
        """Return (T,) bool: the rows of an input or a result that are a document's, or slack."""
        lengths = (self.case.seqlens_k if name in ("k", "v", "dk", "dv") else None) or self.case.seqlens
        owners = [number for number, n in enumerate(lengths) for _ in range(n)] + [SLACK] * self.case.slack
        return torch.tensor(owners, device=self.inputs.q.device) == document


Judge = Callable[[Problem], str]


def forward(problem: Problem) -> str:
    """Check that out is as exact as plain attention in the same dtype."""
    with torch.no_grad():
        out, _ = problem.forward()
    return _exact(problem, {"out": out})


def backward(problem: Problem) -> str:
    """Check that the gradients are as exact as plain attention's."""
    found = problem.compute()
    del found["out"]
    if not found:
        raise NotOfferedError("not differentiable")
    wanted = ["dq", "dk", "dv"] + ["dsinks"] * (problem.inputs.sinks is not None)
    unreached = [name[1:] for name in wanted if name not in found]
    if unreached:
        raise FailedError(f"no gradient reaches {', '.join(unreached)}")
    return _exact(problem, found)


def both(problem: Problem) -> str:
    """Check out, and the gradients if there are any."""
    found = forward(problem)
    try:
        return f"{found}; {backward(problem)}"
    except NotOfferedError as reason:
        return f"{found}; {reason}"


def large_scores(problem: Problem) -> str:
    """Check scores whose exponential overflows, although their softmax doesn't."""
    q, k = problem.inputs.q.clone(), problem.inputs.k.clone()
    q[..., 0] = k[..., 0] = 40.0  # 200 more for every score at a head dimension of 64
    return both(problem.changed(q=q, k=k))


def long_sums(problem: Problem) -> str:
    """Check sums of thousands of terms of one sign; a sum in 16 bits loses terms once it outgrows them."""
    return both(problem.changed(v=problem.inputs.v.abs(), dout=problem.inputs.dout.abs()))


def strided(problem: Problem) -> str:
    """Check q, k and v that are slices of one projection."""
    parts = [getattr(problem.inputs, name) for name in "qkv"]
    slices = torch.cat(parts, 1).split([x.shape[1] for x in parts], 1)
    return both(problem.changed(**dict(zip("qkv", slices, strict=True))))


def expanded(problem: Problem) -> str:
    """Check the backward pass of out.sum(), whose incoming gradient has strides of 0."""
    dout = problem.inputs.dout
    return backward(problem.changed(dout=dout.new_ones(()).expand_as(dout)))


def unchanged(problem: Problem) -> str:
    """Check that nothing is written to the inputs."""
    before = {name: getattr(problem.inputs, name).clone() for name in ROWS}
    problem.compute()
    written = [name for name, x in before.items() if not torch.equal(getattr(problem.inputs, name), x)]
    if written:
        raise FailedError(f"{', '.join(written)} changed in place")
    return ""


def isolation(problem: Problem) -> str:
    """Check that a change of one document changes no bit of another's results."""
    before, noise = problem.repeated()
    for document in range(len(problem.case.seqlens)):
        _change_rows(problem, document, -2.0, f"a change to document {document}", before, noise)
    return _to_the_bit(noise)


def slack(problem: Problem) -> str:
    """Check that rows past the last document have zeros for results, and that values there, like NaN, stay there."""
    before, noise = problem.repeated()
    for value in (0.0, nan, inf):
        found = _change_rows(problem, SLACK, value, f"{value} in slack rows", before, noise)
        for name, x in found.items():
            largest = float(x[problem.rows(name, SLACK)].abs().nan_to_num(inf, inf).max())
            if largest:
                raise FailedError(f"{name} has values up to {largest:.1e} in rows past the last document, not zeros")
    return _to_the_bit(noise)


def repeat(problem: Problem) -> str:
    """Check that the same inputs give the same bits. The function is asked to be deterministic, if it can be."""
    _, noise = problem.repeated(REPEATS)
    moved = [f"{name} by {size:.1e}" for name, size in noise.items() if size]
    if moved:
        raise FailedError(f"{REPEATS} runs on the same inputs differ: {', '.join(moved)}")
    return f"{REPEATS} runs: {', '.join(noise)}"


def lse_values(problem: Problem) -> str:
    """Check the log-sum-exp, (H, T_q) float32, natural logarithm; report the infinity in rows that see nothing."""
    with torch.no_grad():
        _, lse = problem.forward_with_lse()
    blind = problem.inputs.mask.key_start == problem.inputs.mask.key_stop
    values = lse[:, blind].unique().tolist()
    if values not in ([], [-inf], [inf]):
        raise FailedError(f"{values[:4]} in rows that see nothing; it must be -inf")
    figures = _exact(problem, {"lse": lse.masked_fill(blind, -inf)})
    return f"{figures}; +inf in rows that see nothing, as in FlashAttention 2" if values == [inf] else figures


def lse_gradient(problem: Problem) -> str:
    """Check the gradient through the log-sum-exp, if the log-sum-exp requires a gradient."""
    problem = problem.changed(dlse=make_inputs(problem.case).dlse.to(problem.inputs.dlse))
    leaves = {name: getattr(problem.inputs, name).detach().requires_grad_() for name in "qk"}
    results = problem.changed(**leaves).forward_with_lse()
    if not results[1].requires_grad:
        raise NotOfferedError("lse requires no gradient")
    gradients = problem.inputs.dout, problem.inputs.dlse.to(results[1].dtype)
    dq, dk = torch.autograd.grad(results, list(leaves.values()), gradients, allow_unused=True)
    if dq is None or dk is None:
        raise FailedError("lse requires a gradient, and none reaches q and k")
    return _exact(problem, {"dq": dq, "dk": dk})


def dropout(problem: Problem) -> str:
    """Check the rate at which weights are dropped, the scale of the others, and that backward drops the same ones."""
    v, p = problem.inputs.v, problem.case.dropout_p
    # With the identity as v, out is the matrix of weights. With the identity as dout, dv is its transpose.
    identity = torch.eye(v.shape[2], dtype=v.dtype, device=v.device)[:, None].expand_as(v).contiguous()
    problem = problem.changed(v=identity, dout=identity)
    found = problem.compute()
    kept = found["out"] != 0  # [T_q, H, T_k]
    visible = problem.inputs.mask.to_dense()[:, None].expand_as(kept)
    pairs = int(visible.sum())
    rate = 1 - float(kept[visible].double().mean())
    if abs(rate - p) > 5 * (p * (1 - p) / pairs) ** 0.5:
        raise FailedError(f"{rate:.3f} of {pairs} pairs are dropped; dropout_p={p} asks for {p:.3f}")
    without = problem.changed(keywords={})
    with torch.no_grad():
        weights, _ = without.forward()
    scaled = (found["out"].double() * (1 - p)).to(weights.dtype)
    _exact(without, {"out": torch.where(kept, scaled, weights)})
    if "dv" in found and not torch.equal(found["dv"].permute(2, 1, 0) != 0, kept):
        raise FailedError("backward drops other pairs than forward")
    return f"{rate:.3f} dropped"


def _exact(problem: Problem, found: dict[str, Tensor]) -> str:
    try:
        errors = check_outputs(problem.inputs, found)
    except AssertionError as error:
        raise FailedError(str(error)) from None
    nearest = max(found, key=lambda name: errors.backend[name] / (errors.allowed[name] or 1.0))  # to its limit
    return f"{nearest}: {errors.backend[nearest]:.1e} of {errors.allowed[nearest]:.1e} allowed"


def _change_rows(
    problem: Problem, document: int, value: float, what: str, before: dict[str, Tensor], noise: dict[str, float]
) -> dict[str, Tensor]:
    """Overwrite the rows of one document; return the results, after a check that all other rows keep theirs."""
    changed = {name: getattr(problem.inputs, name).clone() for name in ROWS}
    for name, x in changed.items():
        x[problem.rows(name, document)] = value
    # Memory full of NaN is freed, so that rows that are never written are likely to show it.
    spoiled = [torch.full_like(x, nan) for x in changed.values() for _ in range(2)]
    del spoiled
    after = problem.changed(**changed).compute(deterministic=True)
    for name in before:
        kept = ~problem.rows(name, document)
        moved = _distance(before[name][kept], after[name][kept])
        if moved > 4 * noise[name]:
            raise FailedError(f"{what} moves {name} of another document by {moved:.1e}")
    return after


def _to_the_bit(noise: dict[str, float]) -> str:
    largest = max(noise.values())
    return f"no further than a repeated call does, {largest:.1e}" if largest else f"to the bit: {', '.join(noise)}"


def _distance(a: Tensor, b: Tensor) -> float:
    return 0.0 if torch.equal(a, b) else float((a.double() - b.double()).abs().nan_to_num(inf, inf).max())
