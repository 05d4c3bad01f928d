"""MultipackBatchSampler: batches of bins of documents, with the arguments of axolotl's class of that name."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import BatchSampler, Sampler, SequentialSampler

from tritonpack.checks import check_flag
from tritonpack.packing.bins import pack
from tritonpack.packing.collator import is_iterable
from tritonpack.packing.lengths import check_integer
from tritonpack.packing.planning.plan import Plan, document_numbers
from tritonpack.packing.samplers.epochs import EpochSampler, digest
from tritonpack.packing.samplers.ranks import can_compare, compare, place_among_processes
from tritonpack.packing.units import as_units, fit_for_sampler


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
    process the same number of batches and leaves out the rest, which `dropped_documents` counts. `set_epoch`, which
    accelerate and Trainer call, changes the order. A second pass over one epoch causes a warning. To resume, choose the
    epoch and skip the batches that are done, as Trainer and `accelerate.skip_first_batches` do.

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
            different ranks, under `drop_last` too few bins for a batch of each process; `drop_last=False` for several
            processes.
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
        # DistributedSampler has the attribute `shuffle`.
        self._epochs_differ = seeded or (takes_epoch and bool(getattr(sampler, "shuffle", True)))
        self._sampler = sampler
        self._same_on_all_ranks = seeded or isinstance(sampler, (SequentialSampler, range))
        self._made: tuple[int, Plan] | None = None  # an epoch, and its batches as steps
        num_replicas = place_among_processes()[0] if num_replicas is None else num_replicas
        self.num_replicas = check_integer(num_replicas, "num_replicas")
        if seed is None:
            generator = getattr(sampler, "generator", None)
            if isinstance(generator, torch.Generator):
                seed = generator.initial_seed()
            else:  # processes may be seeded differently
                seed = torch.initial_seed() if self.num_replicas == 1 else 0
        self.seed = check_integer(seed, "seed", 0, None)
        self.batch_max_len = check_integer(batch_max_len, "batch_max_len")
        self.lengths, self.report = fit_for_sampler(as_units(_whole(lengths)), self.batch_max_len, overlong)
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

    def _current(self) -> Plan:
        """The batches of the current epoch as steps, and their bins as rows."""
        if self._made is None or self._made[0] != self.epoch:
            self._made = self.epoch, self._pack(self._documents(self.epoch))
        return self._made[1]

    def _pack(self, documents: NDArray[np.int32]) -> Plan:
        documents = documents[self.lengths[documents] > 0]
        if not len(documents):
            raise ValueError(
                f"the sampler yields no document of at most {self.batch_max_len} tokens. Raise "
                "batch_max_len, or give it a dataset that isn't empty."
            )
        group_size = len(documents) if self.sequential else self.group_size
        items, sizes = [], []
        for start in range(0, len(documents), group_size):
            group = documents[start : start + group_size]
            algorithm: Literal["next_fit", "best_fit"] = "next_fit" if self.sequential else "best_fit"
            packing = pack(self.lengths[group], self.batch_max_len, algorithm=algorithm, max_items=self.bin_size)
            items.append(group[packing.items])
            sizes.append(np.diff(packing.offsets))
        found, counts = np.concatenate(items), np.concatenate(sizes)
        if self.drop_last:
            batches = len(counts) // self.batch_size
            if batches < self.num_replicas:
                raise ValueError(
                    f"{len(found)} documents make {len(counts)} bins of {self.batch_max_len} tokens, fewer than one "
                    f"batch of batch_size={self.batch_size} for each of num_replicas={self.num_replicas} processes, "
                    "and drop_last leaves out what makes none. Lower batch_size or batch_max_len, pass drop_last=False "
                    "in one process, or num_replicas=1 if nothing divides the batches."
                )
            counts = counts[: batches * self.batch_size]
        else:  # bins without documents complete the last batch
            counts = np.append(counts, np.zeros(-len(counts) % self.batch_size, dtype=np.int64))
        offsets = np.concatenate([[0], np.cumsum(counts)])
        used = found[: offsets[-1]]
        return Plan(used, offsets, self.batch_size, self.batch_max_len, left_out=len(found) - len(used))

    def _documents(self, epoch: int) -> NDArray[np.int32]:
        """The document numbers that the given sampler yields in an epoch."""
        sampler: Any = self._sampler
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        elif hasattr(sampler, "generator"):
            seed = np.random.SeedSequence([self.seed, epoch]).generate_state(1, np.uint64)[0]
            sampler = copy.copy(sampler)
            sampler.generator = torch.Generator(device="cpu").manual_seed(int(seed))
        return document_numbers(list(sampler), len(self.lengths), "the sampler")

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
        """The documents at the end of this epoch that `drop_last` leaves out; overlong ones aren't counted.

        They are the documents of an incomplete batch, and of the batches beyond a multiple of `num_replicas`, which
        accelerate leaves out.
        """
        plan = self._current()
        used = plan.num_steps // self.num_replicas * self.num_replicas * self.batch_size
        return plan.left_out + len(plan.items) - int(plan.offsets[used])

    def efficiency(self) -> float:
        """The share of the room in this epoch's batches that holds tokens, from 0 to 1."""
        plan = self._current()
        tokens = self.lengths[plan.items].sum(dtype=np.int64)
        return float(tokens / (np.count_nonzero(np.diff(plan.offsets)) * self.batch_max_len))


def _whole(lengths: Any) -> Any:
    """The lengths, as integers if they are floats with whole values; `Units` checks all others."""
    try:
        array = np.asarray(lengths)
    except ValueError:  # rows of different lengths
        return lengths
    is_whole = array.dtype.kind == "f" and bool(((array == np.floor(array)) & (np.abs(array) < 2.0**53)).all())
    return array.astype(np.int64) if is_whole else array
