"""How many steps are planned together, if nobody says: as many as hold some hundred documents."""

import numpy as np
import pytest

from tests.packing.lengths import log_normal, openchat
from tritonpack import MultipackDistributedBatchSampler
from tritonpack.packing.planning.plan import choose_steps_together, plan_epoch
from tritonpack.packing.planning.statistics import plan_statistics


@pytest.mark.parametrize(
    ("lengths", "capacity", "num_ranks", "expected"),
    [
        (np.full(4000, 8), 4096, 8, {1}),  # full rows in any form
        (log_normal(60_000), 32768, 64, {1}),
        (np.random.default_rng(0).integers(513, 1025, 2000), 1024, 8, {1}),  # each document a row: nothing to combine
        (openchat(), 4096, 1, {64}),
        (openchat(), 8192, 8, {8}),
        (np.full(9, 100), 1024, 4, {8}),  # one step
        (openchat()[:60], 4096, 1, {64}),  # 23 steps
    ],
    ids=["tiny", "log-normal", "halves", "one rank", "few documents", "one step", "few steps"],
)
def test_choice(lengths, capacity, num_ranks, expected):
    assert choose_steps_together(lengths, capacity, num_ranks) in expected


def test_sampler_chooses_once_for_all_ranks_and_epochs():
    samplers = [MultipackDistributedBatchSampler(8192, openchat(), 8, rank) for rank in range(2)]
    for epoch in range(2):
        for one in samplers:
            one.set_epoch(epoch)
            assert one.plan.steps_together == 8
    assert "steps planned together" in repr(samplers[0].plan)


def test_a_few_crowded_rows_share_steps():
    """A row may hold two long documents, and is then a third fuller than the others, for which its step waits."""
    rng = np.random.default_rng(2)
    long, short = rng.normal(4915, 410, 4000), rng.normal(410, 82, 4000)
    lengths = np.clip(np.where(rng.random(4000) < 0.3, long, short), 1, 8192).astype(np.int32)
    plan = plan_epoch(lengths, 8192, 8)
    tokens = plan.sums(lengths)[:-1]
    crowded = tokens > 1.06 * tokens.mean()
    chance = 1 - (1 - crowded.mean()) ** 8
    assert crowded.sum() > 10
    assert crowded.any(axis=1).mean() < 0.8 * chance
    assert plan_statistics(plan, lengths).utilization > 0.96


@pytest.mark.parametrize(
    ("low", "high", "num_ranks", "most_steps"),
    [
        (100, 8193, 1, 2130),  # without steps planned together: 2,840
        (100, 8193, 8, 261),  # in groups of 256 documents: 263
        (2000, 3500, 1, 1445),
        (2000, 3500, 8, 182),
        (1800, 2300, 1, 1042),
    ],
)
def test_rows_of_few_documents_are_full(low, high, num_ranks, most_steps):
    lengths = np.random.default_rng(0).integers(low, high, 4000).astype(np.int32)
    plan = plan_epoch(lengths, 8192, num_ranks, tail="keep")
    assert plan.num_documents == 4000
    assert plan.num_steps <= most_steps
