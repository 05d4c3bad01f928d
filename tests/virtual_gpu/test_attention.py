"""Attention's compiled kernels on the virtual GPU, against float64, as tests/gpu does on a real one."""

import mmap
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests import invariance
from tests.gpu.cases import HOPPER_HEAD_DIMS, LARGE
from tests.virtual_gpu.conftest import NEEDS
from tests.virtual_gpu.device import VirtualGPU, virtual_gpu
from tritonpack.backends import gluon
from tritonpack.testing import CASES, Case, Inputs, check_backend, make_inputs
from tritonpack.testing.cases import parents_of
from tritonpack.testing.tolerance import check_outputs, run

pytestmark = NEEDS

NAN = float("nan")
LONG, WINDOW, SLACK = 400, 150, 37  # tokens
NO_RESERVE = 0x4000  # MAP_NORESERVE of Linux, which mmap lacks before Python 3.13
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# The kernels of the GPU's large cases, with fewer tokens and heads
SHORT = tuple(
    replace(
        case,
        name=f"short-{case.name}",
        seqlens=tuple(min(n, 150) for n in case.seqlens[:4]),
        seqlens_k=case.seqlens_k and tuple(min(n, 170) for n in case.seqlens_k[:4]),
        window=case.window and tuple(min(n, 70) for n in case.window),
        heads=2 * case.heads // case.kv_heads,
        kv_heads=2,
    )
    for case in LARGE
)
NAMES = {
    "sm_80": """
        causal window-both cross-window-slack head-dim-20 head-dim-256 sinks softcap-window alibi-cross dropout
        everything tree-bushes tree-everything
    """,
    "sm_90": """
        short-ordinary short-everything short-tiny window-self cross-more-queries head-dim-111 head-dim-192-128
        head-dim-512-64 nothing-visible-sinks sinks-cross softcap alibi-window-slack dropout-bidirectional everything
        tree-forest tree-window-sinks tree-everything
    """,
}
CELLS = [
    *((name, arch, "bf16") for arch, names in NAMES.items() for name in names.split()),
    *((name, arch, dtype) for name in ("causal", "everything") for arch in NAMES for dtype in ("fp16", "fp32")),
    # 16 bits on sm_120 by mma.sync; sm_100 has tcgen05, which isn't modelled.
    *((case.name, arch, "fp32") for case in CASES[:3] for arch in ("sm_100", "sm_120")),
    *((name, "sm_120", "bf16") for name in ("head-dim-64", "head-dim-128", "everything", "tree-everything")),
    ("causal", "sm_120", "fp16"),
]


@pytest.mark.fast("causal-sm_80-bf16", "causal-sm_90-bf16")
@pytest.mark.parametrize(("name", "arch", "dtype"), CELLS, ids=map("-".join, CELLS))
def test_cases(name: str, arch: str, dtype: str) -> None:
    check(name, arch, dtype)


def check(name: str, arch: str, dtype: str, backend: Any = "triton") -> VirtualGPU:
    """Check the forms of a case forward and backward; `python -m tests.virtual_gpu.every_case` checks all cases."""
    case = next(case for case in (*SHORT, *CASES) if case.name == name)
    if backend == "gluon" and case.head_dim not in HOPPER_HEAD_DIMS:
        case = replace(case, head_dim=64, head_dim_v=None)
    # With two multiprocessors the programs of Gluon's forward have several tiles.
    few = mock.patch.object(gluon, "_multiprocessors", return_value=2)
    with few, virtual_gpu(arch, seed=len(name)) as gpu:
        for form in forms(case):
            check_backend(make_inputs(form, DTYPES[dtype], slack_value=NAN), backend)
    return gpu


def forms(case: Case) -> Iterator[Case]:
    """A case as it is; with a long document or tree and no window, so that loops run often; with slack and a window."""
    yield case
    if case.parents is not None:
        first = len(case.parents)
        added = (parent + first if parent >= 0 else parent for parent in parents_of([(-1, 200), (0, 100), (0, 100)]))
        case = replace(case, parents=(*case.parents, *added), seqlens=(*case.seqlens, LONG))
    elif case.seqlens_k is not None:  # a tile then sees many keys of one document before the keys of the next
        case = replace(case, seqlens=(*case.seqlens, 20, LONG), seqlens_k=(*case.seqlens_k, 300, LONG))
    else:
        case = replace(case, seqlens=(*case.seqlens, LONG))
    yield replace(case, window=(-1, -1))
    yield replace(case, window=(WINDOW, -1 if case.causal else WINDOW), slack=SLACK)


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "seeds"), [("sm_80", 50), ("sm_90", 3)])
def test_results_are_the_same_in_every_order(arch: str, seeds: int) -> None:
    """Orders of programs and warps, and undefined bits, change no bit of results."""
    inputs, expected = make_inputs(SHORT[1], torch.bfloat16), None
    for seed in range(1, seeds + 1):
        with virtual_gpu(arch, seed=seed, races=seed < 4):
            got = run(inputs, "triton")
        expected = expected or got
        assert all(torch.equal(expected[name], got[name]) for name in got), seed


@pytest.mark.parametrize("poison", [(), *invariance.POISONS], ids=lambda names: "-".join(names) or "values")
@pytest.mark.parametrize("case", invariance.CASES, ids=str)
@pytest.mark.parametrize("backend", ["triton", "gluon"])
@pytest.mark.fast("triton-causal-q-k-v-dout-dlse", "gluon-causal-q-k-v-dout-dlse")
def test_documents_have_the_same_bits_in_every_pack(backend: Any, case: Case, poison: tuple[str, ...]) -> None:
    if backend == "gluon":
        plain = replace(case, head_dim_v=None, softcap=0.0, sinks=False, alibi=None)
        case = replace(plain, seqlens=(37, 150, 9), heads=2, kv_heads=1, head_dim=64)
    with virtual_gpu("sm_90", races=False):
        moved = invariance.moved_outputs(case, torch.bfloat16, backend, pack_invariant=True, poison=poison)
    assert not moved


def _elsewhere(x: Tensor, how: str) -> Tensor:
    """The same values in other memory, with NaN around them where it isn't far apart."""
    tokens, heads, dim = x.shape
    if how == "fused":  # a slice of the heads of a larger tensor
        around = torch.full((tokens, heads + 3, dim), NAN, dtype=x.dtype)
        return around[:, 1 : 1 + heads].copy_(x)
    if how == "head-major":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if how == "misaligned":  # by 8 bytes
        skipped = 8 // x.element_size()
        around = torch.full((x.numel() + 2 * skipped,), NAN, dtype=x.dtype)
        return around[skipped:-skipped].view(x.shape).copy_(x)
    return _far(x.shape, x.dtype).copy_(x)


def _far(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Rows 64 MiB apart, so that offsets exceed 2**31; memory that nothing touches takes no room."""
    apart = 2**26
    room = mmap.mmap(-1, shape[0] * apart, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
    return torch.frombuffer(room, dtype=dtype).as_strided(shape, (apart // dtype.itemsize, shape[2], 1))


@pytest.mark.parametrize("how", ["fused", "head-major", "misaligned", "far"])
@pytest.mark.parametrize(("arch", "backend"), [("sm_80", "triton"), ("sm_90", "triton"), ("sm_90", "gluon")])
@pytest.mark.fast("sm_90-triton-far")
def test_memory_of_the_inputs(arch: str, backend: Any, how: str) -> None:
    """Far apart are also the rows of outputs and gradients."""
    case = Case("rows", (1, 90, 0, 17, 60), heads=2, kv_heads=2, head_dim=64, slack=13)  # kernels of "ordinary-64"
    inputs = make_inputs(case, torch.bfloat16, slack_value=NAN)
    moved: dict[str, Any] = {name: _elsewhere(getattr(inputs, name), how) for name in ("q", "k", "v", "dout")}
    near = Tensor.new_empty

    def new_empty(self: Tensor, *size: Any, **options: Any) -> Tensor:
        made = near(self, *size, **options)
        rows = how == "far" and made.is_floating_point() and made.ndim == 3  # no tables
        return _far(made.shape, made.dtype) if rows else made

    with mock.patch.object(Tensor, "new_empty", new_empty), virtual_gpu(arch, races=how != "far"):
        results = run(replace(inputs, **moved), backend)
    check_outputs(inputs, results)


def test_expanded_values() -> None:
    """One value of each token for all heads: stride 0."""
    inputs: Inputs = make_inputs(Case("expanded", (70, 40), heads=2, kv_heads=2, head_dim=64), torch.bfloat16)
    inputs = replace(inputs, v=inputs.v[:, :1].expand_as(inputs.v))
    with virtual_gpu("sm_90"):
        check_backend(inputs, "triton")
