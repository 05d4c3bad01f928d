"""One rank of a fake group of eight: how many bytes would travel, and when. Nothing is sent and nothing computed."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tritonpack.parallel import comm
from tritonpack.parallel.exchanges.call import Call
from tritonpack.parallel.exchanges.merge import exact

RANKS, RANK = 8, 3


@dataclass
class Traffic:
    """What a rank sends and computes.

    Attributes:
        received: bytes that come from other ranks, by collective.
        events: (what, number) in their order. "launch" and "wait" have the number of the collective, "compute" is a
            call of attention, forward or backward, with so many visible pairs.
    """

    received: Counter = field(default_factory=Counter)
    events: list[tuple[str, int]] = field(default_factory=list)
    launches: int = 0

    def forget(self) -> None:
        self.received.clear()
        self.events.clear()
        self.launches = 0

    def launch(self, collective: str, received: int) -> SimpleNamespace:
        """Record a collective; the result has its `wait`."""
        number, self.launches = self.launches, self.launches + 1
        self.received[collective] += received
        self.events.append(("launch", number))
        return SimpleNamespace(wait=lambda *_, **__: self.events.append(("wait", number)))

    def exposed(self) -> list[int]:
        """The collectives between whose launch and wait no pair of a query and a key is computed."""
        found = []
        for number in range(self.launches):
            first, last = self.events.index(("launch", number)), self.events.index(("wait", number))
            if not any(what == "compute" and pairs for what, pairs in self.events[first:last]):
                found.append(number)
        return found


@contextmanager
def fake_collectives(monkeypatch: pytest.MonkeyPatch) -> Iterator[Traffic]:
    """Replace the collectives and the attention of a part; results are memory that nobody has written."""
    traffic = Traffic()

    def all_gather(target, source, **_):
        return traffic.launch("all_gather", target.nbytes - source.nbytes)

    def reduce_scatter(target, source, **_):
        return traffic.launch("reduce_scatter", source.nbytes - target.nbytes)

    def all_to_all(target, source, taken, given, group, **_):
        assert (target.numel(), source.numel()) == (sum(taken), sum(given))
        return traffic.launch("all_to_all", (sum(taken) - taken[dist.get_rank(group)]) * target.itemsize)

    def batch(operations):
        return [traffic.launch("ring", sum(one.tensor.nbytes for one in operations if one.op is dist.irecv))]

    def compute(mask):
        traffic.events.append(("compute", int((mask.key_stop - mask.key_start).sum())))

    def forward(_, q, k, v, mask, heads, sinks):
        compute(mask)
        return q.new_empty(*q.shape[:2], v.shape[2]), q.new_empty(q.shape[1], q.shape[0], dtype=exact(q.dtype))

    def backward(_, dout, dlse, q, k, v, out, lse, mask, heads, sinks):
        compute(mask)
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), lse.new_empty(q.shape[1])

    monkeypatch.setattr(Call, "forward", forward)
    monkeypatch.setattr(Call, "backward", backward)
    monkeypatch.setattr(comm, "_all_gather", all_gather)
    monkeypatch.setattr(comm, "_reduce_scatter", reduce_scatter)
    monkeypatch.setattr(dist, "all_to_all_single", all_to_all)
    monkeypatch.setattr(dist, "batch_isend_irecv", batch)
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=RANKS)
    try:
        yield traffic
    finally:
        dist.destroy_process_group()
