"""setup with units of several documents and collators of one's own."""

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer

import tritonpack
from tests.ecosystem.training import EXACT, distance, trained
from tests.integrations.test_setup import PAIRS, Watch, documents_of, make_trainer

TOKENS = 128


def make(folder: Path, **options: Any) -> Trainer:
    return make_trainer(folder, **{"train_dataset": PAIRS, **options})


@pytest.mark.slow
def test_pairs_stay_together(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    handle = tritonpack.setup(trainer, TOKENS, documents=documents_of)
    assert "PackedDataLoader of 12 units of 24 documents" in str(handle)
    watch = Watch(trainer.model)
    trainer.train()
    assert all(batch[::2] == batch[1::2] for batch in watch.batches), "both documents of a pair, one after the other"
    found = sorted(chain.from_iterable(batch[::2] for batch in watch.batches))
    assert found == sorted(2 * list(range(12))), "each pair once in each of two epochs"
    documents = [documents_of(pair) for pair in PAIRS]
    padded = tokens = 0
    for batch in watch.batches:
        lengths = [len(each["input_ids"]) for number in batch[::2] for each in documents[number]]
        padded += len(lengths) * max(lengths)
        tokens += sum(lengths)
    last = trainer.state.log_history[-1]
    assert last["train_tokens_saved_share"] == pytest.approx(1 - tokens / padded)


@pytest.mark.slow
def test_own_collator_of_trees_trains_alike(tmp_path: Path) -> None:
    """All pairs in one row: in trees there are fewer tokens, and the loss is the mean over the same targets."""
    groups = [[document["input_ids"] for document in documents_of(pair)] for pair in PAIRS]
    outcomes = []
    for options in (
        {"documents": documents_of},
        {
            "documents": documents_of,
            "collate_fn": tritonpack.TreeCollator(),
            "lengths": tritonpack.Units.of_trees(groups),
        },
    ):
        trainer = make(tmp_path, gradient_accumulation_steps=1)
        with tritonpack.setup(trainer, 2048, tail="keep", **options) as handle:
            assert "1 step of 1 rank" in str(handle)
            outcomes.append(trained(trainer))
    assert distance(*outcomes) < 4 * EXACT
