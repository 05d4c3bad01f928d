"""ResumableSampler, the base of both batch samplers: lengths, epochs, exact resume, and states that are checked."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pprint import pformat
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from tritonpack.notices import say_once
from tritonpack.packing.lengths import FittedLengths, check_integer, fit_for_sampler
from tritonpack.packing.samplers.epochs import NEVER, EpochCounter
from tritonpack.packing.units import FittedUnits, Units, fit_units


@dataclass(frozen=True)
class Words:
    """What messages about states call things: the words of the function that the user called.

    Attributes:
        names: of settings that have another name there.
        same_lengths: what to do if lengths differ; `{}` is "documents" or "units".
        same_seed: what to do if seeds differ.
        anew: what to do if a state can't be resumed.
    """

    names: Mapping[str, str] = field(
        default_factory=lambda: {"least_steps": "the least number of steps of an epoch (option epochs)"}
    )
    same_lengths: str = "Pass the lengths of the same {} in the same order"
    same_seed: str = "Pass that seed, or none: the sampler then takes that of the state"
    anew: str = "start an epoch anew with set_epoch"


@dataclass(frozen=True)
class Place:
    """Where a state stands.

    Attributes:
        epoch: of the state.
        before: what was trained on with other settings before (see `resume`); an empty string for nothing.
        made: the batches of the epoch, or of what is left of it.
        done: the batches of the epoch that are done.
        saved: the settings of the state.
    """

    epoch: int
    before: str
    made: Any
    done: int
    saved: Mapping[str, Any]


class ResumableSampler(EpochCounter, ABC):
    """A batch sampler whose batches depend only on its settings and the epoch.

    A subclass makes the batches of an epoch (`_make`) and returns them by number. It says what decides them, and reads
    what it said (`_place`, `_find_place`). This class counts how many batches were yielded.

    Attributes:
        epoch: the epoch of the next iteration, from 0.
        seed: at least 0.
        lengths: (documents,) int32, 0 for dropped documents.
        capacity: tokens that fit into a row.
        report: what was done with documents that are longer.
    """

    _VERSION: ClassVar[int] = 3  # of states
    _words = Words()

    def __init__(
        self,
        units: Units,
        capacity: int,
        overlong: Literal["error", "drop"],
        name: str,
        *,
        seed: int,
        epochs_differ: bool,
        budgets: Mapping[str, int] | None = None,
    ) -> None:
        EpochCounter.__init__(self)
        self.seed = check_integer(seed, "seed", 0, None)
        fitted: FittedLengths | FittedUnits
        if are_documents(units):  # whose messages say how to cut them
            fitted = fit_for_sampler(units.tokens, capacity, overlong, name)
        else:
            fitted = fit_units(units, capacity, budgets, overlong, name=name)
        self.capacity = capacity
        self.report = fitted.report
        self.lengths = np.zeros(len(units), dtype=np.int32)
        chosen = slice(None) if fitted.documents is None else fitted.documents
        self.lengths[chosen] = units.tokens[chosen]
        self._epochs_differ = epochs_differ  # whether another epoch has another order
        self._made: tuple[int, str, Any] | None = None  # an epoch, `before`, the result of `_make`
        self._counted_epoch = 0
        self._before = ""  # what was trained on in that epoch with other settings
        self._done = 0  # batches of that epoch that the latest iteration has yielded, or that a state counts
        self._resumed = False  # the next iteration begins after `_done` batches
        self._passes = 0  # only the latest pass counts its batches
        self._advances = False  # each pass is over the next epoch, unless one was chosen

    @abstractmethod
    def _make(self, epoch: int, before: str = "") -> Any:
        """The data that the batches of an epoch are read from; `before` is that of a subclass which returns it."""

    @abstractmethod
    def _num_batches(self, made: Any) -> int: ...

    @abstractmethod
    def _batch(self, made: Any, number: int) -> list[Any]: ...

    @abstractmethod
    def _place(self, done: int) -> dict[str, Any]:
        """What a state holds besides the version and the epoch."""

    @abstractmethod
    def _find_place(self, state: Mapping[str, Any]) -> Place:
        """Where a state stands; changes nothing."""

    def _current_before(self) -> str:
        return self._before if self._counted_epoch == self.epoch else ""

    def _current(self) -> Any:
        key = (self.epoch, self._current_before())
        if self._made is None or self._made[:2] != key:
            self._made = (*key, self._make(*key))
        return self._made[2]

    def __len__(self) -> int:
        """The exact number of batches of the current epoch, the same on every rank, also after a resume."""
        return self._num_batches(self._current())

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
        self._current()

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
        mine, made = (self._passes, self.epoch), self._current()
        for number in range(self._done, self._num_batches(made)):
            if mine == (self._passes, self._counted_epoch):
                self._done = number + 1
            yield self._batch(made, number)

    @property
    def _batches_done(self) -> int:
        """The batches of the epoch that the latest iterator has yielded, or that a loaded state counts."""
        return self._done if self._counted_epoch == self.epoch else 0

    @property
    def sampler(self) -> Any:
        """This sampler itself. accelerate looks here for `set_epoch` once it has wrapped a batch sampler."""
        return self

    def state_dict(self, batches_done: int | None = None) -> dict[str, Any]:
        """Where the epoch stands, as plain numbers and strings.

        The state of MultipackDistributedBatchSampler is the same on every rank, so one rank may save for all.

        Args:
            batches_done: the batches of this epoch that were trained on, in all processes if accelerate divides
                them. None takes the number that the latest iterator has yielded. With DataLoader workers that
                number is too large, because they fetch ahead; torchdata's StatefulDataLoader corrects it.

        Raises:
            ValueError: more batches than the epoch has.
        """
        done = self._batches_done if batches_done is None else self._check_done(batches_done, len(self))
        return {"version": self._VERSION, "epoch": self.epoch, **self._place(done)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume: the next iteration begins with the batch after the last one that the state counts.

        Raises:
            ValueError: a damaged state, one of another class, or one that was saved with other lengths or options. The
                sampler is then unchanged.
        """
        self._resume(self._find_place(state))

    def _resume(self, place: Place) -> None:
        self.set_epoch(place.epoch)
        self._made = (place.epoch, place.before, place.made)
        self._counted_epoch, self._before, self._done, self._resumed = place.epoch, place.before, place.done, True
        self._passes += 1

    @staticmethod
    def _check_done(done: Any, total: int) -> int:
        return check_integer(done, "batches_done", 0, total, "the number of batches of the epoch")

    def _check_header(self, state: Any, names: set[str]) -> int:
        """The epoch of a state; ValueError unless the state has the version of this class and these names."""
        owner = type(self).__name__
        if not isinstance(state, Mapping):
            raise ValueError(
                f"a state of {owner} must be a mapping, as state_dict() returns it; got {type(state).__name__} "
                f"{state!r:.60}."
            )
        names = {"version", "epoch", *names}
        if "version" in state and not same(state["version"], self._VERSION):
            fault = f"it has version {state['version']!r}"
            remedy = f". Resume with the version of tritonpack that saved it, or {self._words.anew}."
        else:
            wrong = {"it lacks": names - set(state), "it also has": set(state) - names}
            fault = "; ".join(f"{has} {', '.join(sorted(map(repr, those)))}" for has, those in wrong.items() if those)
            remedy = "."
        if fault:
            raise ValueError(f"this isn't a state of version {self._VERSION} of {owner}: {fault}{remedy}")
        return check_integer(state["epoch"], "epoch", 0, None)


def digest(*arrays: NDArray[Any]) -> str:
    """32 hexadecimal digits of the values of arrays, the same on every machine."""
    summary = hashlib.blake2b(digest_size=16)
    for array in arrays:
        summary.update(np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False).data)
    return summary.hexdigest()


def describe_units(units: Units) -> str:
    """How many units there are, what they take together, and a digest of what each of them takes."""
    amounts = {"tokens": units.tokens} | ({} if are_documents(units) else {"squares": units.squares})
    amounts |= {name: units.resources[name] for name in sorted(units.resources)}
    totals = ", ".join(f"{amount.sum()} {name}" for name, amount in amounts.items())
    noun = "documents" if are_documents(units) else "units"
    return f"{len(units)} {noun} with {totals}, digest {digest(*amounts.values())}"


def are_documents(units: Units) -> bool:
    """Whether units are one document each and have no resources, so that their tokens tell all."""
    return not units.resources and bool((units.squares == units.tokens**2).all())


def describe_changes(
    saved: Mapping[str, Any], settings: Mapping[str, Any], words: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Which settings differ, such as "seed was 1 and is 0"; an empty string if none does.

    Args:
        words: names of settings as the user knows them, if they are others.
    """
    changes = []
    for name in sorted({*settings, *saved}, key=str):
        was, now = (repr(values[name]) if name in values else "missing" for values in (saved, settings))
        if not (name in saved and name in settings and same(saved[name], settings[name])):
            changes.append(f"{words.get(name, name)} was {was} and is {now}")
    return "; ".join(changes)


def same(one: Any, other: Any) -> bool:
    """Whether plain values are equal and of the same types: True isn't 1."""
    return pformat(one) == pformat(other)
