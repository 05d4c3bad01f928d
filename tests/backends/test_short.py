"""Short documents by compiled loops: exact in every shape, the same bits on any number of threads and after a fork."""

import math
import multiprocessing
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tritonpack import BlockDiagonalMask, varlen_attention
from tritonpack.backends import short
from tritonpack.options import make_options
from tritonpack.testing import Case, check_outputs, make_inputs
from tritonpack.testing.tolerance import run

short_kernels = pytest.importorskip("tritonpack.backends.short_kernels", exc_type=ImportError)
NAN = float("nan")
LENGTHS = (20, 1, 192, 7, 16, 33, 0, 64)

CASES = (
    Case("plain", LENGTHS, slack=9),
    Case("narrow", LENGTHS, head_dim=1),
    Case("odd", (9, 20, 3), heads=3, kv_heads=1, head_dim=17, head_dim_v=5),
    Case("wide", (9, 20, 3), heads=2, kv_heads=1, head_dim=300, head_dim_v=130),
    Case("many-heads", (5, 40), heads=24, kv_heads=2, head_dim=8),
    Case("multi-head", LENGTHS, heads=3, kv_heads=3),
    Case("full", LENGTHS, causal=False),
    Case("window", LENGTHS, window=(6, 0), slack=9),
    Case("window-both", LENGTHS, causal=False, window=(3, 9)),
    Case("cross", (5, 7, 7, 100), (25, 7, 192, 101)),
    Case("more-queries", (25, 192, 3), (5, 9, 3)),  # the first see nothing
    Case("sinks", LENGTHS, sinks=True, slack=9),
    Case("sinks-more-queries", (25, 3), (5, 3), sinks=True),
    Case("longest", (short.LONGEST, 3), heads=2, kv_heads=1, head_dim=20, window=(300, 0)),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=["fp32", "fp64", "bf16"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.sampled(every=2)
def test_error_within_tolerance(case: Case, dtype: torch.dtype) -> None:
    inputs = make_inputs(case, dtype, slack_value=NAN)
    check_outputs(inputs, run(inputs, "blocked"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_weights_over_the_whole_range(dtype: torch.dtype) -> None:
    """Weights down to the smallest normal number have the relative error of a few roundings, and smaller ones are 0."""
    info = torch.finfo(dtype)
    scores = torch.linspace(math.log(info.tiny) * 1.2, 0, 128, dtype=dtype)
    k = scores[:, None, None].expand(-1, 1, 4).contiguous()
    v = torch.eye(128, dtype=dtype)[:, None]
    q = torch.tensor([[[1.0, 0, 0, 0]]], dtype=dtype)
    mask = BlockDiagonalMask.from_seqlens([1], [128], causal=False)
    out = varlen_attention(q, k, v, mask, scale=1.0, backend="blocked")[0, 0]
    wanted = torch.softmax(scores.double(), 0)
    normal = wanted > info.tiny * 2
    assert ((out.double() - wanted) / wanted)[normal].abs().max() < 4 * info.eps
    assert (out[~normal] <= info.tiny * 2).all()
    assert not out[0]


@pytest.mark.parametrize("score", [3e38, -3e38])
def test_scores_that_overflow(score: float) -> None:
    """All scores of -inf: no weight and no gradient, as in blocks; of inf: NaN, as in plain attention."""
    q, k, v = torch.full((1, 1, 4), 3e38), torch.full((3, 1, 4), math.copysign(3e38, score)), torch.ones(3, 1, 4)
    mask = BlockDiagonalMask.from_seqlens([1], [3], causal=False)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out, lse = varlen_attention(*inputs, mask, return_lse=True, backend="blocked")
    gradients = torch.autograd.grad(out.sum(), inputs)
    if score < 0:
        assert lse.item() == -math.inf
        assert all((x == 0).all() for x in (out, *gradients))
    else:
        assert all(x.isnan().all() for x in (lse, out, *gradients))


@pytest.mark.parametrize("head_dim", [1, 4, 15, 16, 17, 31, 64])
def test_rows_of_any_width_are_copied_whole(head_dim: int) -> None:
    """The last vector of a row ends with it: nothing before or behind the row is written."""
    inputs = make_inputs(Case("width", (9,), heads=2, kv_heads=2, head_dim=head_dim), torch.float32)
    room = torch.full((11 * 2 * head_dim,), 7.0)
    out, lse = room[2 * head_dim : -2 * head_dim].view(9, 2, head_dim), torch.empty(9, 2)
    documents = short.Documents(torch.tensor([[0, 9, 0, 9]]), inputs.mask)
    options = make_options(inputs.q, inputs.mask)
    documents.forward(inputs.q, inputs.k, inputs.v, options, out, lse)
    assert (room[: 2 * head_dim] == 7).all()
    assert (room[-2 * head_dim :] == 7).all()
    assert torch.equal(out, varlen_attention(inputs.q, inputs.k, inputs.v, inputs.mask, backend="blocked"))


def test_a_document_of_nan_changes_no_bit_of_others() -> None:
    """With every key head and with values of another width, whose last vector is filled up."""
    inputs = make_inputs(Case("odd", (9, 20, 3, 33), head_dim=20, head_dim_v=5))
    clean = run(inputs, "blocked")
    poisoned = {x: getattr(inputs, x).clone() for x in ("q", "k", "v", "dout")}
    for x in poisoned.values():
        x[9:29] = NAN
    got = run(replace(inputs, **poisoned), "blocked")
    for name in ("out", "dq", "dk", "dv"):
        assert torch.equal(got[name][:9], clean[name][:9])
        assert torch.equal(got[name][29:], clean[name][29:])
        assert got[name][9:29].isnan().all()


class TestThreads:
    def documents(self, rows: list[list[int]]) -> short.Documents:
        mask = BlockDiagonalMask.from_seqlens([rows[-1][1]])
        return short.Documents(torch.tensor(rows), mask)

    @pytest.mark.parametrize("threads", [1, 2, 3, 8, 100])
    def test_parts_have_each_document_once(self, threads: int) -> None:
        ends = np.cumsum(np.random.default_rng(0).integers(1, 193, 50)).tolist()
        rows = [[a, b, a, b] for a, b in zip([0, *ends[:-1]], ends, strict=True)]
        parts: list[list[list[int]]] = []
        self.documents(rows).each(3, threads, lambda part: parts.append(part.tolist()))
        assert sorted(row for part in parts for row in part) == [[*row, head] for row in rows for head in range(3)]
        assert len(parts) == {1: 1, 2: 8, 3: 12}.get(threads, len(parts))

    def test_heads_of_one_document_are_computed_by_several_threads(self) -> None:
        parts: list[list[list[int]]] = []
        self.documents([[0, 400, 0, 400]]).each(8, 2, lambda part: parts.append(part.tolist()))
        assert parts == [[[0, 400, 0, 400, head]] for head in range(8)]

    def test_parts_have_about_the_same_work(self) -> None:
        rows = [[i * 10, i * 10 + 10, i * 10, i * 10 + 10] for i in range(100)]
        sizes: list[int] = []
        self.documents(rows).each(1, 4, lambda part: sizes.append(len(part)))
        assert sum(sizes) == 100
        assert len(sizes) == 4 * short.PARTS
        assert max(sizes) <= 7

    @pytest.mark.parametrize("threads", [2, 3])
    def test_bits_do_not_depend_on_threads(self, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(short, "FEWEST_NUMBERS", 1)
        inputs = make_inputs(Case("many", (20, 1, 33, 64, 7) * 4))
        before = torch.get_num_threads()
        results = []
        try:
            for number in (1, threads, threads):
                torch.set_num_threads(number)
                results.append(run(inputs, "blocked"))
        finally:
            torch.set_num_threads(before)
        for one in results[1:]:
            assert all(torch.equal(one[name], results[0][name]) for name in one)

    def test_threads_compute_at_the_same_time(self) -> None:
        barrier = threading.Barrier(2, timeout=600)
        met: list[int] = []

        def meet(part: Any) -> None:
            if len(met) < 2:
                met.append(threading.get_ident())
                barrier.wait()

        self.documents([[0, 10, 0, 10], [10, 20, 10, 20]]).each(1, 2, meet)
        assert len(set(met)) == 2

    def test_an_error_in_a_thread_is_raised(self) -> None:
        rows = [[0, 10, 0, 10], [10, 20, 10, 20]]

        def fail(part: Tensor) -> None:
            if part[0, 0]:
                raise KeyError("in a thread")

        with pytest.raises(KeyError, match="in a thread"):
            self.documents(rows).each(1, 2, fail)

    @pytest.mark.filterwarnings("ignore:.*fork")
    def test_after_a_fork(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As workers of a DataLoader are made; the threads of the first process don't exist there."""
        monkeypatch.setattr(short, "FEWEST_NUMBERS", 1)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
        calls, q = self.documents([[0, 10, 0, 10], [10, 20, 10, 20]]), torch.empty(20, 4, 8)
        assert calls._threads(q) == 2
        calls.each(2, 2, lambda part: None)
        process = multiprocessing.get_context("fork").Process(
            target=lambda: calls.each(2, calls._threads(q), lambda part: None)
        )
        process.start()
        process.join(60)
        process.kill()
        assert process.exitcode == 0

    def test_first_call_after_a_fork(self) -> None:
        """The process that imported the package counts, not the one that first computes."""
        command = [sys.executable, "-W", "ignore", "-c", FIRST_CALL_AFTER_A_FORK]
        assert subprocess.run(command, timeout=600).returncode == 0


FIRST_CALL_AFTER_A_FORK = """
import os, signal, torch, tritonpack
torch.set_num_threads(2)
torch.empty(10**6).fill_(1.0)  # from here on OpenMP has a second thread
mask, q = tritonpack.BlockDiagonalMask.from_seqlens([100, 100]), torch.randn(200, 4, 32)
if not os.fork():
    signal.alarm(50)  # ends the process if it waits
    with torch.no_grad():
        tritonpack.varlen_attention(q, q, q, mask)
    os._exit(0)
raise SystemExit(os.wait()[1] != 0)
"""


class TestMachineCode:
    @pytest.mark.parametrize("error", [ImportError("numba needs another numpy"), SystemError("initialization failed")])
    def test_numba_does_not_work(self, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
        class Broken:
            def find_spec(self, name: str, *_: Any) -> None:
                if name == "numba":
                    raise error

        monkeypatch.delitem(sys.modules, "numba")
        monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
        assert short._kernels.__wrapped__() is None

    def test_numba_does_not_compile(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(short_kernels.numba.config, "DISABLE_JIT", 1)
        assert short._kernels.__wrapped__() is None

    def test_functions_of_a_file_have_one_dtype(self) -> None:
        """As numba numbers the machine code of a file, and processes may choose the same number at the same time."""
        names = [f.py_func.__qualname__ for x in ("float32", "float64") for f in short_kernels.functions(np.dtype(x))]
        assert len(set(names)) == 4

    def test_no_folder_can_be_written(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(**_: Any) -> None:
            raise RuntimeError("cannot cache function")

        monkeypatch.setattr(short_kernels, "numba", SimpleNamespace(njit=refuse))
        kept = short_kernels._kept(short_kernels.forward, np.dtype("float32"))
        functions = (kept, short_kernels.functions(np.dtype("float32"))[1])
        monkeypatch.setattr(short, "_functions", lambda dtype: functions)
        inputs = make_inputs(CASES[0])
        check_outputs(inputs, run(inputs, "blocked"))


NARROWER = """
import sys
import llvmlite.binding as llvm
features = llvm.get_host_cpu_features()
missing = "avx512" if sys.argv[1] == "32" else "avx"
features.update({name: False for name in features if name.startswith(missing)})
llvm.get_host_cpu_features = lambda: features
from tests.backends.test_short import CASES
from tritonpack.backends import short_kernels
from tritonpack.testing import check_outputs, make_inputs
from tritonpack.testing.tolerance import run
import torch
assert short_kernels.VECTOR_BYTES <= int(sys.argv[1])
for case in CASES[::3]:
    for dtype in (torch.float32, torch.float64):
        inputs = make_inputs(case, dtype, slack_value=float("nan"))
        check_outputs(inputs, run(inputs, "blocked"))
"""


@pytest.mark.slow
@pytest.mark.parametrize("width", [16, 32])
def test_narrower_vectors(width: int, tmp_path: Path) -> None:
    """As other processors have them."""
    root = Path(__file__).parents[2]
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(root)}
    subprocess.run([sys.executable, "-c", NARROWER, str(width)], cwd=root, env=environment, check=True, timeout=600)
