"""The Python of docs/packing.md and docs/offline-packing.md runs, with rows of 64 tokens, and does what they say."""

from functools import partial

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler

import tritonpack
from tests.packing.tables import write_files
from tests.packing.test_training import tiny_llama
from tests.test_guides import blocks

datasets, accelerate = pytest.importorskip("datasets"), pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")
OPTIONS = {"use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
Arguments = partial(transformers.TrainingArguments, **OPTIONS)
BLOCKS = blocks("packing")
LENGTHS = numpy.random.default_rng(0).integers(5, 20, 60)
DOCUMENTS = [{"input_ids": [token % 37 + 1 for token in range(length)]} for length in LENGTHS.tolist()]
PAIRS = [{name: [token] * 3 for name in ("prompt_ids", "chosen_ids", "rejected_ids")} for token in range(1, 21)]


def tokens(given):
    return sum(batch["input_ids"].numel() for batch in given["loader"])


def learned(given):
    return bool(torch.isfinite(given["loss"])) and given["batch"]["input_ids"].shape[1] <= 64


def trained(given):
    given["trainer"].args.max_steps = 2
    given["trainer"].train()
    return given["trainer"].state.global_step == 2


# A text that occurs in one block only -> what holds afterwards.
CASES = {
    ".loss\nprint(loader)": lambda given: learned(given) and given["loader"].epoch == 1,
    "accelerator.prepare(tritonpack": lambda given: tokens(given) == LENGTHS.sum(),
    "sampler.set_epoch(epoch)": lambda given: learned(given) and given["sampler"].epoch == 1,
    "# the next iteration": lambda given: len(list(given["sampler"])) == len(given["sampler"]) - 3,
    "# after the Accelerator": lambda given: len(list(given["loader"])) == len(given["sampler"]),
    "batches_done=step": lambda given: len(list(given["sampler"])) == len(given["sampler"]) - 3,
    "packing.num_bins": lambda given: (
        len(given["loader"]) == given["packing"].lower_bound and tokens(given) == LENGTHS.sum()
    ),
    "tritonpack.setup": lambda given: "train_packing_efficiency" in given["trainer"].state.log_history[-1],
    "stream.set_epoch": lambda given: learned(given) and given["stream"].epoch == 1,
    "dispatch_batches": trained,
    "RandomSampler": lambda given: tokens(given) > 0.8 * LENGTHS.sum(),
    "Units.of_trees": lambda given: given["plan"].num_documents == 1,
    "def documents(pair)": lambda given: tokens(given) == 20 * 12,
    "split_dataset_by_node": lambda given: len(list(given["stream"])) > 1,
}


SLOW = ("tritonpack.setup", "dispatch_batches")


@pytest.mark.parametrize("text", [pytest.param(text, marks=[pytest.mark.slow] * (text in SLOW)) for text in CASES])
def test_block(text, tmp_path):
    model, sampler = tiny_llama(torch.float32), tritonpack.MultipackDistributedBatchSampler(64, LENGTHS)
    iterator = iter(sampler)
    [next(iterator) for _ in range(3)]
    given = {
        "tritonpack": tritonpack, "numpy": numpy, "DataLoader": DataLoader, "RandomSampler": RandomSampler, "epochs": 2,
        "dataset": DOCUMENTS, "documents": datasets.Dataset.from_list(DOCUMENTS), "lengths": LENGTHS, "pairs": PAIRS,
        "model": model, "sampler": sampler, "step": 3, "world_size": 3, "rank": 1, "folder": str(tmp_path),
        "Trainer": transformers.Trainer, "TrainingArguments": Arguments,
        "trainer": transformers.Trainer(model, Arguments(tmp_path, max_steps=2), train_dataset=DOCUMENTS),
    }  # fmt: skip
    if "accelerator" in text or text == "batches_done=step":
        given["accelerator"] = accelerate.Accelerator(cpu=True)
    (code,) = (block for block in BLOCKS if text in block)
    with tritonpack.patch(model):
        exec(compile(code.replace("32768", "64").replace("4096", "64"), "packing.md", "exec"), given)
        assert CASES[text](given)


def test_every_block_is_run():
    assert [sum(text in block for text in CASES) for block in BLOCKS] == [1] * len(CASES)


@pytest.mark.slow
def test_packing_to_disk(tmp_path, monkeypatch):
    """Of the two columns Trainer's removal of unused columns leaves position_ids, which keeps documents apart."""
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path / "data" / "documents", "parquet", DOCUMENTS)
    model, seen = tiny_llama(torch.float32), []
    names = {"tritonpack": tritonpack, "datasets": datasets, "DataLoader": DataLoader, "model": model}

    def collate(features):
        seen.extend(features)
        return tritonpack.PackingCollator()(features)

    with tritonpack.patch(model):
        for block in blocks("offline-packing"):
            exec(compile(block.replace("32768", "16"), "offline-packing.md", "exec"), names)
        rows = names["rows"]
        arguments = Arguments("out", max_steps=1, per_device_train_batch_size=len(rows))
        transformers.Trainer(model, arguments, train_dataset=rows, data_collator=collate).train()
    assert torch.isfinite(names["loss"])
    assert "split into" in rows.info.description
    assert sorted(seen[0]) == ["input_ids", "position_ids"]
    lengths = [length for row in rows for length in row["seq_lengths"]]
    assert sorted(tritonpack.PackingCollator()(seen)["cu_seq_lens_q"].diff().tolist()) == sorted(lengths)
    assert sum(lengths) == LENGTHS.sum()


def test_rows_without_a_target_have_no_loss():
    model, documents = tiny_llama(torch.float32), [{"input_ids": [5, 6, 7], "labels": [-100] * 3}] * 2
    with tritonpack.patch(model):
        assert model(**next(iter(tritonpack.dataloader(documents, 8)))).loss.isnan()
    assert model(**{name: torch.tensor([column]) for name, column in documents[0].items()}).loss.isnan()
