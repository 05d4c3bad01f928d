"""MultipackDistributedBatchSampler: batches of documents for each rank, step by step, from one plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Sampler

from tritonpack.checks import check_flag
from tritonpack.notices import say_once
from tritonpack.packing.lengths import check_integer
from tritonpack.packing.planning.order import Order, epoch_order
from tritonpack.packing.planning.plan import MOST_TOKENS, Objective, Plan, check_options
from tritonpack.packing.planning.tail import Tail, check_tail
from tritonpack.packing.samplers.epochs import EpochSampler
from tritonpack.packing.samplers.ranks import (
    SUBJECT,
    can_compare,
    compare,
    place_among_processes,
    place_in_world,
    raise_faults_on_all_ranks,
)
from tritonpack.packing.samplers.resume import (
    VERSION,
    Place,
    Segment,
    after,
    check_state,
    describe_changes,
    digest,
    plan_segment,
    same,
)
from tritonpack.packing.units import Units, as_units, fit_for_sampler
from tritonpack.removed import refuse_removed


class MultipackDistributedBatchSampler(EpochSampler, Sampler[list[int]]):
    """Batches of whole documents for each rank, at most `batch_max_length` tokens each, the same number on every rank.

    Every rank computes the same plan from the lengths, the seed and the epoch, without communication, and takes its
    part of each step. The class replaces the multipack project's class of this name, with `objective="linear"` also its
    sampler for linear attention.

    >>> lengths = [5, 3, 4, 4, 2, 6, 8, 8]
    >>> sampler = MultipackDistributedBatchSampler(8, lengths, num_replicas=2, rank=0, seed=2)
    >>> len(sampler), list(sampler), sampler.dropped_documents
    (2, [[1, 0], [6]], 1)
    >>> len(sampler), list(MultipackDistributedBatchSampler(8, lengths, num_replicas=2, rank=1, seed=2))
    (2, [[2, 3], [4, 5]])

    All rows are full. Document 7 has 8 tokens, too few for a third step of two ranks. `tail` decides what happens to
    it.

    Every process of a process group makes this sampler. The constructors compare lengths and settings, and all of them
    raise the error if two differ. A sampler for some of the processes (`num_replicas` smaller than the group) compares
    nothing. Compare `state_dict()` there, which is the same on every rank.

    Pass the sampler to a DataLoader as `batch_sampler` and call `set_epoch` before each epoch. A second pass over one
    epoch causes a warning. accelerate divides batches among processes and calls `set_epoch` itself: pass `shard=False`
    there.

    Attributes:
        num_replicas, rank, seed: as given or found; `rank` is None with `shard=False`.
        is_shared: whether the ranks of a `group` share batches.
        epoch: the epoch of the next iteration.
        lengths: (documents,) int32, 0 for dropped documents.
        report: what was done with documents that are longer than `batch_max_length`.

    Args:
        batch_max_length: tokens of a rank's batch, from 1 to 2**30.
        lengths: (documents,) integers of at least 1, the tokens of each document, the same on every rank; or `Units`.
        num_replicas, rank: the number of ranks, and the rank of this process. None reads them from torch.distributed;
            without a process group they are 1 and 0.
        group: the ranks that share every batch (`SequenceParallel`), which count as one: a process group, or a
            dimension of a DeviceMesh such as `mesh["sp"]`. It stands in place of `num_replicas` and `rank`.
        seed: at least 0, the same on every rank. None takes the seed of torch (`torch.manual_seed`) at this moment, in
            a process group that of rank 0. A loaded state brings its own along.
        objective, tail: see `plan_epoch`.
        epochs: pad this many epochs to the same number of steps, the largest of theirs. More than 1 plans all of these
            epochs once, at the first use of an epoch.
        overlong: "error" refuses documents longer than `batch_max_length`, "drop" leaves them out. To truncate them,
            pass `lengths` that are cut, and load with `PackingCollator(max_document_length=...)`.
        shuffle: shuffle the documents, in a new order for each epoch.
        order: the documents of an epoch in an order of your own, such as a curriculum: an array of document numbers, or
            a function of the seed and the epoch that returns one.
        shard: yield the batches of this rank only. False yields the batches of all ranks, step by step.

    Raises:
        ValueError: lengths that aren't positive integers or don't fit, a rank that doesn't exist, a wrong option, too
            few tokens to fill one step to 95% under `tail="drop"`; lengths, options or seeds that differ between the
            ranks of a process group; no seed for a sampler that can't ask rank 0 for it.
        TimeoutError: ranks of the process group that don't make the sampler.
        ImportError: numba can't be imported, at the first use of an epoch.

    Source: https://github.com/imoneoi/multipack_sampler defines the interface and the measures.
    """

    def __init__(
        self,
        batch_max_length: int,
        lengths: Sequence[int] | NDArray[Any] | Units,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int | None = None,
        *,
        objective: Objective = "quadratic",
        tail: Tail = "drop",
        epochs: int = 1,
        overlong: Literal["error", "drop"] = "error",
        shuffle: bool = True,
        order: Order | None = None,
        shard: bool = True,
        group: Any = None,
        **removed: Any,
    ) -> None:
        with raise_faults_on_all_ranks("sampler", num_replicas):
            refuse_removed(removed, "MultipackDistributedBatchSampler()")
            self.batch_max_length = check_integer(batch_max_length, "batch_max_length", 1, MOST_TOKENS)
            self._seed_is_given = seed is not None
            self.seed = check_integer(torch.initial_seed() if seed is None else seed, "seed", 0, None)
            check_flag(shuffle, "shuffle")
            super().__init__(epochs_differ=shuffle and (order is None or callable(order)))
            self._units = as_units(lengths)  # with those that are left out, which longer rows have planned
            self.lengths, self.report = fit_for_sampler(self._units, batch_max_length, overlong, "batch_max_length")
            self._shard = check_flag(shard, "shard")
            self.num_replicas, self.rank = place_in_world(num_replicas, rank, shard, group)
            self.is_shared = group is not None
            self._ranks_that_compare = place_among_processes()[0] if self.is_shared else self.num_replicas
            check_options(objective, tail)
            if order is not None and not shuffle:
                raise ValueError("shuffle=False has no effect on an order of your own; leave it out.")
            in_epoch = epoch_order(len(self.lengths), self.seed, 0, shuffle, order)
            self._order = order if order is None or callable(order) else in_epoch  # a copy
            check_tail(self.lengths[in_epoch].astype(np.int64), self.batch_max_length, self.num_replicas, tail)
            self._options = {"objective": objective, "tail": tail, "shuffle": shuffle}
            self._epochs = check_integer(epochs, "epochs")
            self._least_steps: dict[int, int] = {}  # by seed: if several epochs get the same number
            self._made: tuple[int, str, Segment] | None = None  # an epoch, `before`, the segment
            amounts = {"tokens": self._units.tokens}
            amounts |= {} if self._units.are_documents else {"squares": self._units.squares}
            totals = ", ".join(f"{amount.sum()} {name}" for name, amount in amounts.items())
            count = f"{len(self.lengths)} {self._noun}s"
            self._lengths_summary = f"{count} with {totals}, digest {digest(*amounts.values())}"
        if can_compare(self._ranks_that_compare):
            values = {**self._given(), "the lengths": self._lengths_summary, "the digest of order": None}
            values["seed"] = self.seed if self._seed_is_given else None
            if order is not None:
                values["the digest of order"] = digest(epoch_order(len(self.lengths), 0, 0, order=order))
            number = place_among_processes()[1] if self.is_shared else self.rank
            first = compare(
                SUBJECT, values, {"rank": number, "seed": torch.initial_seed()},
                "the samplers of the ranks differ", "Pass the same lengths in the same order and the same options on "
                "every rank, make samplers in the same order, and call set_epoch on all ranks.",
            )  # fmt: skip
            self.seed = first["seed"] if seed is None else self.seed
        elif seed is None and shuffle and place_among_processes()[0] > 1:
            raise ValueError(
                f"seed=None takes torch's seed from rank 0, but a sampler for {self.num_replicas} ranks in "
                f"{place_among_processes()[0]} processes can't ask it: some of them may make no sampler. Pass the same "
                "seed on every rank, such as seed=0."
            )

    @property
    def _noun(self) -> str:
        return self._units.noun

    @property
    def _batches_per_step(self) -> int:
        return 1 if self._shard else self.num_replicas

    def _settings(self, seed: int | None = None) -> dict[str, Any]:
        """What decides the plans, with this seed or the sampler's: the settings of a segment."""
        seed = self.seed if seed is None else seed
        own = {"tokens_per_row": self.batch_max_length, "num_ranks": self.num_replicas, "seed": seed, **self._options}
        if self._epochs > 1 and seed not in self._least_steps:
            plans = (self._segment(epoch, "", {**own, "least_steps": 1}).plan for epoch in range(self._epochs))
            self._least_steps[seed] = max(plan.num_steps for plan in plans)
        return {**own, "least_steps": self._least_steps.get(seed, 1)}

    def _segment(self, epoch: int, before: str, settings: Mapping[str, Any]) -> Segment:
        if self._made is not None and self._made[:2] == (epoch, before) and same(self._made[2].settings, settings):
            return self._made[2]
        return plan_segment(self._units, epoch, before, settings, self._order)

    def _current(self) -> Segment:
        before = self._before if self._counted_epoch == self.epoch else ""
        if self._made is None or self._made[:2] != (self.epoch, before):
            self._made = self.epoch, before, self._segment(self.epoch, before, self._settings())
        return self._made[2]

    def __len__(self) -> int:
        """The exact number of batches of the current epoch, the same on every rank, also after a resume."""
        made = self._current()
        return (made.steps_before + made.plan.num_steps) * self._batches_per_step

    def _batch(self, made: Segment, number: int) -> list[int]:
        step, rank = divmod(number, self.num_replicas) if self.rank is None else (number, self.rank)
        return made.plan.row(step - made.steps_before, rank).tolist()

    def state_dict(self, batches_done: int | None = None) -> dict[str, Any]:
        """Where the epoch stands, as plain numbers and strings, the same on every rank, so one may save for all.

        Args:
            batches_done: the batches of this epoch that were trained on, in all processes if accelerate divides
                them. None takes the number that the latest iterator has yielded. With DataLoader workers that
                number is too large, because they fetch ahead; torchdata's StatefulDataLoader corrects it.

        Raises:
            ValueError: more batches than the epoch has.
        """
        done, made = self._count_done(batches_done), self._current()
        first = made.steps_before * self._batches_per_step
        if done < first:
            raise ValueError(
                f"batches_done must be at least {first}, the batches of this epoch from before it was resumed with "
                f"other settings; got {done}. Count the batches from the beginning of the epoch."
            )
        return {
            "version": VERSION,
            "epoch": self.epoch,
            "lengths": self._lengths_summary,
            "before": self._before if self._counted_epoch == self.epoch else "",
            "rows_done": (done - first) * (self.num_replicas // self._batches_per_step),
            "plan": made.digest,
            **made.settings,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume: the next iteration begins with the batch after the last one that the state counts.

        The batches are those of an uninterrupted epoch if the settings plan the same epoch as those of the state, also
        if they aren't the same, such as `epochs`. Otherwise, as with another number of ranks or another
        `batch_max_length`, what is left of the epoch is planned anew, and a warning names the changes. Every document
        is then trained on once, but for those that `tail` leaves out.

        Every rank must call this, with the same state: ranks that share a process group compare it.

        Raises:
            ValueError: a damaged state, one of another class or version, one that was saved with other lengths, or with
                another seed than was given if the order depends on it, another state on another rank. The sampler is
                then unchanged.
            TimeoutError: ranks that don't load a state.
        """
        found = fault = None
        try:
            found = self._find_place(state)
        except ValueError as error:
            fault = error
        if can_compare(self._ranks_that_compare):
            place: dict[str, Any] = {"fault": f"can't load its state: {fault}"}
            if found is not None:
                place = {"epoch": found.epoch, "batches done": found.done, "before": found.before}
            remedy = "Save the state of one rank, and load it on all."
            compare("loaded a state", place, {}, "the ranks load different states", remedy)
        if found is None:
            assert fault is not None
            raise fault
        self._resume(found.epoch, found.done, found.before)
        self._made = found.epoch, found.before, found.made
        self.seed = found.made.settings["seed"]
        changes = describe_changes(found.saved, found.made.settings) if found.before else ""
        is_new = found.done == found.made.steps_before * self._batches_per_step
        if changes and is_new and place_among_processes()[1] == 0:
            say_once(
                "other-settings",
                f"epoch {self.epoch} goes on with other settings: {changes}. The {found.made.num_left} {self._noun}s "
                "that were left are planned anew.",
            )

    def _find_place(self, state: Mapping[str, Any]) -> Place:
        """Where a state stands; changes nothing."""
        settings = self._settings()
        names = {"version", "epoch", "lengths", "before", "rows_done", "plan", *settings}
        check_state(state, names, type(self).__name__)
        epoch = check_integer(state["epoch"], "epoch", 0, None)
        rows_done = check_integer(state["rows_done"], "rows_done of the state", 0, None)
        seed = check_integer(state["seed"], "seed of the state", 0, None)
        if state["lengths"] != self._lengths_summary:
            raise ValueError(
                f"the state was saved with other lengths: they were those of {state['lengths']!r:.100} and are those "
                f"of {self._lengths_summary!r}. Pass the same {self._noun}s in the same order, cut at the same length, "
                "or begin the epoch anew."
            )
        if self._epochs_differ and self._seed_is_given and seed != self.seed:
            raise ValueError(
                f"the state can't be resumed, because its seed was {seed} and is {self.seed}. Pass that seed, or none: "
                "the seed of the state is then taken."
            )
        if self._epochs_differ:
            settings = self._settings(seed)
        before, saved = state["before"], {name: state[name] for name in settings}
        try:
            if not isinstance(before, str):
                raise ValueError(f"before must be a str; got {before!r:.60}.")
            old = self._segment(epoch, before, saved)
        except ValueError as error:
            raise ValueError(f"the settings of the state can't be: {error}") from None
        if old.digest != state["plan"]:
            raise ValueError(
                "the state was saved with another order, or with another version of tritonpack or NumPy, which plans "
                "other batches from the same settings. Resume with these, or begin the epoch anew."
            )
        check_integer(rows_done, "rows_done", 0, len(old.plan.offsets) - 1, "the number of rows of its plan")
        begun = self._shard and rows_done % old.plan.num_ranks != 0  # a step, by other processes
        made = old if same(saved, settings) else self._segment(epoch, before, settings)
        if begun or made.digest != old.digest or made.plan.num_ranks != old.plan.num_ranks:
            before = after(before, saved, rows_done)
            made, rows_done = self._segment(epoch, before, settings), 0
        rows = made.steps_before * self.num_replicas + rows_done
        return Place(epoch, before, made, rows * self._batches_per_step // self.num_replicas, saved)

    @property
    def plan(self) -> Plan:
        """The plan of the current epoch for all ranks. It is computed at the first use.

        After a resume with other settings it is the plan of what was left of the epoch.
        """
        return self._current().plan

    @property
    def dropped_documents(self) -> int:
        """The documents that are in no row of `plan`, because of `tail`; `report` counts those that are too long."""
        made = self._current()
        return made.num_left - made.plan.num_documents

    def num_batches(self) -> int:
        """The number of steps of the current epoch. The multipack project's class has this method."""
        return len(self) // self._batches_per_step

    def efficiency(self) -> float:
        """The share of the room in the rows of `plan` that holds tokens, from 0 to 1, over all ranks.

        Documents that filler rows repeat count once, as in `plan_statistics`.
        """
        plan = self.plan
        room = plan.num_steps * self.num_replicas * self.batch_max_length
        return float(self._units.tokens[plan.items[: plan.num_documents]].sum() / room) if room else 1.0

    def _given(self) -> dict[str, Any]:
        """The settings that every rank must have."""
        return {
            "batch_max_length": self.batch_max_length, "num_replicas": self.num_replicas, "seed": self.seed,
            **self._options, "epochs": self._epochs, "shard": self._shard,
        }  # fmt: skip

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in {"rank": self.rank, **self._given()}.items())
        return f"{type(self).__name__}({len(self.lengths)} {self._noun}s, {shown})"

    @property
    def batch_size(self) -> None:
        """None, because batches have different numbers of documents. Libraries that divide batches read it.

        Raises:
            ValueError: this sampler yields the batches of one rank of several, which can't be divided again, or a
                number of batches that the processes can't divide.
        """
        if self._shard and self.num_replicas > 1:
            raise ValueError(
                f"this sampler yields the batches of rank {self.rank} only, of {self.num_replicas} ranks. Dividing "
                "them among processes again would lose most of them. Pass shard=False to a sampler for "
                "accelerate or another library that divides batches, or don't let it prepare this DataLoader."
            )
        processes = place_among_processes()[0]
        if self.num_replicas % processes:
            option = "group" if self.is_shared else "num_replicas"
            raise ValueError(
                f"this sampler plans for num_replicas={self.num_replicas}, and {processes} processes can't divide its "
                f"batches without losing or repeating some. Leave out {option} and pass shard=False, or don't let "
                "accelerate prepare this DataLoader."
            )
