"""The check of results sees wrong results, also where it draws only some of the rows."""

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.harness.batch import Batch
from benchmarks.harness.peers import Attention, Peer, Prepared, ours, packed
from benchmarks.harness.verify import ResultCheck
from tests.benchmarks.harness.batches import batch_of


def check(prepare: Any, batch: Batch, *, layout: Any = packed, backward: bool = True, count: int = 512) -> None:
    prepared, found = Prepared(Peer("", prepare, layout), batch), ResultCheck(batch, count)
    out = prepared.forward()
    found.check_forward(prepared.leave(out))
    if backward:
        found.check_backward(out, prepared)


def check_variant(variant: Any, count: int = 512) -> None:
    """Check a function of tritonpack's attention, q, k and v."""

    def prepare(batch: Batch) -> Attention:
        attention = ours(batch)
        return lambda q, k, v: variant(attention, q, k, v)

    check(prepare, batch_of("causal"), count=count)


@pytest.mark.parametrize("count", [512, 40])
def test_right_results_pass(count: int) -> None:
    check_variant(lambda attention, *qkv: attention(*qkv), count)


@pytest.mark.parametrize("count", [512, 40])
def test_leak_between_documents_is_found(count: int) -> None:
    def leaking(attention: Attention, *qkv: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in qkv)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)

    with pytest.raises(AssertionError, match="out beyond"):
        check_variant(leaking, count)


def test_gradient_off_by_a_thousandth_is_found() -> None:
    with pytest.raises(AssertionError, match="dv beyond"):
        check_variant(lambda attention, q, k, v: attention(q, k, v * 0.999 + v.detach() * 0.001))


@pytest.mark.parametrize("row", [0, 37, 137], ids=["first", "in the middle", "last"])
@pytest.mark.parametrize("count", [512, 40])
def test_wrong_gradient_of_one_key_is_found(row: int, count: int) -> None:
    def variant(attention: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k = k.clone()
        k.register_hook(lambda dk: dk.index_add(0, torch.tensor([row]), torch.full_like(dk[:1], 0.01)))
        return attention(q, k, v)

    with pytest.raises(AssertionError, match="dk beyond"):
        check_variant(variant, count)


def test_nan_in_a_row_that_was_not_drawn_is_found() -> None:
    rows = set(ResultCheck(batch_of("causal"), 40).rows.tolist())
    row = next(i for i in range(138) if i not in rows)
    with pytest.raises(AssertionError, match="isn't finite"):
        check_variant(lambda attention, *qkv: attention(*qkv).index_fill(0, torch.tensor([row]), torch.nan), 40)


def test_gradient_in_rows_without_one_is_found() -> None:
    with pytest.raises(AssertionError, match="dq isn't zero"):
        check_variant(lambda attention, q, k, v: attention(q, k, v) + 1e-30 * (q.flip(0) - q.flip(0).detach()), 40)


def test_wrong_shape_is_found() -> None:
    with pytest.raises(AssertionError, match="shape"):
        check_variant(lambda attention, *qkv: attention(*qkv)[1:])


def test_drawn_rows_include_the_ends_of_documents() -> None:
    rows = ResultCheck(batch_of("causal"), 20).rows
    assert {38, 117, 37, 118, 137} <= set(rows.tolist())  # the longest, the shortest and the median document
    assert rows.tolist() == sorted(set(rows.tolist()))
    assert len(rows) <= 20
