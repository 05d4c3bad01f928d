"""The judges of the conformance kit: each runs one case of a function and returns its figures, or raises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tritonpack.testing.cases import Case, Inputs, make_inputs
from tritonpack.testing.conformance.call import VarlenFunction
from tritonpack.testing.tolerance import Errors, check_outputs

REPEATS = 5
NAN, INF = float("nan"), float("inf")


class FailedError(Exception):
    """The function gave a wrong answer; the message has the figures."""


class NotOfferedError(Exception):
    """The function doesn't offer the feature of the case; the message names the missing part."""


@dataclass(frozen=True)
class Problem:
    """One case for one function."""

    function: VarlenFunction
    case: Case
    inputs: Inputs  # the same for every dtype up to rounding
    scale: float | None = None  # of the scores; None leaves the function's default

    @classmethod
    def of(
        cls, function: VarlenFunction, case: Case, dtype: torch.dtype, device: torch.device, scale: float | None
    ) -> Problem:
        inputs = make_inputs(case, dtype, device)
        # Few functions differentiate lse, so its gradient is 0. Some require sinks in q's dtype.
        sinks = None if inputs.sinks is None else inputs.sinks.to(dtype)
        return cls(function, case, replace(inputs, dlse=torch.zeros_like(inputs.dlse), sinks=sinks), scale)

    def forward(self, inputs: Inputs, *, lse: bool = False, deterministic: bool = False) -> tuple[Tensor, Any]:
        """Return out, after a check of its shape and dtype, and the log-sum-exp as the function returns it."""
        out, found = self.function(self.case, inputs, scale=self.scale, lse=lse, deterministic=deterministic)
        shape = (*inputs.q.shape[:2], inputs.v.shape[2])
        if out.shape != shape or out.dtype != inputs.q.dtype:
            raise FailedError(f"out is {_describe(out)}; it must be {tuple(shape)} in {_short(inputs.q.dtype)}")
        return out, found

    def compute(self, inputs: Inputs | None = None, *, deterministic: bool = False) -> dict[str, Tensor]:
        """Return out, and those of dq, dk, dv and dsinks that a gradient reaches, if the function is differentiable."""
        inputs = self.inputs if inputs is None else inputs
        tensors = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "sinks": inputs.sinks}
        leaves: dict[str, Any] = {name: x.detach().requires_grad_() for name, x in tensors.items() if x is not None}
        out, _ = self.forward(replace(inputs, **leaves), deterministic=deterministic)
        results = {"out": out.detach()}
        if out.requires_grad:
            try:
                found = torch.autograd.grad(out, list(leaves.values()), inputs.dout, allow_unused=True)
            except NotImplementedError:
                return results
            results |= {f"d{name}": x for name, x in zip(leaves, found, strict=True) if x is not None}
        return results


Judge = Callable[[Problem], str]


def forward(problem: Problem) -> str:
    """Check that out is as exact as plain attention in the same dtype."""
    with torch.no_grad():
        out, _ = problem.forward(problem.inputs)
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
    return both(replace(problem, inputs=replace(problem.inputs, q=q, k=k)))


def long_sums(problem: Problem) -> str:
    """Check sums of thousands of terms of one sign; a sum in 16 bits loses terms once it outgrows them."""
    inputs = replace(problem.inputs, v=problem.inputs.v.abs(), dout=problem.inputs.dout.abs())
    return both(replace(problem, inputs=inputs))


def strided(problem: Problem) -> str:
    """Check q, k and v that are slices of one projection."""
    inputs = problem.inputs
    widths = [x.shape[1] for x in (inputs.q, inputs.k, inputs.v)]
    q, k, v = torch.cat([inputs.q, inputs.k, inputs.v], 1).split(widths, 1)
    return both(replace(problem, inputs=replace(inputs, q=q, k=k, v=v)))


def expanded(problem: Problem) -> str:
    """Check the backward pass of out.sum(), whose incoming gradient has strides of 0."""
    ones = torch.ones((), dtype=problem.inputs.dout.dtype, device=problem.inputs.dout.device)
    return backward(replace(problem, inputs=replace(problem.inputs, dout=ones.expand_as(problem.inputs.dout))))


def unchanged(problem: Problem) -> str:
    """Check that nothing is written to the inputs."""
    inputs = problem.inputs
    before = {name: getattr(inputs, name).clone() for name in ("q", "k", "v", "dout")}
    problem.compute()
    written = [name for name, x in before.items() if not torch.equal(getattr(inputs, name), x)]
    if written:
        raise FailedError(f"{', '.join(written)} changed in place")
    return ""


def isolation(problem: Problem) -> str:
    """Check that a change of one document changes no bit of another's results."""
    case, inputs = problem.case, problem.inputs
    before, noise = _repeated(problem, inputs)
    begins_q, begins_k = (_begins(lengths) for lengths in (case.seqlens, case.seqlens_k or case.seqlens))
    for document in range(len(case.seqlens)):
        rows = {side: slice(*b[document : document + 2]) for side, b in (("q", begins_q), ("k", begins_k))}
        changed = {name: getattr(inputs, name).clone() for name in ("q", "k", "v", "dout")}
        for name, x in changed.items():
            x[rows["k" if name in "kv" else "q"]] *= -2.0
        after = problem.compute(replace(inputs, **changed), deterministic=True)
        for name in before:
            others = torch.ones(before[name].shape[0], dtype=torch.bool, device=before[name].device)
            others[rows["k" if name in ("dk", "dv") else "q"]] = False
            moved = _distance(before[name][others], after[name][others])
            if moved > 4 * noise[name]:
                raise FailedError(f"a change to document {document} moves {name} of another by {moved:.1e}")
    return _to_the_bit(noise)


def slack_zeros(problem: Problem) -> str:
    """Check that rows past the last document have zeros for results and gradients."""
    found = _on_used_memory(problem, problem.inputs)
    _check_slack(problem.case, found)
    return ", ".join(found)


def slack_inert(problem: Problem) -> str:
    """Check that values past the last document, NaN and infinite ones too, change no result."""
    case = problem.case
    clean, noise = _repeated(problem, problem.inputs)
    for value in (NAN, INF):
        tensors = {name: getattr(problem.inputs, name).clone() for name in ("q", "k", "v", "dout")}
        for x in tensors.values():
            x[-case.slack :] = value
        found = _on_used_memory(problem, replace(problem.inputs, **tensors))
        for name in clean:
            moved = _distance(clean[name][: -case.slack], found[name][: -case.slack])
            if moved > 4 * noise[name]:
                raise FailedError(f"{value} in slack rows moves {name} of a document by {moved:.1e}")
        _check_slack(case, found)
    return _to_the_bit(noise)


def repeat(problem: Problem) -> str:
    """Check that the same inputs give the same bits. The function is asked to be deterministic, if it can be."""
    _, noise = _repeated(problem, problem.inputs, REPEATS)
    moved = {name: size for name, size in noise.items() if size}
    if moved:
        figures = ", ".join(f"{name} by {size:.1e}" for name, size in moved.items())
        raise FailedError(f"{REPEATS} runs on the same inputs differ: {figures}")
    return f"{REPEATS} runs: {', '.join(noise)}"


def lse_values(problem: Problem) -> str:
    """Check the log-sum-exp, (H, T_q) float32, natural logarithm."""
    with torch.no_grad():
        lse = _lse(problem, problem.inputs)
    return _exact(problem, {"lse": lse})


def lse_of_empty_rows(problem: Problem) -> str:
    """Check that the log-sum-exp of rows that see nothing is infinite, and report its sign."""
    with torch.no_grad():
        lse = _lse(problem, problem.inputs)
    blind = problem.inputs.mask.key_start == problem.inputs.mask.key_stop
    values = lse[:, blind].unique().tolist()
    if values not in ([-INF], [INF]):
        raise FailedError(
            f"{', '.join(dict.fromkeys(f'{x:.3g}' for x in values[:4]))} in rows that see nothing; it must be -inf"
        )
    _exact(problem, {"lse": lse.masked_fill(blind, -INF)})
    return "-inf" if values == [-INF] else "+inf, as in FlashAttention 2"


def lse_gradient(problem: Problem) -> str:
    """Check the gradient through the log-sum-exp, if the log-sum-exp requires a gradient."""
    inputs = replace(problem.inputs, dlse=make_inputs(problem.case).dlse.to(problem.inputs.dlse))
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k)]
    out = problem.forward(replace(inputs, q=leaves[0], k=leaves[1]), lse=True)
    lse = _lse_of(out, inputs)
    if not lse.requires_grad:
        raise NotOfferedError("lse requires no gradient")
    grads = torch.autograd.grad((out[0], lse), leaves, (inputs.dout, inputs.dlse.to(lse.dtype)), allow_unused=True)
    if any(x is None for x in grads):
        raise FailedError("lse requires a gradient, and none reaches q and k")
    return _exact(replace(problem, inputs=inputs), dict(zip(("dq", "dk"), grads, strict=True)))


def dropout(problem: Problem) -> str:
    """Check the rate at which weights are dropped, the scale of the others, and that backward drops the same weights.

    With the identity as v, out is the matrix of weights. With the identity as dout, dv is its transpose.
    """
    inputs, p = problem.inputs, problem.case.dropout_p
    size = inputs.q.shape[2]
    assert inputs.q.shape == inputs.v.shape == (size, inputs.q.shape[1], size)
    identity = torch.eye(size, dtype=inputs.q.dtype, device=inputs.q.device)[:, None].expand_as(inputs.v).contiguous()
    inputs = replace(inputs, v=identity, dout=identity)
    found = problem.compute(inputs)
    kept = found["out"] != 0  # [T_q, H, T_k]
    visible = inputs.mask.to_dense()[:, None].expand_as(kept)
    pairs = int(visible.sum())
    rate = 1 - float(kept[visible].double().mean())
    if abs(rate - p) > 5 * (p * (1 - p) / pairs) ** 0.5:
        raise FailedError(f"{rate:.3f} of {pairs} pairs are dropped; dropout_p={p} asks for {p:.3f}")
    keywords = {name: x for name, x in inputs.keywords.items() if not name.startswith("dropout")}
    without = replace(problem, case=replace(problem.case, dropout_p=0.0), inputs=replace(inputs, keywords=keywords))
    with torch.no_grad():
        weights, _ = without.forward(without.inputs)
    scaled = (found["out"].double() * (1 - p)).to(weights.dtype)
    _exact(without, {"out": torch.where(kept, scaled, weights)})
    if "dv" in found and not torch.equal(found["dv"].permute(2, 1, 0) != 0, kept):
        raise FailedError("backward drops other pairs than forward")
    return f"{rate:.3f} dropped"


def _exact(problem: Problem, found: dict[str, Tensor]) -> str:
    keywords = {name: x for name, x in problem.inputs.keywords.items() if not name.startswith("dropout")}
    for name, x in found.items():
        like = {"dq": problem.inputs.q, "dk": problem.inputs.k, "dv": problem.inputs.v}.get(name)
        if like is not None and (x.shape, x.dtype) != (like.shape, like.dtype):
            raise FailedError(f"{name} is {_describe(x)}, but {name[1:]} is {_describe(like)}")
    try:
        errors = check_outputs(replace(problem.inputs, keywords=keywords), found, scale=problem.scale)
    except AssertionError as error:
        raise FailedError(str(error)) from None
    return _figures(errors)


def _figures(errors: Errors) -> str:
    """Name the output whose error is nearest to its limit."""
    name = max(errors.backend, key=lambda name: errors.backend[name] / (errors.allowed[name] or 1.0))
    return f"{name}: {errors.backend[name]:.1e} of {errors.allowed[name]:.1e} allowed"


def _repeated(problem: Problem, inputs: Inputs, times: int = 2) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return the results, and how far each moves when the call is repeated."""
    first = problem.compute(inputs, deterministic=True)
    noise = dict.fromkeys(first, 0.0)
    for _ in range(times - 1):
        again = problem.compute(inputs, deterministic=True)
        noise = {name: max(noise[name], _distance(first[name], again[name])) for name in first}
    return first, noise


def _to_the_bit(noise: dict[str, float]) -> str:
    largest = max(noise.values())
    return f"no further than a repeated call does, {largest:.1e}" if largest else f"to the bit: {', '.join(noise)}"


def _on_used_memory(problem: Problem, inputs: Inputs) -> dict[str, Tensor]:
    """Return the results after memory full of NaN was freed; rows that are never written are likely to show it."""
    spoiled = [torch.full_like(x, NAN) for x in (inputs.q, inputs.k, inputs.v, inputs.dout) for _ in range(2)]
    del spoiled
    return problem.compute(inputs, deterministic=True)


def _check_slack(case: Case, found: dict[str, Tensor]) -> None:
    for name, x in found.items():
        rows = x[-case.slack :]
        if not torch.equal(rows, torch.zeros_like(rows)):
            largest = float(rows.nan_to_num(INF).abs().max())
            what = f"values up to {largest:.1e}" if largest < INF else "values that aren't finite"
            raise FailedError(f"{name} has {what} in rows past the last document; they must be zeros")


def _distance(a: Tensor, b: Tensor) -> float:
    return 0.0 if torch.equal(a, b) else float((a.double() - b.double()).abs().nan_to_num(INF, INF).max())


def _lse(problem: Problem, inputs: Inputs) -> Tensor:
    return _lse_of(problem.forward(inputs, lse=True), inputs)


def _lse_of(result: tuple[Tensor, Tensor | None], inputs: Inputs) -> Tensor:
    lse = result[1]
    if lse is None:
        raise NotOfferedError("no lse is returned")
    shape = (inputs.q.shape[1], inputs.q.shape[0])
    if lse.shape == shape[::-1] != shape:
        lse = lse.T
    if lse.shape != shape or lse.dtype != torch.promote_types(inputs.q.dtype, torch.float32):
        raise FailedError(f"lse is {_describe(lse)}; it must be (H, T_q) = {shape} in float32")
    return lse


def _begins(lengths: tuple[int, ...]) -> list[int]:
    return [0, *torch.tensor(lengths, device="cpu").cumsum(0).tolist()]


def _describe(x: Tensor) -> str:
    return f"{tuple(x.shape)} in {_short(x.dtype)}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
