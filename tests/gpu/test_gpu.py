"""Tests that need a GPU: bf16 on tensor cores, races, memory, large offsets, no waiting, no recompiling."""

from dataclasses import replace

import pytest
import torch

import tritonpack
from tests import invariance
from tests.gpu.cases import LARGE
from tests.gpu.programs import capture, goes_on
from tritonpack import BlockDiagonalMask, varlen_attention
from tritonpack.testing import CASES, Case, check_backend, make_inputs
from tritonpack.testing.tolerance import ROW_OUTPUTS, run

pytestmark = pytest.mark.gpu

HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.usefixtures("poisoned_memory")
def test_small_cases(case: Case, dtype: torch.dtype) -> None:
    try:
        check_backend(make_inputs(case, dtype, "cuda", slack_value=float("nan")), "triton")
    except tritonpack.BackendUnavailableError as error:  # float32 at 512 on a GPU with little shared memory
        if dtype != torch.float32:
            raise
        pytest.skip(str(error))


@HALF
@pytest.mark.parametrize("case", LARGE, ids=str)
@pytest.mark.usefixtures("poisoned_memory")
def test_large_cases(case: Case, dtype: torch.dtype) -> None:
    check_backend(make_inputs(case, dtype, "cuda", slack_value=float("nan")), "triton")


@HALF
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_repeats_are_equal_to_the_bit(case: Case, dtype: torch.dtype) -> None:
    """A race would change results between runs."""
    inputs = make_inputs(case, dtype, "cuda")
    first = run(inputs, "triton")
    for _ in range(200):
        again = run(inputs, "triton")
        assert all(torch.equal(first[name], again[name]) for name in first)


@HALF
@pytest.mark.parametrize("poison", [(), *invariance.POISONS], ids=lambda names: "-".join(names) or "values")
@pytest.mark.parametrize("case", invariance.CASES, ids=str)
def test_pack_invariant_documents_have_the_same_bits_in_every_pack(
    case: Case, poison: tuple[str, ...], dtype: torch.dtype
) -> None:
    longer = replace(case, seqlens=(37, 450, 1, 129, 33) if poison else (37, 5, 450, 1, 128, 129, 33))
    moved = invariance.moved_outputs(longer, dtype, "triton", pack_invariant=True, device="cuda", poison=poison)
    assert not moved


def test_cuda_graph_with_offsets_of_fixed_capacity() -> None:
    """Captured once, replayed for other documents; the mask and its tiles are built inside the graph."""
    total, capacity, heads, head_dim = 1024, 16, 4, 64
    q, k, v, dout = (torch.randn(total, heads, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    cu_seqlens = torch.zeros(capacity + 1, dtype=torch.int32, device="cuda")

    def offsets(lengths: list[int]) -> torch.Tensor:
        padded = [*lengths, *[0] * (capacity - len(lengths))]
        return torch.tensor([0, *padded]).cumsum(0).to(device="cuda", dtype=torch.int32)

    def step() -> tuple[torch.Tensor, ...]:
        out = varlen_attention(q, k, v, BlockDiagonalMask.from_cu_seqlens(cu_seqlens, total_q=total))
        return out, *torch.autograd.grad(out, (q, k, v), dout)

    cu_seqlens.copy_(offsets([1000]))
    graph, captured = capture(step)
    for lengths in ([1000], [10, 300, 0, 500], [64] * 16, [1, 2, 3]):
        cu_seqlens.copy_(offsets(lengths))
        graph.replay()
        for got, expected in zip(captured, step(), strict=True):
            assert torch.equal(got, expected)


def test_cuda_graph_of_a_mask_made_before() -> None:
    """Replays take the mask's documents, with a transpose and tables from before the capture or from the graph."""
    q = torch.randn(1024, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def step(mask: BlockDiagonalMask) -> tuple[torch.Tensor, ...]:
        out = varlen_attention(q, q, q, mask)
        return out, *torch.autograd.grad(out, q, torch.ones_like(out))

    used, unused, other = (BlockDiagonalMask.from_seqlens([10, 300, 714], device="cuda") for _ in range(3))
    expected = step(other)
    warm, of_used = capture(lambda: step(used))
    cold = torch.cuda.CUDAGraph()
    with torch.cuda.graph(cold):
        of_unused = step(unused)
    for mask, graph, captured in ((used, warm, of_used), (unused, cold, of_unused)):
        before = step(mask)  # the graph's own values don't exist yet
        graph.replay()
        for results in (before, captured, step(mask)):
            for got, want in zip(results, expected, strict=True):
                assert torch.equal(got, want)
    used.key_start.add_(0)
    with pytest.raises(ValueError, match="must not be overwritten"):
        step(used)


def test_a_change_in_a_document_changes_no_other_bit() -> None:
    case = LARGE[1]
    inputs = make_inputs(case, torch.bfloat16, "cuda")
    before = run(inputs, "triton")
    rows = slice(830, 2330)
    for x in (inputs.q, inputs.k, inputs.v, inputs.dout):
        x[rows] += 1.5
    after = run(inputs, "triton")
    for name in ROW_OUTPUTS:
        was, now = (x[name].movedim(-1, 0) if name == "lse" else x[name] for x in (before, after))
        others = torch.ones(was.shape[0], dtype=torch.bool, device="cuda")
        others[rows] = False
        assert torch.equal(was[others], now[others]), name
        assert not torch.equal(was[rows], now[rows]), name


def test_backward_memory_is_gradients_and_row_statistics() -> None:
    tokens, heads, kv_heads, head_dim = 16384, 32, 8, 128
    q, k, v = (
        torch.randn(tokens, n, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for n in (heads, kv_heads, kv_heads)
    )
    mask = BlockDiagonalMask.from_seqlens([tokens - 300, 300], device="cuda")
    out = varlen_attention(q, k, v, mask)
    dout = torch.randn_like(out)
    torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    grads = torch.autograd.grad(out, (q, k, v), dout)
    extra = torch.cuda.max_memory_allocated() - before - sum(g.nbytes for g in grads)
    assert extra <= 2 * 4 * heads * tokens + 2**20


@pytest.mark.usefixtures("waiting_is_an_error")
def test_nothing_waits_for_the_host() -> None:
    cu_seqlens = torch.tensor([0, 100, 100, 600], dtype=torch.int32, device="cpu").to("cuda", non_blocking=True)
    q, k, v = (torch.randn(640, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    rows = torch.arange(640, device="cuda", dtype=torch.int32)
    masks = (
        BlockDiagonalMask(rows.div(50, rounding_mode="floor").mul(50), rows + 1, 640),  # whose bounds are checked
        BlockDiagonalMask.from_cu_seqlens(cu_seqlens, total_q=640),
        BlockDiagonalMask.from_position_ids(torch.arange(640, device="cuda") % 50),
        BlockDiagonalMask.from_segment_ids((torch.arange(640, device="cuda") // 50).clamp(max=9)),
        BlockDiagonalMask.from_padding_mask((torch.arange(640, device="cuda") < 600).int()),
    )
    for mask in masks:
        varlen_attention(q, k, v, mask).sum().backward()


def test_new_lengths_do_not_recompile() -> None:
    from tritonpack.kernels.backward import dkdv_kernel, dq_kernel
    from tritonpack.kernels.forward import forward_kernel

    kernels = (forward_kernel, dkdv_kernel, dq_kernel)

    def compiled() -> int:
        return sum(len(caches[0]) for kernel in kernels for caches in kernel.device_caches.values())

    def step(lengths: list[int]) -> None:
        q = torch.randn(sum(lengths), 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        varlen_attention(q, q, q, BlockDiagonalMask.from_seqlens(lengths, device="cuda")).sum().backward()

    step([64, 64])
    before = compiled()
    for lengths in ([1], [16], [17, 0, 31], [1000, 24], [4096], [333] * 7):
        step(lengths)
    assert compiled() == before


def test_more_than_2_to_the_31_elements() -> None:
    """The last document, whose rows begin beyond 2**31 elements, has the bits that it has alone."""
    tokens, heads, head_dim, tail = 2**31 // (32 * 128) + 1000, 32, 128, 500
    q = torch.randn(tokens, heads, head_dim, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(tokens, 1, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    assert q.numel() > 2**31

    def outputs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int]) -> tuple[torch.Tensor, ...]:
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        out = varlen_attention(q, k, v, BlockDiagonalMask.from_seqlens(lengths, device="cuda"), pack_invariant=True)
        return out.detach(), *torch.autograd.grad(out, (q, k, v), out.detach())

    packed = outputs(q, k, v, [*[1000] * ((tokens - tail) // 1000), (tokens - tail) % 1000, tail])
    alone = outputs(q[-tail:], k[-tail:], v[-tail:], [tail])
    for of_all, expected in zip(packed, alone, strict=True):
        assert torch.equal(of_all[-tail:], expected)
        assert torch.isfinite(of_all[::1001]).all()


UNSOUND = torch.tensor([[0, 0, 2], [1, 2, 9]], dtype=torch.int32)  # the bounds of three queries; there are three keys


def test_validate_finds_bad_bounds_on_the_device() -> None:
    """`trusted`, because an assertion of the constructor would end all work of this process."""
    mask = BlockDiagonalMask(*UNSOUND.to("cuda"), 3, trusted=True)
    with pytest.raises(ValueError, match="row 2"):
        mask.validate()


BOUNDS = """
import torch
from tritonpack import BlockDiagonalMask
BlockDiagonalMask(*torch.tensor([[0, 0, 2], {stop}], dtype=torch.int32, device="cuda"), 3)
"""


@pytest.mark.parametrize("stop", [[1, 2, 3], UNSOUND[1].tolist()], ids=["sound", "unsound"])
def test_bad_bounds_fail_an_assertion(stop: list[int]) -> None:
    assert goes_on(BOUNDS.format(stop=stop)) is (stop == [1, 2, 3])
