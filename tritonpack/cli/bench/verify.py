"""Whether a peer computes what it should, on the very tensors it is timed with.

The judge is float64 attention by the rule of `tritonpack.testing`: an error of at most twice plain attention's. A dense
reference of a whole batch doesn't fit, so some queries are drawn, and the gradient of the output is zero in all others:
their outputs, their dq, and dK and dV of every key then depend on nothing but these rows of the mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tritonpack.cli.bench.batch import Batch
from tritonpack.cli.bench.peers import Prepared
from tritonpack.testing import Inputs, check_outputs

ROWS = 512


def sample_rows(batch: Batch, count: int = ROWS, seed: int = 1) -> Tensor:
    """(rows,) ascending: the ends of the longest, the median and the shortest document, and others at random."""
    total = batch.q.shape[0]
    if total <= count:
        return torch.arange(total, device=batch.q.device)
    order = sorted(range(len(batch.lengths)), key=lambda i: -batch.lengths[i])
    stops = torch.tensor(batch.lengths).cumsum(0)
    ends = [
        place
        for document in (order[0], order[len(order) // 2], order[-1])
        for place in (int(stops[document]) - batch.lengths[document], int(stops[document]) - 1)
    ]
    drawn = torch.randperm(total, generator=torch.Generator().manual_seed(seed))[: count - len(ends)]
    return torch.cat([torch.tensor(ends), drawn]).unique().to(batch.q.device)


class Judge:
    """The drawn rows of a batch, for the last key head and the query heads that share it."""

    def __init__(self, batch: Batch, count: int = ROWS) -> None:
        group = batch.q.shape[1] // batch.k.shape[1]
        self.batch = batch
        self.rows = sample_rows(batch, count)
        self.dout = torch.zeros_like(batch.dout).index_copy_(0, self.rows, batch.dout[self.rows])
        self.inputs = Inputs(
            self._rows(batch.q),
            batch.k[:, -1:].detach(),
            batch.v[:, -1:].detach(),
            self._rows(batch.dout),
            torch.zeros(group, len(self.rows), device=batch.q.device),
            batch.mask.restrict(self.rows),
        )

    def _rows(self, x: Tensor) -> Tensor:
        group = x.shape[1] // self.batch.k.shape[1]
        return x.detach()[self.rows, -group:]

    def check_forward(self, out: Tensor) -> None:
        """Check an output, (tokens, heads, head_dim).

        Raises:
            AssertionError: another shape, a value that isn't finite, or an error beyond what is allowed.
        """
        if out.shape != self.batch.q.shape:
            raise AssertionError(f"the output has shape {tuple(out.shape)}, not {tuple(self.batch.q.shape)}")
        if not out.isfinite().all():
            raise AssertionError("some of the output isn't finite")
        check_outputs(self.inputs, {"out": self._rows(out)})

    def check_backward(self, out: Tensor, peer: Prepared) -> None:
        """Check the gradients of an output in the peer's layout; its graph is kept.

        Raises:
            AssertionError: an error beyond what is allowed, or a gradient in rows that should have none.
            NotImplementedError: the output has no graph.
        """
        if not out.requires_grad:
            raise NotImplementedError("no backward here")
        dq, dk, dv = peer.gradients(out, self.dout)
        check_outputs(self.inputs, {"dq": self._rows(dq), "dk": dk[:, -1:], "dv": dv[:, -1:]})
        if dq.index_fill(0, self.rows, 0.0).count_nonzero():
            raise AssertionError("dq isn't zero in rows whose output has no gradient")
