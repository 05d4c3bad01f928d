"""What samplers share: how far an epoch is, states that say so, and digests of what a state depends on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tritonpack.notices import say_once
from tritonpack.packing.lengths import natural_number

STATE_VERSION = 1


@dataclass
class Progress:
    """How many batches of an epoch were handed out, and where the next iteration begins.

    Attributes:
        epoch: the epoch that `done` counts batches of.
        done: batches that the latest iteration has handed out, or that a state counts.
        resumed: the next iteration begins after `done` batches.
        iterations: how many have begun; only the latest counts what it hands out.
        choices: how often the epoch had been set when the latest iteration began.
    """

    epoch: int = 0
    done: int = 0
    resumed: bool = False
    iterations: int = 0
    choices: int = -1

    def done_in(self, epoch: int) -> int:
        return self.done if epoch == self.epoch else 0

    def resume(self, epoch: int, done: int) -> None:
        """Let the next iteration of this epoch begin after so many batches."""
        self.epoch, self.done, self.resumed = epoch, done, True
        self.iterations += 1

    def begin(self, epoch: int, total: int, choices: int, *, shuffled: bool) -> Iterator[int]:
        """The numbers of the batches of a new iteration, counted as they are handed out.

        Args:
            epoch: the sampler's.
            total: its batches.
            choices: how often `set_epoch` has been called.
            shuffled: whether another epoch would have another order.
        """
        if epoch != self.epoch:
            self.epoch, self.done, self.resumed = epoch, 0, False
        if shuffled and self.done == total and not self.resumed and choices == self.choices:
            say_once(
                "same-epoch",
                f"a sampler begins a second pass over epoch {epoch}, so the documents come in the same order again. "
                "Call set_epoch(number) on the sampler before each pass over the DataLoader; where the same order is "
                f"meant, set_epoch({epoch}) again.",
            )
        start = self.done if self.resumed else 0
        self.done, self.resumed, self.choices = start, False, choices
        self.iterations += 1
        return self._count(range(start, total), self.iterations)

    def _count(self, numbers: range, iteration: int) -> Iterator[int]:
        for number in numbers:
            if iteration == self.iterations:
                self.done = number + 1
            yield number


def digest(*arrays: NDArray[Any]) -> str:
    """32 hexadecimal digits that tell arrays apart by their values, the same on every machine."""
    summary = hashlib.blake2b(digest_size=16)
    for array in arrays:
        summary.update(np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False).data)
    return summary.hexdigest()


def make_state(epoch: int, done: int, settings: Mapping[str, Any], **digests: str) -> dict[str, Any]:
    """A state of plain numbers and strings."""
    return {
        "version": STATE_VERSION,
        "epoch": epoch,
        "batches_done": done,
        "settings": dict(settings),
        **digests,
    }


def read_state(state: Any, owner: str, settings: Mapping[str, Any], digest_name: str) -> tuple[int, int, str]:
    """What a state says, once all of it is known to be sound.

    Args:
        state: what `make_state` made, perhaps stored in between.
        owner: the class that the state must be of.
        settings: the owner's, which must be those of the state.
        digest_name: the digest that a state of the owner has.

    Returns:
        The epoch, the batches done, still to be compared with those of the epoch, and the digest.

    Raises:
        ValueError: whatever isn't as `make_state` makes it, or another setting.
    """
    if not isinstance(state, Mapping):
        raise ValueError(f"a state of {owner} must be a mapping, what its state_dict() gives; got {_kind(state)}.")
    names = {"version", "epoch", "batches_done", "settings", digest_name}
    faults = []
    if "version" in state and not _same(state["version"], STATE_VERSION):
        faults.append(f"it has version {state['version']!r}")
    if lacking := names - set(state):
        faults.append(f"it lacks {_quote(lacking)}")
    if more := set(state) - names:
        faults.append(f"it has {_quote(more)} besides")
    if faults:
        raise ValueError(f"this isn't a state of version {STATE_VERSION} of {owner}: {'; '.join(faults)}.")
    epoch = natural_number(state["epoch"], "epoch")
    if not isinstance(state["settings"], Mapping):
        raise ValueError(f"settings of the state must be a mapping; got {_kind(state['settings'])}.")
    if not isinstance(state[digest_name], str):
        raise ValueError(f"{digest_name} of the state must be a digest, a text; got {_kind(state[digest_name])}.")
    refuse_changes(state["settings"], settings)
    return epoch, state["batches_done"], state[digest_name]


def check_batches_done(value: Any, most: int) -> int:
    """The number of batches that are done, of at most so many, as an int."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 0 <= value <= most:
        raise ValueError(f"batches_done must be an integer from 0 to {most}, the epoch's batches; got {value!r}.")
    return int(value)


def refuse_changes(saved: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """ValueError for settings that aren't those that a state was saved with, naming each."""

    def shown(values: Mapping[str, Any], name: str) -> str:
        return repr(values[name]) if name in values else "missing"

    changes = [
        f"{name} was {shown(saved, name)} and is {shown(settings, name)}"
        for name in sorted({*settings, *saved}, key=str)
        if name not in saved or name not in settings or not _same(saved[name], settings[name])
    ]
    if changes:
        raise ValueError(
            f"the state can't be resumed, because what it was saved with has changed: {'; '.join(changes)}. Restore "
            "that, or start an epoch anew with set_epoch."
        )


def _same(one: Any, other: Any) -> bool:
    """Whether plain values are equal and of the same types: True isn't 1."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    return type(one) is type(other) and one == other


def _kind(value: Any) -> str:
    return f"{type(value).__name__} {value!r:.60}" if value is not None else "None"


def _quote(names: set[Any]) -> str:
    return ", ".join(sorted(map(repr, names)))
