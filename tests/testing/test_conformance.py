"""The conformance kit: right functions pass, and each wrong one fails the checks of its defect and no others."""

import re
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import tritonpack
from tests.testing import backends
from tests.testing.backends import WRONG, attention
from tritonpack import flash_attn
from tritonpack.testing import CASES, check_outputs, conformance, make_inputs, tolerance
from tritonpack.testing.cases import Inputs
from tritonpack.testing.conformance.call import VarlenFunction


@pytest.fixture(autouse=True, scope="module")
def _one_standard_for_all_functions() -> Iterator[None]:
    """The standard depends on the inputs alone, and nearly all functions get the same ones: compute it once."""
    known: dict[Any, Any] = {}

    def content(x: Any) -> Any:
        return (x.dtype, x.shape, x.detach().double().numpy().tobytes()) if isinstance(x, Tensor) else x

    def standard(inputs: Inputs, compute: Callable[..., Any] = tolerance._standard) -> Any:
        mask, options = inputs.mask, [x for item in sorted(inputs.keywords.items()) for x in item]
        tensors = inputs.q, inputs.k, inputs.v, inputs.dout, inputs.dlse, inputs.sinks
        of_mask = mask.key_start, mask.key_stop, mask.num_keys, mask.diagonal, mask.document
        key = tuple(map(content, (*tensors, *of_mask, *options)))
        if key not in known:
            known[key] = compute(inputs)
        return known[key]

    with mock.patch.object(tolerance, "_standard", standard):
        yield


LARGE = ("*/head-dim-*", "inputs/many-*")
NAMES = [check.name for check in conformance.CHECKS]
BY_NAME = {check.name: check for check in conformance.CHECKS}


def matching(*patterns: str, but: tuple[str, ...] = ()) -> set[str]:
    found = {name for name in NAMES if any(fnmatch(name, p) for p in patterns)}
    assert all(any(fnmatch(name, p) for name in NAMES) for p in (*patterns, *but)), "a pattern that matches nothing"
    return {name for name in found if not any(fnmatch(name, p) for p in but)}


QUICK = matching("*", but=LARGE)


def quick_report(function: Callable[..., Any]) -> conformance.Report:
    """The report of a function in float32 on all checks but the large ones."""
    return conformance.run(function, dtypes=[torch.float32], device="cpu", skip=LARGE)


class TestRightFunctions:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
    @pytest.mark.slow
    def test_tritonpack_passes_every_check(self, dtype: torch.dtype) -> None:
        report = conformance.run(flash_attn.flash_attn_varlen_func, dtypes=[dtype], device="cpu")
        assert set(report.of("pass")) == matching("*"), "\n".join(str(r) for r in report.results if r.outcome != "pass")
        assert report.passed


FORWARD_AND_BACKWARD = ("forward/*", "backward/*")
MANY = ("inputs/large-scores", "inputs/many-*", "inputs/slices")
BROKEN = {
    "ignores_boundaries": matching(*FORWARD_AND_BACKWARD, "inputs/large-scores", "inputs/slices", "empty/*",
     "isolation/*", "lse/*", "dropout/*", but=("*/one-document", "*/window-self", "empty/all")),
    "window_off_by_one": matching("*/window-*", "*/*-window", but=("*/window-wide",)),
    "top_left": matching("*/cross", "*/cross-more-queries", "*/sinks-cross", "lse/empty-rows", but=("isolation/*",)),
    "scale_forgotten": matching("*/scale"),
    "garbage_in_slack": matching("slack/*"),
    "garbage_in_gradients_of_slack": matching("slack/*"),
    "slack_leaks": matching("slack/*"),
    "head_order": matching("*/group-of-three", "inputs/slices"),
    "softcap_ignored": matching("*/softcap*"),
    "low_precision": matching(*FORWARD_AND_BACKWARD, *MANY, "empty/*", "lse/values", "lse/gradient", "dropout/*",
     "lse/empty-rows", but=("empty/all",)),
    "noisy": matching("repeat/*"),
    "noisy_gradient": matching("repeat/*"),
    "drops_dk": matching("backward/*", "inputs/*", "empty/*", "lse/gradient", but=("inputs/unchanged",)),
    "zeros_for_dk": matching("backward/*", "inputs/*", "empty/*", "lse/gradient",
     but=("inputs/unchanged", "empty/all", "*/one-token-documents", "*/window-self")),
    "lse_to_the_base_2": matching("lse/*"),
    "lse_of_nothing_is_nan": matching("lse/empty-rows"),
    "lse_gradient_dropped": matching("lse/gradient"),
    "writes_to_q": matching("inputs/unchanged"),
    "strides_ignored": matching("inputs/slices"),
    "exponentials_overflow": matching("inputs/large-scores"),
    "dropout_not_scaled": matching("dropout/*"),
    "dropout_ignored": matching("dropout/*"),
    "dropout_differs_in_backward": matching("dropout/*"),
}  # fmt: skip


class TestWrongFunctions:
    @pytest.mark.fast("ignores_boundaries")
    @pytest.mark.parametrize("name", BROKEN)
    def test_a_defect_fails_its_checks_and_no_others(self, name: str) -> None:
        report = quick_report(WRONG[name])
        assert report.function == name
        assert {result.check for result in report.results if result.outcome != "pass"} == BROKEN[name] & QUICK, report
        assert not report.passed

    @pytest.mark.slow
    def test_an_exception_is_an_error_with_its_first_line(self) -> None:
        report = quick_report(WRONG["raises_on_empty_documents"])
        assert set(report.of("error")) == matching("empty/*")
        assert set(report.of("pass")) == QUICK - matching("empty/*")
        assert {r.detail for r in report.results if r.outcome == "error"} == {"RuntimeError: an empty document"}
        assert not report.passed

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
    def test_a_running_sum_in_16_bits_fails(self, dtype: torch.dtype) -> None:
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
            ("dropout_differs_in_backward", "dropout/weights", "backward drops other pairs than forward"),
        ],
    )
    def test_the_detail_names_the_defect(self, name: str, check: str, detail: str) -> None:
        result = BY_NAME[check](WRONG[name], torch.float32, "cpu")
        assert result.outcome == "fail"
        assert re.match(detail, result.detail), result.detail

    def test_noise_does_not_hide_a_leak(self) -> None:
        def both(**arguments: Any) -> Tensor:
            return WRONG["ignores_boundaries"](**arguments) * (1 + 1e-7 * torch.rand(()))

        assert BY_NAME["isolation/causal"](both).outcome == "fail"
        assert "than a repeated call" in BY_NAME["isolation/causal"](WRONG["noisy"]).detail


class TestSpellings:
    def test_torch(self) -> None:
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
        report = conformance.run(varlen_attn, dtypes=[torch.float32], device="cpu", only=only)
        assert set(report.of("not offered")) == matching("*/sinks*", "forward/softcap")
        assert report.passed
        assert {window for window, _ in seen} == {(-1, 0), (16, 0)}
        pytest.importorskip("torch.nn.attention.varlen")
        assert BY_NAME["lse/values"](varlen_attn).outcome == "pass"
        assert seen[-1][1].lse is True

    def test_bare_minimum(self) -> None:
        """The function has a bidirectional forward pass and no optional parameter."""

        @torch.no_grad()
        def bare(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Tensor:
            return attention(q, k, v, cu_seqlens_q, cu_seqlens_k, 0, 0)

        report = quick_report(bare)
        offered = {"forward/bidirectional", "forward/cross-bidirectional", "inputs/many-keys", "inputs/many-queries"}
        offered |= {"isolation/bidirectional", "isolation/cross", "empty/queries", "empty/keys", "empty/all"}
        assert set(report.of("pass")) == offered & QUICK
        details = {r.check: r.detail for r in report.results if r.outcome == "not offered"}
        assert details["forward/causal"] == "no parameter causal or is_causal"
        assert details["backward/bidirectional"] == "not differentiable"
        assert details["forward/sinks"].startswith("no parameter")
        assert not report.of("fail")
        assert not report.of("error")
        assert report.passed

    def test_checks_of_bits_ask_for_determinism(self) -> None:
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

    def test_lse_of_empty_rows_may_have_either_sign(self) -> None:
        @backends.altered
        def fa2(call: Any, **rest: Any) -> Any:
            return backends.map_lse(call(**rest), lambda lse: lse.masked_fill(lse == -torch.inf, torch.inf))

        assert BY_NAME["lse/empty-rows"](attention).passed
        result = BY_NAME["lse/empty-rows"](fa2)
        assert result.outcome == "pass"
        assert result.detail.endswith("+inf in rows that see nothing, as in FlashAttention 2")

    @pytest.mark.parametrize(
        ("function", "message"),
        [
            (3, "must be a function called as flash_attn_varlen_func is; got int"),
            (lambda q, k, v: q, "has no parameter for cu_seqlens_q, cu_seqlens_k; it has q, k, v"),
            (lambda q, k, v, cu_seqlens_q, cu_seqlens_k, pages: q, "requires pages, which the kit doesn't know"),
        ],
        ids=["no function", "no offsets", "pages"],
    )
    def test_functions_of_other_signatures_are_refused(self, function: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            VarlenFunction(function)

    def test_names_of_dtypes_are_refused(self) -> None:
        with pytest.raises(ValueError, match=r"dtypes must be a list of torch dtypes.*got 'float32'"):
            conformance.run(tritonpack.varlen_attention, dtypes="float32", device="cpu")  # type: ignore[arg-type]


class TestReport:
    def test_text(self) -> None:
        both, only = [torch.float32, torch.bfloat16], ["forward/softcap", "*/scale"]
        report = conformance.run(WRONG["softcap_ignored"], dtypes=both, device="cpu", only=only)
        lines = str(report).splitlines()
        assert report.of("pass") == ["forward/scale", "backward/scale"]
        assert lines[0].startswith("forward/softcap")
        assert lines[-1] == report.summary() == "softcap_ignored on cpu: 4 pass, 2 fail"
        assert not report.passed

    def test_a_report_without_a_pass_has_not_passed(self) -> None:
        def bare(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Tensor:
            raise AssertionError("never called")

        report = conformance.run(bare, dtypes=[torch.float32], device="cpu", only=["*/sinks"])
        assert report.of("not offered") == ["forward/sinks", "backward/sinks"]
        assert not report.passed

    def test_patterns(self) -> None:
        chosen = [c.name for c in conformance.checks(only=["slack/*", "lse/*"], skip=["*/gradient"])]
        assert chosen == ["slack/causal", "lse/values", "lse/empty-rows"]
        with pytest.raises(ValueError, match=r"no check matches .*kinds are forward, backward, inputs, empty"):
            conformance.checks(only=["nothing/*"])


def test_the_limit_is_about_twice_the_error_of_plain_attention() -> None:
    inputs = make_inputs(next(case for case in CASES if case.name == "one-document"), torch.bfloat16)
    found = check_outputs(inputs, tolerance.run_plain(inputs))
    assert all(2 < found.allowed[name] / error < 15 for name, error in found.plain.items()), found
    off = {name: x + 2 * found.allowed[name] for name, x in tolerance.run_plain(inputs).items()}
    with pytest.raises(AssertionError, match="out, lse, dq, dk, dv beyond twice plain attention's error"):
        check_outputs(inputs, off)
