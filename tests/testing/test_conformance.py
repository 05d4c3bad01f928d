"""The conformance kit: right functions pass, and each wrong one fails the checks of its defect and no others."""

import re
from collections.abc import Callable
from fnmatch import fnmatch
from typing import Any

import pytest
import torch
from torch import Tensor

import tritonpack
from tests.testing import backends
from tests.testing.backends import DEFECTS, WRONG, attention
from tritonpack import flash_attn
from tritonpack.testing import CASES, check_outputs, conformance, make_inputs, tolerance
from tritonpack.testing.conformance.call import VarlenFunction

LARGE = ("*/head-dim-*", "inputs/many-*")
BY_NAME = {check.name: check for check in conformance.CHECKS}
QUICK = {check.name for check in conformance.checks(skip=LARGE)}


def matching(patterns: str) -> set[str]:
    """The names of checks that match patterns, without those after "but"."""
    parts = (part.split() for part in patterns.partition(" but ")[::2])
    wanted, unwanted = ({name for name in BY_NAME for one in part if fnmatch(name, one)} for part in parts)
    return wanted - unwanted


def quick_report(function: Callable[..., Any], **options: Any) -> conformance.Report:
    """The report of a function in float32 on all checks but the large ones."""
    return conformance.run(function, device="cpu", **{"dtypes": [torch.float32], "skip": LARGE, **options})


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_tritonpack_passes_every_check(dtype: torch.dtype) -> None:
    report = conformance.run(flash_attn.flash_attn_varlen_func, dtypes=[dtype], device="cpu")
    assert report.of("pass") == list(BY_NAME), "\n".join(str(r) for r in report.results if r.outcome != "pass")
    assert report.passed


@pytest.mark.fast("ignores_boundaries")
@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_fails_its_checks_and_no_others(name: str) -> None:
    """The text of an exception is its first line."""
    report = quick_report(WRONG[name])
    assert report.function == name
    failed = {result.check for result in report.results if not result.passed}
    assert failed == matching(DEFECTS[name][1]) & QUICK, report
    assert not report.passed
    errors = {result.detail for result in report.results if result.outcome == "error"}
    assert errors == ({"RuntimeError: an empty document"} if name.startswith("raises") else set())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_a_running_sum_in_16_bits_fails(dtype: torch.dtype) -> None:
    """The function is plain attention that sums `out` key by key in q's dtype."""

    def running(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Tensor:
        p = torch.softmax(torch.einsum("qhd,khd->qhk", q, k).float() * q.shape[2] ** -0.5, -1).to(q.dtype)
        out = torch.zeros_like(q)
        for key in range(k.shape[0]):
            out = out + p[:, :, key, None] * v[key]
        return out

    assert BY_NAME["inputs/many-keys"](running, dtype).outcome == "fail"


@pytest.mark.parametrize(
    ("name", "check", "detail"),
    [
        ("ignores_boundaries", "isolation/causal", r"a change to document 0 moves out of another document by \d"),
        ("garbage_in_slack", "slack/causal", "out has values up to inf in rows past the last document, not zeros"),
        ("garbage_in_gradients_of_slack", "slack/causal", "dk has values up to 1.0e-30 in rows past the last"),
        ("slack_leaks", "slack/causal", "nan in slack rows moves dq of another document by inf"),
        ("noisy", "repeat/causal", r"5 runs on the same inputs differ: out by \d\.\de-\d+"),
        ("drops_dk", "backward/causal", "no gradient reaches k"),
        ("out_in_float64", "lse/values", r"out is \(124, 2, 64\) float64 on cpu; it must be .*float32"),
        ("zeros_for_dk", "backward/causal", r"dk beyond twice plain attention's error: dq: .*allowed"),
        ("lse_of_nothing_is_nan", "lse/empty-rows", r"\[nan, .*\] in rows that see nothing; it must be -inf"),
        ("writes_to_q", "inputs/unchanged", "q changed in place"),
        ("dropout_ignored", "dropout/weights", r"0\.000 of \d+ pairs are dropped; dropout_p=0.3 asks for 0.300"),
    ],
)
def test_the_detail_names_the_defect(name: str, check: str, detail: str) -> None:
    result = BY_NAME[check](WRONG[name])
    assert result.outcome == "fail"
    assert re.match(detail, result.detail), result.detail


def test_noise_does_not_hide_a_leak() -> None:
    def both(**arguments: Any) -> Tensor:
        return WRONG["ignores_boundaries"](**arguments) * (1 + 1e-7 * torch.rand(()))

    assert BY_NAME["isolation/causal"](both).outcome == "fail"
    assert "than a repeated call" in BY_NAME["isolation/causal"](WRONG["noisy"]).detail


def test_spellings_of_torch() -> None:
    """A causal mask is a window, grouped heads need `enable_gqa`, and lse is returned on request."""
    seen = []

    def varlen_attn(
        query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
        return_aux: Any = None, scale: Any = None, window_size: Any = (-1, -1), enable_gqa: bool = False,
    ) -> Any:  # fmt: skip
        assert enable_gqa == (query.shape[1] != key.shape[1])
        seen.append((window_size, return_aux))
        return attention(
            query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, 0.0, scale, False, window_size,
            return_attn_probs=return_aux is not None,
        )[: 2 if return_aux else None]  # fmt: skip

    only = ["*/causal", "*/window-left-16", "*/group-of-three", "*/scale", "*/sinks*", "forward/softcap"]
    report = quick_report(varlen_attn, only=only)
    assert set(report.of("not offered")) == matching("*/sinks* forward/softcap")
    assert report.passed
    assert {window for window, _ in seen} == {(-1, 0), (16, 0)}
    assert BY_NAME["lse/values"](varlen_attn).outcome == "pass"
    assert seen[-1][1].lse is True


def test_a_function_without_optional_parameters() -> None:
    """It has a bidirectional forward pass."""

    @torch.no_grad()
    def bare(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Tensor:
        return attention(q, k, v, cu_seqlens_q, cu_seqlens_k, 0, 0)

    report = quick_report(bare)
    offered = "forward/bidirectional forward/cross-bidirectional isolation/bidirectional isolation/cross empty/* "
    assert set(report.of("pass")) == matching(f"{offered} but empty/documents")
    details = {r.check: r.detail for r in report.results if r.outcome == "not offered"}
    assert details["forward/causal"] == "no parameter causal or is_causal"
    assert details["backward/bidirectional"] == "not differentiable"
    assert report.passed
    nothing = BY_NAME["forward/bidirectional"](lambda q, k, v, cu_seqlens_q, cu_seqlens_k: None)
    assert nothing.detail.startswith("TypeError: returned NoneType, not a tensor")
    assert not quick_report(bare, only=["*/sinks"]).passed  # without a pass


def test_a_leak_is_found_without_a_backward_pass() -> None:
    def refuse(gradient: Tensor) -> None:
        raise NotImplementedError("forward alone")

    @backends.altered
    def leaking(call: Any, q: Tensor, **rest: Any) -> Any:
        return backends.map_out(call(q=backends.with_gradient(q, refuse), **rest), lambda out: out + 1e-3 * out.mean())

    assert BY_NAME["backward/causal"](leaking).outcome == "not offered"
    assert BY_NAME["isolation/causal"](leaking).outcome == "fail"


def test_checks_of_bits_ask_for_determinism() -> None:
    """Only checks of bits ask for the deterministic mode, because it may be slower. Lengths are given in all."""

    @backends.altered
    def priced(call: Any, **rest: Any) -> Any:
        for side in "qk":
            assert rest[f"max_seqlen_{side}"] == int(rest[f"cu_seqlens_{side}"].diff().max())
            assert rest[f"cu_seqlens_{side}"].dtype == torch.int32
        asked.append(rest["deterministic"])
        return call(**rest) if rest["deterministic"] else WRONG["noisy"](**rest)

    asked: list[bool] = []
    for name in ("repeat/causal", "isolation/cross", "slack/causal"):
        assert BY_NAME[name](priced).outcome == "pass", name
    assert all(asked)
    assert BY_NAME["backward/causal"](priced).outcome == "pass"
    assert not asked[-1]


def test_lse_of_empty_rows_may_have_either_sign() -> None:
    @backends.altered
    def fa2(call: Any, **rest: Any) -> Any:
        return backends.map_lse(call(**rest), lambda lse: lse.masked_fill(lse == -torch.inf, torch.inf))

    results = [BY_NAME["lse/empty-rows"](function) for function in (attention, fa2)]
    assert [result.outcome for result in results] == ["pass", "pass"]
    assert [("+inf" in result.detail) for result in results] == [False, True]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: VarlenFunction(3),  # type: ignore[arg-type]
         "must be a function called as flash_attn_varlen_func is; got int"),
        (lambda: VarlenFunction(lambda q, k, v: q), "has no parameter for cu_seqlens_q, cu_seqlens_k; it has q, k, v"),
        (lambda: VarlenFunction(lambda q, k, v, cu_seqlens_q, cu_seqlens_k, pages: q), "requires pages, which the kit"),
        (lambda: conformance.run(tritonpack.varlen_attention, dtypes="float32"),  # type: ignore[arg-type]
         "dtypes must be a list of torch dtypes.*got 'float32'"),
        (lambda: conformance.checks(only=["nothing/*"]), "no check matches .*kinds are forward, backward, inputs"),
    ],
    ids=["no function", "no offsets", "pages", "dtypes", "patterns"],
)  # fmt: skip
def test_refusals(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_text_of_a_report() -> None:
    both, only = [torch.float32, torch.bfloat16], ["forward/softcap", "*/scale"]
    report = quick_report(WRONG["softcap_ignored"], dtypes=both, only=only)
    lines = str(report).splitlines()
    assert report.of("pass") == ["forward/scale", "backward/scale"]
    assert lines[0].startswith("forward/softcap in float32: fail: out beyond")
    assert lines[-1] == report.summary() == "softcap_ignored on cpu: 4 pass, 2 fail"
    assert not report.passed


def test_the_limit_is_about_twice_the_error_of_plain_attention() -> None:
    inputs = make_inputs(next(case for case in CASES if case.name == "one-document"), torch.bfloat16)
    found = check_outputs(inputs, tolerance.run_plain(inputs))
    assert all(2 < found.allowed[name] / error < 15 for name, error in found.plain.items()), found
    off = {name: x + 2 * found.allowed[name] for name, x in tolerance.run_plain(inputs).items()}
    with pytest.raises(AssertionError, match="out, lse, dq, dk, dv beyond twice plain attention's error"):
        check_outputs(inputs, off)
