"""Exchanges in steps of key heads: the keys of the next step travel while the heads of one step are computed.

Keys and values travel again in backward, so that no rank holds all heads of all keys it receives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tritonpack.masks.block_diagonal import BlockDiagonalMask
from tritonpack.parallel.comm import Arrival
from tritonpack.parallel.exchanges.call import Call, Gradients, join, split


@dataclass(frozen=True)
class ByHeads:
    """An exchange in steps of key heads.

    Attributes:
        mask: the mask between this rank's queries and the keys that it has after `send`.
        send: starts to send own rows (n, width); the result has the rows of all these keys, (keys, width).
        give_back: starts to send gradients (keys, width) to the owners of keys; the result is their sum over ranks for
            the own rows, (n, width), in float32 for half precision if anything was summed.
    """

    mask: Callable[[Call], BlockDiagonalMask]
    send: Callable[[Call, Tensor], Arrival]
    give_back: Callable[[Call, Tensor], Arrival]

    def forward(self, call: Call, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """out (n, H, D_v) and lse (H, n) of this rank's n rows."""
        mask = self.mask(call)
        parts = [call.forward(q[:, heads], ks, vs, mask, heads, sinks) for heads, ks, vs in self._steps(call, q, k, v)]
        outs, lses = zip(*parts, strict=True)
        return torch.cat(outs, 1), torch.cat(lses)

    def backward(
        self, call: Call, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None,
        out: Tensor, lse: Tensor,
    ) -> Gradients:  # fmt: skip
        """dq, dk, dv of this rank's rows, and its part of dsinks."""
        mask = self.mask(call)
        dqs: list[Tensor] = []
        dsinks: list[Tensor] = []
        sums: list[Arrival] = []
        dks: list[Tensor] = []
        dvs: list[Tensor] = []

        def collect() -> None:
            dk, dv = split(sums.pop()().to(k.dtype), k, v)
            dks.append(dk)
            dvs.append(dv)

        for heads, ks, vs in self._steps(call, q, k, v):
            dq, dk, dv, dsink = call.backward(
                dout[:, heads], None if dlse is None else dlse[heads], q[:, heads], ks, vs, out[:, heads], lse[heads],
                mask, heads, sinks,
            )  # fmt: skip
            dqs.append(dq)
            dsinks.append(dsink)
            if sums:
                collect()  # so that gradients of at most two steps are in memory
            sums.append(self.give_back(call, join(dk, dv)))
        collect()
        return torch.cat(dqs, 1), torch.cat(dks, 1), torch.cat(dvs, 1), None if sinks is None else torch.cat(dsinks)

    def _steps(self, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """For each step its query heads, and their keys and values."""
        steps = [slice(first, min(first + call.stride, k.shape[1])) for first in range(0, k.shape[1], call.stride)]
        group = q.shape[1] // k.shape[1]

        def send(keys: slice) -> Arrival:
            return self.send(call, join(k[:, keys], v[:, keys]))

        coming = send(steps[0])
        for number, keys in enumerate(steps):
            rows = coming()
            if number + 1 < len(steps):
                coming = send(steps[number + 1])
            yield slice(keys.start * group, keys.stop * group), *split(rows, k, v)
