"""EpochCounter: which epoch the next pass over a sampler or a stream is for, whichever loader makes the pass."""

from __future__ import annotations

import sys
from types import FrameType

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
