"""A conformance kit for attention backends: named checks of any function that is called as flash_attn_varlen_func is.

    print(conformance.run(flash_attn_varlen_func, dtypes=[torch.bfloat16], device="cuda"))

docs/conformance.md explains the checks. From a shell: `tritonpack check-backend flash_attn:flash_attn_varlen_func`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch

from tritonpack.testing.cases import CASES, Case
from tritonpack.testing.conformance import checks as judges
from tritonpack.testing.conformance.call import NotOfferedError, VarlenFunction
from tritonpack.testing.conformance.checks import FailedError, Judge, Problem

Outcome = Literal["pass", "fail", "not offered", "error"]
OUTCOMES: tuple[Outcome, ...] = ("pass", "fail", "not offered", "error")


@dataclass(frozen=True)
class Result:
    """The result of a check.

    Attributes:
        check: the name of the check.
        dtype: the dtype of q, k and v, such as "bfloat16".
        outcome: "pass"; "fail", a wrong answer; "not offered", where the function lacks a parameter, isn't
            differentiable or raises NotImplementedError; "error", any other exception.
        detail: the figures, the reason, the missing parameter, or the exception.
    """

    check: str
    dtype: str
    outcome: Outcome
    detail: str

    @property
    def passed(self) -> bool:
        """Return whether nothing is wrong: passed, or not offered."""
        return self.outcome in ("pass", "not offered")

    def __str__(self) -> str:
        return f"{self.check} in {self.dtype}: {self.outcome}" + (f": {self.detail}" if self.detail else "")


@dataclass(frozen=True)
class Report:
    """The results of a function, by its name, for each check and dtype."""

    function: str
    device: str
    results: tuple[Result, ...]

    @property
    def passed(self) -> bool:
        """Return whether something passed, nothing failed and nothing raised."""
        return all(result.passed for result in self.results) and bool(self.of("pass"))

    def of(self, outcome: Outcome) -> list[str]:
        """The names of the checks with an outcome in any dtype."""
        return list(dict.fromkeys(result.check for result in self.results if result.outcome == outcome))

    def summary(self) -> str:
        """The function, the device, and the number of checks with each outcome."""
        counts = Counter(result.outcome for result in self.results)
        return f"{self.function} on {self.device}: " + ", ".join(f"{counts[o]} {o}" for o in OUTCOMES if counts[o])

    def __str__(self) -> str:
        return "\n".join([*map(str, self.results), self.summary()])


@dataclass(frozen=True)
class Check:
    """A named check of a function: a judge and the case that it runs."""

    name: str  # kind/case, such as "backward/window-self"
    judge: Judge
    case: Case

    def __str__(self) -> str:
        return self.name

    def __call__(
        self, function: Callable[..., Any], dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> Result:
        """Check a function, as `run` does, with q, k and v of a dtype on a device."""
        called = function if isinstance(function, VarlenFunction) else VarlenFunction(function)
        outcome: Outcome = "pass"
        try:
            detail = self.judge(Problem.of(called, self.case, dtype, torch.device(device)))
        except (FailedError, NotOfferedError) as reason:
            outcome, detail = "fail" if isinstance(reason, FailedError) else "not offered", str(reason)
        except Exception as error:
            outcome = "not offered" if isinstance(error, NotImplementedError) else "error"
            detail = f"{type(error).__name__}: {error}".strip().splitlines()[0][:160]
        return Result(self.name, str(dtype).removeprefix("torch."), outcome, detail)


def checks(only: Sequence[str] = ("*",), skip: Sequence[str] = ()) -> list[Check]:
    """Return the checks that match shell patterns of names, such as "backward/*" or "*head-dim-512".

    Raises:
        ValueError: no check matches.
    """

    def matches(name: str, patterns: Sequence[str]) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in patterns)

    chosen = [check for check in CHECKS if matches(check.name, only) and not matches(check.name, skip)]
    if not chosen:
        kinds = ", ".join(dict.fromkeys(check.name.split("/")[0] for check in CHECKS))
        raise ValueError(f"no check matches only={list(only)} and skip={list(skip)}; kinds are {kinds}.")
    return chosen


def run(
    function: Callable[..., Any], *, dtypes: Sequence[torch.dtype] | None = None,
    device: torch.device | str | None = None, only: Sequence[str] = ("*",), skip: Sequence[str] = (),
) -> Report:  # fmt: skip
    """Run all checks on a function.

    Args:
        function: called by keywords as flash_attn_varlen_func is: q (T_q, H, D), k (T_k, H_kv, D), v (T_k, H_kv,
            D_v), cu_seqlens (documents + 1,) int32. Its parameters are read from its signature, or are FlashAttention
            2's. A feature without a parameter is reported as not offered.
        dtypes: the dtypes of q, k and v; None means bfloat16 on a GPU, float32 and bfloat16 elsewhere.
        device: None means the GPU where there is one.
        only, skip: as `checks` takes them.

    Raises:
        ValueError: the function can't be called in this way, or no check matches. The report holds its own errors.
    """
    target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if dtypes is None:
        dtypes = (torch.bfloat16,) if target.type == "cuda" else (torch.float32, torch.bfloat16)
    if isinstance(dtypes, str) or not all(isinstance(dtype, torch.dtype) for dtype in dtypes):
        raise ValueError(f"dtypes must be a list of torch dtypes, such as [torch.float32]; got {dtypes!r:.100}.")
    called, chosen = VarlenFunction(function), checks(only, skip)
    return Report(called.name, str(target), tuple(check(called, dtype, target) for dtype in dtypes for check in chosen))


def _case(name: str, seqlens: tuple[int, ...], seqlens_k: tuple[int, ...] | None = None, **fields: Any) -> Case:
    """A case that has only the feature in its name: no groups, a head dimension of 64, no mask but documents."""
    return Case(name, seqlens, seqlens_k, **{"heads": 2, "kv_heads": 2, "head_dim": 64, "causal": False, **fields})


def _alone(case: Case) -> Case:
    """A case of `CASES` with only the feature in its name, often causal: no groups, empty documents or slack."""
    sides = zip(case.seqlens, case.seqlens_k or case.seqlens, strict=True)
    seqlens, seqlens_k = zip(*(lengths for lengths in sides if all(lengths)), strict=True)
    plain: dict[str, Any] = {} if "head-dim" in case.name else {"head_dim": 64}
    plain |= {} if case.name.startswith(("multi-", "group-")) else {"heads": 2, "kv_heads": 2}
    name = case.name.removesuffix("-slack")
    return replace(case, name=name, seqlens=seqlens, seqlens_k=seqlens_k, slack=0, **plain)


_PLAIN = [case for case in CASES if any(case.seqlens) and not (case.parents or case.dropout_p or case.name == "slack")]
EXACT = (
    *map(_alone, _PLAIN),
    _case("window-left-open", (100, 20), window=(-1, 4)),
    _case("window-wide", (100, 20), window=(500, 500)),
    _case("scale", (5, 37, 70, 12), causal=True, scale=0.71),
)
EMPTY = (
    _case("documents", (0, 40, 0, 0, 33, 0), causal=True),
    _case("queries", (0, 30, 0), (20, 30, 7)),
    _case("keys", (40, 30, 5), (0, 30, 0)),
    _case("all", (0, 0)),
)
_MIXED = _case("causal", (5, 37, 70, 12), causal=True)
ISOLATED = (
    _case("bidirectional", (5, 37, 70, 12)),
    _MIXED,
    _case("window", (5, 37, 70, 12), window=(9, 4)),
    _case("grouped", (5, 37, 70, 12), heads=4, causal=True),
    _case("cross", (5, 40, 30), (20, 70, 30)),
)
_GROUPS = _case("grouped", (5, 130, 70), heads=4, causal=True)

CHECKS = (
    *(Check(f"forward/{case.name}", judges.forward, case) for case in EXACT),
    *(Check(f"backward/{case.name}", judges.backward, case) for case in EXACT),
    Check("backward/expanded-gradient", judges.expanded, _MIXED),
    Check("inputs/large-scores", judges.large_scores, _MIXED),
    Check("inputs/many-keys", judges.long_sums, _case("many-keys", (8,), (4096,))),
    Check("inputs/many-queries", judges.long_sums, _case("many-queries", (4096,), (8,))),
    Check("inputs/slices", judges.strided, _GROUPS),
    Check("inputs/unchanged", judges.unchanged, _MIXED),
    *(Check(f"empty/{case.name}", judges.both, case) for case in EMPTY),
    *(Check(f"isolation/{case.name}", judges.isolation, case) for case in ISOLATED),
    Check("slack/causal", judges.slack, _case("causal", (5, 37, 70), slack=23, causal=True)),
    Check("repeat/causal", judges.repeat, _MIXED),
    Check("repeat/grouped", judges.repeat, _GROUPS),
    Check("lse/values", judges.lse_values, _MIXED),
    Check("lse/empty-rows", judges.lse_values, _case("more-queries", (90, 12), (40, 12), causal=True)),
    Check("lse/gradient", judges.lse_gradient, _MIXED),
    Check("dropout/weights", judges.dropout, _case("weights", (20, 13, 31), dropout_p=0.3)),
)
