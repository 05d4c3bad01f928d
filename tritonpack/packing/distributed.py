"""MultipackDistributedBatchSampler: each rank's documents, step by step, from one plan that all ranks compute alike."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch.utils.data import Sampler

from tritonpack.checks import check_flag
from tritonpack.packing.cost import CostModel
from tritonpack.packing.lengths import OverlongReport, fit_for_sampler, natural_number, positive_integer
from tritonpack.packing.plan import MOST_TOKENS, Objective, Plan, Tail, check_options, plan_epoch
from tritonpack.packing.state import Progress, check_batches_done, digest, make_state, read_state


class MultipackDistributedBatchSampler(Sampler[list[int]]):
    """Batches of whole documents, at most `batch_max_length` tokens each, in as many steps on every rank.

    Every rank computes the same plan from the lengths, the seed and the epoch, without communication, and takes its own
    part of each step. Takes the place of the multipack project's class of this name, and with `objective="linear"` of
    its variant for linear attention.

    >>> lengths = [5, 3, 4, 4, 2, 6, 8, 8]
    >>> sampler = MultipackDistributedBatchSampler(8, lengths, num_replicas=2, rank=0)
    >>> len(sampler), list(sampler)
    (2, [[6], [7]])
    >>> len(sampler), list(MultipackDistributedBatchSampler(8, lengths, num_replicas=2, rank=1))
    (2, [[3, 4], [0]])

    Documents 1, 2 and 5, thirteen tokens, don't fill a third step for two ranks: `tail` says what becomes of them.

    With a plain DataLoader, as `batch_sampler`, call `set_epoch` before each epoch; a second pass over the same epoch
    is warned of. Under accelerate, which gives every
    process its part of the batches itself, pass `shard=False` and have accelerate configured with `even_batches=False`;
    it calls `set_epoch` on its own.

    Attributes:
        num_replicas, rank, seed, epoch: as given, or found; `rank` is None with `shard=False`.
        lengths: (documents,) int32, of those that are left after dropping.
        overlong_report: what became of documents longer than `batch_max_length`.

    Args:
        batch_max_length: tokens of a rank's batch, at least 1.
        lengths: (documents,) integers, tokens per document, at least 1, the same on every rank.
        num_replicas: ranks; None asks torch.distributed, and is 1 where no process group is meant.
        rank: this process's; None likewise.
        seed: at least 0, the same on every rank.
        objective: what the ranks of a step get equal shares of: "quadratic" squared lengths, what attention costs;
            "linear" tokens; "cost" what `cost_model` says, and rows stop at their share.
        tail: what becomes of documents that don't fill a last step: "drop" leaves them out of this epoch; "spread"
            divides all documents over the fewest steps possible, equally full; "keep" makes a last, short step.
        lookahead: the share of its tokens that a step is offered in addition, from 0 to 1; more fills batches better
            and defers more documents: up to 0.05 by two steps at most, beyond that by three in odd cases.
        steps_together: steps planned at once, at least 1. Where a step holds few documents, few combinations fit: 64
            steps together fill rows of 4,096 tokens on one rank to 98% instead of 86% (OpenChat), and a document may be
            deferred by so many times two steps.
        cost_model: for the objective "cost".
        overlong: documents longer than `batch_max_length`: "error" refuses them, "drop" leaves them out. To truncate
            them, pass `lengths` that are cut and `PackingCollator(max_document_length=...)`, which cuts the documents.
        shuffle: whether to shuffle, anew in each epoch.
        shard: whether to yield this rank's batches alone; False yields every rank's in turn, step by step.

    Raises:
        ValueError: lengths that aren't whole numbers of tokens or don't fit, fewer documents than ranks, a rank outside
            the world, an unknown or contradictory option; on iterating, documents that make no full step.

    Source: https://github.com/imoneoi/multipack_sampler defines the interface and the measures.
    """

    def __init__(
        self,
        batch_max_length: int,
        lengths: Sequence[int] | NDArray[Any],
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        *,
        objective: Objective = "quadratic",
        tail: Tail = "drop",
        lookahead: float = 0.01,
        steps_together: int = 1,
        cost_model: CostModel | None = None,
        overlong: Literal["error", "drop"] = "error",
        shuffle: bool = True,
        shard: bool = True,
    ) -> None:
        self.batch_max_length = positive_integer(batch_max_length, "batch_max_length", MOST_TOKENS)
        check_flag(shard, "shard")
        self.num_replicas, self.rank = _place_in_world(num_replicas, rank, shard)
        self.seed = natural_number(seed, "seed")
        self.epoch = 0
        check_options(objective, cost_model, tail, lookahead)
        fitted = fit_for_sampler(lengths, self.batch_max_length, overlong, "batch_max_length")
        if len(fitted.lengths) < self.num_replicas:
            raise ValueError(
                f"{len(fitted.lengths)} documents can't give each of {self.num_replicas} ranks one; use at most "
                f"{len(fitted.lengths)} ranks, or more documents."
            )
        self.lengths = fitted.lengths
        self.overlong_report: OverlongReport = fitted.report
        self._documents = fitted.documents
        self._options: dict[str, Any] = {
            "objective": objective,
            "tail": tail,
            "lookahead": float(lookahead),
            "steps_together": positive_integer(steps_together, "steps_together"),
            "cost_model": cost_model,
            "shuffle": check_flag(shuffle, "shuffle"),
        }
        self._shard = shard
        self._plan: Plan | None = None
        self._choices = 0  # calls of set_epoch
        self._progress = Progress()

    def __len__(self) -> int:
        """Batches of the current epoch, exact, the same on every rank; all of them, also after a resume."""
        return self._num_batches(self.plan)

    def __iter__(self) -> Iterator[list[int]]:
        plan = self.plan
        shuffled = self._options["shuffle"]
        return self._batches(
            plan, self._progress.begin(self.epoch, self._num_batches(plan), self._choices, shuffled=shuffled)
        )

    def _batches(self, plan: Plan, numbers: Iterator[int]) -> Iterator[list[int]]:
        for number in numbers:
            step, rank = (number, self.rank) if self._shard else divmod(number, self.num_replicas)
            assert rank is not None, "a sharding sampler has a rank"
            yield plan.row(step, rank).tolist()

    def _num_batches(self, plan: Plan) -> int:
        return plan.num_steps * (1 if self._shard else self.num_replicas)

    @property
    def plan(self) -> Plan:
        """The current epoch's plan, of all ranks; made when it is first asked for."""
        if self._plan is None:
            self._plan = self._plan_of(self.epoch)
        return self._plan

    def _plan_of(self, epoch: int) -> Plan:
        plan = plan_epoch(
            self.lengths, self.batch_max_length, self.num_replicas, seed=self.seed, epoch=epoch, **self._options
        )
        if self._documents is None:
            return plan
        return Plan(self._documents[plan.items], plan.offsets, plan.num_ranks, plan.capacity)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration goes through; the one being resumed stays where it is."""
        epoch = natural_number(epoch, "epoch")
        self._choices += 1
        if epoch != self.epoch:
            self.epoch = epoch
            self._plan = None

    def num_batches(self) -> int:
        """Steps of the current epoch, as the multipack project's class calls them."""
        return self.plan.num_steps

    def efficiency(self) -> float:
        """The share of the current epoch's rows that holds tokens, from 0 to 1, over all ranks."""
        plan = self.plan
        return float(self.tokens_per_step().sum() / (plan.num_steps * plan.num_ranks * plan.capacity))

    def tokens_per_step(self) -> NDArray[np.int64]:
        """(steps,) int64: the tokens of all ranks in each step of the current epoch, by which losses are weighed."""
        return self.plan.sums(self._lengths_by_document()).sum(axis=1)

    def state_dict(self, batches_done: int | None = None) -> dict[str, Any]:
        """Where the epoch stands, as plain numbers and strings; the same on every rank, so one rank may save for all.

        Args:
            batches_done: batches trained on in this epoch; None counts those that the latest iterator has handed out,
                more than were trained on where a DataLoader's workers fetch ahead. torchdata's StatefulDataLoader
                keeps account of that by itself.

        Raises:
            ValueError: more batches than the epoch has.
        """
        if batches_done is None:
            batches_done = self._progress.done_in(self.epoch)
        done = check_batches_done(batches_done, len(self))
        return make_state(self.epoch, done, self._settings(), plan=self._digest(self.plan))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken: the next iteration yields the batch after it, in that epoch.

        Raises:
            ValueError: a state of other lengths, settings or ranks, or one that isn't whole and this class's; the
                sampler is then left as it was.
        """
        epoch, done, planned = read_state(state, type(self).__name__, self._settings(), "plan")
        plan = self.plan if epoch == self.epoch else self._plan_of(epoch)
        if planned != self._digest(plan):
            raise ValueError(
                "the state was saved with another version of tritonpack or NumPy, which plans other batches from the "
                "same settings. Resume with that version, or start an epoch anew with set_epoch."
            )
        done = check_batches_done(done, self._num_batches(plan))
        self.epoch, self._plan = epoch, plan
        self._progress.resume(epoch, done)

    def verify_ranks(self, group: dist.ProcessGroup | None = None) -> None:
        """Compare plans with the other ranks, a collective call: a few bytes that find lengths or options that differ.

        Raises:
            ValueError: on every rank, if any two ranks have different plans.
        """
        mine = f"{self._digest(self.plan)} in epoch {self.epoch}"
        plans: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(plans, mine, group)
        if len(set(plans)) > 1:
            others = ", ".join(f"rank {rank}: {plan}" for rank, plan in enumerate(plans))
            raise ValueError(
                f"the ranks have different plans ({others}). Pass the same lengths in the same order, the same seed "
                "and the same options on every rank, and call set_epoch on all of them."
            )

    @property
    def sampler(self) -> MultipackDistributedBatchSampler:
        """Itself: where accelerate looks for `set_epoch` once it has wrapped a batch sampler."""
        return self

    @property
    def batch_size(self) -> None:
        """None, batches have different numbers of documents. Asked for by those who divide batches among processes.

        Raises:
            ValueError: a sampler that has done so already, which would lose most batches.
        """
        if self._shard and self.num_replicas > 1:
            raise ValueError(
                f"this sampler yields rank {self.rank}'s batches of {self.num_replicas} ranks alone; dividing them "
                "among processes again would lose most of them. Pass shard=False to a sampler whose batches accelerate "
                "or another library divides, or don't let it prepare this DataLoader."
            )
        return None

    @staticmethod
    def _digest(plan: Plan) -> str:
        return digest(plan.items, plan.offsets)

    def _settings(self) -> dict[str, Any]:
        """What decides the batches, as plain values."""
        cost_model = self._options["cost_model"]
        return {
            **self._options,
            "cost_model": None if cost_model is None else asdict(cost_model),
            "batch_max_length": self.batch_max_length,
            "num_replicas": self.num_replicas,
            "seed": self.seed,
            "shard": self._shard,
            "lengths": digest(self.lengths),
        }

    def _lengths_by_document(self) -> NDArray[np.int64]:
        if self._documents is None:
            return self.lengths.astype(np.int64)
        by_document = np.zeros(int(self._documents[-1]) + 1, dtype=np.int64)
        by_document[self._documents] = self.lengths
        return by_document


def _place_in_world(num_replicas: int | None, rank: int | None, shard: bool) -> tuple[int, int | None]:
    """The number of ranks and this one's, from torch.distributed where they aren't given."""
    meant = dist.is_available() and dist.is_initialized()
    if not meant and (num_replicas is None or (rank is None and shard)):
        launched = os.environ.get("WORLD_SIZE", "1")
        if launched != "1" or (num_replicas is not None and num_replicas != 1):
            raise ValueError(
                f"num_replicas={num_replicas} and rank={rank} leave the place of this process open, and no process "
                f"group tells it (WORLD_SIZE is {launched}). Call torch.distributed.init_process_group first, or pass "
                "both."
            )
    if num_replicas is None:
        num_replicas = dist.get_world_size() if meant else 1
    num_replicas = positive_integer(num_replicas, "num_replicas")
    if not shard:
        return num_replicas, None
    if rank is None:
        rank = dist.get_rank() if meant else 0
    if isinstance(rank, bool) or not isinstance(rank, (int, np.integer)) or not 0 <= rank < num_replicas:
        raise ValueError(
            f"rank must be an integer from 0 to {num_replicas - 1}, as there are {num_replicas}; got {rank!r}."
        )
    return num_replicas, int(rank)
