"""Lightning: `trainer.fit(module, PackedTrainLoader(dataset, tokens=32768, epochs=trainer.max_epochs))`.

This module imports neither `lightning` nor `pytorch_lightning`, and works with both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from tritonpack.packing.loader import PackedDataLoader, dataloader
from tritonpack.packing.samplers.ranks import place_among_processes

__all__ = ["PackedTrainLoader"]


class PackedTrainLoader:
    """The packed rows of `tritonpack.dataloader` for Lightning's Trainer, resumed from its checkpoints.

    Lightning injects samplers into loaders of torch's class DataLoader and numbers their epochs itself, so this is an
    iterable of another class. It makes its loader when Lightning first reads it: then the process group exists, and
    each rank gets its own rows, whatever `use_distributed_sampler` says.

    Args:
        dataset, tokens, options: see `tritonpack.dataloader`.
        epochs: the epochs of the training, `trainer.max_epochs`. They get the same number of steps.

    Raises:
        ValueError: in `trainer.fit`: what `tritonpack.dataloader` raises; rows for other ranks than the process group
            has; an epoch whose number of steps isn't the one that Lightning has read.
    """

    def __init__(self, dataset: Any, tokens: int, *, epochs: int = 1, **options: Any) -> None:
        self._make = lambda: dataloader(dataset, tokens, epochs=epochs, **options)
        self._steps: int | None = None  # that Lightning has read
        self._has_place = any(options.get(name) is not None for name in ("num_replicas", "rank", "group"))

    @cached_property
    def loader(self) -> PackedDataLoader:
        """The loader of this rank, made at the first use. `print` shows its plan."""
        return self._make()

    def __len__(self) -> int:
        if self._steps is None:
            self._steps = len(self.loader)
        return self._steps

    def __iter__(self) -> Iterator[dict[str, Any]]:
        # A generator, because Lightning makes two iterators for the first pass and uses only the second.
        ranks, rank = place_among_processes()
        planned = self.loader.rows.num_replicas
        if not self._has_place and (planned, self.loader.rank) != (ranks, rank):  # all ranks would get one's rows
            raise ValueError(
                f"the rows were planned for rank {self.loader.rank} of {planned}, and this process is rank {rank} of "
                f"{ranks}: the loader was read before Lightning made the process group. Don't read it before "
                "trainer.fit, or pass num_replicas and rank."
            )
        rows = iter(self.loader)
        first = next(rows, None)
        if first is None:  # a state of the end of an epoch, after which Lightning begins the next one
            rows = iter(self.loader)
            first = next(rows)
        if len(self.loader) != len(self):
            raise ValueError(
                f"epoch {self.loader.epoch} has {len(self.loader)} steps, and Lightning has read that epochs have "
                f"{len(self)}, so it would leave out rows or wait for more. Pass epochs=trainer.max_epochs to "
                "PackedTrainLoader: all epochs then get the same number of steps."
            )
        yield first
        yield from rows

    def state_dict(self) -> dict[str, Any]:
        """Where the epoch stands. Lightning puts it into its checkpoints."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume with the batch after the last one that the state counts. Lightning calls it.

        Raises:
            ValueError: a state that was saved with other lengths or options.
        """
        self.loader.load_state_dict(state)
