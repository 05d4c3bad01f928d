"""MultipackBatchSampler: batches of bins of documents, with the arguments of axolotl's class of that name."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import BatchSampler, Sampler, SequentialSampler

from tritonpack.checks import check_flag
from tritonpack.packing.bins import Algorithm, pack
from tritonpack.packing.collator import is_iterable
from tritonpack.packing.lengths import check_integer, fit_lengths
from tritonpack.packing.planning.plan import Plan
from tritonpack.packing.samplers.epochs import EpochSampler, digest
from tritonpack.packing.samplers.ranks import can_compare, compare, place_among_processes, place_in_world
from tritonpack.removed import refuse_removed


class MultipackBatchSampler(EpochSampler, BatchSampler):  # type: ignore[override]  # of `sampler`
    """Batches of bins of documents; each bin holds at most `batch_max_len` tokens.

    Documents are taken in the order of the given sampler. Each goes into the fullest bin with room (best-fit), or with
    `sequential` into the last bin (next-fit). A batch is a list of `batch_size` bins, a bin is a list of document
    numbers. Here a third bin, with document 3, doesn't make a whole batch, so `drop_last` leaves it out:

    >>> batches = MultipackBatchSampler(range(5), batch_size=2, batch_max_len=8, lengths=[5, 4, 3, 8, 4])
    >>> list(batches), batches.efficiency(), batches.dropped_documents
    ([[[0, 2], [1, 4]]], 1.0, 1)

    `DataLoader(BinDataset(dataset), batch_sampler=batches, collate_fn=PackingCollator())` loads a batch as one row of
    at most batch_size x batch_max_len tokens.

    Every process computes the same batches, and accelerate divides them. A second pass over one epoch causes a warning:
    call `set_epoch` before each pass. To resume, choose the epoch and skip the batches that are done, as Trainer does.

    Attributes:
        epoch: the epoch of the next iteration.
        seed: the seed of the sampler's generator; without one torch's seed, or 0 in a run of several processes, which
            may be seeded differently.

    Args:
        sampler: yields document numbers, the same on every rank: a sampler or any iterable. Torch's random ones get a
            new `generator` in each epoch, seeded by `seed` and the epoch; one with `set_epoch` gets the epoch. The
            ranks compare the order of any other sampler at the start of a pass, so every rank must iterate.
        batch_size: bins per batch.
        batch_max_len: tokens per bin.
        lengths: (documents,) whole numbers from 1 to `batch_max_len`, the tokens of each document of the dataset.
        bin_size: the largest number of documents per bin; None and 0 set no limit.
        drop_last: leave out what makes no whole batch for each process. False is for one process.
        sequential: keep the order of the sampler; None means False.
        group_size: the number of documents that are packed at a time (without `sequential`).
        num_replicas: the number of processes among which accelerate divides the batches; None: of all processes.
        packing_efficiency_estimate, num_count_samples, num_processes, safe_mode, mp_start_method: without effect,
            because batches are counted, not estimated.

    Raises:
        ValueError: bad lengths or options, a sampler that divides documents among ranks (DistributedSampler),
            `drop_last=False` for several processes; at the first use of an epoch, a sampler that yields anything but
            document numbers, different orders on different ranks, too few bins for a batch of each process.
        ImportError: at the first use of an epoch, if numba can't be imported.
    """

    batch_size: int

    def __init__(
        self, sampler: Sampler[int] | Iterable[int], batch_size: int, batch_max_len: int,
        lengths: Sequence[int] | NDArray[Any], bin_size: int | None = None,
        packing_efficiency_estimate: float | None = 1.0, drop_last: bool = True, num_count_samples: int = 4,
        sequential: bool | None = False, group_size: int = 100_000, num_processes: int | None = None,
        safe_mode: bool | None = True, mp_start_method: str | None = "fork", *, num_replicas: int | None = None,
        **removed: Any,
    ) -> None:  # fmt: skip
        refuse_removed(removed, "MultipackBatchSampler()")
        if not is_iterable(sampler):
            raise ValueError(f"the sampler must yield document numbers; got {sampler!r:.100}.")
        if (ranks := getattr(sampler, "num_replicas", 1)) > 1:
            advice = "Pass a sampler of all documents, such as a RandomSampler; accelerate divides the batches."
            raise ValueError(f"the sampler divides the documents among {ranks} ranks. {advice}")
        takes_epoch = hasattr(sampler, "set_epoch")
        seeded = hasattr(sampler, "generator") and not takes_epoch
        # DistributedSampler has the attribute `shuffle`.
        self._epochs_differ = seeded or (takes_epoch and bool(getattr(sampler, "shuffle", True)))
        self._sampler: Any = sampler
        self._same_on_all_ranks = seeded or isinstance(sampler, (SequentialSampler, range))
        self._made: tuple[int, Plan] | None = None  # an epoch, and its batches as steps
        self.num_replicas, _ = place_in_world(num_replicas, None, shard=False)
        generator = getattr(sampler, "generator", None)
        default = torch.initial_seed() if self.num_replicas == 1 else 0  # processes may be seeded differently
        self.seed = generator.initial_seed() if isinstance(generator, torch.Generator) else default
        self.batch_max_len = check_integer(batch_max_len, "batch_max_len")
        remedy = "leave longer documents out of the dataset (dataset.filter)"
        self.lengths = fit_lengths(_whole(lengths), self.batch_max_len, name="batch_max_len", remedy=remedy).lengths
        self.drop_last = check_flag(drop_last, "drop_last")
        self.sequential = sequential is not None and check_flag(sequential, "sequential")
        self.batch_size = check_integer(batch_size, "batch_size")
        # 0 stands for no limit in axolotl.
        self.bin_size = None if bin_size is None else check_integer(bin_size, "bin_size", 0) or None
        self.group_size = check_integer(group_size, "group_size")
        if not drop_last and self.num_replicas > 1:
            raise ValueError(
                f"drop_last=False doesn't give {self.num_replicas} processes equally many batches. Pass num_replicas=1 "
                "if nothing divides batches, or use MultipackDistributedBatchSampler(..., tail='spread', shard=False)."
            )

    def _current(self) -> Plan:
        """The batches of the current epoch as steps, and their bins as rows."""
        if self._made is None or self._made[0] != self.epoch:
            self._made = self.epoch, self._pack(self._documents(self.epoch))
        return self._made[1]

    def _pack(self, documents: NDArray[np.int32]) -> Plan:
        group_size = len(documents) if self.sequential else self.group_size
        algorithm: Algorithm = "next_fit" if self.sequential else "best_fit"
        items, sizes = [], []
        for start in range(0, len(documents), group_size):
            group = documents[start : start + group_size]
            packing = pack(self.lengths[group], self.batch_max_len, algorithm=algorithm, max_items=self.bin_size)
            items.append(group[packing.items])
            sizes.append(np.diff(packing.offsets))
        found, counts = np.concatenate(items), np.concatenate(sizes)
        if self.drop_last:
            batches = len(counts) // self.batch_size
            if batches < self.num_replicas:
                raise ValueError(
                    f"{len(found)} documents make {len(counts)} bins of {self.batch_max_len} tokens, fewer than one "
                    f"batch of batch_size={self.batch_size} for each of num_replicas={self.num_replicas} processes. "
                    "Lower them or batch_max_len, or pass drop_last=False in one process."
                )
            counts = counts[: batches * self.batch_size]
        else:  # bins without documents complete the last batch
            counts = np.append(counts, np.zeros(-len(counts) % self.batch_size, dtype=np.int64))
        offsets = np.concatenate([[0], np.cumsum(counts)])
        used = found[: offsets[-1]]
        return Plan(used, offsets, self.batch_size, self.batch_max_len, left_out=len(found) - len(used))

    def _documents(self, epoch: int) -> NDArray[np.int32]:
        """The document numbers that the given sampler yields in an epoch."""
        sampler = self._sampler
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        elif hasattr(sampler, "generator"):
            seed = np.random.SeedSequence([self.seed, epoch]).generate_state(1, np.uint64)[0]
            sampler = copy.copy(sampler)
            sampler.generator = torch.Generator(device="cpu").manual_seed(int(seed))
        numbers, count = np.asarray(list(sampler)), len(self.lengths)
        rule = f"the sampler must yield document numbers, 0 to {count - 1}"
        if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
            raise ValueError(f"{rule}; got {numbers!r:.100}.")
        outside = (numbers < 0) | (numbers >= count)
        if outside.any():
            raise ValueError(f"{rule}; got {numbers[np.argmax(outside)]}. Are these the lengths of the same dataset?")
        return numbers.astype(np.int32)

    def __len__(self) -> int:
        return self._current().num_steps

    def _batch(self, made: Plan, number: int) -> list[list[int]]:
        bins = (made.row(number, place).tolist() for place in range(self.batch_size))
        return [documents for documents in bins if documents]

    def __iter__(self) -> Any:  # yields bins, not documents
        batches = super().__iter__()
        if not self._same_on_all_ranks and can_compare(place_among_processes()[0]):
            plan = self._current()
            compare(
                "begun this pass", {"the digest of the order": digest(plan.items, plan.offsets)},
                "the samplers of the ranks yield documents in different orders, so documents would be seen twice or "
                "never", "Pass torch's RandomSampler, or a sampler with the same order on all ranks.",
            )  # fmt: skip
        return batches

    def generate_batches(self, set_stats: bool | None = None) -> list[list[list[int]]]:
        """All batches of this epoch. The position of an iteration doesn't change. `set_stats` has no effect."""
        return [self._batch(self._current(), number) for number in range(len(self))]

    @property
    def dropped_documents(self) -> int:
        """The documents of an incomplete last batch, and of batches beyond a multiple of `num_replicas`."""
        plan = self._current()
        used = plan.num_steps // self.num_replicas * self.num_replicas * self.batch_size
        return plan.left_out + len(plan.items) - int(plan.offsets[used])

    def efficiency(self) -> float:
        """The share of the room in this epoch's batches that holds tokens, from 0 to 1."""
        plan = self._current()
        tokens = self.lengths[plan.items].sum(dtype=np.int64)
        return float(tokens / (np.count_nonzero(np.diff(plan.offsets)) * self.batch_max_len))


def _whole(lengths: Any) -> Any:
    """The lengths, as integers if they are floats with whole values; `fit_lengths` checks all others."""
    try:
        array = np.asarray(lengths)
    except ValueError:  # rows of different lengths
        return lengths
    is_whole = array.dtype.kind == "f" and bool(((array == np.floor(array)) & (np.abs(array) < 2.0**53)).all())
    return array.astype(np.int64) if is_whole else array
