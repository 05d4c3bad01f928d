"""A conformance kit for attention backends: named checks of any function that is called as flash_attn_varlen_func is.

    from tritonpack.testing import conformance

    report = conformance.run(flash_attn_varlen_func, dtypes=[torch.bfloat16], device="cuda")
    print(report)

or one test per check:

    @pytest.mark.parametrize("check", conformance.checks(), ids=str)
    def test_conformance(check):
        result = check(flash_attn_varlen_func, torch.bfloat16, "cuda")
        assert result.passed, result

The same from a shell: `tritonpack check-backend flash_attn:flash_attn_varlen_func`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch

from tritonpack.testing.cases import Case
from tritonpack.testing.conformance import checks as judges
from tritonpack.testing.conformance.call import VarlenFunction
from tritonpack.testing.conformance.checks import FailedError, Judge, NotOfferedError, Problem

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
    """The results of a function."""

    function: str  # its name
    device: str
    results: tuple[Result, ...]  # one for each check and dtype

    @property
    def passed(self) -> bool:
        """Return whether something passed, nothing failed and nothing raised."""
        return all(result.passed for result in self.results) and any(r.outcome == "pass" for r in self.results)

    def of(self, outcome: Outcome) -> list[str]:
        """The names of the checks with an outcome in any dtype."""
        return list(dict.fromkeys(result.check for result in self.results if result.outcome == outcome))

    def summary(self) -> str:
        """The function, the device, and the number of checks with each outcome."""
        counts = Counter(result.outcome for result in self.results)
        return f"{self.function} on {self.device}: " + ", ".join(f"{counts[o]} {o}" for o in OUTCOMES if counts[o])

    def as_dict(self) -> dict[str, Any]:
        """The report as a dict for JSON."""
        return asdict(self) | {"passed": self.passed}

    def __str__(self) -> str:
        rows = [(r.check, r.dtype, r.outcome, r.detail) for r in self.results]
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
        lines = ("  ".join([*map(str.ljust, row, widths), row[3]]).rstrip() for row in rows)
        return "\n".join([*lines, self.summary()])


@dataclass(frozen=True)
class Check:
    """A named check of a function: a judge and the case that it runs."""

    name: str  # kind/case, such as "backward/window-left"
    judge: Judge
    case: Case
    scale: float | None = None  # of the scores; None leaves the function's default

    def __str__(self) -> str:
        return self.name

    def __call__(
        self, function: Callable[..., Any], dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> Result:
        """Check a function.

        Args:
            function: as `run` takes it.
            dtype, device: the dtype and device of q, k and v.

        Raises:
            ValueError: it can't be called as flash_attn_varlen_func is. The function's own errors are outcomes.
        """
        called = function if isinstance(function, VarlenFunction) else VarlenFunction(function)
        lacking = called.lacks(self.case, scale=self.scale)
        outcome: Outcome = "pass"
        try:
            if lacking:
                raise NotOfferedError(lacking)
            detail = self.judge(Problem.of(called, self.case, dtype, torch.device(device), self.scale))
        except NotOfferedError as reason:
            outcome, detail = "not offered", str(reason)
        except FailedError as reason:
            outcome, detail = "fail", str(reason)
        except Exception as error:
            outcome = "not offered" if isinstance(error, NotImplementedError) else "error"
            detail = f"{type(error).__name__}: {error}".strip().splitlines()[0][:160]
        return Result(self.name, str(dtype).removeprefix("torch."), outcome, detail)


def checks(only: Sequence[str] = ("*",), skip: Sequence[str] = ()) -> list[Check]:
    """Return the checks, for a loop or for pytest's parametrize.

    Args:
        only, skip: shell patterns of names, such as "backward/*" or "*head-dim-512".

    Raises:
        ValueError: no check matches.
    """

    def matches(name: str, patterns: Sequence[str]) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in patterns)

    chosen = [check for check in CHECKS if matches(check.name, only) and not matches(check.name, skip)]
    if not chosen:
        raise ValueError(
            f"no check matches only={list(only)} and skip={list(skip)}. A name is a kind and a case, such as "
            f"'backward/causal'; kinds are {', '.join(dict.fromkeys(check.name.split('/')[0] for check in CHECKS))}."
        )
    return chosen


def run(
    function: Callable[..., Any],
    *,
    dtypes: Sequence[torch.dtype] | None = None,
    device: torch.device | str | None = None,
    only: Sequence[str] = ("*",),
    skip: Sequence[str] = (),
) -> Report:
    """Run all checks on a function.

    Args:
        function: called by keywords as flash_attn_varlen_func is: q (T_q, H, D), k (T_k, H_kv, D), v (T_k, H_kv,
            D_v), cu_seqlens (documents + 1,) int32. The kit reads parameters from its signature, in the spellings of
            FlashAttention 2, 3 and 4, vLLM and torch. A feature without a parameter is reported as not offered.
        dtypes: the dtypes of q, k and v; None means bfloat16 on a GPU, float32 and bfloat16 elsewhere.
        device: None means the GPU where there is one.
        only, skip: as `checks` takes them.

    Returns:
        The report: `.passed`, `.results`, and a table as its text.

    Raises:
        ValueError: the function can't be called in this way, or no check matches. The report holds the function's own
            errors.
    """
    target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if dtypes is None:
        dtypes = (torch.bfloat16,) if target.type == "cuda" else (torch.float32, torch.bfloat16)
    if isinstance(dtypes, str) or not all(isinstance(dtype, torch.dtype) for dtype in dtypes):
        raise ValueError(f"dtypes must be a list of torch dtypes, such as [torch.float32]; got {dtypes!r:.100}.")
    called, chosen = VarlenFunction(function), checks(only, skip)
    return Report(called.name, str(target), tuple(check(called, dtype, target) for dtype in dtypes for check in chosen))


def _case(name: str, seqlens: tuple[int, ...], seqlens_k: tuple[int, ...] | None = None, **fields: Any) -> Case:
    """A case that has only the feature in its name: no empty document, no groups, a head dimension of 64."""
    plain: dict[str, Any] = {"heads": 2, "kv_heads": 2, "head_dim": 64, "causal": False}
    return Case(name, seqlens, seqlens_k, **plain | fields)


_ODD, _SHORT = (1, 63, 111, 64, 65), (40, 33)

EXACT = (
    _case("bidirectional", _ODD),
    _case("causal", _ODD, causal=True),
    _case("one-document", (200,), causal=True),
    _case("one-token-documents", (1,) * 40, causal=True),
    _case("tiny-documents", (3, 7, 2, 20, 1, 5, 9, 33, 4) * 2, causal=True),
    _case("multi-query", (50, 81), heads=4, kv_heads=1, causal=True),
    _case("grouped", (50, 81), heads=4, causal=True),
    _case("group-of-three", (50, 81), heads=6),
    _case("window-left", (130, 20), window=(16, 0), causal=True),
    _case("window-both", (130, 20), window=(9, 4)),
    _case("window-self", (70, 20), window=(0, 0)),
    _case("window-left-open", (100, 20), window=(-1, 4)),
    _case("window-right-open", (100, 20), window=(5, -1)),
    _case("window-wide", (100, 20), window=(500, 500)),
    _case("cross", (40, 30, 64), (70, 30, 97), causal=True),
    _case("cross-bidirectional", (7, 90, 30), (70, 12, 90)),
    _case("cross-more-queries", (90, 12), (40, 12), causal=True),
    _case("cross-window", (33, 50), (60, 20), window=(12, 3)),
    *(_case(f"head-dim-{d}", _SHORT, head_dim=d) for d in (16, 20, 32, 80, 96, 111, 128, 160, 192, 256, 512)),
    _case("head-dim-192-128", _SHORT, head_dim=192, head_dim_v=128),
    _case("head-dim-64-512", _SHORT, head_dim=64, head_dim_v=512),
    _case("softcap", (70, 33, 1), softcap=1.5, causal=True),
    _case("softcap-window", (70, 33), softcap=2.0, window=(9, 4)),
    _case("sinks", (70, 33, 1), sinks=True, causal=True),
    _case("sinks-window", (70, 33), sinks=True, window=(16, 0), causal=True),
    _case("alibi", (70, 33, 1), alibi="heads", causal=True),
    _case("alibi-documents", (9, 70, 33), alibi="documents", causal=True),
    _case("alibi-cross", (33, 90), (60, 40), alibi="documents"),
)

EMPTY = (
    _case("documents", (0, 40, 0, 0, 33, 0), causal=True),
    _case("queries", (0, 30, 0), (20, 30, 7)),
    _case("keys", (40, 30, 5), (0, 30, 0)),
    _case("all", (0, 0)),
)
ISOLATED = (
    _case("bidirectional", (5, 37, 70, 12)),
    _case("causal", (5, 37, 70, 12), causal=True),
    _case("window", (5, 37, 70, 12), window=(9, 4)),
    _case("grouped", (5, 37, 70, 12), heads=4, causal=True),
    _case("cross", (5, 40, 30), (20, 70, 30)),
)
_MIXED = _case("causal", (5, 37, 70, 12), causal=True)
_SLACK = _case("causal", (5, 37, 70), slack=23, causal=True)
_GROUPS = _case("grouped", (5, 130, 70), heads=4, causal=True)


CHECKS = (
    *(Check(f"forward/{case.name}", judges.forward, case) for case in EXACT),
    Check("forward/scale", judges.forward, _MIXED, 0.71),
    *(Check(f"backward/{case.name}", judges.backward, case) for case in EXACT),
    Check("backward/scale", judges.backward, _MIXED, 0.71),
    Check("backward/expanded-gradient", judges.expanded, _MIXED),
    Check("inputs/large-scores", judges.large_scores, _MIXED),
    Check("inputs/many-keys", judges.long_sums, _case("many-keys", (8,), (4096,))),
    Check("inputs/many-queries", judges.long_sums, _case("many-queries", (4096,), (8,))),
    Check("inputs/slices", judges.strided, _GROUPS),
    Check("inputs/unchanged", judges.unchanged, _MIXED),
    *(Check(f"empty/{case.name}", judges.both, case) for case in EMPTY),
    *(Check(f"isolation/{case.name}", judges.isolation, case) for case in ISOLATED),
    Check("slack/zeros", judges.slack_zeros, _SLACK),
    Check("slack/inert", judges.slack_inert, _SLACK),
    Check("repeat/causal", judges.repeat, _MIXED),
    Check("repeat/grouped", judges.repeat, _GROUPS),
    Check("lse/values", judges.lse_values, _MIXED),
    Check("lse/empty-rows", judges.lse_of_empty_rows, _case("more-queries", (90, 12), (40, 12), causal=True)),
    Check("lse/gradient", judges.lse_gradient, _MIXED),
    Check("dropout/weights", judges.dropout, _case("weights", (20, 13, 31), dropout_p=0.3)),
)
