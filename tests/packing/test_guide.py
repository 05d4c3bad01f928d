"""The Python blocks of docs/packing.md run, with rows of 64 tokens in place of its 4,096 and 32,768."""

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler

import tritonpack
from tests.packing.test_training import tiny_llama
from tests.test_guides import blocks

BLOCKS = blocks("packing")
LENGTHS = numpy.random.default_rng(0).integers(5, 20, 60)
DOCUMENTS = [{"input_ids": [token % 37 + 1 for token in range(length)]} for length in LENGTHS.tolist()]
PAIRS = [{name: [token] * 3 for name in ("prompt_ids", "chosen_ids", "rejected_ids")} for token in range(1, 21)]


def tokens(given):
    return sum(batch["input_ids"].numel() for batch in given["loader"])


def learned(given):
    return bool(torch.isfinite(given["loss"])) and given["batch"]["input_ids"].shape[1] <= 64


def trained(given):
    trainer = given["trainer"]
    trainer.args.max_steps, trainer.args.use_cpu, trainer.args.save_strategy = 2, True, "no"
    trainer.train()
    return trainer.state.global_step == 2


# A text that occurs in one block only -> names that the block needs, what holds afterwards.
CASES = {
    ".loss\nprint(loader)": ({}, lambda given: learned(given) and given["loader"].epoch == 1),
    "accelerator.prepare(tritonpack": ({"accelerator": None}, lambda given: tokens(given) == LENGTHS.sum()),
    "sampler.set_epoch(epoch)": ({}, lambda given: learned(given) and given["sampler"].epoch == 1),
    "# the next iteration": ({}, lambda given: len(list(given["sampler"])) == len(given["sampler"]) - 3),
    "# after the Accelerator": ({}, lambda given: len(list(given["loader"])) == len(given["sampler"])),
    "batches_done=step": (
        {"step": 3, "accelerator": None}, lambda given: len(list(given["sampler"])) == len(given["sampler"]) - 3
    ),
    "packing.num_bins": (
        {}, lambda given: len(given["loader"]) == given["packing"].lower_bound and tokens(given) == LENGTHS.sum()
    ),
    "tritonpack.setup": (
        {"trainer": DOCUMENTS},
        lambda given: "train_packing_efficiency" in given["trainer"].state.log_history[-1],
    ),
    "stream.set_epoch": ({}, lambda given: learned(given) and given["stream"].epoch == 1),
    "dispatch_batches": ({}, trained),
    "RandomSampler": ({}, lambda given: tokens(given) > 0.8 * LENGTHS.sum()),
    "Units.of_trees": ({}, lambda given: given["plan"].num_documents == 1),
    "def documents(pair)": ({"pairs": PAIRS}, lambda given: tokens(given) == 20 * 12),
    "split_dataset_by_node": ({"world_size": 3, "rank": 1}, lambda given: len(list(given["stream"])) > 1),
}  # fmt: skip
SLOW = ("tritonpack.setup", "dispatch_batches")


@pytest.mark.parametrize("text", [pytest.param(text, marks=[pytest.mark.slow] * (text in SLOW)) for text in CASES])
def test_block(text, tmp_path):
    transformers = pytest.importorskip("transformers")
    accelerate, datasets = pytest.importorskip("accelerate"), pytest.importorskip("datasets")
    model, (names, holds) = tiny_llama(torch.float32), CASES[text]
    sampler = tritonpack.MultipackDistributedBatchSampler(64, LENGTHS)
    iterator = iter(sampler)
    [next(iterator) for _ in range(3)]
    given = {
        "tritonpack": tritonpack, "numpy": numpy, "DataLoader": DataLoader, "model": model, "epochs": 2,
        "dataset": DOCUMENTS, "documents": datasets.Dataset.from_list(DOCUMENTS), "RandomSampler": RandomSampler,
        "lengths": LENGTHS, "sampler": sampler, "Trainer": transformers.Trainer, "folder": str(tmp_path),
        "TrainingArguments": transformers.TrainingArguments, **names,
    }  # fmt: skip
    if "accelerator" in names:
        given["accelerator"] = accelerate.Accelerator(cpu=True)
    if "trainer" in names:
        options = {"max_steps": 2, "use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
        arguments = transformers.TrainingArguments(str(tmp_path), **options)
        given["trainer"] = transformers.Trainer(model, arguments, train_dataset=DOCUMENTS)
    (code,) = (block for block in BLOCKS if text in block)
    with tritonpack.patch(model):
        exec(compile(code.replace("32768", "64").replace("4096", "64"), "packing.md", "exec"), given)
        assert holds(given)


def test_every_block_is_run():
    assert [sum(text in block for text in CASES) for block in BLOCKS] == [1] * len(CASES)


def test_rows_without_a_target_have_no_loss():
    model, documents = tiny_llama(torch.float32), [{"input_ids": [5, 6, 7], "labels": [-100] * 3}] * 2
    with tritonpack.patch(model):
        assert model(**next(iter(tritonpack.dataloader(documents, 8)))).loss.isnan()
    assert model(**{name: torch.tensor([column]) for name, column in documents[0].items()}).loss.isnan()
