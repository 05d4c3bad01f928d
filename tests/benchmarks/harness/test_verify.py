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


def leaking(attention: Attention, *qkv: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in qkv)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1)


def wrong_dk_of(row: int) -> Any:
    def variant(attention: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k = k.clone()
        k.register_hook(lambda dk: dk.index_add(0, torch.tensor([row]), torch.full_like(dk[:1], 0.01)))
        return attention(q, k, v)

    return variant


NOT_DRAWN = min({*range(138)} - {*ResultCheck(batch_of("causal"), 40).rows.tolist()})
# A function of attention and q, k, v, and the message
WRONG: dict[str, tuple[Any, str]] = {
    "leak": (leaking, "out beyond"),
    "dv by a thousandth": (lambda attention, q, k, v: attention(q, k, v * 0.999 + v.detach() * 0.001), "dv beyond"),
    **{f"dk of key {row}": (wrong_dk_of(row), "dk beyond") for row in (0, 37, 137)},
    "NaN in a row that isn't drawn": (
        lambda attention, *qkv: attention(*qkv).index_fill(0, torch.tensor([NOT_DRAWN]), torch.nan), "isn't finite"
    ),
    "gradient in rows without one": (
        lambda attention, q, k, v: attention(q, k, v) + 1e-30 * (q.flip(0) - q.flip(0).detach()), "dq isn't zero"
    ),
    "shape": (lambda attention, *qkv: attention(*qkv)[1:], "shape"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_results_are_found(case: str) -> None:
    """Also where only some of the rows are drawn."""
    variant, message = WRONG[case]
    with pytest.raises(AssertionError, match=message):
        check_variant(variant, 40)
    check_variant(lambda attention, *qkv: attention(*qkv), 40)


def test_drawn_rows_include_the_ends_of_documents() -> None:
    rows = ResultCheck(batch_of("causal"), 20).rows
    assert {38, 117, 37, 118, 137} <= set(rows.tolist())  # the longest, the shortest and the median document
    assert rows.tolist() == sorted(set(rows.tolist()))
    assert len(rows) <= 20
