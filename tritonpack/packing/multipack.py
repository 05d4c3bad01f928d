"""MultipackBatchSampler: batches of bins of documents, with the arguments of axolotl's class of that name."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import BatchSampler, Sampler, SequentialSampler

from tritonpack.checks import check_flag
from tritonpack.packing.bins import Algorithm, pack
from tritonpack.packing.documents import is_iterable
from tritonpack.packing.lengths import check_integer
from tritonpack.packing.state import ResumableSampler, digest, gather


class _Bins(NamedTuple):
    """The bins of an epoch: bin b holds the documents items[offsets[b] : offsets[b + 1]]."""

    items: NDArray[np.int64]
    offsets: NDArray[np.int64]
    order: str  # a digest of the documents in the order of the given sampler

    @property
    def num_bins(self) -> int:
        return len(self.offsets) - 1


class MultipackBatchSampler(ResumableSampler[_Bins], BatchSampler):  # type: ignore[override]  # of `sampler`
    """Batches of bins of documents; each bin holds at most `batch_max_len` tokens.

    Documents are taken in the order of the given sampler. Each goes into the first bin with room (first-fit), or with
    `sequential` into the last bin (next-fit). A batch is a list of `batch_size` bins, a bin is a list of document
    numbers:

    >>> batches = MultipackBatchSampler(range(5), batch_size=2, batch_max_len=8, lengths=[5, 4, 3, 8, 4])
    >>> list(batches), batches.efficiency(), len(batches)
    ([[[0, 2], [1, 4]]], 1.0, 1)

    The third bin, with document 3, doesn't make a whole batch, so `drop_last` leaves it out:

    >>> batches.dropped_documents
    1

    `DataLoader(BinDataset(dataset), batch_sampler=batches, collate_fn=PackingCollator())` loads a batch as one row of
    at most batch_size x batch_max_len tokens.

    Every process computes the same batches from the seed and the epoch, so accelerate may divide them among processes.
    `set_epoch` changes the order; accelerate and Trainer call it themselves. A second pass over one epoch causes a
    warning.

    Samplers with a `generator` (torch's random ones) get a new generator, seeded by `seed` and the epoch. Samplers
    with `set_epoch` get the epoch. The order of any other sampler may differ between ranks; the ranks compare it at
    the start of an iteration, so every rank must iterate.

    Args:
        sampler: yields document numbers, the same on every rank: a sampler or any iterable.
        batch_size: bins per batch.
        batch_max_len: tokens per bin.
        lengths: (documents,) integers, the tokens of each document of the dataset.
        bin_size: the largest number of documents per bin; None sets no limit.
        drop_last: leave out a last batch of fewer than `batch_size` bins.
        sequential: keep the order of the sampler: a bin holds consecutive documents.
        group_size: the number of documents that are packed at a time (without `sequential`).
        seed: at least 0; None takes the seed of the sampler's generator, or 0.
        overlong: see MultipackDistributedBatchSampler.
        packing_efficiency_estimate, num_count_samples, num_processes, safe_mode, mp_start_method: without effect.
            Batches are counted, not estimated, and one thread packs a million documents in a tenth of a second.

    Raises:
        ValueError: bad lengths or options, a sampler that divides documents among ranks (DistributedSampler); at the
            first use of an epoch, a sampler that yields anything but numbers of documents, fewer bins than one batch
            under `drop_last`, different orders on different ranks.
        ImportError: at the first use of an epoch, if numba can't be imported.
    """

    _DIGEST = "order"
    _OTHER_BATCHES = (
        "the sampler yields another order of documents in epoch {epoch} than when the state was saved. Use a sampler "
        "whose order depends only on the epoch, such as torch's RandomSampler."
    )
    batch_size: int

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
        if not is_iterable(sampler):
            raise ValueError(f"the sampler must yield document numbers; got {sampler!r:.100}.")
        if (ranks := getattr(sampler, "num_replicas", 1)) > 1:
            raise ValueError(
                f"the sampler divides the documents among {ranks} ranks, which would then have different numbers of "
                "batches. Pass a sampler of all documents on every rank, such as torch's RandomSampler, and let "
                "accelerate or Trainer divide the batches."
            )
        takes_epoch = hasattr(sampler, "set_epoch")
        seeded = hasattr(sampler, "generator") and not takes_epoch
        if seed is None:
            generator = getattr(sampler, "generator", None)
            seed = generator.initial_seed() if isinstance(generator, torch.Generator) else 0
        self.batch_max_len = check_integer(batch_max_len, "batch_max_len")
        super().__init__(
            lengths,
            self.batch_max_len,
            overlong,
            "batch_max_len",
            seed=seed,
            # DistributedSampler has the attribute `shuffle`.
            epochs_differ=seeded or (takes_epoch and bool(getattr(sampler, "shuffle", True))),
        )
        self._same_on_all_ranks = seeded or isinstance(sampler, (SequentialSampler, range))
        self._sampler = sampler
        self.drop_last = check_flag(drop_last, "drop_last")
        self.sequential = check_flag(sequential, "sequential")
        self.batch_size = check_integer(batch_size, "batch_size")
        self.bin_size = None if bin_size is None else check_integer(bin_size, "bin_size")
        self.group_size = check_integer(group_size, "group_size")

    def _make(self, epoch: int) -> _Bins:
        documents = self._documents(epoch)
        documents = documents[self.lengths[documents] > 0]
        if not len(documents):
            raise ValueError(
                f"overlong='drop' leaves nothing: all documents of the sampler are longer than {self.batch_max_len} "
                "tokens. Raise batch_max_len."
            )
        algorithm: Algorithm = "next_fit" if self.sequential else "first_fit"
        group_size = len(documents) if self.sequential else self.group_size
        items, sizes = [], []
        for start in range(0, len(documents), group_size):
            group = documents[start : start + group_size]
            packing = pack(self.lengths[group], self.batch_max_len, algorithm=algorithm, max_items=self.bin_size)
            items.append(group[packing.items])
            sizes.append(np.diff(packing.offsets))
        offsets = np.concatenate([[0], np.cumsum(np.concatenate(sizes))])
        return _Bins(np.concatenate(items), offsets, digest(documents))

    def _documents(self, epoch: int) -> NDArray[np.int64]:
        """The document numbers that the given sampler yields in an epoch."""
        sampler: Any = self._sampler
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        elif hasattr(sampler, "generator"):
            seed = np.random.SeedSequence([self.seed, epoch]).generate_state(1, np.uint64)[0]
            sampler = copy.copy(sampler)
            sampler.generator = torch.Generator().manual_seed(int(seed))
        numbers = np.asarray(list(sampler))
        if not numbers.size:
            raise ValueError("the sampler yields no document. Give it a dataset that isn't empty.")
        if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
            raise ValueError(f"the sampler must yield document numbers; got {numbers.dtype} of shape {numbers.shape}.")
        outside = (numbers < 0) | (numbers >= len(self.lengths))
        if outside.any():
            raise ValueError(
                f"the sampler yields document {numbers[np.argmax(outside)]}, but there are lengths of "
                f"{len(self.lengths)} documents, numbered from 0. Pass the lengths of the dataset that the sampler is "
                "for."
            )
        return numbers.astype(np.int64)

    def _num_batches(self, made: _Bins) -> int:
        if not self.drop_last:
            return -(-made.num_bins // self.batch_size)
        if made.num_bins < self.batch_size:
            raise ValueError(
                f"{len(made.items)} documents make {made.num_bins} bins of {self.batch_max_len} tokens, fewer than "
                f"batch_size={self.batch_size}, so drop_last leaves no batch. Lower batch_size or batch_max_len, or "
                "pass drop_last=False."
            )
        return made.num_bins // self.batch_size

    def _batch(self, made: _Bins, number: int) -> list[list[int]]:
        ends = made.offsets[number * self.batch_size : (number + 1) * self.batch_size + 1].tolist()
        return [made.items[start:stop].tolist() for start, stop in pairwise(ends)]

    def _digest(self, made: _Bins) -> str:
        return made.order

    def _settings(self) -> dict[str, Any]:
        names = ("batch_size", "batch_max_len", "bin_size", "drop_last", "sequential", "group_size", "seed")
        return {name: getattr(self, name) for name in names} | {"lengths": digest(self.lengths)}

    def __iter__(self) -> Any:  # yields bins, not documents
        if not self._same_on_all_ranks:
            orders = gather(self._current().order)
            different = [rank for rank, order in enumerate(orders) if order != orders[0]]
            if different:
                raise ValueError(
                    f"the samplers of ranks {different} yield documents in another order than the sampler of rank 0, "
                    "so documents would be seen twice or never. Pass torch's RandomSampler, or a sampler with the same "
                    "order on all ranks."
                )
        return super().__iter__()

    @property
    def len_across_ranks(self) -> int:
        """The number of batches of the current epoch, the same on all ranks."""
        return len(self)

    def generate_batches(self) -> list[list[list[int]]]:
        """All batches of this epoch. The position of an iteration doesn't change."""
        return [self._batch(self._current(), number) for number in range(len(self))]

    @property
    def dropped_documents(self) -> int:
        """The documents in an incomplete last batch, which is left out; overlong ones aren't counted."""
        return len(self._current().items) - int(self._current().offsets[self._num_bins()])

    def efficiency(self) -> float:
        """The share of the room in this epoch's batches that holds tokens, from 0 to 1."""
        made, num_bins = self._current(), self._num_bins()
        tokens = int(self.lengths[made.items[: made.offsets[num_bins]]].sum(dtype=np.int64))
        return tokens / (num_bins * self.batch_max_len)

    def gather_efficiency(self) -> float:
        """The mean of the efficiencies of all ranks. Every rank must call this."""
        return float(np.mean(gather(self.efficiency())))

    def gather_len_batches(self, num: int) -> int:
        """The smallest `num` of all ranks. Every rank must call this."""
        return min(gather(num))

    def _num_bins(self) -> int:
        return min(len(self) * self.batch_size, self._current().num_bins)
