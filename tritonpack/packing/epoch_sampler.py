"""EpochSampler: the order of any sampler, where possible as a function of a seed and the epoch."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Sampler, SequentialSampler

from tritonpack.packing.documents import is_iterable
from tritonpack.packing.lengths import natural_number


class EpochSampler(Sampler[int]):
    """Another sampler's documents, in an order of its own for every epoch.

    torch's random samplers draw from a global generator, whose state is anything: another one on each rank, another one
    after a restart. Here such a sampler, which has a `generator`, draws from a fresh one, seeded with the seed and the
    epoch. A sampler with a `set_epoch` is told the epoch instead. Any other is taken as it is.

    Args:
        sampler: yields document numbers.
        seed: 0 or more; None takes that of the sampler's own generator, 0 where it has none.

    Attributes:
        epoch: from 0; `set_epoch` changes it.
        choices: how often `set_epoch` was called.
        follows_epoch: whether another epoch has another order.
        same_everywhere: whether every process is known to get the same order.
        sharded: whether it has a part of the documents alone, as torch's DistributedSampler does.
    """

    def __init__(self, sampler: Iterable[int], seed: int | None = None) -> None:
        if not is_iterable(sampler):
            raise ValueError(f"the sampler must yield document numbers; got {sampler!r:.100}.")
        generator = getattr(sampler, "generator", None)
        if seed is None:
            seed = generator.initial_seed() if isinstance(generator, torch.Generator) else 0
        self.sampler = sampler
        self.seed = natural_number(seed, "seed")
        self.epoch = self.choices = 0
        told = hasattr(sampler, "set_epoch")
        seeded = hasattr(sampler, "generator") and not told
        self.follows_epoch = seeded or (told and bool(getattr(sampler, "shuffle", True)))  # DistributedSampler's name
        self.same_everywhere = seeded or isinstance(sampler, (SequentialSampler, range))
        self.sharded = getattr(sampler, "num_replicas", 1) > 1

    def set_epoch(self, epoch: int) -> None:
        """Choose the order; without it every epoch has the order of epoch 0."""
        self.epoch = natural_number(epoch, "epoch")
        self.choices += 1

    def __iter__(self) -> Iterator[int]:
        return self._in_epoch(self.epoch)

    def _in_epoch(self, epoch: int) -> Iterator[int]:
        sampler: Any = self.sampler
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        elif hasattr(sampler, "generator"):
            seed = np.random.SeedSequence([self.seed, epoch]).generate_state(1, np.uint64)[0]
            sampler = copy.copy(sampler)
            sampler.generator = torch.Generator().manual_seed(int(seed))
        return iter(sampler)

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]  # as long as the wrapped one has a length

    def documents(self, num_documents: int, epoch: int) -> NDArray[np.int64]:
        """The document numbers of an epoch, each below `num_documents`.

        Raises:
            ValueError: no document, one that isn't below `num_documents`, or something that isn't a document number.
        """
        numbers = np.asarray(list(self._in_epoch(epoch)))
        if not numbers.size:
            raise ValueError("the sampler yields no document. Give it a dataset that isn't empty.")
        if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
            raise ValueError(f"the sampler must yield document numbers; got {numbers.dtype} of shape {numbers.shape}.")
        outside = (numbers < 0) | (numbers >= num_documents)
        if outside.any():
            raise ValueError(
                f"the sampler yields document {numbers[np.argmax(outside)]}, but there are lengths of {num_documents} "
                "documents, numbered from 0. Pass the lengths of the dataset that the sampler is for."
            )
        return numbers.astype(np.int64)
