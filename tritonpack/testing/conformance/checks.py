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
ROWS = ("q", "k", "v", "dout")  # inputs with rows of documents


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

    def changed(self, **tensors: Any) -> Problem:
        """The same problem with other tensors among its inputs."""
        return replace(self, inputs=replace(self.inputs, **tensors))

    def forward(self, *, lse: bool = False, deterministic: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return out, after a check of its shape and dtype, and the log-sum-exp as the function returns it."""
        out, found = self.function(self.case, self.inputs, scale=self.scale, lse=lse, deterministic=deterministic)
        q, v = self.inputs.q, self.inputs.v
        if out.shape != (*q.shape[:2], v.shape[2]) or out.dtype != q.dtype:
            shape = (*q.shape[:2], v.shape[2])
            raise FailedError(f"out is {_describe(out)}; it must be {shape} in {_short(q.dtype)}")
        return out, found

    def compute(self, *, deterministic: bool = False) -> dict[str, Tensor]:
        """Return out, and the gradients among dq, dk, dv and dsinks that exist, if the function is differentiable."""
        tensors = {name: getattr(self.inputs, name) for name in ("q", "k", "v", "sinks")}
        leaves = {name: x.detach().requires_grad_() for name, x in tensors.items() if x is not None}
        out, _ = self.changed(**leaves).forward(deterministic=deterministic)
        results = {"out": out.detach()}
        if out.requires_grad:
            try:
                found = torch.autograd.grad(out, list(leaves.values()), self.inputs.dout, allow_unused=True)
            except NotImplementedError:
                return results
            results |= {f"d{name}": x for name, x in zip(leaves, found, strict=True) if x is not None}
        return results


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
    lengths = {"q": problem.case.seqlens, "k": problem.case.seqlens_k or problem.case.seqlens}
    before, noise = _repeated(problem)
    for document in range(len(lengths["q"])):
        rows = {side: slice(sum(n[:document]), sum(n[: document + 1])) for side, n in lengths.items()}
        rows = {name: rows["k" if name in ("k", "v", "dk", "dv") else "q"] for name in (*ROWS, *before)}
        changed = {name: getattr(problem.inputs, name).clone() for name in ROWS}
        for name, x in changed.items():
            x[rows[name]] *= -2.0
        after = problem.changed(**changed).compute(deterministic=True)
        for name in before:
            others = torch.ones(before[name].shape[0], dtype=torch.bool, device=before[name].device)
            others[rows[name]] = False
            moved = _distance(before[name][others], after[name][others])
            if moved > 4 * noise[name]:
                raise FailedError(f"a change to document {document} moves {name} of another by {moved:.1e}")
    return _to_the_bit(noise)


def slack_zeros(problem: Problem) -> str:
    """Check that rows past the last document have zeros for results and gradients."""
    found = _on_used_memory(problem)
    _check_slack(problem.case, found)
    return ", ".join(found)


def slack_inert(problem: Problem) -> str:
    """Check that values past the last document, NaN and infinite ones too, change no result."""
    case = problem.case
    clean, noise = _repeated(problem)
    for value in (NAN, INF):
        tensors = {name: getattr(problem.inputs, name).clone() for name in ROWS}
        for x in tensors.values():
            x[-case.slack :] = value
        found = _on_used_memory(problem.changed(**tensors))
        for name in clean:
            moved = _distance(clean[name][: -case.slack], found[name][: -case.slack])
            if moved > 4 * noise[name]:
                raise FailedError(f"{value} in slack rows moves {name} of a document by {moved:.1e}")
        _check_slack(case, found)
    return _to_the_bit(noise)


def repeat(problem: Problem) -> str:
    """Check that the same inputs give the same bits. The function is asked to be deterministic, if it can be."""
    _, noise = _repeated(problem, REPEATS)
    moved = {name: size for name, size in noise.items() if size}
    if moved:
        figures = ", ".join(f"{name} by {size:.1e}" for name, size in moved.items())
        raise FailedError(f"{REPEATS} runs on the same inputs differ: {figures}")
    return f"{REPEATS} runs: {', '.join(noise)}"


def lse_values(problem: Problem) -> str:
    """Check the log-sum-exp, (H, T_q) float32, natural logarithm."""
    with torch.no_grad():
        _, lse = _with_lse(problem)
    return _exact(problem, {"lse": lse})


def lse_of_empty_rows(problem: Problem) -> str:
    """Check that the log-sum-exp of rows that see nothing is infinite, and report its sign."""
    with torch.no_grad():
        _, lse = _with_lse(problem)
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
    problem = problem.changed(dlse=make_inputs(problem.case).dlse.to(problem.inputs.dlse))
    leaves = {name: getattr(problem.inputs, name).detach().requires_grad_() for name in "qk"}
    results = _with_lse(problem.changed(**leaves))
    if not results[1].requires_grad:
        raise NotOfferedError("lse requires no gradient")
    gradients = problem.inputs.dout, problem.inputs.dlse.to(results[1].dtype)
    dq, dk = torch.autograd.grad(results, list(leaves.values()), gradients, allow_unused=True)
    if dq is None or dk is None:
        raise FailedError("lse requires a gradient, and none reaches q and k")
    return _exact(problem, {"dq": dq, "dk": dk})


def dropout(problem: Problem) -> str:
    """Check the rate at which weights are dropped, the scale of the others, and that backward drops the same weights.

    With the identity as v, out is the matrix of weights. With the identity as dout, dv is its transpose.
    """
    v, p = problem.inputs.v, problem.case.dropout_p
    assert problem.inputs.q.shape == v.shape == (v.shape[2], v.shape[1], v.shape[2])
    identity = torch.eye(v.shape[2], dtype=v.dtype, device=v.device)[:, None].expand_as(v).contiguous()
    problem = problem.changed(v=identity, dout=identity)
    found = problem.compute()
    kept = found["out"] != 0  # [T_q, H, T_k]
    visible = problem.inputs.mask.to_dense()[:, None].expand_as(kept)
    pairs = int(visible.sum())
    rate = 1 - float(kept[visible].double().mean())
    if abs(rate - p) > 5 * (p * (1 - p) / pairs) ** 0.5:
        raise FailedError(f"{rate:.3f} of {pairs} pairs are dropped; dropout_p={p} asks for {p:.3f}")
    without = replace(problem, case=replace(problem.case, dropout_p=0.0))
    with torch.no_grad():
        weights, _ = without.forward()
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


def _repeated(problem: Problem, times: int = 2) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return the results, and how far each moves when the call is repeated."""
    first = problem.compute(deterministic=True)
    noise = dict.fromkeys(first, 0.0)
    for _ in range(times - 1):
        again = problem.compute(deterministic=True)
        noise = {name: max(noise[name], _distance(first[name], again[name])) for name in first}
    return first, noise


def _to_the_bit(noise: dict[str, float]) -> str:
    largest = max(noise.values())
    return f"no further than a repeated call does, {largest:.1e}" if largest else f"to the bit: {', '.join(noise)}"


def _on_used_memory(problem: Problem) -> dict[str, Tensor]:
    """Return the results after memory full of NaN was freed; rows that are never written are likely to show it."""
    spoiled = [torch.full_like(getattr(problem.inputs, name), NAN) for name in ROWS for _ in range(2)]
    del spoiled
    return problem.compute(deterministic=True)


def _check_slack(case: Case, found: dict[str, Tensor]) -> None:
    for name, x in found.items():
        rows = x[-case.slack :]
        if not torch.equal(rows, torch.zeros_like(rows)):
            largest = float(rows.nan_to_num(INF).abs().max())
            what = f"values up to {largest:.1e}" if largest < INF else "values that aren't finite"
            raise FailedError(f"{name} has {what} in rows past the last document; they must be zeros")


def _distance(a: Tensor, b: Tensor) -> float:
    return 0.0 if torch.equal(a, b) else float((a.double() - b.double()).abs().nan_to_num(INF, INF).max())


def _with_lse(problem: Problem) -> tuple[Tensor, Tensor]:
    """Return out and the log-sum-exp, after a check of its shape and dtype."""
    out, lse = problem.forward(lse=True)
    if lse is None:
        raise NotOfferedError("no lse is returned")
    q = problem.inputs.q
    shape = (q.shape[1], q.shape[0])
    if lse.shape == shape[::-1] != shape:
        lse = lse.T
    if lse.shape != shape or lse.dtype != torch.promote_types(q.dtype, torch.float32):
        raise FailedError(f"lse is {_describe(lse)}; it must be (H, T_q) = {shape} in float32")
    return out, lse


def _describe(x: Tensor) -> str:
    return f"{tuple(x.shape)} in {_short(x.dtype)}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
