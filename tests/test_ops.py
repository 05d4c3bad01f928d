"""Calls without the dispatcher, and calls that something watches, which pass the operators: both compute the same."""

import subprocess
import sys
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.recorded import Recorded
from tritonpack import BlockDiagonalMask, varlen_attention
from tritonpack.backends import blocked
from tritonpack.testing import Case, Inputs, make_inputs

ATTENTION = torch.ops.tritonpack.attention.default
BACKWARD = torch.ops.tritonpack.attention_backward.default
BACKENDS = ["blocked", "reference"]
CASE = Case("everything", (9, 4, 5), softcap=5.0, sinks=True, alibi="documents", dropout_p=0.2, head_dim_v=8)


class Subclass(Tensor):
    """A tensor that no plain call takes."""


def leaves(inputs: Inputs) -> list[Tensor]:
    given = (inputs.q, inputs.k, inputs.v, inputs.sinks)
    return [x.detach().clone().requires_grad_() for x in given if x is not None]


def attend(inputs: Inputs, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, backend: Any = "blocked") -> Any:
    keywords = inputs.keywords | {"sinks": sinks}
    return varlen_attention(q, k, v, inputs.mask, return_lse=True, backend=backend, **keywords)


def outputs(inputs: Inputs, leaves: list[Tensor], backend: Any) -> tuple[Tensor, ...]:
    """out, lse and the gradients."""
    out, lse = attend(inputs, *leaves, backend=backend)
    return out, lse, *torch.autograd.grad([out, lse], leaves, [inputs.dout, inputs.dlse])


def assert_equal(found: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    assert all(torch.equal(one.as_subclass(Tensor), other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_both_ways_give_the_same_bits(backend: Any) -> None:
    """Also of backward alone under a mode, such as of compiled autograd, whatever forward did."""
    inputs = make_inputs(CASE)
    plain = outputs(inputs, leaves(inputs), backend)
    assert all(x.is_contiguous() for x in plain)
    with Recorded() as recorded:
        assert_equal(outputs(inputs, leaves(inputs), backend), plain)
    assert {ATTENTION, BACKWARD} <= {operator for operator, *_ in recorded.calls}
    subclass = [x.detach().as_subclass(Subclass).requires_grad_() for x in leaves(inputs)]
    assert_equal(outputs(inputs, subclass, backend), plain)

    given = leaves(inputs)
    out, lse = attend(inputs, *given, backend=backend)
    with Recorded() as recorded:
        assert_equal(torch.autograd.grad([out, lse], given, [inputs.dout, inputs.dlse]), plain[2:])
    assert BACKWARD in {operator for operator, *_ in recorded.calls}


def test_fake_tensors_pass_the_operator() -> None:
    with FakeTensorMode():
        q, k, v = (torch.empty(9, heads, 16, requires_grad=True) for heads in (4, 2, 2))
        start, stop = (torch.empty(9, dtype=torch.int32) for _ in range(2))
        out = varlen_attention(q, k, v, BlockDiagonalMask(start, stop, 9, trusted=True))
        (dq,) = torch.autograd.grad(out.sum(), q)
    assert {type(out), type(dq)} == {FakeTensor}
    assert out.shape == dq.shape == (9, 4, 16)


def _save_attention(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator == ATTENTION else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize(("selective", "forwards"), [(False, 2), (True, 1)], ids=["", "selective"])
def test_checkpoints(selective: bool, forwards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A selective checkpoint names operators, here ours, whose results it keeps."""
    inputs = make_inputs(CASE)
    expected = outputs(inputs, leaves(inputs), "blocked")

    forward, calls = blocked.forward, []
    monkeypatch.setattr(blocked, "forward", lambda *given: (calls.append("forward"), forward(*given))[1])
    more: dict[str, Any] = {}
    if selective:
        more["context_fn"] = partial(create_selective_checkpoint_contexts, _save_attention)
    given = leaves(inputs)
    given[0] = (given[0].detach() / 2).requires_grad_()
    out, lse = checkpoint(lambda q, *others: attend(inputs, 2 * q, *others), *given, use_reentrant=False, **more)
    dq, *gradients = torch.autograd.grad([out, lse], given, [inputs.dout, inputs.dlse])
    assert len(calls) == forwards
    assert_equal((out, lse, dq / 2, *gradients), expected)


def test_saved_tensors_hooks_see_what_a_layer_keeps() -> None:
    """q, k, v, out, lse, sinks, slopes and the seed; the mask and its tables belong to all layers."""
    inputs = make_inputs(CASE)
    packed: list[Tensor] = []
    expected, given = outputs(inputs, leaves(inputs), "blocked"), leaves(inputs)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (packed.append(x), x.clone())[1], lambda x: x):
        out, lse = attend(inputs, *given)
    addresses = {x.data_ptr() for x in (*given, out, lse)}
    assert len([x for x in packed if x.data_ptr() in addresses]) == 6
    assert len(packed) == 8
    assert_equal((out, lse, *torch.autograd.grad([out, lse], given, [inputs.dout, inputs.dlse])), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("written", ["bounds", "transpose", "slopes"])
def test_writes_between_forward_and_backward(written: str, backend: Any) -> None:
    inputs = make_inputs(Case("plain", (9, 4, 5), alibi="heads" if written == "slopes" else None))
    q = inputs.q.requires_grad_()
    out = varlen_attention(q, inputs.k, inputs.v, inputs.mask, backend=backend, **inputs.keywords)
    mask = inputs.mask.transpose() if written == "transpose" else inputs.mask
    (inputs.keywords["alibi_slopes"] if written == "slopes" else mask.key_start).add_(0)
    with pytest.raises((ValueError, RuntimeError), match=r"must not be overwritten|modified by an in"):
        out.sum().backward()


@pytest.mark.slow
def test_the_first_call_of_a_process_can_be_compiled() -> None:
    """The backend is imported while torch.compile traces."""
    program = """
import torch
from tests.recorded import Recorded
from tritonpack import BlockDiagonalMask, varlen_attention
mask = BlockDiagonalMask.from_seqlens([17, 40, 20])
q, k, v = (torch.randn(77, heads, 16) for heads in (4, 2, 2))
out = torch.compile(varlen_attention, fullgraph=True, backend="eager")(q, k, v, mask)
assert torch.equal(out, varlen_attention(q, k, v, mask))
"""
    subprocess.run([sys.executable, "-c", program], check=True)
