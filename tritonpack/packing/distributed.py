"""MultipackDistributedBatchSampler: batches of documents for each rank, step by step, from one plan."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, Literal

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch.utils.data import Sampler

from tritonpack.checks import check_flag
from tritonpack.packing.cost import CostModel
from tritonpack.packing.lengths import check_integer
from tritonpack.packing.plan import MOST_TOKENS, Objective, Plan, check_options, plan_epoch
from tritonpack.packing.state import ResumableSampler, digest, gather, has_group
from tritonpack.packing.tail import Tail, check_tail
from tritonpack.packing.together import choose_steps_together


class MultipackDistributedBatchSampler(ResumableSampler[Plan], Sampler[list[int]]):
    """Batches of whole documents for each rank, at most `batch_max_length` tokens each, the same number on every rank.

    Every rank computes the same plan from the lengths, the seed and the epoch, without communication, and takes its
    part of each step. The class replaces the multipack project's class of this name, with `objective="linear"` also its
    sampler for linear attention.

    >>> lengths = [5, 3, 4, 4, 2, 6, 8, 8]
    >>> sampler = MultipackDistributedBatchSampler(8, lengths, num_replicas=2, rank=0)
    >>> len(sampler), list(sampler)
    (2, [[6], [7]])
    >>> len(sampler), list(MultipackDistributedBatchSampler(8, lengths, num_replicas=2, rank=1))
    (2, [[3, 4], [0]])

    Documents 1, 2 and 5 have 13 tokens, too few for a third step of two ranks. `tail` decides what happens to them.

    Pass the sampler to a DataLoader as `batch_sampler` and call `set_epoch` before each epoch. A second pass over one
    epoch causes a warning. accelerate divides batches among processes and calls `set_epoch` itself: pass `shard=False`
    there, and configure accelerate with `even_batches=False`.

    Attributes:
        num_replicas, rank, seed: as given or found; `rank` is None with `shard=False`.
        epoch: the epoch of the next iteration.
        lengths: (documents,) int32, 0 for dropped documents.
        overlong_report: what was done with documents longer than `batch_max_length`.
        steps_together: as given, or the number that was chosen.

    Args:
        batch_max_length: tokens of a rank's batch, from 1 to 2**30.
        lengths: (documents,) integers of at least 1, the tokens of each document, the same on every rank.
        num_replicas, rank: the number of ranks, and the rank of this process. None reads them from torch.distributed;
            without a process group they are 1 and 0.
        seed: at least 0, the same on every rank.
        objective, tail, lookahead, steps_together, cost_model: see `plan_epoch`. With `steps_together=None` the
            constructor measures how many steps to plan at once.
        overlong: "error" refuses documents longer than `batch_max_length`, "drop" leaves them out. To truncate them,
            pass `lengths` that are cut, and load with `PackingCollator(max_document_length=...)`.
        shuffle: shuffle the documents, in a new order for each epoch.
        shard: yield the batches of this rank only. False yields the batches of all ranks, step by step.

    Raises:
        ValueError: lengths that aren't positive integers or don't fit, a rank that doesn't exist, a wrong option, too
            few tokens to fill one step to 95% under `tail="drop"`.
        ImportError: numba can't be imported; with a given `steps_together` at the first use of an epoch.

    Source: https://github.com/imoneoi/multipack_sampler defines the interface and the measures.
    """

    _DIGEST = "plan"
    _OTHER_BATCHES = (
        "the state was saved with another version of tritonpack or NumPy, which plans other batches from the same "
        "settings. Resume with that version, or start an epoch anew with set_epoch."
    )

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
        steps_together: int | None = None,
        cost_model: CostModel | None = None,
        overlong: Literal["error", "drop"] = "error",
        shuffle: bool = True,
        shard: bool = True,
    ) -> None:
        self.batch_max_length = check_integer(batch_max_length, "batch_max_length", 1, MOST_TOKENS)
        check_flag(shuffle, "shuffle")
        super().__init__(lengths, self.batch_max_length, overlong, "batch_max_length", seed=seed, epochs_differ=shuffle)
        self._shard = check_flag(shard, "shard")
        self.num_replicas, self.rank = _place_in_world(num_replicas, rank, shard)
        check_options(objective, cost_model, tail, lookahead)
        self._documents = np.flatnonzero(self.lengths).astype(np.int32)  # all but the dropped ones
        check_tail(self.lengths, self.batch_max_length, self.num_replicas, tail)
        self.steps_together = (
            choose_steps_together(
                self.lengths[self._documents], self.batch_max_length, self.num_replicas, objective=objective,
                cost_model=cost_model, lookahead=lookahead,
            )
            if steps_together is None
            else check_integer(steps_together, "steps_together")
        )  # fmt: skip
        self._options: dict[str, Any] = {
            "objective": objective,
            "tail": tail,
            "lookahead": float(lookahead),
            "steps_together": self.steps_together,
            "cost_model": cost_model,
            "shuffle": shuffle,
        }

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.batch_max_length} tokens per batch, {len(self._documents)} documents, rank "
            f"{self.rank} of {self.num_replicas}, objective={self._options['objective']!r}, "
            f"tail={self._options['tail']!r}, steps_together={self.steps_together})"
        )

    def _make(self, epoch: int) -> Plan:
        lengths = self.lengths[self._documents]
        plan = plan_epoch(
            lengths, self.batch_max_length, self.num_replicas, seed=self.seed, epoch=epoch, **self._options
        )
        return replace(plan, items=self._documents[plan.items])

    def _num_batches(self, made: Plan) -> int:
        return made.num_steps * (1 if self._shard else self.num_replicas)

    def _batch(self, made: Plan, number: int) -> list[int]:
        step, rank = divmod(number, self.num_replicas) if self.rank is None else (number, self.rank)
        return made.row(step, rank).tolist()

    def _digest(self, made: Plan) -> str:
        return digest(made.items, made.offsets)

    def _settings(self) -> dict[str, Any]:
        cost_model = self._options["cost_model"]
        return {
            **self._options,
            "cost_model": None if cost_model is None else asdict(cost_model),
            "batch_max_length": self.batch_max_length,
            "num_replicas": self.num_replicas,
            "seed": self.seed,
            "shard": self._shard,
            "lengths": digest(self.lengths[self._documents]),
        }

    @property
    def plan(self) -> Plan:
        """The plan of the current epoch for all ranks. It is computed at the first use."""
        return self._current()

    def num_batches(self) -> int:
        """The number of steps of the current epoch. The multipack project's class has this method."""
        return self.plan.num_steps

    def efficiency(self) -> float:
        """The share of the current epoch's rows that holds tokens, from 0 to 1, over all ranks."""
        return float(self.tokens_per_step().sum() / (self.plan.num_steps * self.num_replicas * self.batch_max_length))

    def tokens_per_step(self) -> NDArray[np.int64]:
        """(steps,) int64, the tokens of all ranks in each step of the current epoch, for weighting losses."""
        return self.plan.sums(self.lengths.astype(np.int64)).sum(axis=1)

    def verify_ranks(self, group: dist.ProcessGroup | None = None) -> None:
        """Check that all ranks have the same plan. Every rank must call this; it exchanges a few bytes.

        Raises:
            ValueError: on every rank, if any two ranks have different plans.
        """
        plans = gather(f"{self._digest(self.plan)} in epoch {self.epoch}", group)
        if len(set(plans)) > 1:
            others = ", ".join(f"rank {rank}: {plan}" for rank, plan in enumerate(plans))
            raise ValueError(
                f"the ranks have different plans ({others}). Pass the same lengths in the same order, the same seed "
                "and the same options on every rank, and call set_epoch on all of them."
            )

    @property
    def batch_size(self) -> None:
        """None, because batches have different numbers of documents. Libraries that divide batches read it.

        Raises:
            ValueError: this sampler yields the batches of one rank of several, which can't be divided again.
        """
        if self._shard and self.num_replicas > 1:
            raise ValueError(
                f"this sampler yields the batches of rank {self.rank} only, of {self.num_replicas} ranks. Dividing "
                "them among processes again would lose most of them. Pass shard=False to a sampler for "
                "accelerate or another library that divides batches, or don't let it prepare this DataLoader."
            )


def _place_in_world(num_replicas: int | None, rank: int | None, shard: bool) -> tuple[int, int | None]:
    """The number of ranks and the rank of this process (None unless `shard`), from torch.distributed if not given."""
    group = has_group()
    if not group and (num_replicas is None or (rank is None and shard)):
        launched = os.environ.get("WORLD_SIZE", "1")
        if launched != "1" or num_replicas not in (None, 1):
            raise ValueError(
                f"num_replicas={num_replicas} and rank={rank} don't say which rank this process is, and there is no "
                f"process group to ask (WORLD_SIZE is {launched}). Call torch.distributed.init_process_group first, or "
                "pass both."
            )
    if num_replicas is None:
        num_replicas = dist.get_world_size() if group else 1
    num_replicas = check_integer(num_replicas, "num_replicas")
    if not shard:
        return num_replicas, None
    if rank is None:
        rank = dist.get_rank() if group else 0
    return num_replicas, check_integer(rank, "rank", 0, num_replicas - 1, f"because num_replicas is {num_replicas}")
