"""The epoch of the next pass over a sampler or a stream, and checks of their states."""

from __future__ import annotations

import hashlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pprint import pformat
from traceback import walk_stack
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tritonpack.notices import say_once
from tritonpack.packing.lengths import MAX_INT64, check_integer

NEVER = -1
VERSION = 5  # of states


class EpochCounter:
    """Counts passes over a sampler or a stream, because libraries iterate over it through several loaders of their own.

    `set_epoch` chooses the epoch of the next pass. accelerate calls it, too, as a pass begins, with the number of the
    passes of that loader. This number is no choice: the pass is over the epoch that was chosen, or else over the next.
    """

    epoch: int = 0  # of the next pass; while a pass is under way its epoch
    _latest: int = NEVER  # the epoch of the latest pass that has begun
    _is_chosen: int = False  # the epoch, since the latest pass began
    _is_counted: int = False  # the next pass, by a loader of accelerate that makes it
    _was_counted: int = False  # the latest pass

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass; ValueError unless it is an integer from 0 to 2**63 - 1."""
        epoch = check_integer(epoch, "epoch", 0, MAX_INT64)
        if not _is_number_of_a_pass():
            self.epoch, self._is_chosen = epoch, True
            return
        if not self._is_chosen:
            # torchdata's workers begin a pass as their loader is made, so the first call may come after its begin.
            self.epoch = max(self.epoch, self._latest + (self._was_counted or self._is_counted))
        self._is_counted = True

    def _begin(self, epochs_differ: bool) -> None:
        """Count a pass that begins, and warn if it repeats an epoch in vain."""
        if _is_sharded_stateful_pass():
            say_once(
                "stateful-loader",
                "accelerate's use_stateful_dataloader saves no epoch in several processes, so a loader that loads its "
                "state goes on in epoch 0. Call set_epoch(number) on the prepared loader when you resume.",
            )
        if epochs_differ and self._latest == self.epoch and not self._is_chosen:
            say_once(
                "same-epoch",
                f"a sampler or a stream begins a second pass over epoch {self.epoch}, in the same order. Call "
                "set_epoch(number) before each pass, on it or on the loader that accelerate made, also to repeat one.",
            )
        self._was_counted = self._is_counted
        self._latest, self._is_chosen, self._is_counted = self.epoch, False, False


class EpochSampler(EpochCounter, ABC):
    """A batch sampler whose batches depend only on its settings and the epoch; it counts those that it has yielded."""

    _epochs_differ: bool  # another epoch has another order
    _advances = False  # each pass is over the next epoch, unless one was chosen
    _passes = 0  # only the latest pass counts its batches
    _epoch = 0
    _done = 0  # batches of the epoch that the latest pass has yielded
    _before: Sequence[Any] = ()  # what was planned with other settings, see `Segment`
    _waits = True  # the next pass begins after these batches

    @property
    def epoch(self) -> int:
        return self._epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._epoch = epoch
            self._go_to(0)

    def _go_to(self, done: int, before: Sequence[Any] = ()) -> None:
        """Let the next pass over this epoch begin after `done` batches."""
        self._done, self._before, self._waits = done, before, True
        self._passes += 1

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def _current(self) -> Any:
        """The source of the batches of the current epoch, such as a plan."""

    @abstractmethod
    def _batch(self, made: Any, number: int) -> list[Any]: ...

    def __iter__(self) -> Iterator[list[Any]]:
        self._find_begin()
        return self._pass()

    def _find_begin(self) -> None:
        """Find the epoch and the first batch of the next pass."""
        self._advances |= bool(self._is_counted)  # a loader of accelerate makes passes
        if self._advances and self._latest >= self.epoch and not self._is_chosen:
            self.epoch = self._latest + 1
        if not self._waits:  # a pass has begun there
            self._done, self._before = 0, ()
        len(self)  # raises errors now, not at the first batch

    def _pass(self) -> Iterator[list[Any]]:
        # A pass begins with its first batch: some loaders make iterators that they don't use, or choose an epoch after.
        self._find_begin()
        self._begin(self._epochs_differ)
        self._waits = False
        self._passes += 1
        this, made = self._passes, self._current()
        for number in range(self._done, len(self)):
            if this == self._passes:
                self._done = number + 1
            yield self._batch(made, number)

    @property
    def sampler(self) -> Any:
        """This sampler itself. accelerate looks here for `set_epoch` once it has wrapped a batch sampler."""
        return self


def _is_number_of_a_pass() -> bool:
    """Return whether a loader of accelerate calls `set_epoch` as it begins a pass."""
    frame = sys._getframe(2)
    while frame.f_code.co_name == "set_epoch" and frame.f_back is not None:
        frame = frame.f_back
    module = str(frame.f_globals.get("__name__", ""))
    return frame.f_code.co_name == "__iter__" and module.startswith("accelerate.")


def _is_sharded_stateful_pass() -> bool:
    """Return whether torchdata's loader makes the pass through a shard of accelerate, which has no state."""
    by_torchdata, callers = False, set()
    for frame, _ in walk_stack(sys._getframe(2)):
        module = str(frame.f_globals.get("__name__", ""))
        by_torchdata |= module.startswith("torchdata.")
        if module == "accelerate.data_loader":
            callers.add(type(frame.f_locals.get("self")).__name__)
    return by_torchdata and not callers.isdisjoint({"BatchSamplerShard", "IterableDatasetShard"})


def check_state(state: Any, names: set[str], owner: str) -> None:
    """ValueError unless a state has the version of this package, these names, and the digest of its values if any."""
    if not isinstance(state, Mapping) or not same(state.get("version"), VERSION) or state.keys() != names:
        remedy = "Resume with the version of tritonpack that saved it, or begin the epoch anew."
        raise ValueError(f"this isn't a state of version {VERSION} of {owner}; got {state!r:.300}. {remedy}")
    if "digest" in names and not same(state["digest"], seal(state)["digest"]):
        raise ValueError("the state is damaged: its values aren't those that were saved. Begin a new pass.")


def seal(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state with a digest of its values. The documents' own state isn't in it, because it may have any form."""
    source = [state["source"] is None, isinstance(state["source"], Mapping)]
    values = sorted({**state, "source": source, "digest": None}.items())
    return {**state, "digest": digest(np.frombuffer(repr(values).encode(), np.uint8))}


def describe_changes(saved: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """The settings that differ, such as "seed was 1 and is 0"; an empty string if none does."""
    words = {"capacity": "the tokens of a row", "num_ranks": "the number of ranks"}
    return "; ".join(
        f"{words.get(name, name)} was {saved[name]!r} and is {now!r}"
        for name, now in sorted(settings.items())
        if not same(saved[name], now)
    )


def digest(*arrays: NDArray[Any]) -> str:
    """32 hexadecimal digits of the values of arrays, the same on every machine."""
    summary = hashlib.blake2b(digest_size=16)
    for array in arrays:
        summary.update(np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False).data)
    return summary.hexdigest()


def same(one: Any, other: Any) -> bool:
    """Return whether plain values are equal and have the same types: True isn't 1."""
    return pformat(one) == pformat(other)
