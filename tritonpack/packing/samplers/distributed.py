"""MultipackDistributedBatchSampler: batches of documents for each rank, step by step, from one plan."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Sampler

from tritonpack.checks import check_flag
from tritonpack.notices import say_once
from tritonpack.packing.lengths import check_integer
from tritonpack.packing.planning.plan import MOST_TOKENS, Objective, Plan, check_options, plan_epoch
from tritonpack.packing.planning.tail import Tail, check_tail
from tritonpack.packing.samplers.epochs import VERSION, EpochSampler, check_state, describe_changes, digest, same
from tritonpack.packing.samplers.ranks import can_compare, compare, place_among_processes, place_in_world
from tritonpack.packing.units import Units, as_units, fit_for_sampler
from tritonpack.removed import refuse_removed

# What decides the plans beside the units and the epoch: arguments of `plan_epoch`.
_SETTINGS = {"capacity", "num_ranks", "seed", "objective", "tail", "shuffle", "least_steps"}
_OTHER = "Load another state, or begin the epoch anew."


@dataclass(frozen=True, eq=False)
class Segment:
    """A part of an epoch that is planned with the same settings: what earlier parts left over."""

    epoch: int
    before: Sequence[tuple[dict[str, Any], int]]  # the settings of earlier parts, and how many of their rows are done
    settings: dict[str, Any]
    plan: Plan
    steps_before: int  # of earlier parts; one that wasn't whole counts

    @cached_property
    def digest(self) -> str:
        return digest(self.plan.items, self.plan.offsets)


class MultipackDistributedBatchSampler(EpochSampler, Sampler[list[int]]):
    """Batches of whole documents for each rank, at most `batch_max_length` tokens each, the same number on every rank.

    Every rank computes the same plan from the lengths, the seed and the epoch, without communication, and takes its
    part of each step. The class replaces the multipack project's two samplers.

    >>> lengths = [5, 3, 4, 4, 2, 6, 8, 8]
    >>> sampler = MultipackDistributedBatchSampler(8, lengths, num_replicas=2, rank=0, seed=2)
    >>> list(sampler), list(MultipackDistributedBatchSampler(8, lengths, num_replicas=2, rank=1, seed=2))
    ([[1, 0], [6]], [[2, 3], [4, 5]])

    Document 7 has 8 tokens, too few for a third step of two ranks. `tail` decides what happens to it.

    The processes of a process group compare lengths and settings; a sampler for some of them compares nothing. Call
    `set_epoch` before each epoch: a second pass over one epoch causes a warning.

    Attributes:
        num_replicas, rank, seed: as given or found; `rank` is None with `shard=False`.
        epoch: the epoch of the next iteration.
        lengths: (documents,) int32, 0 for dropped documents.
        report: what was done with documents that are longer than `batch_max_length`.

    Args:
        batch_max_length: tokens of a rank's batch, from 1 to 2**30.
        lengths: (documents,) integers of at least 1, the tokens of each document, the same on every rank; or `Units`.
        num_replicas, rank: the number of ranks, and the rank of this process. None reads them from torch.distributed,
            or from the launcher's WORLD_SIZE and RANK; without them they are 1 and 0.
        group: in place of `num_replicas` and `rank` the ranks that share every batch (`SequenceParallel`) and count as
            one: a process group, or a dimension of a DeviceMesh such as `mesh["sp"]`.
        seed: at least 0, the same on every rank. None takes the seed of torch (`torch.manual_seed`) at this moment, in
            a process group the seed of rank 0.
        objective, tail, shuffle: see `plan_epoch`.
        epochs: pad this many epochs to the same number of steps, the largest of theirs.
        overlong: "error" refuses documents longer than `batch_max_length`, "drop" leaves them out.
        shard: yield the batches of this rank only. False yields the batches of all ranks, step by step, for accelerate.

    Raises:
        ValueError: a wrong option, lengths that don't fit, a rank that isn't this process's, too few tokens to fill one
            step to 95% under `tail="drop"`; ranks of a process group with other lengths, options or seeds; no seed for
            a sampler that can't ask rank 0 for it.
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
        shard: bool = True,
        group: Any = None,
        **removed: Any,
    ) -> None:
        if removed:
            refuse_removed(removed, "MultipackDistributedBatchSampler()")
        self.batch_max_length = check_integer(batch_max_length, "batch_max_length", 1, MOST_TOKENS)
        self._seed_is_given = seed is not None
        self.seed = check_integer(torch.initial_seed() if seed is None else seed, "seed", 0, None)
        self._epochs_differ = check_flag(shuffle, "shuffle")
        self._units = as_units(lengths)  # with those that are left out, which longer rows have planned
        self.lengths, self.report = fit_for_sampler(self._units, batch_max_length, overlong)
        self._shard = check_flag(shard, "shard")
        self.num_replicas, self.rank = place_in_world(num_replicas, rank, shard, group)
        self.is_shared = group is not None
        check_options(objective, tail)
        check_tail(self.lengths.astype(np.int64), self.batch_max_length, self.num_replicas, tail)
        self._options = {"objective": objective, "tail": tail, "shuffle": shuffle}
        self._epochs = check_integer(epochs, "epochs")
        self._least_steps: dict[int, int] = {}  # by seed: if several epochs get the same number
        self._made: Segment | None = None
        tokens, squares = self._units.tokens, self._units.squares
        self._lengths_summary = (
            f"{len(tokens)} {self._units.noun}s with {tokens.sum()} tokens and {squares.sum()} squares, digest "
            f"{digest(tokens, squares)}"
        )
        processes = place_among_processes()[0]
        self._compares = can_compare(processes if self.is_shared else self.num_replicas)
        if self._compares:
            values = {
                "batch_max_length": self.batch_max_length, "num_replicas": self.num_replicas, **self._options,
                "seed": self.seed if self._seed_is_given else None, "epochs": self._epochs, "shard": shard,
                "the lengths": self._lengths_summary,
            }  # fmt: skip
            remedy = "Pass the same lengths and options on every rank, and make samplers in the same order."
            differ = "the samplers of the ranks differ"
            self.seed = compare("made this sampler", values, differ, remedy, told=self.seed)
        elif seed is None and shuffle and processes > 1:
            raise ValueError(
                f"seed=None takes torch's seed from rank 0, but a sampler for {self.num_replicas} ranks in {processes} "
                "processes can't ask it: some of them may make no sampler. Pass a seed, such as seed=0."
            )

    @property
    def _batches_per_step(self) -> int:
        return 1 if self._shard else self.num_replicas

    def _settings(self, seed: int) -> dict[str, Any]:
        """The settings of a segment, with this seed."""
        own = {"capacity": self.batch_max_length, "num_ranks": self.num_replicas, "seed": seed, **self._options}
        if self._epochs > 1 and seed not in self._least_steps:
            plans = (self._segment(epoch, (), {**own, "least_steps": 1}).plan for epoch in range(self._epochs))
            self._least_steps[seed] = max(plan.num_steps for plan in plans)
        return {**own, "least_steps": self._least_steps.get(seed, 1)}

    def _segment(self, epoch: int, before: Sequence[tuple[dict[str, Any], int]], settings: dict[str, Any]) -> Segment:
        """Plan what earlier segments of an epoch leave over; ValueError for settings or rows that can't be."""
        made = self._made
        if made and same([made.epoch, *made.before, made.settings], [epoch, *before, settings]):
            return made
        done, steps = np.zeros(len(self._units), dtype=np.bool_), 0
        for own, rows in (*before, (settings, 0)):
            if own.keys() != _SETTINGS:
                raise ValueError(f"they are {', '.join(map(repr, own))}.")
            # An epoch that changes its settings can't have the number of steps of other epochs.
            options = {**own, "least_steps": 1} if done.any() else own
            left_out = done | (self._units.tokens > check_integer(own["capacity"], "capacity"))
            plan = plan_epoch(self._units, epoch=epoch, done=left_out if left_out.any() else None, **options)
            check_integer(rows, "the rows of earlier settings", 0, len(plan.offsets) - 1)
            done[plan.items[: plan.offsets[rows]]] = True
            steps += -(-rows // plan.num_ranks)
        return Segment(epoch, tuple(before), settings, plan, steps)

    def _current(self) -> Segment:
        made = self._made
        if made is None or made.epoch != self.epoch or made.before is not self._before:
            self._made = made = self._segment(self.epoch, self._before, self._settings(self.seed))
        return made

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
            batches_done: the batches of this epoch that were trained on, in all processes if accelerate divides them;
                ValueError for more than it has. None takes the number that the latest iterator has yielded. DataLoader
                workers fetch batches ahead, which count; torchdata's StatefulDataLoader corrects that.
        """
        made, done = self._current(), self._done
        if batches_done is not None:
            done = check_integer(batches_done, "batches_done", 0, len(self), "the number of batches of the epoch")
        first = made.steps_before * self._batches_per_step
        if done < first:
            raise ValueError(
                f"batches_done counts from the beginning of the epoch, so it must be at least {first}, which were done "
                f"before it was resumed with other settings; got {done}."
            )
        rows_done = (done - first) * (self.num_replicas // self._batches_per_step)
        return {
            "version": VERSION,
            "epoch": self.epoch,
            "lengths": self._lengths_summary,
            # Text, because torch.distributed.checkpoint loads a state into one of the same shape.
            "segments": json.dumps([*made.before, (made.settings, rows_done)]),
            "plan": made.digest,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume: the next iteration begins with the batch after the last one that the state counts.

        With settings that plan another epoch, such as another number of ranks, the rest of the epoch is planned anew,
        and a warning names the changes. Every document is then trained on once, except documents that `tail` leaves
        out. A sampler without a seed takes the seed of the state. Every rank of a process group must call this.

        Raises:
            ValueError: a damaged state, one of another class or version, one that was saved with other lengths,
                another state on another rank. The sampler is then unchanged.
            TimeoutError: ranks that don't load a state.
        """
        made, done, saved = self.find_place(state)
        if self._compares:
            place = {"epoch": made.epoch, "batches done": done, "earlier settings": json.dumps(made.before)}
            remedy = "Save the state of one rank, and load it on all."
            compare("loaded a state", place, "the ranks load different states", remedy)
        self.set_epoch(made.epoch)
        self._go_to(done, made.before)
        self._made, self.seed = made, made.settings["seed"]
        is_new = done == made.steps_before * self._batches_per_step
        changes = describe_changes(saved, made.settings) if made.before and is_new else ""
        if changes and place_among_processes()[1] == 0:
            left = made.plan.num_documents + made.plan.left_out
            rest = f"The {left} {self._units.noun}s that were left are planned anew."
            say_once("other-settings", f"epoch {self.epoch} goes on with other settings: {changes}. {rest}")

    def find_place(self, state: Mapping[str, Any]) -> tuple[Segment, int, dict[str, Any]]:
        """The segment in which a state goes on, the batches of its epoch that are done, and the saved settings."""
        check_state(state, {"version", "epoch", "lengths", "segments", "plan"}, type(self).__name__)
        epoch = check_integer(state["epoch"], "epoch", 0, None)
        if state["lengths"] != self._lengths_summary:
            raise ValueError(
                f"the state was saved with other lengths: of {state['lengths']!r:.100}, and now they are of "
                f"{self._lengths_summary!r}. Pass the same, in the same order and cut alike, or begin the epoch anew."
            )
        try:
            *before, (saved, rows_done) = [(dict(own), rows) for own, rows in json.loads(state["segments"])]
            old = self._segment(epoch, before, saved)
            check_integer(rows_done, "rows_done", 0, len(old.plan.offsets) - 1, "the number of rows of its plan")
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"the state is damaged: segments can't be read or planned: {error} {_OTHER}") from None
        if old.digest != state["plan"]:
            raise ValueError(f"another version of tritonpack or NumPy planned the state's batches. {_OTHER}")
        settings = self._settings(self.seed if self._seed_is_given or not self._epochs_differ else saved["seed"])
        begun = self._shard and rows_done % old.plan.num_ranks != 0  # a step, by other processes
        made = old if same(saved, settings) else self._segment(epoch, before, settings)
        if begun or made.digest != old.digest or made.plan.num_ranks != old.plan.num_ranks:
            before += [(saved, rows_done)] if rows_done else []
            made, rows_done = self._segment(epoch, before, settings), 0
        rows = made.steps_before * self.num_replicas + rows_done
        return made, rows * self._batches_per_step // self.num_replicas, saved

    @property
    def plan(self) -> Plan:
        """The plan of the current epoch for all ranks; after a resume with other settings, of what was left of it."""
        return self._current().plan

    @property
    def dropped_documents(self) -> int:
        """The documents that are in no row of `plan`, because of `tail`; `report` counts those that are too long."""
        return self.plan.left_out

    def num_batches(self) -> int:
        """The number of steps of the current epoch. The multipack project's class has this method."""
        return len(self) // self._batches_per_step

    def efficiency(self) -> float:
        """The share of the room in the rows of `plan` that holds tokens; tokens of filler rows don't count."""
        plan = self.plan
        room = plan.num_steps * self.num_replicas * self.batch_max_length
        return float(self._units.tokens[plan.items[: plan.num_documents]].sum() / room) if room else 1.0

    @property
    def batch_size(self) -> None:
        """None: batches have different numbers of documents. Libraries that divide batches read it; ValueError for
        batches of one rank, or a number of batches, that the processes can't divide.
        """
        processes = place_among_processes()[0]
        if (self._shard and self.num_replicas > 1) or self.num_replicas % processes:
            whose = "all ranks" if self.rank is None else f"rank {self.rank}"
            raise ValueError(
                f"this sampler yields the batches of {whose}, of {self.num_replicas} ranks, which {processes} "
                "processes can't divide without losing or repeating some. For accelerate leave out num_replicas, rank "
                "and group, and pass shard=False; or don't let it prepare this DataLoader."
            )
