"""MultipackBatchSampler: bins of documents in batches, with the arguments of axolotl's class of that name."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch.utils.data import BatchSampler, Sampler

from tritonpack.packing.epoch_sampler import EpochSampler
from tritonpack.packing.lengths import MAX_INT32, fit_for_sampler, positive_integer
from tritonpack.packing.state import Progress, check_batches_done, digest, make_state, read_state

START_METHODS = ("fork", "spawn", "forkserver")


@dataclass(frozen=True, eq=False)
class _Epoch:
    """One epoch's bins: bin b holds the documents items[offsets[b] : offsets[b + 1]]."""

    number: int
    items: NDArray[np.int64]
    offsets: NDArray[np.int64]
    order: str  # a digest of the sampler's order

    @property
    def num_bins(self) -> int:
        return len(self.offsets) - 1

    def bins(self, start: int, stop: int) -> list[list[int]]:
        ends = self.offsets[start : stop + 1].tolist()
        return [self.items[first:last].tolist() for first, last in pairwise(ends)]


class MultipackBatchSampler(BatchSampler):
    """Batches of bins of documents: each bin holds at most `batch_max_len` tokens.

    Documents are taken in the sampler's order, and each goes into the first bin with room for it (first-fit), or with
    `sequential` into the last bin (next-fit). A batch is a list of `batch_size` bins, a bin a list of document numbers:

    >>> batches = MultipackBatchSampler(range(5), batch_size=2, batch_max_len=8, lengths=[5, 4, 3, 8, 4])
    >>> list(batches), batches.efficiency(), len(batches)
    ([[[0, 2], [1, 4]]], 1.0, 1)

    The third bin, with document 3, makes no whole batch and is left out by `drop_last`:

    >>> batches.dropped_documents
    1

    `DataLoader(BinDataset(dataset), batch_sampler=batches, collate_fn=PackingCollator())` loads a batch as one flat row
    of at most batch_size x batch_max_len tokens.

    Every process computes the same batches from the seed and the epoch, without communication, so accelerate may
    give each process its share of them; the order changes with `set_epoch`, which accelerate and Trainer find on the
    batch sampler and on its `sampler` and call by themselves. A second pass over the same epoch is warned of.

    Only two kinds of samplers need torch.distributed, and then every process must iterate: those whose order can't be
    known to be the same on all ranks are compared, and those that have a part of the documents alone, such as
    DistributedSampler, end on all ranks with the shortest, which a warning tells with what is left out.

    Args:
        sampler: yields document numbers: a sampler or any iterable. torch's random ones are reseeded, see EpochSampler.
        batch_size: bins per batch.
        batch_max_len: tokens per bin.
        lengths: (documents,) integers, tokens per document of the dataset.
        bin_size: documents per bin at most; None for any number.
        drop_last: leave the last batch out where it has fewer than `batch_size` bins.
        sequential: keep the sampler's order: bins hold consecutive documents.
        group_size: documents that are packed at a time (without `sequential`).
        seed: of the order of random samplers, see EpochSampler.
        overlong: documents longer than `batch_max_len`: "error" refuses them, "drop" leaves them out. To truncate them,
            pass `lengths` that are cut and `PackingCollator(max_document_length=...)`, which cuts the documents.
        packing_efficiency_estimate, num_count_samples, num_processes, safe_mode, mp_start_method: checked, but without
            effect: batches are counted, not estimated, and one thread packs a million documents in a tenth of a second.

    Raises:
        ValueError: bad lengths or options; when batches are asked for, a sampler that yields anything but numbers of
            documents with a length, fewer bins than one batch under `drop_last`, ranks whose samplers yield different
            orders, a sharded sampler without torch.distributed.
    """

    def __init__(
        self,
        sampler: Sampler[int] | Iterable[int],
        batch_size: int,
        batch_max_len: int,
        lengths: Sequence[int] | NDArray[Any],
        bin_size: int | None = None,
        packing_efficiency_estimate: float | None = 1.0,
        drop_last: bool = True,
        num_count_samples: int = 4,
        sequential: bool = False,
        group_size: int = 100_000,
        num_processes: int | None = None,
        safe_mode: bool = True,
        mp_start_method: str | None = "fork",
        *,
        seed: int | None = None,
        overlong: Literal["error", "drop"] = "error",
    ) -> None:
        _check_without_effect(packing_efficiency_estimate, num_count_samples, num_processes, safe_mode, mp_start_method)
        for name, value in (("drop_last", drop_last), ("sequential", sequential)):
            if not isinstance(value, bool):
                raise ValueError(f"{name} must be True or False; got {value!r}.")
        self.batch_max_len = positive_integer(batch_max_len, "batch_max_len")
        self.bin_size = None if bin_size is None else positive_integer(bin_size, "bin_size")
        self.group_size = positive_integer(group_size, "group_size")
        self.sequential = sequential
        fitted = fit_for_sampler(lengths, self.batch_max_len, overlong, "batch_max_len")
        self.overlong_report = fitted.report
        self.lengths = np.zeros(len(lengths), dtype=np.int32)  # 0: left out
        self.lengths[slice(None) if fitted.documents is None else fitted.documents] = fitted.lengths
        super().__init__(EpochSampler(sampler, seed), positive_integer(batch_size, "batch_size"), drop_last)
        self.sampler: EpochSampler
        self._packed: _Epoch | None = None
        self._across_ranks: tuple[int, int] | None = None  # an epoch, and the fewest batches of a rank in it
        self._progress = Progress()

    @property
    def epoch(self) -> int:
        return self.sampler.epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose batches come next; each has its own order, the same for the same seed."""
        self.sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[list[int]]]:  # type: ignore[override]  # bins, not documents
        packed = self._pack()
        self._compare_ranks(packed)
        numbers = self._progress.begin(
            packed.number, len(self), self.sampler.choices, shuffled=self.sampler.follows_epoch
        )
        return (self._batch(packed, number) for number in numbers)

    def _batch(self, packed: _Epoch, batch: int) -> list[list[int]]:
        first = batch * self.batch_size
        return packed.bins(first, min(first + self.batch_size, packed.num_bins))

    def __len__(self) -> int:
        """Batches in the whole epoch, exactly; on all ranks the same."""
        return self.len_across_ranks

    @property
    def len_across_ranks(self) -> int:
        """Batches that every rank has in this epoch; with a sharded sampler every rank must ask for it."""
        own = self._num_batches(self._pack())
        if not self.sampler.sharded:
            return own
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                "the sampler has a part of the documents alone, so ranks must agree on the number of batches. Call "
                "torch.distributed.init_process_group first, or pass a sampler of all documents."
            )
        if self._across_ranks is None or self._across_ranks[0] != self.epoch:
            fewest = self.gather_len_batches(own)
            self._across_ranks = (self.epoch, fewest)
            if fewest < own:
                warnings.warn(
                    f"{own - fewest} of {own} batches, with {self.dropped_documents} documents, are left out on this "
                    f"rank in epoch {self.epoch}, because another rank has {fewest} batches. To use every document, "
                    "pack on all ranks alike: pass a sampler of all documents.",
                    stacklevel=3,
                )
        return self._across_ranks[1]

    def generate_batches(self) -> list[list[list[int]]]:
        """All batches of this epoch; leaves the place of an iteration alone."""
        packed = self._pack()
        return [self._batch(packed, batch) for batch in range(len(self))]

    @property
    def dropped_documents(self) -> int:
        """Documents of this epoch that no batch holds, besides overlong ones: of an incomplete batch, of batches that
        another rank lacks."""
        packed = self._pack()
        return len(packed.items) - int(packed.offsets[self._num_bins(packed)])

    def efficiency(self) -> float:
        """The share of the tokens that this epoch's batches have room for that they hold, from 0 to 1."""
        tokens, room = self._tokens_and_room()
        return tokens / room

    def gather_efficiency(self) -> float:
        """The efficiency of all ranks' batches together; every rank must ask for it."""
        tokens, room = np.sum(_gather(self._tokens_and_room()), axis=0).tolist()
        return tokens / room

    def gather_len_batches(self, num: int) -> int:
        """The least of all ranks' `num`; every rank must ask for it."""
        return min(_gather(num))

    def state_dict(self, batches_done: int | None = None) -> dict[str, Any]:
        """Where the epoch stands, as plain numbers and strings.

        Args:
            batches_done: batches trained on in this epoch, on all processes together where accelerate shares them out;
                None counts those that were yielded, more than were trained on where a DataLoader's workers fetch ahead.

        Raises:
            ValueError: more batches than the epoch has.
        """
        if batches_done is None:
            done = self._progress.done_in(self.epoch)
        else:
            done = check_batches_done(batches_done, len(self))
        return make_state(self.epoch, done, self._settings(), order=self._pack().order)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where `state_dict` was taken: the next iteration begins with the batch after those yielded.

        Raises:
            ValueError: a state of other documents, other options or another order than this sampler has, or one that
                isn't whole and this class's; the sampler is then left as it was.
        """
        epoch, done, order = read_state(state, type(self).__name__, self._settings(), "order")
        packed = self._pack_epoch(epoch)
        if packed.order != order:
            raise ValueError(
                f"the sampler yields another order of documents in epoch {epoch} than when the state was saved. Use "
                "one whose order follows from the epoch alone, such as torch's RandomSampler."
            )
        done = check_batches_done(done, self._num_batches(packed))
        self.set_epoch(epoch)
        self._packed = packed
        self._progress.resume(epoch, done)

    def _settings(self) -> dict[str, Any]:
        names = ("batch_size", "batch_max_len", "bin_size", "drop_last", "sequential", "group_size")
        own = {name: getattr(self, name) for name in names}
        return own | {"seed": self.sampler.seed, "lengths": digest(self.lengths)}

    def _pack(self) -> _Epoch:
        if self._packed is None or self._packed.number != self.epoch:
            self._packed = self._pack_epoch(self.epoch)
        return self._packed

    def _pack_epoch(self, epoch: int) -> _Epoch:
        from tritonpack.packing.heuristics import (
            first_fit,  # numba, slow to import: only when something is packed
            next_fit,
        )

        documents = self.sampler.documents(len(self.lengths), epoch)
        documents = documents[self.lengths[documents] > 0]
        lengths = self.lengths[documents]
        assign, group_size = (next_fit, len(lengths)) if self.sequential else (first_fit, self.group_size)
        items, sizes = [], []
        for start in range(0, len(lengths), group_size):
            group = lengths[start : start + group_size]
            entries, offsets = assign(group, self.batch_max_len, min(self.bin_size or MAX_INT32, len(group)))
            items.append(documents[start + entries.astype(np.int64)])
            sizes.append(np.diff(offsets))
        offsets = np.concatenate([[0], np.cumsum(np.concatenate(sizes))])
        return _Epoch(epoch, np.concatenate(items), offsets, digest(documents))

    def _num_batches(self, packed: _Epoch) -> int:
        if not self.drop_last:
            return -(-packed.num_bins // self.batch_size)
        if packed.num_bins < self.batch_size:
            raise ValueError(
                f"{len(packed.items)} documents make {packed.num_bins} bins of {self.batch_max_len} tokens, fewer than "
                f"batch_size={self.batch_size}, so drop_last leaves no batch. Lower batch_size or batch_max_len, or "
                "pass drop_last=False."
            )
        return packed.num_bins // self.batch_size

    def _num_bins(self, packed: _Epoch) -> int:
        return min(len(self) * self.batch_size, packed.num_bins)

    def _tokens_and_room(self) -> tuple[int, int]:
        packed = self._pack()
        num_bins = self._num_bins(packed)
        tokens = self.lengths[packed.items[: packed.offsets[num_bins]]].sum(dtype=np.int64)
        return int(tokens), num_bins * self.batch_max_len

    def _compare_ranks(self, packed: _Epoch) -> None:
        if self.sampler.same_everywhere or self.sampler.sharded:
            return
        orders = _gather(packed.order)
        if len(set(orders)) > 1:
            different = [rank for rank, order in enumerate(orders) if order != orders[0]]
            raise ValueError(
                f"the samplers of ranks {different} yield documents in another order than that of rank 0, so documents "
                "would be seen twice or never. Pass torch's RandomSampler, or a sampler whose order is the same on all "
                "ranks."
            )


def _gather(value: Any) -> list[Any]:
    """Each rank's value; the own one alone where nothing is distributed."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _check_without_effect(
    packing_efficiency_estimate: Any, num_count_samples: Any, num_processes: Any, safe_mode: Any, mp_start_method: Any
) -> None:
    """What axolotl's sampler needs and this one doesn't must be what it could be there."""
    estimate = packing_efficiency_estimate
    if estimate is not None and (
        isinstance(estimate, bool) or not isinstance(estimate, (int, float)) or not 0 <= estimate <= 1
    ):
        raise ValueError(f"packing_efficiency_estimate must be a number from 0 to 1; got {estimate!r}.")
    positive_integer(num_count_samples, "num_count_samples")
    if num_processes is not None:
        positive_integer(num_processes, "num_processes")
    if not isinstance(safe_mode, bool):
        raise ValueError(f"safe_mode must be True or False; got {safe_mode!r}.")
    if mp_start_method is not None and mp_start_method not in START_METHODS:
        raise ValueError(f"mp_start_method must be None or one of {START_METHODS}; got {mp_start_method!r}.")
