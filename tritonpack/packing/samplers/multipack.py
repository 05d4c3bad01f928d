"""MultipackBatchSampler: batches of bins of documents, with the arguments of axolotl's class of that name."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.utils.data import BatchSampler, Sampler, SequentialSampler

from tritonpack.checks import check_flag
from tritonpack.notices import say_once
from tritonpack.packing.bins import Algorithm, pack
from tritonpack.packing.columns import is_iterable
from tritonpack.packing.lengths import check_integer
from tritonpack.packing.samplers.epochs import EpochSampler
from tritonpack.packing.samplers.ranks import has_group, place_among_processes
from tritonpack.packing.samplers.resume import VERSION, check_state, digest
from tritonpack.packing.units import as_units, fit_for_sampler


class _Bins(NamedTuple):
    """The bins of an epoch, bin b with items[offsets[b] : offsets[b + 1]], and a digest of its batches."""

    items: NDArray[np.int32]
    offsets: NDArray[np.int64]
    digest: str

    @property
    def num_bins(self) -> int:
        return len(self.offsets) - 1


class MultipackBatchSampler(EpochSampler, BatchSampler):  # type: ignore[override]  # of `sampler`
    """Batches of bins of documents; each bin holds at most `batch_max_len` tokens.

    Documents are taken in the order of the given sampler. Each goes into the fullest bin with room (best-fit), or with
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

    Every process computes the same batches from the seed and the epoch, so accelerate may divide them. It gives every
    process the same number of batches and leaves out the rest, which `dropped_documents` counts. accelerate and Trainer
    call `set_epoch`, which changes the order. A second pass over one epoch causes a warning.

    Samplers with a `generator` (torch's random ones) get a new generator, seeded by `seed` and the epoch. Samplers
    with `set_epoch` get the epoch. The order of any other sampler may differ between ranks; the ranks compare it at
    the start of an iteration, so every rank must iterate.

    Attributes:
        epoch: the epoch of the next iteration.
        seed, num_replicas: as given or found.
        lengths: (documents,) int32, 0 for dropped documents.
        report: what was done with documents that are longer than `batch_max_len`.

    Args:
        sampler: yields document numbers, the same on every rank: a sampler or any iterable.
        batch_size: bins per batch.
        batch_max_len: tokens per bin.
        lengths: (documents,) whole numbers, the tokens of each document of the dataset.
        bin_size: the largest number of documents per bin; None and 0 set no limit.
        drop_last: leave out a last batch of fewer than `batch_size` bins, and batches that are too few for one per
            process. False is for one process.
        sequential: keep the order of the sampler: a bin holds consecutive documents. None means False.
        group_size: the number of documents that are packed at a time (without `sequential`).
        seed: at least 0. None takes the seed of the sampler's generator. Without a generator it takes torch's seed,
            or 0 in a run of several processes, which may be seeded differently.
        overlong: see MultipackDistributedBatchSampler.
        num_replicas: the number of processes among which accelerate or Trainer divides the batches. None reads it from
            torch.distributed, or from the launcher's WORLD_SIZE; without them it is 1.
        packing_efficiency_estimate, num_count_samples, num_processes, safe_mode, mp_start_method: without effect, and
            of any value, because batches are counted, not estimated.

    Raises:
        ValueError: bad lengths or options, a sampler that divides documents among ranks (DistributedSampler); at the
            first use of an epoch, a sampler that yields anything but numbers of documents, different orders on
            different ranks, fewer bins than one batch under `drop_last`; `drop_last=False` for several processes.
        ImportError: at the first use of an epoch, if numba can't be imported.
    """

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
        sequential: bool | None = False,
        group_size: int = 100_000,
        num_processes: int | None = None,
        safe_mode: bool | None = True,
        mp_start_method: str | None = "fork",
        *,
        seed: int | None = None,
        overlong: Literal["error", "drop"] = "error",
        num_replicas: int | None = None,
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
        num_replicas = place_among_processes()[0] if num_replicas is None else num_replicas
        self.num_replicas = check_integer(num_replicas, "num_replicas")
        if seed is None:
            generator = getattr(sampler, "generator", None)
            if isinstance(generator, torch.Generator):
                seed = generator.initial_seed()
            else:  # processes may be seeded differently
                seed = torch.initial_seed() if self.num_replicas == 1 else 0
        self.batch_max_len = check_integer(batch_max_len, "batch_max_len")
        # DistributedSampler has the attribute `shuffle`.
        super().__init__(epochs_differ=seeded or (takes_epoch and bool(getattr(sampler, "shuffle", True))))
        self.seed = check_integer(seed, "seed", 0, None)
        self.lengths, self.report = fit_for_sampler(
            as_units(_whole(lengths)), self.batch_max_len, overlong, "batch_max_len"
        )
        self._same_on_all_ranks = seeded or isinstance(sampler, (SequentialSampler, range))
        self._sampler = sampler
        self._made: tuple[int, _Bins] | None = None  # the bins of an epoch
        self.drop_last = check_flag(drop_last, "drop_last")
        self.sequential = sequential is not None and check_flag(sequential, "sequential")
        self.batch_size = check_integer(batch_size, "batch_size")
        # 0 stands for no limit in axolotl.
        self.bin_size = None if bin_size is None else check_integer(bin_size, "bin_size", 0) or None
        self.group_size = check_integer(group_size, "group_size")
        if not drop_last and self.num_replicas > 1:
            raise ValueError(
                f"drop_last=False doesn't give {self.num_replicas} processes equally many batches, so some documents "
                "would be seen twice. Pass drop_last=True, or plan all documents with MultipackDistributedBatchSampler"
                "(..., tail='spread', shard=False). If nothing divides the batches, pass num_replicas=1."
            )

    def _current(self) -> _Bins:
        """The bins of the current epoch."""
        if self._made is None or self._made[0] != self.epoch:
            self._made = self.epoch, self._pack(self._documents(self.epoch))
        return self._made[1]

    def _pack(self, documents: NDArray[np.int32]) -> _Bins:
        documents = documents[self.lengths[documents] > 0]
        if not len(documents):
            raise ValueError(
                f"overlong='drop' leaves nothing: all documents of the sampler are longer than {self.batch_max_len} "
                "tokens. Raise batch_max_len."
            )
        group_size = len(documents) if self.sequential else self.group_size
        algorithm: Algorithm = "next_fit" if self.sequential else "best_fit"
        items, sizes = [], []
        for start in range(0, len(documents), group_size):
            group = documents[start : start + group_size]
            packing = pack(self.lengths[group], self.batch_max_len, algorithm=algorithm, max_items=self.bin_size)
            items.append(group[packing.items])
            sizes.append(np.diff(packing.offsets))
        found, offsets = np.concatenate(items), np.concatenate([[0], np.cumsum(np.concatenate(sizes))])
        settings = np.array([self.batch_size, self.drop_last])
        return _Bins(found, offsets, digest(found, offsets, self.lengths[found], settings))

    def _documents(self, epoch: int) -> NDArray[np.int32]:
        """The document numbers that the given sampler yields in an epoch."""
        sampler: Any = self._sampler
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        elif hasattr(sampler, "generator"):
            seed = np.random.SeedSequence([self.seed, epoch]).generate_state(1, np.uint64)[0]
            sampler = copy.copy(sampler)
            sampler.generator = torch.Generator(device="cpu").manual_seed(int(seed))
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
        return numbers.astype(np.int32)

    def __len__(self) -> int:
        return self._num_batches(self._current())

    def _num_batches(self, made: _Bins) -> int:
        if not self.drop_last:
            return -(-made.num_bins // self.batch_size)
        if made.num_bins < self.batch_size:
            raise ValueError(
                f"{len(made.items)} documents make {made.num_bins} bins of {self.batch_max_len} tokens, fewer than "
                f"batch_size={self.batch_size}, so drop_last leaves no batch. Lower batch_size or batch_max_len, or "
                "pass drop_last=False."
            )
        batches = made.num_bins // self.batch_size
        if batches < self.num_replicas:
            say_once(
                "no-round",
                f"{len(made.items)} documents make {batches} batches, fewer than the {self.num_replicas} processes. If "
                "accelerate or Trainer divides the batches, no process gets any. Lower batch_max_len or batch_size. If "
                "nothing divides them, pass num_replicas=1.",
            )
        return batches

    def _batch(self, made: _Bins, number: int) -> list[list[int]]:
        ends = made.offsets[number * self.batch_size : (number + 1) * self.batch_size + 1].tolist()
        return [made.items[start:stop].tolist() for start, stop in pairwise(ends)]

    def __iter__(self) -> Any:  # yields bins, not documents
        batches = super().__iter__()
        if has_group() and not self._same_on_all_ranks:
            digests: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(digests, self._current().digest)
            different = [rank for rank, own in enumerate(digests) if own != digests[0]]
            if different:
                raise ValueError(
                    f"the samplers of ranks {different} yield documents in another order than the sampler of rank 0, "
                    "so documents would be seen twice or never. Pass torch's RandomSampler, or a sampler with the same "
                    "order on all ranks."
                )
        return batches

    def state_dict(self, batches_done: int | None = None) -> dict[str, Any]:
        """Where the epoch stands, as plain numbers and strings; see MultipackDistributedBatchSampler."""
        done = self._count_done(batches_done)
        return {"version": VERSION, "epoch": self.epoch, "batches_done": done, "batches": self._current().digest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume: the next iteration begins with the batch after the last one that the state counts.

        Raises:
            ValueError: a damaged state, or one of other batches. The sampler is then unchanged.
        """
        check_state(state, {"version", "epoch", "batches_done", "batches"}, type(self).__name__)
        epoch = check_integer(state["epoch"], "epoch", 0, None)
        made = self._current() if epoch == self.epoch else self._pack(self._documents(epoch))
        if state["batches"] != made.digest:
            raise ValueError(
                f"the state can't be resumed, because epoch {epoch} has other batches than when it was saved. Pass the "
                "same lengths, settings and seed, and a sampler whose order depends only on the epoch, such as torch's "
                "RandomSampler; or begin the epoch anew."
            )
        total = self._num_batches(made)
        self._resume(epoch, check_integer(state["batches_done"], "batches_done", 0, total, "the batches of the epoch"))
        self._made = epoch, made

    def generate_batches(self, set_stats: bool | None = None) -> list[list[list[int]]]:
        """All batches of this epoch. The position of an iteration doesn't change. `set_stats` has no effect."""
        return [self._batch(self._current(), number) for number in range(len(self))]

    @property
    def dropped_documents(self) -> int:
        """The documents at the end of this epoch that `drop_last` leaves out; overlong ones aren't counted.

        They are the documents of an incomplete batch, and of the batches beyond a multiple of `num_replicas`, which
        accelerate leaves out.
        """
        made, batches = self._current(), len(self)
        used = batches // self.num_replicas * self.num_replicas * self.batch_size
        return len(made.items) - int(made.offsets[used]) if self.drop_last else 0

    def efficiency(self) -> float:
        """The share of the room in this epoch's batches that holds tokens, from 0 to 1."""
        made = self._current()
        num_bins = min(len(self) * self.batch_size, made.num_bins)
        tokens = self.lengths[made.items[: made.offsets[num_bins]]].sum(dtype=np.int64)
        return float(tokens / (num_bins * self.batch_max_len))


def _whole(lengths: Any) -> Any:
    """The lengths, as integers if they are floats with whole values; `Units` checks all others."""
    try:
        array = np.asarray(lengths)
    except ValueError:  # rows of different lengths
        return lengths
    is_whole = array.dtype.kind == "f" and bool(((array == np.floor(array)) & (np.abs(array) < 2.0**53)).all())
    return array.astype(np.int64) if is_whole else array
