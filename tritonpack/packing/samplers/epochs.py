"""The epoch of the next pass over a sampler or a stream, whichever loader makes the pass."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from types import FrameType
from typing import Any

from tritonpack.notices import say_once
from tritonpack.packing.lengths import check_integer

NEVER = -1


class EpochCounter:
    """The epoch of the next pass, and the epoch of the latest pass that has begun.

    Libraries iterate over a sampler or a stream through loaders of their own, and through several of them: accelerate's
    `skip_first_batches` makes a new one. So passes are counted here, in the object that all of them iterate over.

    `set_epoch` chooses the epoch of the next pass. accelerate calls it, too, as a pass begins, with the number of the
    passes of that loader. This number isn't a choice: it doesn't replace an epoch that was chosen, and it never goes
    back behind an epoch that has begun.

    Attributes:
        epoch: the epoch of the next pass, from 0; while a pass is under way its epoch.
    """

    def __init__(self) -> None:
        self.epoch: int = 0
        self._latest: int = NEVER  # the epoch of the latest pass that has begun
        self._is_chosen: int = False  # the epoch, since the latest pass began
        self._number: int = NEVER  # of the next pass, as the loader counts that makes it
        self._had_number: int = False  # the latest pass
        self._shift: int = 0  # from the numbers of loaders to epochs

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass.

        Raises:
            ValueError: an epoch that isn't an integer of at least 0.
        """
        epoch = check_integer(epoch, "epoch", 0, None)
        if not _is_number_of_a_pass():
            self.epoch, self._is_chosen = epoch, True
            return
        self._number = epoch
        if not self._is_chosen:
            # A pass without a number may be this one: torchdata's workers begin to read as their loader is made.
            self.epoch = max(epoch + self._shift, self._latest + self._had_number)

    def _go_on(self) -> None:
        """Go on to the next epoch if a pass over this one has begun, unless it was chosen again."""
        if self._latest >= self.epoch and not self._is_chosen:
            self.epoch = self._latest + 1

    def _begin(self) -> bool:
        """Count a pass that begins. Return whether it repeats the epoch of the pass before, which nobody chose."""
        if _is_sharded_stateful_pass():
            say_once(
                "stateful-loader",
                "accelerate's use_stateful_dataloader saves no epoch in several processes, so a loader that loads its "
                "state goes on in epoch 0. Call set_epoch(number) on the prepared loader when you resume.",
            )
        again = self._latest == self.epoch and not self._is_chosen
        self._had_number = self._number != NEVER
        if self._had_number:
            self._shift = self.epoch - self._number
        self._latest, self._is_chosen, self._number = self.epoch, False, NEVER
        return again


class EpochSampler(EpochCounter, ABC):
    """A batch sampler whose batches depend only on its settings and the epoch; it counts those that it has yielded.

    Attributes:
        epoch: the epoch of the next iteration, from 0.
    """

    def __init__(self, epochs_differ: bool) -> None:
        super().__init__()
        self._epochs_differ = epochs_differ  # whether another epoch has another order
        self._advances = False  # each pass is over the next epoch, unless one was chosen
        self._counted_epoch = 0
        self._before = ""  # what was trained on in that epoch with other settings, see `plan_segment`
        self._done = 0  # batches of that epoch that the latest iteration has yielded, or that a state counts
        self._resumed = False  # the next iteration begins after `_done` batches
        self._passes = 0  # only the latest pass counts its batches

    @abstractmethod
    def __len__(self) -> int:
        """The exact number of batches of the current epoch, the same on every rank, also after a resume."""

    @abstractmethod
    def _current(self) -> Any:
        """What the batches of the current epoch are read from."""

    @abstractmethod
    def _batch(self, made: Any, number: int) -> list[Any]: ...

    def __iter__(self) -> Iterator[list[Any]]:
        self._find_begin()
        return self._pass()

    def _find_begin(self) -> None:
        """Find the epoch and the first batch of the next pass."""
        self._advances |= self._number != NEVER  # a loader of accelerate makes passes
        if self._advances:
            self._go_on()
        if self._counted_epoch != self.epoch or not self._resumed:
            self._counted_epoch, self._done, self._resumed, self._before = self.epoch, 0, False, ""
        len(self)  # raises errors now, not at the first batch

    def _pass(self) -> Iterator[list[Any]]:
        # A pass begins with its first batch: some loaders make iterators that they don't use, or choose an epoch after.
        self._find_begin()
        if self._begin() and self._epochs_differ:
            say_once(
                "same-epoch",
                f"a sampler begins a second pass over epoch {self.epoch}, so the documents come in the same order "
                "again. Call set_epoch(number) on the sampler before each pass over the DataLoader. If you want the "
                f"same order, call set_epoch({self.epoch}) again.",
            )
        self._resumed = False
        self._passes += 1
        this, made, batches = (self._passes, self.epoch), self._current(), len(self)
        for number in range(self._done, batches):
            if this == (self._passes, self._counted_epoch):
                self._done = number + 1
            yield self._batch(made, number)

    @property
    def _batches_done(self) -> int:
        """The batches of the epoch that the latest iterator has yielded, or that a loaded state counts."""
        return self._done if self._counted_epoch == self.epoch else 0

    def _count_done(self, batches_done: int | None) -> int:
        """The batches that a state counts: as given, or those that were yielded."""
        if batches_done is None:
            return self._batches_done
        return check_integer(batches_done, "batches_done", 0, len(self), "the number of batches of the epoch")

    def _resume(self, epoch: int, done: int, before: str = "") -> None:
        """Let the next iteration begin after the first batches of an epoch."""
        self.set_epoch(epoch)
        self._counted_epoch, self._before, self._done, self._resumed = epoch, before, done, True
        self._passes += 1

    @property
    def sampler(self) -> Any:
        """This sampler itself. accelerate looks here for `set_epoch` once it has wrapped a batch sampler."""
        return self


def _is_number_of_a_pass() -> bool:
    """Whether a loader of accelerate calls `set_epoch` as it begins a pass."""
    frame = sys._getframe(2)
    while frame.f_code.co_name == "set_epoch" and frame.f_back is not None:
        frame = frame.f_back
    module = str(frame.f_globals.get("__name__", ""))
    return frame.f_code.co_name == "__iter__" and module.startswith("accelerate.")


def _is_sharded_stateful_pass() -> bool:
    """Whether torchdata's loader makes the pass, through a shard of accelerate's, which has no state."""
    frame: FrameType | None = sys._getframe(2)
    by_torchdata = in_shard = False
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        by_torchdata = by_torchdata or module.startswith("torchdata.")
        if module == "accelerate.data_loader":
            name = type(frame.f_locals.get("self")).__name__
            in_shard = in_shard or name in ("BatchSamplerShard", "IterableDatasetShard")
        frame = frame.f_back
    return by_torchdata and in_shard
