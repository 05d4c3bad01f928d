"""tritonpack.flash_attn on a GPU: no call waits, CUDA graphs use new offsets, layers share a mask."""

import pytest
import torch
from torch import Tensor

from tests.gpu.programs import capture, goes_on
from tritonpack.flash_attn import fa2, fa3, masks

pytestmark = pytest.mark.gpu


def offsets(*ends: int) -> Tensor:
    return torch.tensor([0, *ends], dtype=torch.int32, device="cpu").to("cuda", non_blocking=True)


def inputs(total: int = 1024) -> list[Tensor]:
    return [torch.randn(total, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]


@pytest.mark.usefixtures("waiting_is_an_error")
def test_no_call_waits() -> None:
    (q, k, v), cu, used = inputs(), offsets(300, 301, 1000), offsets(200, 1)
    for _ in range(2):
        fa3.flash_attn_varlen_func(q, k, v, cu, cu, causal=True, seqused_k=used).sum().backward()
        fa2.flash_attn_func(q[None], k[None], v[None], causal=True).sum().backward()


def test_layers_share_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    built, original = [], masks._build
    monkeypatch.setattr(masks, "_build", lambda *a: built.append(1) or original(*a))
    q, k, v = inputs()
    cu = offsets(300, 1000)
    for _ in range(3):
        fa2.flash_attn_varlen_func(q, k, v, cu, cu, causal=True)
    assert len(built) == 1


def test_graphs_follow_their_offsets() -> None:
    q, k, v = inputs()
    cu = offsets(300, 1000)

    def step() -> tuple[Tensor, ...]:
        out = fa2.flash_attn_varlen_func(q, k, v, cu, cu, causal=True)
        return out, *torch.autograd.grad(out.sum(), (q, k, v))

    graph, captured = capture(step)
    for ends in ((300, 1000), (1, 2), (512, 1024)):
        cu.copy_(offsets(*ends))
        graph.replay()
        for got, expected in zip(captured, step(), strict=True):
            assert torch.equal(got, expected)


STALE = """
import torch
from tritonpack.flash_attn import flash_attn_varlen_func
q = torch.randn(100, 4, 64, device="cuda", dtype=torch.bfloat16)
cu = torch.tensor([0, 30, 100], dtype=torch.int32, device="cuda")
flash_attn_varlen_func(q, q, q, cu, cu)
cu.data[1] = {value}
flash_attn_varlen_func(q, q, q, cu, cu)
"""


@pytest.mark.parametrize(("value", "sound"), [(30, True), (31, False)])
def test_uncounted_write_fails_an_assertion(value: int, sound: bool) -> None:
    assert goes_on(STALE.format(value=value)) is sound
