"""The check of a peer's results, on the tensors that it is timed with.

Results are compared with float64 attention by the rule of `tritonpack.testing`: the error is at most twice the error of
plain attention. A dense reference of a whole batch needs too much memory, so some queries are drawn, and the gradient
of the output is zero in all other rows. The drawn outputs, dq, and dk and dv of every key then depend on these rows of
the mask alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.harness.batch import Batch
from benchmarks.harness.peers import Peer, Prepared
from benchmarks.harness.registry import Call
from tritonpack.testing import Inputs, check_outputs

ROWS = 512
# Work relative to a forward pass: backward has five matrix products, forward has two.
WORK = {"forward": 1.0, "backward": 2.5, "both": 3.5}
OPS = tuple(WORK)


def _sample_rows(batch: Batch, count: int) -> Tensor:
    """(rows,) int64, ascending: both ends of the longest, the median and the shortest document, and random rows."""
    total = batch.shape.tokens
    if total <= count:
        return torch.arange(total, device=batch.q.device)
    order = torch.tensor(batch.lengths, device="cpu").argsort(descending=True, stable=True)
    documents = order[[0, len(order) // 2, -1]]
    stops = batch.cu_seqlens.cpu().long()
    ends = torch.cat([stops[documents], stops[documents + 1] - 1])
    generator = torch.Generator(device="cpu").manual_seed(1)
    drawn = torch.randperm(total, generator=generator, device="cpu")[: count - len(ends)]
    return torch.cat([ends, drawn]).unique().to(batch.q.device)


class ResultCheck:
    """Checks the drawn rows of a batch, for the last key head and the query heads that share it."""

    def __init__(self, batch: Batch, count: int = ROWS) -> None:
        self.group = batch.shape.heads // batch.shape.kv_heads
        self.shape = batch.q.shape
        self.rows = _sample_rows(batch, count)
        self.dout = torch.zeros_like(batch.dout).index_copy_(0, self.rows, batch.dout[self.rows])
        self.inputs = Inputs(
            self._drawn(batch.q),
            batch.k[:, -1:],
            batch.v[:, -1:],
            self._drawn(batch.dout),
            torch.zeros(self.group, len(self.rows), device=batch.q.device),
            batch.mask.restrict(self.rows),
        )

    def _drawn(self, x: Tensor) -> Tensor:
        return x.detach()[self.rows, -self.group :]

    def check_forward(self, out: Tensor) -> None:
        """Check an output, (tokens, heads, head_dim).

        Raises:
            AssertionError: it has another shape, a value that isn't finite, or an error beyond what is allowed.
        """
        if out.shape != self.shape:
            raise AssertionError(f"the output has shape {tuple(out.shape)}, not {tuple(self.shape)}")
        if not out.isfinite().all():
            raise AssertionError("some of the output isn't finite")
        check_outputs(self.inputs, {"out": self._drawn(out)})

    def check_backward(self, out: Tensor, peer: Prepared) -> None:
        """Check the gradients of an output in the peer's layout; its graph is kept.

        Raises:
            AssertionError: an error beyond what is allowed, or a gradient in rows that should have none.
            NotImplementedError: the output has no graph.
        """
        if not out.requires_grad:
            raise NotImplementedError("no backward here")
        dq, dk, dv = map(peer.leave, peer.backward(out, peer.enter(self.dout)))
        check_outputs(self.inputs, {"dq": self._drawn(dq), "dk": dk[:, -1:], "dv": dv[:, -1:]})
        if dq.index_fill(0, self.rows, 0.0).count_nonzero():
            raise AssertionError("dq isn't zero in rows whose output has no gradient")


def checked(batch: Batch, peers: Iterable[Peer]) -> dict[str, Callable[[], Iterator[Call]]]:
    """The calls of peers on a batch, of each peer one for each of OPS, as `Case.prepare` returns them."""
    check, flops = ResultCheck(batch), batch.flops()

    def calls(peer: Peer) -> Iterator[Call]:
        prepared = Prepared(peer, batch)
        out = prepared.forward()
        check.check_forward(prepared.leave(out))
        yield Call(prepared.forward, flops=flops)
        check.check_backward(out, prepared)
        yield Call(partial(prepared.backward, out), flops=WORK["backward"] * flops)
        yield Call(prepared.both, flops=WORK["both"] * flops)

    return {peer.name: partial(calls, peer) for peer in peers}
